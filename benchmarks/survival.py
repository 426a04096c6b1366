r"""Does a training run that is killed again and again come to the same bits?

    python -m benchmarks.survival --folder=/tmp/survival --signal=KILL

Trains a random two-layer model on the sample records, judged over HTTP on this machine: once
undisturbed, and once with a signal at a seeded random moment of every start, after which it is
started again. Metrics, parameters and optimizer state have to be equal, no journalled judgment may
be asked for again, and no temporary or cut-off file may be left. Ends with one JSON document, and
with status 1 where something differs or the run was over before all signals were sent.
"""

import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from safetensors.numpy import save_file

from memcalib_jax.api.server import ChatServer, last_user_object, serving
from memcalib_jax.data import LEVELS
from memcalib_jax.models import ModelConfig, default_model_path, load_tokenizer

FLAGS = flags.FLAGS
flags.DEFINE_integer("kills", 30, "Signals in all.", lower_bound=1)
flags.DEFINE_integer("steps", 12, "Steps of the run.", lower_bound=1)
flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "What is sent.")
flags.DEFINE_integer("seed", 0, "Seed of the moments.")
flags.DEFINE_string("folder", None, "Where the runs go; has to be new.", required=True)

ROOT = pathlib.Path(__file__).parents[1]
TRAIN = ["--num_prompts=2", "--group_size=3", "--mini_batch_size=3", "--max_response_tokens=12",
         "--dtype=float32", "--learning_rate=1e-3", "--save_every=1", "--eval_every=3",
         "--judge_model=scripted", "--judge_requests_per_minute=100000"]
HIDDEN = 32


class CountingJudge:
    """Gives levels by a hash of the response; counts the requests by the response's hash."""

    def __init__(self):
        self._lock = threading.Lock()
        self._asked = Counter()

    def take(self) -> Counter:
        """Returns what was asked since the last call."""
        with self._lock:
            asked, self._asked = self._asked, Counter()
        return asked

    def answer(self, body: dict) -> str:
        payload = last_user_object(body["messages"])
        digest = hashlib.sha256(payload["response"].encode())
        with self._lock:
            self._asked[digest.hexdigest()] += 1
        time.sleep(0.05)  # so that a kill may find calls out
        return json.dumps({"atom_judgments": [
            {"atom_id": atom["atom_id"], "u_star": atom["u_star"], "evidence_quote": "",
             "predicted_usage_level": LEVELS[digest.digest()[i % 32] % 3], "reason": "scripted"}
            for i, atom in enumerate(payload["atoms"])]})


def make_model(folder: pathlib.Path):
    """Writes a random two-layer llama with the built-in model's tokenizer."""
    tokenizer = load_tokenizer(default_model_path())
    tokenizer.save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
              "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
              "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(len(tokenizer)), folder / "model.safetensors")


def _weights(vocab_size):
    random = np.random.default_rng(0)
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
              "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
              "mlp.gate_proj": (2 * HIDDEN, HIDDEN), "mlp.up_proj": (2 * HIDDEN, HIDDEN),
              "mlp.down_proj": (HIDDEN, 2 * HIDDEN)}
    tensors = {"model.embed_tokens.weight": 0.3 * random.standard_normal((vocab_size, HIDDEN)),
               "model.norm.weight": np.ones(HIDDEN)}
    for layer in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN)
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = (
                random.standard_normal(shape) * HIDDEN ** -0.5)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def journalled(run: pathlib.Path) -> Counter:
    """Returns how many judgments of each response the run's journals hold."""
    found = Counter()
    for path in (run / "judgments").glob("*.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last is cut off
            row = json.loads(line)
            found[row["response_sha256"]] += row["reason"] != "empty_response"
    return found


class Run:
    """One run's processes: started, watched and signalled."""

    def __init__(self, folder, name, judge, url):
        self.dir, self.log = folder / name, folder / f"{name}.log"
        self._judge = judge
        self._command = [
            sys.executable, "-m", "experiments.train_rl", *TRAIN, f"--num_steps={FLAGS.steps}",
            f"--run_dir={self.dir}", f"--model_path={folder / 'model'}", f"--judge_url={url}"]
        self._env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "PYTHONUNBUFFERED": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.starts = []  # of each: what the journals held before it, and what it asked

    def start(self) -> subprocess.Popen:
        self._before = journalled(self.dir)
        self._begun = self.log.stat().st_size if self.log.exists() else 0
        self._judge.take()
        with self.log.open("a") as log:
            return subprocess.Popen(self._command, cwd=ROOT, env=self._env, stdout=log, stderr=log)

    def ended(self):
        self.starts.append((self._before, self._judge.take()))

    def last_line(self) -> str:
        """Returns where the run says that it is."""
        known = re.findall(r"(first step: \w+|step \d+/\d+|resuming after step \d+|done)",
                           self.log.read_text()[self._begun:])
        return known[-1] if known else "start"

    def finish(self):
        process = self.start()
        status = process.wait()
        self.ended()
        if status:
            sys.exit(f"a run ended with status {status}:\n{self.log.read_text()[-2000:]}")

    def interrupt(self, after: float, sent: signal.Signals) -> str | None:
        """Starts it and sends the signal; returns where it fell, or None where it had ended."""
        process = self.start()
        try:
            status = process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
            status = process.wait()
        self.ended()
        if status == 0:
            return None
        # Until it trains, SIGTERM ends it at once: there is nothing to save.
        if status not in ({75, -sent} if sent == signal.SIGTERM else {-sent}):
            sys.exit(f"status {status} after SIG{FLAGS.signal}:\n{self.log.read_text()[-2000:]}")
        return f"{self.last_line()}, status {status}"


def asked_again(run: Run) -> int:
    """Returns how many requests were for judgments that the journals held at a start."""
    whole = journalled(run.dir)
    return sum(max(0, count - (whole[response] - before[response]))
               for before, asked in run.starts for response, count in asked.items())


def metrics(run: pathlib.Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{name: value for name, value in row.items()
             if not name.startswith(("time/", "judge/"))} for row in rows]


def same_bits(one: pathlib.Path, other: pathlib.Path, item: str) -> bool:
    trees = [ocp.StandardCheckpointer().restore(
        (run / "checkpoints" / str(FLAGS.steps) / item).absolute()) for run in (one, other)]
    leaves = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)] for tree in trees]
    return len(leaves[0]) > 0 and leaves[0] == leaves[1]


