#!/usr/bin/env bash
# Runs a command, and starts it again after it was preempted or lost a machine:
#   bash launch/restart.sh python -m experiments.train_rl --run_dir=runs/a ...
# How it ended decides, here for every launcher:
#   75 (preempted, saved), 128 and above (killed, but not 130): again
#   1 with --multihost or --coordinator (one of several processes went, the others stop): again
#   0 (done), 2 (a mistake), 130 (Ctrl-C) and all other failures: stop
# It gives up, with status 1, when RESTARTS_WITHOUT_PROGRESS (5) starts in a row saved no checkpoint
# in the run folder. --once leaves starting again to a scheduler: status 75 asks for it, and the
# starts are counted in the run folder's restarts/, a file for each RESTART_NAME (the host's name).
# --run_dir=DIR in front of the command names another folder that shows whether it gets on.
# --dry_run prints what it would do; --saved_step RUN_DIR prints how far its checkpoints are.
set -uo pipefail

fail() { echo "error: $*" >&2; exit 2; }

# Programs in stages have a folder of checkpoints in the folder of each: their steps add up.
saved_step() {
    local folder name newest total=0
    for folder in "$1"/checkpoints "$1"/*/checkpoints; do
        newest=0
        for name in "$folder"/*; do
            name="${name##*/}"
            if [[ "$name" =~ ^[0-9]+$ ]] && ((10#$name > newest)); then newest=$((10#$name)); fi
        done
        total=$((total + newest))
    done
    echo "$total"
}

once="" dry_run="" run_dir=""
while [[ "${1:-}" = --* ]]; do
    case "$1" in
    --once) once=yes ;;
    --dry_run) dry_run=yes ;;
    --run_dir=*) run_dir="${1#*=}" ;;
    --saved_step)
        [ $# -eq 2 ] || fail "--saved_step takes a run folder"
        saved_step "$2"
        exit
        ;;
    *) fail "unknown option $1: restart.sh [--once] [--dry_run] COMMAND --run_dir=..." ;;
    esac
    shift
done
[ $# -ge 1 ] || fail "give a command: restart.sh [--once] [--dry_run] COMMAND --run_dir=..."

joined="" previous="" named=""
for word in "$@"; do
    if [ "$previous" = --run_dir ]; then named="$word"; fi
    case "$word" in
    --run_dir=*) named="${word#*=}" ;;
    --multihost | --multihost=true | --coordinator | --coordinator=*) joined=yes ;;
    esac
    previous="$word"
done
run_dir="${run_dir:-$named}"
[ -n "$run_dir" ] || fail "the command has no --run_dir=..., which shows whether it gets on"
limit="${RESTARTS_WITHOUT_PROGRESS:-5}"
[[ "$limit" =~ ^[1-9][0-9]*$ ]] || fail "RESTARTS_WITHOUT_PROGRESS=$limit is no number above 0"

if [ -n "$dry_run" ]; then
    printf '%q ' "$@"
    echo
    exit 0
fi

# What is counted outlives this process, which may go with its machine: a line "STEP STARTS".
record="$run_dir/restarts/${RESTART_NAME:-$(hostname)}"
mkdir -p "${record%/*}" || fail "--run_dir=$run_dir cannot be written"

stop_with() { rm -f "$record"; exit "$1"; }

give_up() {
    echo "error: $fruitless starts in a row saved no checkpoint in $run_dir; $1" >&2
    stop_with 1
}

count_start() {
    local step before=-1 starts=0
    step="$(saved_step "$run_dir")"
    if [ -f "$record" ]; then read -r before starts < "$record"; fi
    if [ "$step" != "$before" ]; then starts=0; fi
    if [ "$starts" -ge "$limit" ]; then fruitless=$starts; give_up "the last was cut off"; fi
    echo "$step $((starts + 1))" > "$record"
}

may_start_again() {
    case "$1" in
    75) return 0 ;;
    1) [ -n "$joined" ] ;;
    130) return 1 ;;
    *) [ "$1" -ge 128 ] ;;
    esac
}

# What runs in the background is deaf to Ctrl-C, and is sent SIGTERM for it.
child="" told_to_stop=""
trap 'told_to_stop=yes; if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi' TERM INT
while true; do
    count_start
    "$@" &
    child=$!
    wait "$child"
    status=$?
    # A signal to this script ends the first wait before the command has saved and gone.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
    child=""
    may_start_again "$status" || stop_with "$status"
    read -r step fruitless < "$record"
    if [ "$(saved_step "$run_dir")" = "$step" ] && [ "$fruitless" -ge "$limit" ]; then
        give_up "the last ended with status $status"
    fi
    if [ -n "$once$told_to_stop" ]; then exit 75; fi
    echo "the command ended with status $status; starting it again" >&2
    sleep "${RESTART_SECONDS:-10}" &
    child=$!
    wait "$child"
    child=""
    if [ -n "$told_to_stop" ]; then exit 75; fi
done
