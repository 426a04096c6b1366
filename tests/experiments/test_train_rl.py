"""`python -m experiments.train_rl`, from end to end with a tiny model and the lexical stand-in."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from memcalib_jax.credit import CHANNELS
from memcalib_jax.data import build_messages, load_records, render
from memcalib_jax.models import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def cases(folder, tiny_model_dir, records_file, judge_url, run_program):
    """Runs many cases in one process; returns each one's status, out and err by name."""
    broken = folder / "broken.jsonl"
    broken.write_text('{"id": \n')
    (folder / "file").write_text("")
    tokenizer = load_tokenizer(tiny_model_dir)
    lengths = sorted(len(render(tokenizer, build_messages(record)))
                     for record in load_records(records_file))
    other = folder / "other" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps({"seed": 7, "method": "grpo"}))

    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.json").write_text("[1]")
    (folder / "damaged" / "checkpoints" / "4").mkdir(parents=True)

    def flags(run, **changes):
        values = {
            "run_dir": folder / run, "model_path": tiny_model_dir, "train_file": records_file,
            "judge_url": judge_url, "judge_model": "lexical-stand-in", "num_prompts": 2,
            "group_size": 4, "mini_batch_size": 4, "num_steps": 1, "max_response_tokens": 40,
            "dtype": "float32", "learning_rate": 1e-3, "judge_requests_per_minute": 100000,
        } | changes
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    named = {
        "memcalib": flags("memcalib"),
        "gdpo": flags("gdpo", method="gdpo"),
        "grpo": flags("grpo", method="grpo"),
        "absolute": flags("absolute", mode="absolute", dtype="bfloat16"),
        "sentence": flags("sentence", granularity="sentence", merge_overuse=True,
                          eta=",".join(["0.5"] * 9), closed_gate_fraction=0,
                          verify_sharing=True, remat="elementwise", bin_tokens=512),
        "dry_run": flags("dry", dry_run=True),
        "dry run nowhere": flags("file/below", dry_run=True),
        "too long": flags("long", max_prompt_tokens=lengths[-1] - 1, num_prompts=1,
                          eval_file=records_file),
        "all too long": flags("x", max_prompt_tokens=10),
        "mini_batch": flags("x", mini_batch_size=6),
        "indivisible": flags("x", mini_batch_size=3 * 4),
        "top_p": flags("x", top_p=0),
        "few records": flags("x", num_prompts=50, mini_batch_size=200),
        "no file": flags("x", train_file=folder / "none.jsonl"),
        "broken line": flags("x", train_file=broken),
        "no model": flags("x", model_path=folder / "none"),
        "positions": flags("x", max_response_tokens=5000),
        "judge away": flags("x", judge_url="http://127.0.0.1:9/v1"),
        "judge url": flags("x", judge_url="http://127.0.0.1:9"),
        "no key": flags("x", judge_url="https://judge.example/v1"),
        "prompt file": flags("x", judge_prompt_file=folder / "none.txt"),
        "run_dir a file": flags("file"),
        "other settings": flags("other"),
        "unknown argument": [*flags("x"), "stray"],
        "unknown flag": [*flags("x"), "--lerning_rate=1"],
        "unknown method": flags("x", method="ppo"),
        "eta": flags("x", eta="0.5,1.5"),
        "eta word": flags("x", eta="high"),
        "no judge": flags("x", judge_url=None),
        "nan": flags("x", learning_rate="nan"),
        "infinite": flags("x", kl="inf"),
        "no run_dir": flags("x", run_dir=" "),
        "cache a file": flags("x", judge_cache_dir=folder / "file"),
        "foreign config": flags("foreign"),
        "damaged checkpoint": flags("damaged"),
    }
    answers = run_program("experiments.train_rl", *named.values())
    return dict(zip(named, answers, strict=True))


@pytest.mark.parametrize("case, parts", [
    ("all too long", ["--max_prompt_tokens=10"]),
    ("mini_batch", ["--mini_batch_size=6", "--group_size=4", "8 responses"]),
    ("indivisible", ["--mini_batch_size=12", "8 responses"]),
    ("top_p", ["--top_p"]),
    ("few records", ["--num_prompts=50"]),
    ("no file", ["none.jsonl"]),
    ("broken line", ["broken.jsonl", "line 1"]),
    ("no model", ["none"]),
    ("positions", ["--max_response_tokens=5000", "2048 positions"]),
    ("judge away", ["http://127.0.0.1:9/v1", "server is running"]),
    ("judge url", ["/v1"]),
    ("no key", ["MEMCALIB_JUDGE_API_KEY"]),
    ("prompt file", ["none.txt"]),
    ("run_dir a file", ["--run_dir", "cannot be written"]),
    ("other settings", ["--seed: 7 there, 0 now", "--method: 'grpo' there, 'memcalib' now"]),
    ("unknown argument", ["stray"]),
    ("unknown flag", ["lerning_rate"]),
    ("unknown method", ["--method=ppo", "memcalib|gdpo|grpo"]),
    ("eta", ["--eta=0.5,1.5", "nine"]),
    ("eta word", ["--eta=high"]),
    ("no judge", ["--judge_url"]),
    ("nan", ["--learning_rate=nan"]),
    ("infinite", ["--kl=inf"]),
    ("no run_dir", ["--run_dir"]),
    ("cache a file", ["--judge_cache_dir", "file"]),
    ("foreign config", ["config.json", "--run_dir"]),
    ("damaged checkpoint", ["checkpoints/4", "move it away"]),
])
def test_a_users_mistake_gets_one_plain_message(cases, folder, case, parts):
    answer = cases[case]
    assert answer["status"] == 2
    message = [line for line in answer["err"].splitlines() if line.startswith("error: ")]
    assert len(message) == 1
    assert "Traceback" not in answer["err"]
    for part in parts:
        assert part in answer["err"], answer["err"]
    assert not (folder / "x" / "config.json").exists()