def leftovers(run: pathlib.Path) -> list[str]:
    """Returns temporary files, and files that are not whole."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*")
                  if "tmp" in path.name or path.is_file() and not _is_whole(path))


def _is_whole(path):
    data = path.read_bytes()
    try:
        if path.name.endswith(".gz"):
            data = gzip.decompress(data)
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            return data[-1:] in (b"", b"\n") and all(
                json.loads(line) is not None for line in data.splitlines() if line)
        if path.suffix == ".npz":
            return zipfile.ZipFile(path).testzip() is None
        return path.suffix != ".json" or json.loads(data) is not None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile):
        return False


def interrupted(run: Run, seconds: float) -> list[str]:
    """Sends a signal a start, within `seconds`; returns where they fell."""
    rng, places = np.random.default_rng(FLAGS.seed), []
    while len(places) < FLAGS.kills:
        place = run.interrupt(rng.uniform(0, seconds), signal.Signals[f"SIG{FLAGS.signal}"])
        if place is None:
            break
        places.append(place)
        print(f"{len(places)}/{FLAGS.kills}  {place}", flush=True)
    return places


def main(_):
    logging.set_verbosity(logging.ERROR)  # the storage layer tells of each file
    folder = pathlib.Path(FLAGS.folder).absolute()
    folder.mkdir(parents=True)
    make_model(folder / "model")
    judge = CountingJudge()
    with serving(ChatServer(0, {"scripted": "scripted"}, judge.answer)) as server:
        warm, whole, killed = (Run(folder, name, judge, server.base_url)
                               for name in ("warm", "whole", "killed"))
        warm.finish()  # compiles
        began = time.monotonic()
        whole.finish()
        seconds = time.monotonic() - began
        print(f"undisturbed: {seconds:.1f} s", flush=True)
        resumed = time.monotonic()
        warm.finish()  # has nothing to do: a start
        start = time.monotonic() - resumed
        # Most signals fall before a start's first step is done: all find the run alive.
        places = interrupted(killed, start + 2.5 * (seconds - start) / FLAGS.steps)
        killed.finish()
    report(whole, killed, places)


def report(whole: Run, killed: Run, places: list[str]):
    """Prints the table and the document; exits with 1 where something differs."""
    rows = {"signals": len(places), "starts": len(killed.starts),
            "where": dict(Counter(re.sub(r" \d+(/\d+)?", "", place) for place in places)),
            "asked_undisturbed": sum(whole.starts[0][1].values()),
            "asked": sum(sum(asked.values()) for _, asked in killed.starts),
            "asked_after_journalled": asked_again(killed),
            "metrics_equal": metrics(whole.dir) == metrics(killed.dir),
            "parameters_equal": same_bits(whole.dir, killed.dir, "params"),
            "optimizer_equal": same_bits(whole.dir, killed.dir, "state"),
            "left": leftovers(killed.dir)}
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    survived = (len(places) == FLAGS.kills and not rows["asked_after_journalled"]
                and rows["metrics_equal"] and rows["parameters_equal"]
                and rows["optimizer_equal"] and not rows["left"])
    print(json.dumps({"signal": FLAGS.signal, "steps": FLAGS.steps, "seed": FLAGS.seed,
                      "survived": survived} | rows))
    sys.exit(not survived)


if __name__ == "__main__":
    app.run(main)
