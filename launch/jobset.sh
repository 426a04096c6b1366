#!/usr/bin/env bash
# Fills in jobset.yaml and gives it to kubectl: one process a host of a TPU slice on GKE.
#   NAME=memcalib IMAGE=gcr.io/lab/memcalib CLAIM=shared-disk ACCELERATOR=tpu-v5-lite-podslice \
#       TOPOLOGY=8x8 HOSTS=16 bash launch/jobset.sh experiments.train_rl --run_dir=/shared/run ...
# --dry_run as the first argument prints what kubectl would get. The image holds the checkout in its
# working folder, installed (launch/Dockerfile); CLAIM, a volume that all hosts may write, is at
# /shared. Further variables: CHIPS_A_HOST (4), NAMESPACE (default), MAX_RESTARTS (100), SECRET
# (NAME-keys): what holds the endpoints' keys, made from MEMCALIB_JUDGE_API_KEY and the like where
# those are set.
set -euo pipefail

here="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source-path=SCRIPTDIR
source "$here/keys.sh"
fail() { echo "error: $*" >&2; exit 2; }
dry_run=""
if [ "${1:-}" = --dry_run ]; then dry_run=yes; shift; fi
if [[ "${1:-}" = -* ]]; then fail "unknown option $1: the program comes first, then its flags"; fi
for name in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY HOSTS; do
    [ -n "${!name:-}" ] || fail "$name is not set"
done
[ $# -ge 1 ] || fail "give a program and its flags, such as experiments.train_rl --run_dir=..."
NAMESPACE="${NAMESPACE:-default}"
SECRET="${SECRET:-$NAME-keys}"
CHIPS_A_HOST="${CHIPS_A_HOST:-4}"
MAX_RESTARTS="${MAX_RESTARTS:-100}"
for name in HOSTS CHIPS_A_HOST MAX_RESTARTS; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || fail "$name=${!name} is no number"
done
for name in NAME IMAGE CLAIM ACCELERATOR TOPOLOGY NAMESPACE SECRET; do
    [[ "${!name}" =~ ^[A-Za-z0-9._:/@-]+$ ]] || fail "$name=${!name} is no name"
done
program=(python -m "$@" --multihost)
bash "$here/restart.sh" --dry_run "${program[@]}" > /dev/null

# A list of JSON strings, in which Kubernetes replaces no $(NAME).
words=""
for word in bash launch/restart.sh --once "${program[@]}"; do
    [[ "$word" != *[[:cntrl:]]* ]] || fail "a flag holds a line break or another control character"
    word="${word//\\/\\\\}"
    word="${word//\"/\\\"}"
    word="${word//\$(/\$\$(}"
    words+="${words:+, }\"$word\""
done
# shellcheck disable=SC2034  # read by its name
COMMAND="[$words]"
text="$(< "$here/jobset.yaml")"
for name in NAME NAMESPACE MAX_RESTARTS HOSTS ACCELERATOR TOPOLOGY CLAIM IMAGE SECRET \
    CHIPS_A_HOST COMMAND; do
    text="${text//"\${$name}"/"${!name}"}"
done
kubectl=(kubectl --namespace="$NAMESPACE")
if [ -n "$dry_run" ]; then
    for name in $(key_names); do
        echo "# first: $name goes to the secret $SECRET, by standard input"
    done
    echo "# ${kubectl[*]} apply -f - gets:"
    echo "$text"
    exit 0
fi
if [ -n "$(key_names)" ]; then
    for name in $(key_names); do printf '%s=%s\n' "$name" "${!name}"; done |
        "${kubectl[@]}" create secret generic "$SECRET" --from-env-file=/dev/stdin \
            --dry-run=client --output=yaml | "${kubectl[@]}" apply -f -
fi
"${kubectl[@]}" apply -f - <<< "$text"
