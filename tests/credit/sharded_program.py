"""Run the credit core on four CPU devices and compare with one; run by test_credit_sharding."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import credit_oracle
from memcalib_jax import (
    CreditConfig,
    gdpo_advantages,
    init_thresholds,
    memcalib_advantages,
    update_thresholds,
)

AXES = ("data", "fsdp")
BATCH, WHOLE = PartitionSpec(AXES), PartitionSpec()


def step(case, granularity, axis_name=None):
    """One batch's credit: advantages, scale, GDPO and both kinds of thresholds."""
    advantages, details = memcalib_advantages(
        case["rewards"],
        case["valid"],
        case["full"],
        case["ablated"],
        case["scored"],
        case["mask"],
        case["thresholds"],
        CreditConfig(granularity=granularity),
        sentence_ids_P_G_T=case["sentence_ids"],
        sentence_thresholds_C=case["sentence_thresholds"],
        axis_name=axis_name,
    )
    pool = (details.scores, details.score_mask)
    if granularity == "sentence":
        pool = (details.sentence_scores, details.sentence_score_mask)
    thresholds = update_thresholds(
        init_thresholds(), *pool, min_count=32, axis_name=axis_name
    )
    gdpo = gdpo_advantages(case["rewards"], case["valid"], axis_name=axis_name)
    return advantages, gdpo, details.rms, thresholds


def main():
    assert len(jax.devices()) == 4
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), AXES)
    case = credit_oracle.random_case(0, prompts=8, size=4, length=24)
    specs = {name: WHOLE if "thresholds" in name else BATCH for name in case}
    for granularity in ("token", "sentence"):
        whole = jax.jit(step, static_argnums=1)(case, granularity)
        by_hand = jax.shard_map(
            functools.partial(step, granularity=granularity, axis_name=AXES),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(BATCH, BATCH, WHOLE, WHOLE),
        )
        placed = {
            name: jax.device_put(array, NamedSharding(mesh, specs[name]))
            for name, array in case.items()
        }
        by_compiler = jax.jit(step, static_argnums=1)(placed, granularity)
        for result in (jax.jit(by_hand)(case), by_compiler):
            np.testing.assert_allclose(result[0], whole[0], atol=2e-6)
            np.testing.assert_allclose(result[1], whole[1], atol=1e-6)
            np.testing.assert_allclose(result[2], whole[2], rtol=3e-7)
            np.testing.assert_array_equal(result[3], whole[3])
        assert (np.asarray(whole[3])[1:] > 0.02).any(), "no threshold moved"
        assert np.abs(whole[0]).max() > 1.5
    print("sharded equals whole")


if __name__ == "__main__":
    main()
