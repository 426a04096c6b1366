#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct with MemCalib-RL for a few steps against a judge over HTTP, and
# evaluates it before and after. Everything runs on this machine; results go to runs/quickstart,
# or to the folder given as the first argument. Run again, it goes on where it stopped.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ensure_venv
ensure_smollm2
mkdir -p "${1:-$ROOT/runs/quickstart}" || {
    complain "the results folder ${1:-$ROOT/runs/quickstart} cannot be made"
    exit 1
}
run_dir="$(cd "${1:-$ROOT/runs/quickstart}" && pwd)"
cd "$ROOT"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$ROOT/.venv/jax_cache}"

# The judge is a stand-in that looks for the atoms' words: no model, no key, no cost.
port_file="$run_dir/judge_port"
rm -f "$port_file"
"$VENV_PYTHON" -m memcalib_jax.judge.server --port 0 --port_file "$port_file" \
    >"$run_dir/judge.log" 2>&1 &
judge_pid=$!
finished=""
trap 'kill "$judge_pid" 2>/dev/null || true
    [ -n "$finished" ] || complain "stopped; run the same command again to go on where it stopped"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
for _ in $(seq 300); do
    if [ -s "$port_file" ]; then break; fi
    if ! kill -0 "$judge_pid" 2>/dev/null; then break; fi
    sleep 0.1
done
if [ ! -s "$port_file" ]; then
    complain "the judge server did not start; see $run_dir/judge.log"
    exit 1
fi
judge=("--judge_url=http://127.0.0.1:$(cat "$port_file")/v1" --judge_model=lexical-stand-in
    --judge_requests_per_minute=100000)
evaluate=("$VENV_PYTHON" -m experiments.evaluate "${judge[@]}" --dtype=float32 --num_seeds=2
    --max_response_tokens=96 --temperature=0.6)

say "1/4 Evaluating the model as it is, on 12 held-out sample records."
"${evaluate[@]}" --run_dir="$run_dir/before"
say "2/4 Training on the other 36 records."
"$VENV_PYTHON" -m experiments.train_rl --flagfile=experiments/presets/quickstart.flags \
    "${judge[@]}" --run_dir="$run_dir/train"
say "3/4 Evaluating the trained model."
"${evaluate[@]}" --run_dir="$run_dir/after" --checkpoint="$run_dir/train"
say "4/4 Before and after:"
"$VENV_PYTHON" -m experiments.compare "$run_dir/before/results.json" "$run_dir/after/results.json"
say ""
say "A few steps prove the machinery, not the method, and the judge is a lexical stand-in."
say "Everything lies in $run_dir:"
say "  train/metrics.jsonl, train/rollouts/, train/checkpoints/, train/tensorboard/"
say "  before/ and after/: results.json, results.png, seed_*/responses.jsonl, seed_*/judgments.jsonl"
finished=yes
