import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import credit_oracle
from memcalib_jax import (
    CHANNELS,
    CreditConfig,
    gdpo_advantages,
    init_thresholds,
    memcalib_advantages,
    update_thresholds,
)


@functools.partial(jax.jit, static_argnames=("stops", "axis_name"))
def assign(case, config=CreditConfig(), stops=False, axis_name=None):
    return memcalib_advantages(
        case["rewards"],
        case["valid"],
        case["full"],
        case["ablated"],
        case["scored"],
        case["mask"],
        case["thresholds"],
        config,
        sentence_ids_P_G_T=case["sentence_ids"],
        sentence_thresholds_C=case["sentence_thresholds"],
        stop_mask_P_G_T=case["stop"] if stops else None,
        axis_name=axis_name,
    )


gdpo = jax.jit(gdpo_advantages)


def one_pair(channel, difference, *, rewards=(1.0, 0.0), threshold=0.02):
    """One group of two; the first response has a counterfactual in one channel.

    Responses are as long as `difference`, padded to 8 tokens.
    """
    used = np.arange(8) < len(difference)
    rewards_P_G_C = np.zeros((1, 2, 9), np.float32)
    rewards_P_G_C[0, :, CHANNELS.index(channel)] = rewards
    ablated = np.full((1, 2, 9, 8), np.nan, np.float32)
    ablated[0, 0, CHANNELS.index(channel), used] = -1 - np.array(difference)
    scored = np.zeros((1, 2, 9), bool)
    scored[0, 0, CHANNELS.index(channel)] = True
    return {
        "rewards": rewards_P_G_C,
        "valid": np.ones((1, 2), bool),
        "full": np.full((1, 2, 8), -1, np.float32),
        "ablated": ablated,
        "scored": scored,
        "mask": np.broadcast_to(used, (1, 2, 8)).copy(),
        "thresholds": np.full(9, threshold, np.float32),
        "sentence_ids": np.zeros((1, 2, 8), np.int32),
        "sentence_thresholds": np.full(9, 0.01, np.float32),
        "stop": np.zeros((1, 2, 8), bool),
    }


def assert_close(actual, expected, where=...):
    actual, expected = np.asarray(actual, np.float64)[where], expected[where]
    error = abs(actual - expected) / np.maximum(1, abs(expected))
    assert error.max() < 2e-6


def assert_mean_preserved(case, advantages, details):
    """Recompute both means in float64 from the float32 outputs."""
    length = case["mask"].sum(-1)
    channel = np.asarray(details.channel_advantages, np.float64)
    multipliers = np.asarray(details.multipliers, np.float64)
    mean = (multipliers * channel[..., None]).sum(-1) / length[..., None]
    assert (abs(mean - channel) <= 2e-7 * np.maximum(1, abs(channel))).all()
    sums = channel.sum(-1) / float(details.rms)
    mean = np.asarray(advantages, np.float64).sum(-1) / length
    assert (abs(mean - sums) <= 2e-7 * np.maximum(1, abs(sums))).all()


def test_a_response_worked_by_hand():
    # q = 1, .5, 0, 0, so m = 8/3, 4/3, 0, 0 and .25 + .75 m = 2.25, 1.25, .25, .25; the channel's
    # advantages are +-1, and so is their RMS. The other response has no atoms: uniform.
    advantages, details = assign(one_pair("C+", [1.02, 0.52, 0.0, -1.0]))
    np.testing.assert_allclose(advantages[0, 0, :4], [2.25, 1.25, 0.25, 0.25], rtol=2e-6)
    np.testing.assert_allclose(advantages[0, 1, :4], [-1] * 4, rtol=2e-6)
    np.testing.assert_allclose(details.multipliers[0, 0, 8, :4], [8 / 3, 4 / 3, 0, 0], rtol=3e-7)
    np.testing.assert_array_equal(details.multipliers[0, 1, 8, :4], 1)
    np.testing.assert_allclose(details.scores[0, 0, 8, :4], [1.02, 0.52, 0, -1], rtol=1e-6)
    assert details.fallback[0, 0, 8] == 0 and details.fallback[0, 1, 8] == 1


