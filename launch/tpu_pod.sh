#!/usr/bin/env bash
# A TPU slice from creation to deletion, the same command on each of its workers:
#   NAME=memcalib ZONE=us-west4-a bash launch/tpu_pod.sh train experiments.train_rl --run_dir=...
# makes the slice, installs, runs, fetches the logs and deletes it; where the slice is taken away,
# it starts again with a new one (restart.sh says when, and when it gives up). Or by hand, each as
# one action: create, install, run PROGRAM FLAGS, wait PROGRAM FLAGS (until that run ends), logs,
# delete. --dry_run as the first argument prints the commands instead. Further variables: PROJECT;
# TPU_TYPE (v5litepod-64); RUNTIME (v2-alpha-tpuv5-lite); QUEUED=1 for a queued resource, SPOT=1 for
# what may be taken away; LOGS (logs/NAME); KEEP=1: train leaves the slice there. What is installed
# is this checkout's last commit. The run folder must be one that all workers share. The endpoints'
# keys, MEMCALIB_JUDGE_API_KEY and the like, travel in a file that only its owner can read.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=keys.sh
source "$root/launch/keys.sh"
fail() { echo "error: $*" >&2; exit 2; }
dry_run=""
if [ "${1:-}" = --dry_run ]; then dry_run=yes; shift; fi
actions="train, create, install, run, wait, logs or delete"
action="${1:-}"
[ -n "$action" ] || fail "say what to do: $actions"
shift
case "$action" in
train | attempt | run | wait)
    [[ "${1:---}" != -* ]] ||
        fail "$action needs a program and its flags, such as experiments.train_rl --run_dir=..."
    program=(.venv/bin/python -m "$@" --multihost)
    bash "$root/launch/restart.sh" --dry_run "${program[@]}" > /dev/null
    ;;
create | install | logs | delete) [ $# -eq 0 ] || fail "$action takes no $1" ;;
-*) fail "unknown option $action: --dry_run, then $actions" ;;
*) fail "unknown action $action: $actions" ;;
esac
[ -n "${NAME:-}" ] || fail "NAME is not set: the name of the slice"
[ -n "${ZONE:-}" ] || fail "ZONE is not set: the zone of the slice"
where=(--zone="$ZONE")
if [ -n "${PROJECT:-}" ]; then where+=(--project="$PROJECT"); fi
logs="${LOGS:-logs/$NAME}"
pause="${POLL_SECONDS:-60}"
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)

if [ -z "$dry_run" ]; then
    scratch="$(mktemp -d)"  # readable by its owner alone
    trap 'rm -rf "$scratch"' EXIT
fi

do_it() {
    if [ -n "$dry_run" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

ssh_to() { # WORKERS COMMAND [MORE GCLOUD FLAGS]
    do_it "${vm[@]}" ssh "$NAME" "${where[@]}" --worker="$1" --command="$2" "${@:3}"
}

create() {
    local kind="${TPU_TYPE:-v5litepod-64}" runtime="${RUNTIME:-v2-alpha-tpuv5-lite}" more=() state
    if [ "${SPOT:-}" = 1 ]; then more=(--spot); fi
    if [ "${QUEUED:-}" != 1 ]; then
        do_it "${vm[@]}" create "$NAME" "${where[@]}" --accelerator-type="$kind" \
            --version="$runtime" ${more[@]+"${more[@]}"}
        return
    fi
    do_it "${queue[@]}" create "$NAME" --node-id="$NAME" "${where[@]}" \
        --accelerator-type="$kind" --runtime-version="$runtime" ${more[@]+"${more[@]}"}
    while true; do
        state="$(do_it "${queue[@]}" describe "$NAME" "${where[@]}" \
            "--format=value(state.state)")" || state=""
        if [ -n "$dry_run" ]; then echo "$state# until it is ACTIVE"; fi
        case "$dry_run$state" in
        yes* | ACTIVE) return ;;
        FAILED | SUSPENDING | SUSPENDED | DELETING)
            echo "error: the queued resource $NAME is $state" >&2
            return 1
            ;;
        esac
        sleep "$pause"
    done
}

# The last commit, and a Python of its own: the machines' may be too old.
install() {
    local archive="${scratch:+$scratch/}memcalib.tar.gz"
    do_it git -C "$root" archive --format=tar.gz --output="$archive" HEAD || return
    do_it "${vm[@]}" scp "$archive" "$NAME:memcalib.tar.gz" "${where[@]}" --worker=all || return
    ssh_to all "set -e; mkdir -p memcalib; tar -xzf memcalib.tar.gz -C memcalib; cd memcalib; \
python3 -m pip install -q --user uv; python3 -m uv venv -q --allow-existing --python=3.12 .venv; \
python3 -m uv pip install -q --python=.venv/bin/python -e . 'jax[tpu]'"
}

