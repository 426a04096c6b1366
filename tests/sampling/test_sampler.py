import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcalib_jax.models import logits
from memcalib_jax.sampling import Sample, sample, sampler
from memcalib_jax.sampling.decode import admit, decode_block, reshape_rows

PROMPTS = [[3, 4, 5], [7], [9, 60, 2, 2, 11, 30, 30, 8], [1, 2], [50] * 20]
STOP_IDS = [1, 2]


def draw_samples(model, prompts=PROMPTS, **changes):
    arguments = dict(num_samples=3, max_tokens=24, key=jax.random.key(0), stop_ids=STOP_IDS)
    return sample(*model, prompts, **(arguments | changes))


def tokens_of(samples):
    return [[one.tokens for one in row] for row in samples]


def forced_logits(model, prompts, samples, size=64):
    """Returns for each response the float64 logits `[T, V]` that predict its tokens."""
    pairs = [(list(prompt), one.tokens) for prompt, row in zip(prompts, samples) for one in row]
    lengths = np.array([len(prompt) + len(tokens) for prompt, tokens in pairs])
    rows = np.zeros((len(pairs), size), np.int32)
    for row, (prompt, tokens) in zip(rows, pairs):
        row[:len(prompt) + len(tokens)] = prompt + tokens
    whole = np.asarray(logits(*model, jnp.asarray(rows), jnp.asarray(lengths)), np.float64)
    return [one[len(prompt) - 1:length - 1]
            for one, (prompt, _), length in zip(whole, pairs, lengths)]


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def assert_log_probs(model, prompts, samples, temperature, tolerance, size=64):
    flat = [one for row in samples for one in row]
    for one, rows in zip(flat, forced_logits(model, prompts, samples, size)):
        expected = log_softmax(rows / temperature)[np.arange(len(rows)), one.tokens]
        np.testing.assert_allclose(one.log_probs, expected, atol=tolerance)


def assert_ends(samples, stop_ids, max_tokens):
    for one in (one for row in samples for one in row):
        assert 1 <= len(one.tokens) == len(one.log_probs) <= max_tokens
        assert not set(one.tokens[:-1]) & set(stop_ids)
        assert one.finish_reason == ("stop" if one.tokens[-1] in stop_ids else "length")
        assert one.finish_reason == "stop" or len(one.tokens) == max_tokens


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.7}, {"top_k": 4}])
def test_log_probs_are_the_forward_s_whole_distribution(small_model, temperature, truncation):
    samples = draw_samples(small_model, temperature=temperature, **truncation)
    assert_ends(samples, STOP_IDS, 24)
    assert_log_probs(small_model, PROMPTS, samples, temperature, 3e-5)


@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"top_k": 2}])
def test_truncation_draws_from_the_kept_tokens_only(small_model, truncation):
    samples = draw_samples(small_model, **truncation)
    for one, rows in zip((one for row in samples for one in row),
                         forced_logits(small_model, PROMPTS, samples)):
        for token, row in zip(one.tokens, np.exp(log_softmax(rows))):
            more_likely = row[row > row[token] * (1 + 1e-5)]
            if "top_k" in truncation:
                assert len(more_likely) < truncation["top_k"]
            else:
                assert more_likely.sum() < truncation["top_p"] + 1e-5


def test_greedy_is_the_chain_of_largest_logits(small_model):
    samples = draw_samples(small_model, temperature=0.0)
    flat = [one for row in samples for one in row]
    for one, rows in zip(flat, forced_logits(small_model, PROMPTS, samples)):
        assert one.tokens == rows.argmax(axis=-1).tolist()
    assert_log_probs(small_model, PROMPTS, samples, 1.0, 3e-5)
    assert all(row[0] == row[1] == row[2] for row in samples)


def test_responses_of_a_prompt_differ(small_model):
    for row in draw_samples(small_model, temperature=1.5, stop_ids=[]):
        assert len({tuple(one.tokens) for one in row}) == 3


def test_same_call_gives_the_same_bits_and_another_key_others(small_model):
    first = draw_samples(small_model)
    assert draw_samples(small_model) == first
    assert tokens_of(draw_samples(small_model, key=jax.random.key(1))) != tokens_of(first)


@pytest.mark.parametrize("changes", [{"max_rows": 6}, {"max_rows": 3}, {"max_rows": 2}])
def test_tokens_do_not_depend_on_how_many_decode_at_once(small_model, changes):
    # Two slots that refill, one slot, and samples of one prompt split over slots.
    expected = draw_samples(small_model)
    samples = draw_samples(small_model, **changes)
    assert tokens_of(samples) == tokens_of(expected)
    assert_log_probs(small_model, PROMPTS, samples, 1.0, 3e-5)