def test_an_under_use_penalty_falls_on_suppressed_tokens():
    # CA-: d = -2 at the third token; m = 4 there and 0 elsewhere.
    advantages, details = assign(one_pair("CA-", [2.0, 0.0, -2.0, 0.0], rewards=(-2.0, 0.0)))
    np.testing.assert_allclose(details.multipliers[0, 0, 6, :4], [0, 0, 4, 0], atol=1e-6)
    np.testing.assert_allclose(advantages[0, 0, :4], [-0.25, -0.25, -3.25, -0.25], rtol=2e-6)


def responsible(**differences):
    """One response in a group of two that scores several channels, d by channel; 4 tokens."""
    case = one_pair("CA-", [0.0] * 4)
    case["rewards"][...] = 0
    case["ablated"][...] = np.nan
    case["scored"][...] = False
    for channel, difference in differences.items():
        index = CHANNELS.index(channel)
        case["rewards"][0, 0, index] = -2.0 if channel.endswith("-") else 1.0
        case["ablated"][0, 0, index, :4] = -1 - np.array(difference)
        case["scored"][0, 0, index] = True
    return case


def test_guarded_spares_what_right_use_supports():
    # CA- looks for d < 0: q = 2, 1, 1, 0 with threshold 0.02 would be m = 2, 1, 1, 0. The second
    # token is B+'s (d = .5 > .02), the third is not (d = .02 is not above it) and the last is the
    # stop token, so that q = 2, 0, 1, 0 and m = 8/3, 0, 4/3, 0.
    case = responsible(**{"CA-": [-2.02, -1.02, -1.02, -0.02], "B+": [0.0, 0.5, 0.02, -1.0]})
    case["stop"][0, 0, 3] = True
    _, ordered = assign(case, stops=True)
    np.testing.assert_allclose(ordered.multipliers[0, 0, 6, :4], [2, 1, 1, 0], atol=1e-6)
    _, guarded = assign(case, CreditConfig(mode="guarded"), stops=True)
    np.testing.assert_allclose(guarded.multipliers[0, 0, 6, :4], [8 / 3, 0, 4 / 3, 0], atol=1e-6)
    np.testing.assert_allclose(guarded.multipliers[0, 0, 4, :4], [0, 4, 0, 0], atol=1e-6)
    for name in ("scores", "score_mask"):
        np.testing.assert_array_equal(getattr(guarded, name), getattr(ordered, name))


def test_guarded_without_an_unsupported_token_is_uniform():
    case = responsible(**{"CA-": [-2.0, 0.0, 0.0, 0.0], "C+": [1.0, 0.0, 0.0, 0.0]})
    _, details = assign(case, CreditConfig(mode="guarded"), stops=True)
    assert details.fallback[0, 0, 6] == 4 and details.fallback[0, 0, 8] == 0
    # A stop token alone leaves nothing either.
    case = responsible(**{"CA-": [-2.0, 0.0, 0.0, 0.0]})
    case["stop"][0, 0, 0] = True
    assert assign(case, CreditConfig(mode="guarded"), stops=True)[1].fallback[0, 0, 6] == 4


def test_guarded_spares_whole_sentences():
    # B+'s means .5 and -.25: the first sentence is supported, its second token included. CA-
    # would share means 1 and .5 as m = 4/3 and 2/3; now all goes to the second: m = 0, 2.
    case = responsible(**{"CA-": [-1.51, -0.51, -0.51, -0.51], "B+": [1.0, 0.0, -0.5, 0.0]})
    case["sentence_ids"][..., 2:] = 1
    config = CreditConfig(mode="ordered", granularity="sentence")
    _, ordered = assign(case, config, stops=True)
    np.testing.assert_allclose(ordered.multipliers[0, 0, 6, :4], [4 / 3] * 2 + [2 / 3] * 2,
                               rtol=1e-6)
    _, details = assign(case, config.replace(mode="guarded"), stops=True)
    np.testing.assert_allclose(details.multipliers[0, 0, 6, :4], [0, 0, 2, 2], atol=1e-6)
    np.testing.assert_array_equal(details.sentence_scores, ordered.sentence_scores)


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_guarded_is_ordered_where_nothing_is_supported(granularity):
    case = credit_oracle.random_case(14)
    for right in (4, 8):
        case["ablated"][..., right, :] = case["full"]
    case["stop"][...] = False
    outputs = [
        assign(case, CreditConfig(mode=mode, granularity=granularity), stops=True)
        for mode in ("ordered", "guarded")
    ]
    jax.tree.map(np.testing.assert_array_equal, *outputs)
    assert outputs[0][1].localized[..., [3, 6, 7]].sum() > 5