def rows(run_dir: pathlib.Path):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


@pytest.mark.parametrize("method", ["memcalib", "gdpo", "grpo", "absolute", "sentence"])
def test_a_step_of_every_method(cases, folder, method):
    assert cases[method]["status"] == 0, cases[method]["err"]
    assert "step 1/1  SCS" in cases[method]["out"]
    row, = rows(folder / method)
    assert row["step"] == 1 and row["judge/valid"] == 1.0
    assert row["loss/first_ratio_error"] <= (1e-6 if method != "absolute" else 1e-2)
    assert row["loss/grad_norm"] > 0 and row["loss/update_norm"] > 0
    for channel in CHANNELS:
        assert -2.0 <= row[f"credit/{channel}/reward"] <= 1.0
    # The six figures hold together: a response is exact, or over-used, or under-used.
    assert row["rollout/Exact"] <= row["rollout/SCS"]
    assert row["rollout/Exact"] >= 100 - row["rollout/AOR"] - row["rollout/AUR"] - 1e-6
    assert ("credit/noise_floor" in row) == (
        method in ("memcalib", "absolute", "sentence"))
    assert (folder / method / "checkpoints" / "1").is_dir()
    assert list((folder / method / "tensorboard").iterdir())


def test_rollouts_explain_their_advantages(cases, folder):
    path = folder / "memcalib" / "rollouts" / "step_1.jsonl.gz"
    responses = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert len(responses) == 8
    for response in responses:
        atoms = sum((channel["atoms"] for channel in response["channels"].values()), [])
        assert sorted(atoms) == sorted(response["levels"])
    means = np.array([np.mean(response["advantages"]) for response in responses])
    # Redistribution keeps each response's mean, and those have an RMS of 1 over the batch.
    np.testing.assert_allclose(np.sqrt(np.mean(means ** 2)), 1.0, atol=2e-3)


def test_noise_floor_is_far_below_the_thresholds(cases, folder):
    row, = rows(folder / "memcalib")
    assert 0 < row["credit/noise_floor"] < 1e-4
    assert row["credit/CA-/threshold"] >= 0.02 - 1e-6


def test_programs_are_named_and_counted(cases, folder):
    assert "programs compiled in" in cases["memcalib"]["out"]
    row, = rows(folder / "memcalib")
    assert row["time/programs_compiled"] > 0 and row["time/compile"] > 0


def test_only_open_gates_are_scored_where_asked(cases, folder):
    row, = rows(folder / "sentence")
    everything, = rows(folder / "memcalib")
    assert 0 < row["credit/pairs_scored"] <= everything["credit/pairs_scored"]
    assert sum(row[f"credit/{name}/direction"] for name in CHANNELS[1:]) == 0
    assert row["credit/AC-/trigger_rate"] == everything["credit/AC-/trigger_rate"]
    assert "verify_sharing" in cases["sentence"]["out"]


def test_dry_run_writes_no_run(cases, folder):
    assert cases["dry_run"]["status"] == 0
    assert "1 steps of 2 x 4 responses; all checks passed" in cases["dry_run"]["out"]
    assert "a device keeps\n  master weights" in cases["dry_run"]["out"]
    assert not (folder / "dry").exists()


def test_a_dry_run_finds_a_folder_that_cannot_be_made(cases):
    assert cases["dry run nowhere"]["status"] == 2
    assert "cannot be written" in cases["dry run nowhere"]["err"]


def test_long_prompts_are_counted_skips(cases, folder):
    assert cases["too long"]["status"] == 0, cases["too long"]["err"]
    assert "skipped 1 of 4 training prompts" in cases["too long"]["out"]
    assert rows(folder / "long")[0]["step"] == 1


def test_config_is_written_without_secrets(cases, folder):
    config = json.loads((folder / "memcalib" / "config.json").read_text())
    assert config["eta"] == ["0.75"] and config["kl"] == 0.01 and config["versions"]["jax"]
    assert not any("key" in name for name in config)
