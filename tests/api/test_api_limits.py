import asyncio

import pytest

from memcalib_jax.api.limits import RequestWindow


def pass_times(window, fake_time, arrivals):
    async def run():
        times = []
        for arrival in arrivals:
            fake_time.now = max(fake_time.now, arrival)
            waited = await window.wait()
            times.append((fake_time.now, waited))
        return times

    return asyncio.run(run())


def test_window_slides(fake_time):
    window = RequestWindow(2, clock=fake_time.clock, sleep=fake_time.sleep)
    times = pass_times(window, fake_time, [0.0, 50.0, 55.0, 56.0, 200.0])
    # The third waits for the first to be a minute old, the fourth for the second.
    assert times == [(0.0, 0.0), (50.0, 0.0), (60.0, 5.0), (110.0, 50.0), (200.0, 0.0)]


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_never_more_than_the_limit_in_a_minute(fake_time, limit):
    window = RequestWindow(limit, clock=fake_time.clock, sleep=fake_time.sleep)
    arrivals = [3.7 * k % 41 + 11 * k for k in range(40)]
    times = [time for time, _ in pass_times(window, fake_time, sorted(arrivals))]
    for start in times:
        assert sum(start <= time < start + 60 for time in times) <= limit


def test_cancelled_waiter_takes_no_place(fake_time):
    async def run():
        blocked = asyncio.Event()

        async def sleep(seconds):
            blocked.set()
            await asyncio.Event().wait()

        window = RequestWindow(1, clock=fake_time.clock, sleep=sleep)
        await window.wait()
        waiter = asyncio.create_task(window.wait())
        await blocked.wait()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        fake_time.now = 60.0
        return await asyncio.wait_for(window.wait(), 5)

    assert asyncio.run(run()) == 0.0
