import asyncio
import json

import pytest

from memcalib_jax.api import ChatClient, ChatError, ChatSettings
from memcalib_jax.api.budget import Budget, Price, read_prices


def test_money_is_counted_by_model():
    budget = Budget(prices={"a": Price(2.0, 10.0)})
    budget.spend("a", 1_000_000, 100_000)
    budget.spend("unpriced", 7, 3)
    assert (budget.tokens, budget.money) == (1_100_010, 3.0)


def test_what_is_out_counts_until_it_is_known():
    budget = Budget(max_tokens=100)
    first = budget.reserve("m", 10, 50)
    assert budget.reserve("m", 10, 50) is None  # Fits only if the first takes less.
    budget.settle(first, 10, 5)
    second = budget.reserve("m", 10, 50)
    budget.settle(second, 10, 50)
    assert budget.tokens == 75
    with pytest.raises(ChatError, match="75 of 100 tokens are spent") as caught:
        budget.reserve("m", 10, 50)
    assert (caught.value.kind, caught.value.retried) == ("budget", False)


def test_money_bounds_too():
    budget = Budget(max_money=1.0, prices={"m": Price(0.0, 1.0)})
    assert budget.reserve("m", 0, 900_000)
    assert budget.reserve("m", 0, 200_000) is None
    with pytest.raises(ChatError, match="may cost 1.5000"):
        budget.reserve("m", 0, 1_500_000)


@pytest.mark.parametrize("bounds", [{"max_tokens": 0}, {"max_money": -1.0},
                                    {"max_money": float("nan")}])
def test_bounds_are_positive(bounds):
    with pytest.raises(ValueError, match="must be positive"):
        Budget(**bounds)


@pytest.mark.parametrize("text", ["", "[]", '{"m": 3}', '{"m": {"prompt": 1}}',
                                  '{"m": {"prompt": "x", "completion": 1}}',
                                  '{"m": {"prompt": -1, "completion": 1}}',
                                  '{"m": {"prompt": NaN, "completion": 1}}'])
def test_price_tables_that_are_none(tmp_path, text):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="prices"):
        read_prices(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_prices(tmp_path / "absent")


def test_price_table(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"m": {"prompt": 0.5, "completion": 2}}))
    assert read_prices(path)["m"].of(2_000_000, 500_000) == 2.0


def spend_all(endpoint, budget, count, **settings):
    async def run():
        settings_ = ChatSettings(endpoint.base_url, "m", max_tokens=100,
                                 requests_per_minute=9999, **settings)
        async with ChatClient(settings_, api_key="", budget=budget) as client:
            asked = [client.complete([{"role": "user", "content": "x"}], sample_index=i)
                     for i in range(count)]
            return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def test_a_client_stops_within_its_budget(endpoint, steps):
    usage = {"prompt_tokens": 10, "completion_tokens": 90}
    endpoint.script = [(200, steps.completion(usage=usage))] * 50
    budget = Budget(max_tokens=1000)
    results = spend_all(endpoint, budget, 40)
    failed = [result for result in results if isinstance(result, ChatError)]
    assert {error.kind for error in failed} == {"budget"}
    assert len(endpoint.requests) == 40 - len(failed) == budget.tokens // 100
    # A prompt is taken for at most 60 tokens, so that no more than one call less fits.
    assert 800 <= budget.tokens <= 1000


def test_an_endpoint_that_counts_no_tokens_is_counted_by_size(endpoint):
    budget = Budget()
    spend_all(endpoint, budget, 1)
    assert 40 < budget.tokens < 200