send_keys() {
    [ -n "$(key_names)" ] || return 0
    local name file="${scratch:+$scratch/}memcalib_keys"
    if [ -z "$dry_run" ]; then
        (
            umask 077  # scp gives its copy the same rights
            for name in $(key_names); do printf 'export %s=%q\n' "$name" "${!name}"; done > "$file"
        )
    fi
    do_it "${vm[@]}" scp "$file" "$NAME:.memcalib_keys" "${where[@]}" --worker=all
}

run() {
    local command
    send_keys || return
    printf -v command '%q ' bash launch/restart.sh "${program[@]}"
    ssh_to all "cd memcalib || exit 1; if [ -f ~/.memcalib_keys ]; then . ~/.memcalib_keys; \
rm -f ~/.memcalib_keys; fi; rm -f status; \
nohup sh -c '\"\$@\"; echo \$? > status' sh $command> run.log 2>&1 < /dev/null &"
}

# Whether the slice is gone, as far as can be told.
is_lost() {
    local said
    if said="$("${vm[@]}" describe "$NAME" "${where[@]}" "--format=value(state)" 2>&1)"; then
        case "$said" in *PREEMPTED* | *TERMINATED* | *STOPP* | *DELETING*) return 0 ;; esac
        return 1
    fi
    [[ "$said" = *NOT_FOUND* ]]
}

# Returns the status that the run ended with; 75 where the slice was taken away.
wait_for_end() {
    local ask said word previous="" run_dir="" unheard=0
    for word in "${program[@]}"; do
        case "$word" in --run_dir=*) run_dir="${word#*=}" ;; esac
        if [ "$previous" = --run_dir ]; then run_dir="$word"; fi
        previous="$word"
    done
    printf -v ask '%s; bash launch/restart.sh --saved_step %q' \
        "cd memcalib; cat status 2>/dev/null || echo running" "$run_dir"
    if [ -n "$dry_run" ]; then
        ssh_to 0 "$ask"
        echo "# every $pause seconds, until it prints the status that the run ended with"
        return
    fi
    while true; do
        if said="$(ssh_to 0 "$ask")"; then
            unheard=0
            mkdir -p "$logs/checkpoints/${said##*$'\n'}"  # how far it is, for restart.sh
            said="${said%%$'\n'*}"
            if [[ "$said" =~ ^[0-9]+$ ]]; then return "$said"; fi
        elif is_lost; then
            echo "the slice $NAME was taken away" >&2
            return 75
        else
            unheard=$((unheard + 1))
            if [ "$unheard" -ge 10 ]; then
                echo "error: no word from $NAME; the run may go on: look with wait or logs" >&2
                return 3
            fi
        fi
        sleep "$pause" &
        wait $!
    done
}

fetch_logs() {
    do_it mkdir -p "$logs"
    ssh_to all "cat memcalib/run.log" --output-directory="$logs"
}

delete() {
    if [ "${QUEUED:-}" = 1 ]; then
        do_it "${queue[@]}" delete "$NAME" "${where[@]}" --force --quiet
    else
        do_it "${vm[@]}" delete "$NAME" "${where[@]}" --quiet
    fi
}

attempt() {
    local status=0
    trap 'echo "the slice $NAME is still there: wait, logs and delete go on by hand" >&2; exit 130' INT TERM
    create || return 1
    if install && run; then
        wait_for_end || status=$?
    elif is_lost; then
        status=75
    else
        echo "error: no run was started; the slice $NAME may be there: delete removes it" >&2
        return 1
    fi
    if [ "$status" = 3 ]; then return 3; fi  # it may be running yet
    fetch_logs || true
    if [ "${KEEP:-}" != 1 ] || [ "$status" = 75 ]; then delete || true; fi
    return "$status"
}

case "$action" in
train)
    if [ -n "$dry_run" ]; then
        attempt
        echo "# from the start again where the slice was taken away"
        exit
    fi
    # The logs' folder stands for the run's, which this machine does not see.
    bash "$root/launch/restart.sh" --run_dir="$logs" bash "${BASH_SOURCE[0]}" attempt "$@"
    ;;
attempt) attempt ;;
run) run ;;
wait) wait_for_end ;;
logs) fetch_logs ;;
*) "$action" ;;
esac
