"""`python -m experiments.convert`: from a model or a training run to a Hugging Face folder."""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from memcalib_jax import models
from memcalib_jax.models.lora import LoraConfig, adapter_shapes, init_adapter
from memcalib_jax.training.checkpoint import Checkpoints
from memcalib_jax.training.state import OptimizerConfig, init_state

ROOT = pathlib.Path(__file__).parents[2]
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
LORA = LoraConfig(rank=3, alpha=6, targets=("q_proj",))


def save_checkpoint(run, params, step):
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(step, init_state(params, OptimizerConfig()), {})
    checkpoints.close()


# Runs of an adapter whose config.json was changed, and checkpoints that lack a part.
ADAPTERS = {"no_alpha": {"lora_alpha": None}, "text_rank": {"lora_rank": "3"},
            "other_rank": {"lora_rank": 4}, "other_targets": {"lora_targets": ["k_proj"]},
            "no_such_target": {"lora_targets": ["z_proj"]}}
DAMAGED = ("no_parameters", "no_metadata", "cut_metadata")


def damage(folder):
    """Makes copies of the run: one whose checkpoints were never finished, and `DAMAGED`."""
    shutil.copytree(folder / "run", folder / "unfinished")
    for step in [*(folder / "unfinished" / "checkpoints").iterdir()]:
        step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp"))
    for run in DAMAGED:
        shutil.copytree(folder / "run", folder / run)
    params = {run: folder / run / "checkpoints" / "4" / "params" for run in DAMAGED}
    shutil.rmtree(params["no_parameters"])
    (params["no_metadata"] / "_METADATA").unlink()
    (params["cut_metadata"] / "_METADATA").write_text("{")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def answers(folder, tiny_model_dir, run_program):
    params = jax.device_get(models.load(tiny_model_dir)[0])
    for step in (3, 4):
        save_checkpoint(folder / "run", jax.tree.map(lambda x: x + np.float32(step), params), step)
    adapter = jax.tree.map(lambda x: x + np.float32(0.1), jax.device_get(
        init_adapter(jax.random.key(0), models.load_config(tiny_model_dir), LORA)))
    save_checkpoint(folder / "adapter", adapter, 2)
    (folder / "adapter" / "config.json").write_text(json.dumps({
        "lora_rank": LORA.rank, "lora_alpha": LORA.alpha, "lora_targets": LORA.targets}))
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_config.json").write_text("{}")
    (folder / "no_tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model_dir / name, folder / "no_tokenizer")
    save_checkpoint(folder / "other", {"embed": np.zeros((3, 2), np.float32)}, 1)
    for run, changes in ADAPTERS.items():
        shutil.copytree(folder / "adapter", folder / run)
        settings = {"lora_rank": LORA.rank, "lora_alpha": LORA.alpha,
                    "lora_targets": LORA.targets} | changes
        (folder / run / "config.json").write_text(json.dumps(
            {name: value for name, value in settings.items() if value is not None}))
    damage(folder)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "precious.txt").write_text("keep me")

    def flags(output, **values):
        values = {"model_path": tiny_model_dir, "output_dir": folder / output} | values
        return [f"--{name}={value}" for name, value in values.items()]

    cases = {
        "newest": flags("newest", checkpoint=folder / "run"),
        "half": flags("empty", checkpoint=folder / "run", dtype="bfloat16"),
        "plain": flags("plain"),
        "adapter": flags("merged", checkpoint=folder / "adapter"),
        "again": flags("newest", checkpoint=folder / "run"),
        "full": flags("full", checkpoint=folder / "run"),
        "no_run": flags("new", checkpoint=folder / "absent"),
        "other": flags("new", checkpoint=folder / "other"),
        "no_model": flags("new", model_path=folder / "absent"),
        "run_as_model": flags("new", model_path=folder / "adapter"),
        "adapter_as_model": flags("new", model_path=folder / "peft"),
        "no_output": flags("", output_dir=" "),
        "no_checkpoint": flags("new", checkpoint=""),
        "under_a_file": flags("full/precious.txt/new"),
        **{run: flags("new", checkpoint=folder / run)
           for run in (*ADAPTERS, "unfinished", *DAMAGED)},
    }
    if HAS_TORCH:
        cases |= {
            "checked": flags("checked", check=True),
            "checked_half": flags("checked_half", dtype="bfloat16", check=True),
            "no_tokenizer": flags("new", model_path=folder / "no_tokenizer", check=True),
        }
    return dict(zip(cases, run_program("experiments.convert", *cases.values()), strict=True))


def test_the_newest_checkpoint_becomes_a_model(answers, folder, tiny_model_dir):
    assert answers["newest"]["status"] == 0, answers["newest"]["err"]
    assert answers["newest"]["out"] == (
        f"wrote step 4 of {folder / 'run'} to {folder / 'newest'}\n")
    before, after = (models.load(path) for path in (tiny_model_dir, folder / "newest"))
    assert before[1] == after[1]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x + np.float32(4), y),
                 before[0], after[0])
    text = "The user is vegan."
    assert (models.load_tokenizer(folder / "newest")(text)["input_ids"]
            == models.load_tokenizer(tiny_model_dir)(text)["input_ids"])
    assert (json.loads((folder / "newest" / "config.json").read_text())
            == json.loads((tiny_model_dir / "config.json").read_text()))


