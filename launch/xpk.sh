#!/usr/bin/env bash
# One workload on a GKE cluster made by xpk, on TPU slices or GPU nodes:
#   CLUSTER=lab NAME=memcalib DEVICE=v5litepod-64 IMAGE=gcr.io/lab/memcalib \
#       bash launch/xpk.sh experiments.train_rl --run_dir=/shared/run ...
# The image holds the checkout in its working folder, installed (launch/Dockerfile). --dry_run as the
# first argument prints the command instead. Further variables: SLICES (1), or with GPU=1 NODES (1)
# of a GPU type; PROJECT, ZONE of the cluster; MAX_RESTARTS (100) of the whole workload: after a
# preemption or a lost node, as restart.sh decides, which gives up without progress. The endpoints'
# keys, MEMCALIB_JUDGE_API_KEY and the like, are taken from the environment by name, and stand in the
# workload that the cluster keeps: where others may read those, use jobset.sh, which makes a secret.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/keys.sh"

fail() { echo "error: $*" >&2; exit 2; }
dry_run=""
if [ "${1:-}" = --dry_run ]; then dry_run=yes; shift; fi
if [[ "${1:-}" = -* ]]; then fail "unknown option $1: the program comes first, then its flags"; fi
for name in CLUSTER NAME DEVICE IMAGE; do
    [ -n "${!name:-}" ] || fail "$name is not set"
done
[ $# -ge 1 ] || fail "give a program and its flags, such as experiments.train_rl --run_dir=..."
program=(python -m "$@" --multihost)
bash "$(dirname "${BASH_SOURCE[0]}")/restart.sh" --dry_run "${program[@]}" > /dev/null
printf -v command '%q ' bash launch/restart.sh --once "${program[@]}"
# shellcheck disable=SC2153  # NAME is of the environment
create=(xpk workload create --cluster="$CLUSTER" --workload="$NAME" --docker-image="$IMAGE")
if [ "${GPU:-}" = 1 ]; then
    create+=(--device-type="$DEVICE" --num-nodes="${NODES:-1}")
else
    create+=(--tpu-type="$DEVICE" --num-slices="${SLICES:-1}")
fi
if [ -n "${PROJECT:-}" ]; then create+=(--project="$PROJECT"); fi
if [ -n "${ZONE:-}" ]; then create+=(--zone="$ZONE"); fi
create+=(--max-restarts="${MAX_RESTARTS:-100}" --restart-on-exit-codes=75
    --termination-grace-period-seconds=120)
if [ -n "$(key_names)" ]; then
    names=NAMES_FILE
    if [ -z "$dry_run" ]; then
        names="$(mktemp)"
        trap 'rm -f "$names"' EXIT
        key_names > "$names"  # xpk takes the values from the environment
    fi
    create+=(--env-file="$names")
fi
create+=(--command="$command")
if [ -n "$dry_run" ]; then printf '%q ' "${create[@]}"; echo; else "${create[@]}"; fi
