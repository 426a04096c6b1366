"""Three training steps on meshes of eight CPU devices against one; run by test_sharded_training."""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import contextlib
import hashlib
import tempfile

import jax
import numpy as np

from memcalib_jax.api import BackgroundLoop
from memcalib_jax.credit import CreditConfig
from memcalib_jax.data import load_records, sample_path
from memcalib_jax.judge import AtomJudgment, Judgment
from memcalib_jax.models import load, load_config, load_tokenizer, parameter_axes
from memcalib_jax.models.lora import LoraConfig
from memcalib_jax.parallel import make_mesh, shardings
from memcalib_jax.training import step as steps
from memcalib_jax.training.checkpoint import Checkpoints, newest_state
from memcalib_jax.training.judging import Journal, JudgePool
from memcalib_jax.training.rollouts import Policy, SamplingConfig, render_prompts
from memcalib_jax.training.state import OptimizerConfig, init_state, split
from memcalib_jax.training.step import StepConfig, train_step
from memcalib_jax.training.update import ObjectiveConfig

MESHES = [dict(data=8, fsdp=1), dict(fsdp=8), dict(data=2, fsdp=2, tensor=2),
          dict(fsdp=4, tensor=2)]
RATE = 1e-3


class HashJudge:
    """Judges by a hash of the response, so that levels differ and repeat."""

    async def judge(self, record, text, *, sample_index):
        digest = hashlib.sha256(text.encode()).digest()
        details = tuple(AtomJudgment(atom.id, digest[i] % 3, "", "")
                        for i, atom in enumerate(record.atoms))
        return Judgment(tuple(detail.level for detail in details), True, None, details)


def settings(steps_rate):
    return StepConfig(
        method="memcalib", credit=CreditConfig.create(),
        sampling=SamplingConfig(4, 12),
        objective=ObjectiveConfig(compute_dtype="float32"),
        # A larger epsilon than usual: what is nothing but rounding should not be moved at full rate.
        optimizer=OptimizerConfig(learning_rate=steps_rate, epsilon=1e-6),
        mini_batch_size=16, scoring=steps.ScoringConfig("float32"), bin_tokens=2048, trace=False)


def run(path, sizes, lora=None):
    """Returns, for each of three steps, what was sampled, advantages, thresholds and parameters."""
    config, tokenizer = load_config(path), load_tokenizer(path)
    prompts, _ = render_prompts(tokenizer, load_records(sample_path("records.jsonl"))[:8],
                                representation="atomic", max_prompt_tokens=4096)
    mesh = make_mesh(**sizes) if sizes else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), \
            BackgroundLoop("judge") as background, tempfile.TemporaryDirectory() as folder:
        params, _ = load(path, shardings=mesh and shardings(
            parameter_axes(config), config.parameter_shapes(), mesh))
        policy = Policy(params, config, tokenizer)
        key = jax.random.key(0)
        trained, frozen = split(params, config, lora, key)
        state = init_state(trained, settings(RATE).optimizer)
        layout = jax.tree.map(lambda x: x.sharding, state)
        seen = []
        for step in range(1, 4):
            journal = Journal(Path(folder) / f"{step}.jsonl")
            result = train_step(state, params, policy, prompts, jax.random.fold_in(key, step),
                                JudgePool(HashJudge(), background, journal), settings(RATE), frozen)
            state = result.state
            assert jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), state,
                                layout) == jax.tree.map(lambda _: True, state)
            seen.append((result.rows, jax.device_get(state), result.metrics))
        if mesh:
            split_leaves = [x for x in jax.tree.leaves(state.params)
                            if not x.sharding.is_fully_replicated]
            assert len(split_leaves) >= (3 if sizes.get("data") != 8 else 0)
        return jax.device_get(init_state(trained, settings(RATE).optimizer).params), seen


def compare(one, many, name):
    start, alone = one
    _, ours = many
    for step, ((rows, state, _), (our_rows, our_state, _)) in enumerate(zip(alone, ours)):
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in our_rows], name
        np.testing.assert_allclose(our_state.thresholds, state.thresholds, rtol=0, atol=1e-6)
        for row, our_row in zip(rows, our_rows):
            np.testing.assert_allclose(our_row["log_probs"], row["log_probs"], rtol=0,
                                       atol=1e-4 if step else 1e-5)
            np.testing.assert_allclose(our_row["advantages"], row["advantages"], rtol=0, atol=1e-3)
    state, our_state = alone[-1][1], ours[-1][1]
    moved = jax.tree.map(lambda x, y: x - y, state.params, start)
    apart = jax.tree.map(lambda x, y: x - y, state.params, our_state.params)
    size = lambda tree: np.sqrt(sum(np.square(x, dtype=np.float64).sum()
                                    for x in jax.tree.leaves(tree)))
    print(name, "apart by", size(apart) / size(moved), "of what was moved")
    assert size(apart) < 1e-3 * size(moved), name


def resume_elsewhere(path):
    """A state saved on one mesh is the same on others, on fewer devices too."""
    config, optimizer = load_config(path), settings(RATE).optimizer

    def params_on(mesh):
        return load(path, shardings=mesh and shardings(
            parameter_axes(config), config.parameter_shapes(), mesh))[0]

    with tempfile.TemporaryDirectory() as folder:
        state = init_state(params_on(make_mesh(data=2, fsdp=2, tensor=2)), optimizer)
        state = state.replace(
            step=state.step + 5, params=jax.tree.map(lambda x: x * 1.25, state.params),
            opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        expected = jax.device_get(state)
        checkpoints = Checkpoints(Path(folder))
        checkpoints.save(5, state, {})
        for mesh in (None, make_mesh(fsdp=8), make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])):
            found = newest_state(checkpoints, params_on(mesh), optimizer, {})
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)
            devices = {len(x.sharding.device_set) for x in jax.tree.leaves(found)}
            assert devices == {mesh.size if mesh else 1}
        checkpoints.close()


def main(path):
    resume_elsewhere(path)
    for lora in (None, LoraConfig(4, 8.0)):
        one = run(path, None, lora)
        assert max(one[1][-1][1].thresholds) > 0.021, "no threshold moved"
        for sizes in MESHES if lora is None else MESHES[2:3]:
            compare(one, run(path, sizes, lora), f"{sizes} {lora}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