def test_tails_grow_wrap_and_shrink_without_a_trace(small_model, monkeypatch):
    expected = draw_samples(small_model, max_tokens=100)
    assert max(len(one.tokens) for row in expected for one in row) > 64
    monkeypatch.setattr(sampler, "SMALLEST_TAIL", 32)
    samples = draw_samples(small_model, max_tokens=100, max_rows=6)
    assert tokens_of(samples) == tokens_of(expected)
    assert_log_probs(small_model, PROMPTS, samples, 1.0, 3e-5, size=128)


def test_tokens_do_not_depend_on_batch_mates_or_order(small_model):
    expected = tokens_of(draw_samples(small_model))
    order = [4, 2, 0, 3, 1]
    shuffled = draw_samples(small_model, [PROMPTS[i] for i in order], request_ids=order)
    assert tokens_of(shuffled) == [expected[i] for i in order]
    alone = draw_samples(small_model, [PROMPTS[2]], request_ids=[2])
    assert tokens_of(alone) == [expected[2]]


def test_a_longer_batch_mate_changes_no_token(small_model):
    # It moves every prompt to a larger bucket.
    expected = tokens_of(draw_samples(small_model))
    samples = draw_samples(small_model, [*PROMPTS[:4], [5] * 130])
    assert tokens_of(samples)[:4] == expected[:4]


def test_request_ids_seed_the_draws(small_model):
    same = [PROMPTS[0]] * 5
    drawn = tokens_of(draw_samples(small_model, same, request_ids=[4, 9, 4, 2 ** 32 - 1, 0]))
    assert drawn[0] == drawn[2]
    assert all(drawn[i] != drawn[0] for i in (1, 3, 4))


def test_more_samples_keep_the_first_ones(small_model):
    few = tokens_of(draw_samples(small_model))
    more = tokens_of(draw_samples(small_model, num_samples=5, max_rows=3))
    assert [row[:3] for row in more] == few


@pytest.mark.parametrize("stop_ids", [[1], [2], [2, 1], list(range(8))])
def test_each_stop_id_ends_a_response_and_belongs_to_it(small_model, stop_ids):
    # The draws do not depend on the stop ids: responses are cut where the free ones meet one.
    free = draw_samples(small_model, stop_ids=[])
    samples = draw_samples(small_model, stop_ids=stop_ids)
    assert_ends(samples, stop_ids, 24)
    ended = 0
    for free_row, row in zip(free, samples):
        for whole, one in zip(free_row, row):
            cut = next((i + 1 for i, token in enumerate(whole.tokens) if token in stop_ids), 24)
            assert one.tokens == whole.tokens[:cut]
            ended += one.finish_reason == "stop"
    assert ended


@pytest.mark.parametrize("length", [1, 2, 16, 17, 24])
def test_a_stop_token_at_the_last_place_is_a_stop(small_model, length):
    tokens = draw_samples(small_model, stop_ids=[])[4][0].tokens
    last = tokens[length - 1]
    first_there = last not in tokens[:length - 1]
    samples = draw_samples(small_model, max_tokens=length, stop_ids=[last])[4][0]
    if first_there:
        assert (samples.tokens, samples.finish_reason) == (tokens[:length], "stop")
    else:
        assert samples.tokens == tokens[:tokens.index(last) + 1]
        assert samples.finish_reason == "stop"
    other = draw_samples(small_model, max_tokens=length, stop_ids=[])[4][0]
    assert (other.tokens, other.finish_reason) == (tokens[:length], "length")