def test_guarded_needs_the_stop_tokens():
    with pytest.raises(ValueError, match="'guarded' needs stop_mask_P_G_T"):
        assign(credit_oracle.random_case(0), CreditConfig(mode="guarded"))


def test_multipliers_above_the_cap_spill_over():
    # One token of eight: 8 becomes 4, the others share the rest: 4 / 7.
    _, details = assign(one_pair("AB-", [1.0] + [0.0] * 7, rewards=(-1.0, 0.0)))
    np.testing.assert_allclose(details.multipliers[0, 0, 1], [4] + [4 / 7] * 7, rtol=2e-7)


def test_a_sentence_shares_one_multiplier():
    # Clipped means 1.5 and 0; all credit to the first sentence of two tokens: m = 2, 2, 0, 0.
    case = one_pair("B+", [2.0, 1.0, 0.5, -0.5])
    case["sentence_ids"][..., 2:] = 1
    advantages, details = assign(case, CreditConfig(granularity="sentence"))
    np.testing.assert_allclose(details.multipliers[0, 0, 4, :4], [2, 2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(details.sentence_scores[0, 0, 4, :4], [1.5, 0, 0, 0])
    np.testing.assert_array_equal(
        details.sentence_score_mask[0, 0, 4, :4], [True, True, False, False]
    )
    np.testing.assert_allclose(advantages[0, 0, :4], [1.75, 1.75, 0.25, 0.25], rtol=2e-6)


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda case: None, 0),
        (lambda case: case["rewards"].fill(0), 1),
        (lambda case: case["valid"].fill(False), 1),
        (lambda case: case["scored"].fill(False), 3),
        (lambda case: case["ablated"].fill(-1.01), 4),
        (lambda case: case["mask"][0, 0].fill(False), 4),
        (lambda case: case["thresholds"].fill(5), 5),
        # A punished channel whose sibling is punished harder has a positive advantage.
        (lambda case: case["rewards"][0, :, 8].put([0, 1], [-1, -2]), 6),
        (lambda case: case["rewards"][0, :, 8].put([0, 1], [1, 1]), 6),
        (lambda case: case["valid"][0, 1:].fill(False), 6),
    ],
)
def test_fallback_codes(change, code):
    case = one_pair("C+", [1.0, 0.5, 0.0, -1.0])
    change(case)
    advantages, details = assign(case)
    assert details.fallback.dtype == jnp.int8
    assert details.fallback[0, 0, 8] == code
    assert details.localized[0, 0, 8] == (code == 0)
    if code:
        mask = case["mask"][0, 0]
        np.testing.assert_array_equal(details.multipliers[0, 0, 8], mask)
        expected = gdpo(case["rewards"], case["valid"])[0, 0]
        np.testing.assert_allclose(advantages[0, 0], np.where(mask, expected, 0), rtol=3e-7)


def test_the_first_reason_that_applies_is_given():
    case = one_pair("C+", [0.0, 0.0], rewards=(1.0, 1.0))
    assert assign(case)[1].fallback[0, 0, 8] == 4  # and 5 and 6
    case["scored"][...] = False
    assert assign(case)[1].fallback[0, 0, 8] == 3
    ignored = one_pair("A+", [1.0, 0.0])
    ignored["scored"][...] = False
    assert assign(ignored)[1].fallback[0, 0, 0] == 2
    under_use = one_pair("BA-", [1.0, 0.0], rewards=(-1.0, 0.0))
    assert assign(under_use, CreditConfig(mode="positive_only"))[1].fallback[0, 0, 3] == 2
    under_use["rewards"][...] = 0
    assert assign(under_use, CreditConfig(mode="positive_only"))[1].fallback[0, 0, 3] == 1


def test_infinite_signals_are_clipped():
    case = one_pair("C+", [1.0, 0.0, 0.0, 0.0])
    case["ablated"][0, 0, 8, 0] = -np.inf
    with jax.debug_nans(True):
        advantages, details = assign(case)
    assert details.scores[0, 0, 8, 0] == 3
    np.testing.assert_allclose(advantages[0, 0, :4], [3.25, 0.25, 0.25, 0.25], rtol=2e-6)


