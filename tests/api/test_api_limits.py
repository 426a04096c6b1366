import asyncio
import threading

import pytest

from memcalib_jax.api.limits import Gate, Limits, shared_gate


def pass_times(gate, limits, fake_time, arrivals, **asked):
    async def run():
        times = []
        for arrival in arrivals:
            fake_time.now = max(fake_time.now, arrival)
            granted, waited = await gate.enter(limits, **asked)
            gate.leave(granted)
            times.append((fake_time.now, waited))
        return times

    return asyncio.run(run())


def make_gate(fake_time):
    return Gate(clock=fake_time.clock, sleep=fake_time.sleep)


def test_window_slides(fake_time):
    times = pass_times(make_gate(fake_time), Limits(9, 2), fake_time,
                       [0.0, 50.0, 55.0, 56.0, 200.0])
    # The third waits for the first to be a minute old, the fourth for the second.
    assert times == [(0.0, 0.0), (50.0, 0.0), (60.0, 5.0), (110.0, 50.0), (200.0, 0.0)]


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_never_more_than_the_limit_in_a_minute(fake_time, limit):
    arrivals = sorted(3.7 * k % 41 + 11 * k for k in range(40))
    passed = pass_times(make_gate(fake_time), Limits(9, limit), fake_time, arrivals)
    times = [time for time, _ in passed]
    for start in times:
        assert sum(start <= time < start + 60 for time in times) <= limit


def test_tokens_of_a_minute(fake_time):
    times = pass_times(make_gate(fake_time), Limits(9, 99, tokens_per_minute=100), fake_time,
                       [0.0, 10.0, 20.0, 21.0], tokens=45)
    # 45 + 45 fit; the third waits for the first to leave, the fourth for the second.
    assert times == [(0.0, 0.0), (10.0, 0.0), (60.0, 40.0), (70.0, 10.0)]


def test_a_request_of_more_tokens_than_the_limit_passes_alone(fake_time):
    times = pass_times(make_gate(fake_time), Limits(9, 99, tokens_per_minute=100), fake_time,
                       [0.0, 5.0], tokens=500)
    assert times == [(0.0, 0.0), (60.0, 55.0)]


def test_tokens_that_were_not_taken_are_given_back(fake_time):
    gate, limits = make_gate(fake_time), Limits(9, 99, tokens_per_minute=100)

    async def run():
        first, _ = await gate.enter(limits, tokens=90)
        gate.leave(first, tokens=10)
        second, waited = await gate.enter(limits, tokens=90)
        gate.leave(second)
        return waited

    assert asyncio.run(run()) == 0.0


def enter_all(gate, limits, count, **asked):
    """Lets `count` requests in, each until all that can have entered; returns the most at once."""
    async def run():
        out = most = entered = 0

        async def one():
            nonlocal out, most, entered
            granted, _ = await gate.enter(limits, **asked)
            out, entered = out + 1, entered + 1
            most = max(most, out)
            for _ in range(5):
                await asyncio.sleep(0)
            out -= 1
            gate.leave(granted)

        await asyncio.gather(*(one() for _ in range(count)))
        return most, entered

    return asyncio.run(run())


def test_requests_out_at_once_are_bounded():
    assert enter_all(Gate(), Limits(3, 99), 12) == (3, 12)


def test_bytes_in_flight_are_bounded():
    assert enter_all(Gate(), Limits(9, 99, bytes_in_flight=100), 12, size=40) == (2, 12)
    assert enter_all(Gate(), Limits(9, 99, bytes_in_flight=100), 3, size=400) == (1, 3)


def test_a_server_that_says_slow_down_gets_less_and_then_more(fake_time):
    gate, limits = make_gate(fake_time), Limits(8, 999)

    async def run():
        granted = [(await gate.enter(limits))[0] for _ in range(8)]
        for one in granted[:3]:  # Three say so, of one burst.
            gate.slow_down(one, 5.0)
        for one in granted:
            gate.leave(one)
        started = fake_time.now
        again = [(await gate.enter(limits))[0] for _ in range(6)]
        assert fake_time.now - started == 5.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gate.enter(limits), 0.01)
        gate.leave(again.pop())
        for _ in range(4):  # They make room for one more.
            gate.speed_up()
        for _ in range(2):
            again.append((await asyncio.wait_for(gate.enter(limits), 1))[0])
        return len(again)

    assert asyncio.run(run()) == 7


def test_threads_share_a_gate():
    gate, limits = Gate(), Limits(2, 10_000)
    lock, state = threading.Lock(), {"out": 0, "most": 0, "done": 0}

    def work():
        async def run():
            for _ in range(40):
                granted, _ = await gate.enter(limits)
                with lock:
                    state["out"] += 1
                    state["most"] = max(state["most"], state["out"])
                await asyncio.sleep(0.0005)
                with lock:
                    state["out"] -= 1
                    state["done"] += 1
                gate.leave(granted)

        asyncio.run(run())

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert state == {"out": 0, "most": 2, "done": 200}


def test_cancelled_waiter_takes_no_place(fake_time):
    async def run():
        blocked = asyncio.Event()

        async def sleep(seconds):
            blocked.set()
            await asyncio.Event().wait()

        gate, limits = Gate(clock=fake_time.clock, sleep=sleep), Limits(9, 1)
        granted, _ = await gate.enter(limits)
        gate.leave(granted)
        waiter = asyncio.create_task(gate.enter(limits))
        await blocked.wait()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        fake_time.now = 60.0
        return (await asyncio.wait_for(gate.enter(limits), 5))[1]

    assert asyncio.run(run()) == 0.0


def test_clients_of_one_endpoint_and_key_share_a_gate():
    first = shared_gate("http://127.0.0.1:1/v1", "sk-1")
    assert shared_gate("http://127.0.0.1:1/v1", "sk-1") is first
    assert shared_gate("http://127.0.0.1:1/v1", "sk-2") is not first
    assert shared_gate("http://127.0.0.1:2/v1", "sk-1") is not first
    assert shared_gate("http://127.0.0.1:1/v1", None) is not first