def test_callback_gets_every_response_once_as_soon_as_it_ends(small_model):
    calls = []
    samples = draw_samples(small_model, max_tokens=100,
                           on_finished=lambda *call: calls.append(call))
    assert sorted((p, g) for p, g, _ in calls) == [(p, g) for p in range(5) for g in range(3)]
    assert all(samples[p][g] is one for p, g, one in calls)
    blocks = [-(-(len(one.tokens) - 1) // sampler.BLOCK_STEPS) for _, _, one in calls]
    assert blocks == sorted(blocks) and blocks[0] < blocks[-1]


def test_every_token_is_called_out_in_order_and_before_its_response_ends(small_model):
    tokens, at_the_end = {}, {}
    samples = draw_samples(
        small_model, max_tokens=100,
        on_token=lambda p, g, token: tokens.setdefault((p, g), []).append(token),
        on_finished=lambda p, g, _: at_the_end.update({(p, g): list(tokens[p, g])}))
    assert tokens == at_the_end
    assert tokens == {(p, g): one.tokens for p, row in enumerate(samples)
                      for g, one in enumerate(row)}


def test_callback_comes_while_others_still_decode(small_model):
    lengths = [[len(one.tokens) for one in row] for row in draw_samples(small_model)]
    early, late = min(map(min, lengths)), max(map(max, lengths))
    assert early <= 16 < late

    class Enough(Exception):
        pass

    def stop_at_once(prompt, index, one):
        raise Enough(len(one.tokens))

    with pytest.raises(Enough) as caught:
        draw_samples(small_model, on_finished=stop_at_once)
    assert caught.value.args[0] < late


def test_a_long_response_does_not_hold_back_waiting_prompts(small_model):
    arguments = dict(max_tokens=100, stop_ids=range(8))
    lengths = [max(len(one.tokens) for one in row)
               for row in draw_samples(small_model, **arguments)]
    *others, longest = np.argsort(lengths).tolist()
    order = [longest, *others]
    finished = []
    draw_samples(small_model, [PROMPTS[i] for i in order], request_ids=order, max_rows=6,
                 on_finished=lambda prompt, *_: finished.append(prompt), **arguments)
    # Two prompts decode at once; the third starts and ends while the longest goes on.
    last_of_longest = len(finished) - 1 - finished[::-1].index(0)
    assert finished.index(2) < last_of_longest


def test_few_live_rows_move_together_without_a_trace(small_model, monkeypatch):
    expected = draw_samples(small_model)
    sizes = []
    monkeypatch.setattr(sampler, "FEWEST_ROWS", 1)
    monkeypatch.setattr(sampler, "reshape_rows", lambda rows, slots, places, tail_size: (
        sizes.append(places.shape), reshape_rows(rows, slots, places, tail_size))[1])
    assert tokens_of(draw_samples(small_model, stop_ids=STOP_IDS)) == tokens_of(expected)
    free = draw_samples(small_model, max_tokens=100, stop_ids=range(8))
    assert min(slots for slots, _ in sizes) < 5 and min(group for _, group in sizes) < 3
    assert_log_probs(small_model, PROMPTS, free, 1.0, 3e-5, size=128)


def test_same_shapes_do_not_compile_again(small_model):
    draw_samples(small_model)
    sizes = admit._cache_size(), decode_block._cache_size()
    draw_samples(small_model, [[i // 2 for i in prompt] for prompt in PROMPTS[:4]] + [[1] * 33],
                 key=jax.random.key(8), temperature=0.7, max_tokens=23, request_ids=range(5, 10))
    assert (admit._cache_size(), decode_block._cache_size()) == sizes


def test_bfloat16_log_probs_are_float32_and_near_the_forward_s(small_model):
    params, config = small_model
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params), config
    samples = draw_samples(low)
    assert_log_probs(low, PROMPTS, samples, 1.0, 0.15)
    values = np.array([x for row in samples for one in row for x in one.log_probs])
    assert np.array_equal(values, values.astype(np.float32))
    assert not np.array_equal(values, np.asarray(jnp.asarray(values, jnp.bfloat16), np.float64))


@pytest.mark.parametrize("changes, message", [
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": [[1], []]}, "prompt 1 has no tokens"),
    ({"prompts": [[1], [2, 61]]}, "prompt 1 holds token id 61.*61 ids"),
    ({"prompts": [[-1]]}, "prompt 0 holds token id -1"),
    ({"prompts": [[0.5]]}, "prompt 0 must be a flat sequence of integer"),
    ({"prompts": [[1] * 233]}, "233 tokens: with max_tokens 24 it exceeds.*256"),
    ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
    ({"temperature": -0.1}, "temperature must be 0"),
    ({"temperature": float("nan")}, "temperature must be 0"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
    ({"top_k": -1}, "top_k must be 0"),
    ({"stop_ids": [61]}, "stop_ids holds token id 61"),
    ({"request_ids": [1, 2]}, "request_ids must have one number a prompt: 2 for 5"),
    ({"request_ids": [1, 2, 3, 4, -5]}, "got -5")])
def test_bad_arguments_are_refused_by_name(small_model, changes, message):
    with pytest.raises(ValueError, match=message):
        draw_samples(small_model, **changes)


def test_logits_that_are_not_finite_are_an_error(small_model):
    params, config = small_model
    broken = dict(params, final_norm=params["final_norm"] * np.nan)
    with pytest.raises(FloatingPointError, match="prompt 0, sample 0, token 0 are not finite"):
        draw_samples((broken, config))


def test_real_model_log_probs_equal_the_forward_s(smollm2):
    params, config, tokenizer = smollm2
    # Its pad id is its end-of-turn id, which stands inside every prompt too.
    prompts = [tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in ("Name three colours.", "What should I cook tonight? I like rice.")]
    assert all(set(prompt) & set(config.eos_ids) for prompt in prompts)
    for temperature in (0.6, 1.0, 1.5):
        samples = sample(params, config, prompts, num_samples=4, max_tokens=24,
                         key=jax.random.key(3), temperature=temperature, stop_ids=config.eos_ids)
        assert isinstance(samples[1][3], Sample)
        assert_ends(samples, config.eos_ids, 24)
        assert_log_probs((params, config), prompts, samples, temperature, 3e-4, size=80)