@pytest.mark.parametrize(
    "mode, granularity, stops",
    [
        ("ordered", "token", False),
        ("ordered", "sentence", False),
        ("absolute", "token", False),
        ("absolute", "sentence", False),
        ("positive_only", "token", False),
        ("positive_only", "sentence", False),
        ("ordered", "token", True),
        ("absolute", "sentence", True),
        ("guarded", "token", True),
        ("guarded", "sentence", True),
    ],
)
def test_against_the_oracle(mode, granularity, stops):
    config = CreditConfig.create(mode=mode, granularity=granularity)
    localized = 0
    for seed in range(6):
        case = credit_oracle.random_case(seed)
        advantages, details = assign(case, config, stops=stops)
        expected = credit_oracle.memcalib(
            credit_oracle.doubled(case), mode=mode, granularity=granularity, stops=stops
        )
        sure = expected["sure"]
        assert sure.mean() > 0.9
        np.testing.assert_array_equal(details.fallback[sure], expected["fallback"][sure])
        assert_close(details.multipliers, expected["multipliers"], sure)
        assert_close(advantages, expected["token_advantages"], sure.all(-1))
        assert_close(details.channel_advantages, expected["advantages"])
        assert_mean_preserved(case, advantages, details)
        localized += int(details.localized.sum())
    assert localized > 100


def test_strengths_and_weights_per_channel():
    rng = np.random.default_rng(0)
    eta = rng.uniform(0, 1, 9).astype(np.float32)
    weights = rng.uniform(0, 2, 9).astype(np.float32)
    config = CreditConfig.create(eta=eta, channel_weights=weights)
    for seed in range(3):
        case = credit_oracle.random_case(seed)
        advantages, _ = assign(case, config)
        expected = credit_oracle.memcalib(
            credit_oracle.doubled(case),
            eta=eta.astype(np.float64),
            weights=weights.astype(np.float64),
        )
        assert_close(advantages, expected["token_advantages"], expected["sure"].all(-1))


def test_long_responses_keep_their_mean():
    case = credit_oracle.random_case(7, prompts=2, size=4, length=2048)
    advantages, details = assign(case, CreditConfig(eta=1.0))
    assert details.localized.sum() > 5
    assert_mean_preserved(case, advantages, details)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, 1e30, 0.0])
@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_what_lies_behind_masks_does_not_matter(granularity, poison):
    config = CreditConfig(granularity=granularity)
    outputs = [
        assign(credit_oracle.random_case(1, poison=value), config) for value in (np.nan, poison)
    ]
    jax.tree.map(np.testing.assert_array_equal, *outputs)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outputs[0]))


@pytest.mark.parametrize("granularity", ["token", "sentence"])
def test_finite_inputs_make_no_nan(granularity):
    case = credit_oracle.random_case(2, poison=0.0)
    case["mask"][0, :2] = False
    with jax.debug_nans(True):
        advantages, _ = assign(case, CreditConfig(granularity=granularity))
    assert np.isfinite(advantages).all()
    np.testing.assert_array_equal(advantages[0, :2], 0)


@pytest.mark.parametrize("change", ["eta 0", "nothing scored", "thresholds too high"])
def test_without_localization_it_is_gdpo(change):
    case, config = credit_oracle.random_case(3), CreditConfig()
    if change == "eta 0":
        config = CreditConfig.create(eta=0)
    elif change == "nothing scored":
        case["scored"][...] = False
    else:
        case["thresholds"][...] = 9
    advantages, _ = assign(case, config)
    expected = gdpo(case["rewards"], case["valid"])[..., None]
    np.testing.assert_allclose(
        advantages, np.where(case["mask"], expected, 0), rtol=0, atol=3e-7
    )


def test_a_batch_without_valid_responses_is_zero():
    case = credit_oracle.random_case(4)
    case["valid"][...] = False
    advantages, details = assign(case)
    np.testing.assert_array_equal(advantages, 0)
    assert not details.score_mask.any() and not details.localized.any()
    np.testing.assert_allclose(details.rms, 1e-3)