def test_another_dtype(answers, folder):
    assert answers["half"]["status"] == 0, answers["half"]["err"]
    wide, narrow = (load_file(folder / name / "model.safetensors") for name in ("newest", "empty"))
    for name, values in wide.items():
        np.testing.assert_array_equal(values.astype(narrow[name].dtype), narrow[name])
    assert json.loads((folder / "empty" / "config.json").read_text())["dtype"] == "bfloat16"


def test_without_a_checkpoint_the_model_is_written_as_it_is(answers, folder, tiny_model_dir):
    assert answers["plain"]["status"] == 0, answers["plain"]["err"]
    before, after = (load_file(path / "model.safetensors")
                     for path in (tiny_model_dir, folder / "plain"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_an_adapter_is_merged(answers, folder, tiny_model_dir):
    assert answers["adapter"]["status"] == 0, answers["adapter"]["err"]
    (before, _), (after, _) = (models.load(path) for path in (tiny_model_dir, folder / "merged"))
    a, b = (np.asarray(Checkpoints(folder / "adapter" / "checkpoints").restore_params(
        2, jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
                        adapter_shapes(models.load_config(tiny_model_dir), LORA),
                        is_leaf=lambda x: isinstance(x, tuple)))["layers"][f"q_lora_{letter}"])
            for letter in "ab")
    np.testing.assert_allclose(
        after["layers"]["q"], before["layers"]["q"] + 2 * np.einsum("ldr,lrhe->ldhe", a, b),
        rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after["layers"]["k"], before["layers"]["k"])


@pytest.mark.parametrize("case, message", [
    ("again", "newest: already exists and is not empty; choose another folder"),
    ("full", "full: already exists and is not empty"),
    ("no_run", "absent holds no whole checkpoint"),
    ("other", "parameters of another shape than --model_path="),
    ("no_model", "absent: there is no such file or folder"),
    ("run_as_model", "is the folder of a training run: name the model that it started from"),
    ("adapter_as_model", "is an adapter: name the model that it was trained on"),
    ("no_output", "--output_dir is empty"),
    ("no_checkpoint", "--checkpoint is empty"),
    ("under_a_file", "precious.txt is no folder that can be written"),
    ("no_alpha", "no_alpha/config.json: 'lora_alpha'"),
    ("text_rank", "lora_rank, lora_alpha or lora_targets of "),
    ("other_rank", "layers/q_lora_a is (2, 32, 3), expected (2, 32, 4)"),
    ("other_targets", "with an adapter of rank 3: layers/k_lora_a is absent, expected (2, 32, 3)"),
    ("no_such_target", "'z_proj' is no projection of a llama model; there are "),
    ("unfinished", "unfinished holds no whole checkpoint"),
    *((run, f"{run}/checkpoints/4 cannot be read") for run in DAMAGED),
    pytest.param("no_tokenizer", "no_tokenizer: there is no tokenizer", marks=needs_torch),
])
def test_mistakes_are_refused_and_nothing_is_touched(answers, folder, case, message):
    assert answers[case]["status"] == 2
    assert answers[case]["err"].startswith("error: ") and message in answers[case]["err"]
    assert "Traceback" not in answers[case]["err"]
    assert not (folder / "new").exists()
    assert [path.name for path in (folder / "full").iterdir()] == ["precious.txt"]
    assert not list(folder.glob(".*"))


@needs_torch
@pytest.mark.parametrize("case", ["checked", "checked_half"])
def test_check_finds_the_logits_of_transformers(answers, folder, case):
    assert answers[case]["status"] == 0, answers[case]["err"]
    difference, = re.findall(r"largest difference from transformers: (\S+)", answers[case]["out"])
    assert float(difference) < 1e-5


def convert_after(setup, folder, tiny_model_dir, output):
    """Runs the program with --check after some Python code; returns the finished process."""
    code = f"{setup}; import runpy; runpy.run_module('experiments.convert', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, f"--model_path={tiny_model_dir}",
         f"--output_dir={folder / output}", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=300)


@needs_torch
def test_check_refuses_another_model(folder, tiny_model_dir):
    setup = ("import torch, transformers; auto = transformers.AutoModelForCausalLM; "
             "read = auto.from_pretrained; auto.from_pretrained = lambda *a, **k: "
             "read(*a, **{**k, 'dtype': torch.bfloat16}).float()")
    process = convert_after(setup, folder, tiny_model_dir, "doubtful")
    assert process.returncode == 2 and "largest difference" in process.stdout
    assert "error: transformers reads" in process.stderr and "more than 0.001" in process.stderr


def test_without_torch_a_check_is_refused_before_any_work(folder, tiny_model_dir):
    process = convert_after("import sys; sys.modules['torch'] = None", folder, tiny_model_dir,
                            "unchecked")
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr == (
        "error: --check needs torch, which is not installed: pip install -e '.[parity]'\n")
    assert not (folder / "unchecked").exists()
