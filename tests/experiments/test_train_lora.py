"""Training an adapter from end to end: resumed to the same bits, evaluated, read as PEFT's."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from memcalib_jax.data import build_messages, load_records, render
from memcalib_jax.models import load, load_config, load_tokenizer, logits
from memcalib_jax.models.lora import with_adapter
from memcalib_jax.models.weights.peft import load_adapter

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def flags(folder, tiny_model_dir, judge_url):
    """Makes the flags of a run."""
    def make(run, **changes):
        values = {"run_dir": folder / run, "model_path": tiny_model_dir, "dtype": "float32",
                  "judge_url": judge_url, "judge_model": "lexical-stand-in",
                  "judge_requests_per_minute": 100000} | changes
        return [f"--{name}={value}" for name, value in values.items()]

    return make


@pytest.fixture(scope="module")
def trained(folder, flags, records_file, run_program):
    """An adapter trained in one go, one trained in two, and what is refused. Answers by name."""
    def make(run, **changes):
        return flags(run, **{
            "train_file": records_file, "num_prompts": 4, "group_size": 3, "mini_batch_size": 12,
            "num_steps": STEPS, "max_response_tokens": 24, "learning_rate": 0.02, "save_every": 1,
            "lora_rank": 4, "lora_alpha": 8, "lora_targets": "q_proj,o_proj,up_proj"} | changes)

    cases = {
        "whole": make("whole"),
        "first": make("halves", num_steps=1),
        "other_rank": make("halves", lora_rank=2),
        "all_parameters": make("halves", lora_rank=0),
        "second": make("halves"),
        "targets": make("x", lora_targets="q_proj,embed_tokens"),
    }
    return dict(zip(cases, run_program("experiments.train_rl", *cases.values()), strict=True))


@pytest.fixture(scope="module")
def evaluated(trained, folder, flags, records_file, run_program):
    """The trained adapter's most likely answers."""
    answer, = run_program("experiments.evaluate", flags(
        "evaluation", checkpoint=folder / "whole", eval_file=records_file, temperature=0,
        num_seeds=1, max_response_tokens=2))
    return answer


def metrics(run_dir):
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith(("time/", "judge/"))}
            for line in (run_dir / "metrics.jsonl").open()]


def test_the_first_step_starts_at_the_reference(trained, folder):
    assert trained["whole"]["status"] == 0, trained["whole"]["err"]
    first, second = metrics(folder / "whole")
    assert first["loss/first_ratio_error"] <= 1e-6
    assert abs(first["loss/kl"]) < 1e-9 and second["loss/kl"] > 1e-6
    assert first["loss/grad_norm"] > 0


def test_a_resumed_run_comes_to_the_same_bits(trained, folder):
    assert trained["first"]["status"] == 0, trained["first"]["err"]
    assert "resuming after step 1" in trained["second"]["out"]
    assert metrics(folder / "halves") == metrics(folder / "whole")
    for item in ("params", "state"):
        whole, halves = (ocp.StandardCheckpointer().restore(
            folder / run / "checkpoints" / str(STEPS) / item) for run in ("whole", "halves"))
        leaves = list(zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True))
        assert leaves
        for a, b in leaves:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert [(folder / "halves" / "adapter" / name).read_bytes() for name in names] == [
        (folder / "whole" / "adapter" / name).read_bytes() for name in names]


@pytest.mark.parametrize("case, parts", [
    ("other_rank", ["--lora_rank: 4 there, 2 now"]),
    ("all_parameters", ["--lora_rank: 4 there, 0 now"]),
    ("targets", ["--lora_targets", "'embed_tokens' is no projection of a llama model"]),
])
def test_what_cannot_be_is_refused_before_training(trained, case, parts):
    assert trained[case]["status"] == 2
    assert "Traceback" not in trained[case]["err"]
    for part in parts:
        assert part in trained[case]["err"]


def test_the_written_adapter_is_the_checkpoints(trained, folder, tiny_model_dir):
    adapter, lora = load_adapter(folder / "whole" / "adapter", load_config(tiny_model_dir))
    assert (lora.rank, lora.alpha, set(lora.targets)) == (4, 8, {"q_proj", "o_proj", "up_proj"})
    stored = flatten_dict(ocp.StandardCheckpointer().restore(
        folder / "whole" / "checkpoints" / str(STEPS) / "params"))
    adapter = flatten_dict(adapter)
    assert adapter.keys() == stored.keys()
    for path, values in adapter.items():
        np.testing.assert_array_equal(values, stored[path])
    assert np.any(adapter["layers", "q_lora_b"])


def test_an_evaluation_reads_base_and_adapter(evaluated, folder, tiny_model_dir, records_file):
    assert evaluated["status"] == 0, evaluated["err"]
    base, config = load(tiny_model_dir)
    adapted = with_adapter(base, *load_adapter(folder / "whole" / "adapter", config))
    tokenizer, records = load_tokenizer(tiny_model_dir), load_records(records_file)
    prompts = [render(tokenizer, build_messages(record, representation="fluent"))
               for record in records]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[:len(prompt)] = prompt

    def likeliest(params):
        last = logits(params, config, tokens, lengths)[np.arange(len(prompts)), lengths - 1]
        return {record.id: int(row.argmax()) for record, row in zip(records, last)}

    lines = (folder / "evaluation" / "seed_0" / "responses.jsonl").open()
    rows = [json.loads(line) for line in lines]
    assert {row["id"]: row["tokens"][0] for row in rows} == likeliest(adapted) != likeliest(base)