def test_padding_changes_nothing():
    case = credit_oracle.random_case(5)
    padded = dict(case)
    for name in ("full", "ablated", "mask", "sentence_ids", "stop"):
        widths = [(0, 0)] * (case[name].ndim - 1) + [(0, 24)]
        fill = np.nan if case[name].dtype == np.float32 else 0
        padded[name] = np.pad(case[name], widths, constant_values=fill)
    advantages, _ = assign(case)
    wide, _ = assign(padded)
    np.testing.assert_allclose(wide[..., :40], advantages, atol=1e-6)
    np.testing.assert_array_equal(wide[..., 40:], 0)


def test_prompts_and_members_may_be_permuted():
    case = credit_oracle.random_case(6)
    rng = np.random.default_rng(6)
    prompts, members = rng.permutation(3), rng.permutation(8)
    shuffled = {
        name: array if array.ndim == 1 else array[prompts][:, members]
        for name, array in case.items()
    }
    expected = np.asarray(assign(case)[0])[prompts][:, members]
    np.testing.assert_allclose(assign(shuffled)[0], expected, atol=2e-6)


def test_the_pool_is_every_scored_pair_of_a_valid_response():
    case = credit_oracle.random_case(7)
    case["thresholds"][...] = 9  # shuts every pair; the pool does not care
    _, details = assign(case)
    pairs = case["scored"] & case["valid"][..., None] & (np.arange(9) > 0)
    mask = pairs[..., None] & case["mask"][..., None, :]
    np.testing.assert_array_equal(details.score_mask, mask)
    signs = np.array(credit_oracle.SIGNS["ordered"])[:, None]
    z = signs * (case["full"][..., None, :].astype(np.float64) - case["ablated"])
    np.testing.assert_allclose(
        details.scores, np.where(mask, np.clip(z, -3, 3), 0), atol=3e-7, rtol=0
    )
    now = init_thresholds()
    moved = jax.jit(update_thresholds)(now, details.scores, details.score_mask)
    np.testing.assert_allclose(
        moved, credit_oracle.thresholds(now, np.clip(z, -3, 3), mask), rtol=1e-6
    )
    assert moved[0] == now[0] and (moved[1:] > now[1:]).all()


def test_merged_overuse_lives_in_one_channel():
    case = credit_oracle.random_case(8)
    advantages, details = assign(case, CreditConfig(merge_overuse=True))
    by_hand = {**case, "rewards": case["rewards"].copy()}
    by_hand["rewards"][..., 1] += by_hand["rewards"][..., 2]
    by_hand["rewards"][..., 2] = 0
    np.testing.assert_array_equal(advantages, assign(by_hand)[0])
    np.testing.assert_array_equal(details.fallback[..., 2], 1)
    assert details.localized[..., 1].any()


@pytest.mark.parametrize("mode, granularity", [("ordered", "token"), ("absolute", "sentence")])
def test_gradients_are_finite(mode, granularity):
    case = credit_oracle.random_case(9)
    floats = {name: array for name, array in case.items() if array.dtype == np.float32}

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(floats, config):
        advantages, _ = assign({**case, **floats}, config)
        return jnp.sum(advantages * jnp.cos(jnp.arange(advantages.size)).reshape(advantages.shape))

    config = CreditConfig.create(
        granularity=granularity, mode=mode, channel_weights=np.ones(9), eta=np.full(9, 0.5)
    )
    by_input, by_setting = gradient(floats, config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((by_input, by_setting)))
    assert np.abs(by_input["ablated"]).max() > 0 and np.abs(by_setting.eta).max() > 0
    np.testing.assert_array_equal(by_input["full"][~case["mask"]], 0)


def test_it_maps_over_a_leading_axis():
    cases = [credit_oracle.random_case(seed) for seed in (10, 11)]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *cases)
    mapped = jax.jit(jax.vmap(assign))(stacked)
    for index, case in enumerate(cases):
        jax.tree.map(
            lambda got, wanted: np.testing.assert_allclose(got[index], wanted, atol=1e-6),
            mapped,
            assign(case),
        )


def test_a_batch_spread_over_a_mapped_axis_has_one_scale():
    case = credit_oracle.random_case(12, prompts=4)
    per_batch = {"thresholds": None, "sentence_thresholds": None}
    axes = {name: per_batch.get(name, 0) for name in case}
    parts = {
        name: array if axes[name] is None else array.reshape(2, 2, *array.shape[1:])
        for name, array in case.items()
    }
    mapped = jax.vmap(
        functools.partial(assign, axis_name="data"), in_axes=(axes,), axis_name="data"
    )
    advantages, details = jax.jit(mapped)(parts)
    whole, whole_details = assign(case)
    np.testing.assert_allclose(details.rms, [whole_details.rms] * 2, rtol=3e-7)
    np.testing.assert_allclose(advantages.reshape(whole.shape), whole, atol=2e-6)


