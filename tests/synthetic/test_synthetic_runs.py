import gzip
import json

import jax
import numpy as np
import pytest
from conftest import TRAINING

from memcalib_jax.credit import CHANNELS, channel_rewards
from memcalib_jax.evaluation.trace import load_trace, trace_path
from memcalib_jax.synthetic.arms import Arm, measure_start, metrics_of, run_arm
from memcalib_jax.synthetic.cold_start import ColdStart, init_params, make_cold_start, model_config
from memcalib_jax.synthetic.judge import use_levels
from memcalib_jax.synthetic.records import draw_records, value_of
from memcalib_jax.synthetic.summary import summarize_run
from memcalib_jax.training.checkpoint import Checkpoints


@pytest.mark.parametrize("text, name, parts", [
    ("grpo@0.05", "grpo@0.05", ("grpo", "ordered", 0.05)),
    ("memcalib@0", "memcalib@0", ("memcalib", "ordered", 0.0)),
    ("guarded@.5", None, None), ("guarded@0.10", "guarded@0.1", ("memcalib", "guarded", 0.1)),
    ("gdpo", None, None), ("ppo@0.1", None, None), ("gdpo@nan", None, None)])
def test_arms_by_name(text, name, parts):
    if parts is None:
        with pytest.raises(ValueError, match=f"'{text}' is no arm: give one of memcalib, gdpo"):
            Arm.parse(text)
    else:
        arm = Arm.parse(text)
        assert str(arm) == name and (arm.method, arm.mode, arm.kl) == parts


def rows_of(folder, step):
    with gzip.open(folder / "rollouts" / f"step_{step}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_two_steps_through_the_loop(guarded_run):
    steps = metrics_of(guarded_run)
    assert [row["step"] for row in steps] == [1, 2]
    records = {record.id: record for record in draw_records(32, seed=[3, 5], name="t")}
    rows = rows_of(guarded_run, 1) + rows_of(guarded_run, 2)
    assert len(rows) == 32 and len({row["id"] for row in rows}) == 8
    exact = []
    for row in rows:
        record = records[row["id"]]
        levels = use_levels([value_of(atom) for atom in record.atoms], row["text"])
        assert ["ABC"[level] for level in levels] == list(row["levels"].values())
        ideal = np.array([atom.ideal for atom in record.atoms])
        exact.append(levels == ideal.tolist())
        rewards = np.asarray(channel_rewards(ideal, np.array(levels), np.ones(len(ideal), bool)))
        assert {name: found["reward"] for name, found in row["channels"].items()} == {
            CHANNELS[channel]: pytest.approx(rewards[channel])
            for channel in np.flatnonzero(rewards)}
    assert 100 * np.mean(exact[:16]) == pytest.approx(steps[0]["rollout/Exact"])
    assert steps[0]["loss/first_ratio_error"] < 1e-4
    assert steps[0]["sampler/log_prob_gap_max"] < 1e-3
    assert steps[1]["eval/valid"] == 1.0 and steps[1]["loss/update_norm"] > 0


def test_guarded_runs_trace_their_stop_tokens(guarded_run):
    trace = load_trace(trace_path(guarded_run, 2))
    assert trace.settings["mode"] == "guarded"
    for response, found in enumerate(trace.responses):
        stops = trace.stop_N[trace.tokens_of(response)]
        assert stops.tolist() == [False] * (len(stops) - 1) + [found["finish_reason"] == "stop"]


def test_a_run_that_was_stopped_comes_to_the_same_numbers(guarded_run, start, tmp_path):
    arm = Arm.parse("guarded@0.05")
    half = TRAINING.__class__(**{**vars(TRAINING), "num_steps": 1})
    run_arm(tmp_path, arm, half, start, 3, lambda line: None)
    said = []
    state = run_arm(tmp_path, arm, TRAINING, start, 3, said.append)
    assert said[0] == "resuming after step 1"

    def timeless(steps):
        return [{name: value for name, value in row.items() if not name.startswith("time/")}
                for row in steps]

    assert timeless(metrics_of(tmp_path)) == timeless(metrics_of(guarded_run))
    assert rows_of(tmp_path, 2) == rows_of(guarded_run, 2)
    whole = Checkpoints(guarded_run / "checkpoints").restore_params(2, state.params)
    jax.tree.map(np.testing.assert_array_equal, whole, state.params)


def test_arms_of_a_seed_meet_the_same_records_and_first_responses(guarded_run, start, tmp_path):
    for arm in ("gdpo@0.01", "grpo@0.05"):
        run_arm(tmp_path / arm, Arm.parse(arm), TRAINING, start, 3, lambda line: None)
        for step in (1, 2):
            assert [row["id"] for row in rows_of(tmp_path / arm, step)] == [
                row["id"] for row in rows_of(guarded_run, step)]
        assert [row["tokens"] for row in rows_of(tmp_path / arm, 1)] == [
            row["tokens"] for row in rows_of(guarded_run, 1)]


def test_a_runs_summary(guarded_run, start):
    arm = Arm.parse("guarded@0.05")
    measured = measure_start(start, TRAINING, 3)
    assert measured.keys() >= {"SCS", "sMOS"} and 0 <= measured["SCS"] <= 100
    found = summarize_run(guarded_run, arm, 3, measured)
    last = metrics_of(guarded_run)[-1]
    assert found["arm"] == "guarded@0.05" and found["num_steps"] == 2
    assert found["figures"]["SCS"] == last["eval/SCS"]
    assert found["figures"]["stop"] in (0.0, None)  # guarded
    assert found["figures"]["gain"] is None and found["figures"]["steps_to_goal"] is None
    assert found["figures"]["unstopped"] == pytest.approx(100 * (1 - last["rollout/stopped"]))


def test_a_cold_start_learns_and_is_made_once(tokenizer, tmp_path):
    settings = ColdStart(echo_steps=2, habit_steps=3, batch_size=8, records=64)
    said = []
    start = make_cold_start(tmp_path, settings, tokenizer, 1, said.append)
    assert sum("habit: step" in line for line in said) == 3
    first = init_params(model_config(), jax.random.key(1))
    assert not np.array_equal(first["embed"], start.params["embed"])
    losses = [json.loads(line)["loss/total"] for phase in ("echo", "habit")
              for line in (tmp_path / phase / "metrics.jsonl").read_text().splitlines()]
    # About log 147 at first, since the random model knows nothing.
    assert losses[0] == pytest.approx(np.log(147), abs=0.6) and losses[-1] < losses[0]
    again = make_cold_start(tmp_path, settings, tokenizer, 1, lambda line: pytest.fail(line))
    jax.tree.map(np.testing.assert_array_equal, start.params, again.params)
