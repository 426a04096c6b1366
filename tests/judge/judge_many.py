"""Judges many responses against an endpoint that fails, and writes down how each one ended.

    python judge_many.py URL CACHE OUTCOMES COUNT
"""

import asyncio
import json
import os
import sys

from memcalib_jax.api import ChatClient, ChatSettings
from memcalib_jax.data import load_records, sample_path
from memcalib_jax.judge import Judge

CONCURRENCY = 64


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def main(url, cache, outcomes, count):
    records = load_records(sample_path("records.jsonl"))
    settings = ChatSettings(url, "m", timeout=0.5, max_attempts=4, max_concurrent=CONCURRENCY,
                            requests_per_minute=10**7, cache_dir=cache)
    memory = []
    with open(outcomes, "a") as file:
        async def hurry(seconds):
            await asyncio.sleep(seconds / 50)

        async with ChatClient(settings, sleep=hurry) as client:
            judge, numbers = Judge(client), iter(range(count))

            async def work():
                for number in numbers:
                    record = records[number % len(records)]
                    judgment = await judge.judge(record, f"This is response number {number}")
                    right = judgment.valid and judgment.levels == tuple(
                        atom.ideal for atom in record.atoms)
                    file.write(json.dumps([number, judgment.valid, right, judgment.reason]) + "\n")
                    file.flush()
                    if number % 100 == 0:
                        memory.append(resident_mib())

            await asyncio.gather(*(work() for _ in range(2 * CONCURRENCY)))
            print(json.dumps({"memory": memory, "stats": client.stats()}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