def test_a_sweep_over_numbers_compiles_once():
    traces = []

    @jax.jit
    def run(case, config):
        traces.append(config.mode)
        return memcalib_advantages(
            *(case[name] for name in ("rewards", "valid", "full", "ablated", "scored", "mask")),
            case["thresholds"],
            config,
        )[0]

    case = credit_oracle.random_case(13, prompts=1, length=8)
    outputs = [
        np.asarray(run(case, CreditConfig.create(eta=eta, cap=cap)))
        for eta, cap in ((0.25, 4.0), (0.75, 3.0), (1.0, 2.0))
    ]
    assert len(traces) == 1
    assert not np.array_equal(outputs[0], outputs[1])
    run(case, CreditConfig.create(eta=0.25, cap=4.0, mode="absolute"))
    assert traces == ["ordered", "absolute"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"eta": 1.5}, r"eta must be in \[0, 1\], got 1.5"),
        ({"eta": [0.5] * 8}, r"eta must be nine numbers or a number, got shape \(8,\)"),
        ({"eta": [0.5] * 8 + [-0.1]}, r"eta must be in \[0, 1\]"),
        ({"eta": "much"}, "eta must be a number, got 'much'"),
        ({"eta": float("nan")}, r"eta must be in \[0, 1\], got nan"),
        ({"cap": 0.5}, "cap must be finite, 1 or more, got 0.5"),
        ({"cap": float("inf")}, "cap must be finite"),
        ({"cap": None}, "cap must be a number, got None"),
        ({"max_difference": -1}, "max_difference must be finite, 0 or more"),
        ({"min_signal": -0.1}, "min_signal must be"),
        ({"min_sentence_signal": -0.1}, "min_sentence_signal must be"),
        ({"coverage_power": -1}, "coverage_power must be"),
        ({"channel_weights": 1.0}, r"channel_weights must be nine numbers, got shape \(\)"),
        ({"channel_weights": [-1.0] * 9}, "channel_weights must be finite, 0 or more"),
        ({"epsilon": -1e-6}, "epsilon must be"),
        ({"min_std": -1e-6}, "min_std must be"),
        ({"mode": "both"}, "mode must be one of ordered, absolute, positive_only, guarded, got 'both'"),
        ({"granularity": "word"}, "granularity must be one of token, sentence, got 'word'"),
        ({"etta": 0.5}, "unknown setting 'etta'; known are eta, cap"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CreditConfig.create(**settings)


def test_default_settings_are_the_papers():
    config = CreditConfig.create()
    assert config == CreditConfig()
    assert (config.eta, config.cap, config.max_difference, config.min_signal) == (0.75, 4, 3, 0.02)
    assert (config.mode, config.granularity, config.merge_overuse) == ("ordered", "token", False)


@pytest.mark.parametrize(
    "name, array, message",
    [
        ("rewards", np.zeros((3, 8, 8)), r"rewards_P_G_C must be \[prompts, responses, 9\], got"),
        ("valid", np.ones((8, 3), bool), r"valid_P_G must have shape \[3, 8\], got \[8, 3\]"),
        ("full", np.zeros((3, 8, 39)), r"full_log_probs_P_G_T must have shape \[3, 8, 40\]"),
        ("ablated", np.zeros((3, 8, 40, 9)), r"ablated_log_probs_P_G_C_T must .*\[3, 8, 9, 40\]"),
        ("thresholds", np.zeros(8), r"thresholds_C must have shape \[9\], got \[8\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, array, message):
    case = {**credit_oracle.random_case(0), name: array}
    with pytest.raises(ValueError, match=message):
        assign(case)


def test_sentences_need_their_ids():
    case = one_pair("C+", [1.0, 0.0])
    arrays = [case[name] for name in ("rewards", "valid", "full", "ablated", "scored", "mask")]
    with pytest.raises(ValueError, match="'sentence' needs sentence_ids_P_G_T"):
        jax.eval_shape(
            memcalib_advantages, *arrays, case["thresholds"], CreditConfig(granularity="sentence")
        )
