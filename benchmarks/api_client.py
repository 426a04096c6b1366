"""How many requests a second does one client get out, and how many could one core do?

    python -m benchmarks.api_client

A server in a process of its own answers in 200 ms, then at once; 64 requests are out at a time. With
64 slots of 200 ms, 320 a second are possible. Requests a second of CPU time say what the client's
own work allows on one core. The last line is one JSON document.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time

from memcalib_jax.api import ChatClient, ChatSettings

CONCURRENCY, REQUESTS = 64, 3000
PROMPT = "x" * 2000

_SERVER = """
import asyncio, sys
delay = float(sys.argv[1])
body = b'{"choices": [{"message": {"content": "good"}, "finish_reason": "stop"}], "usage": ' \\
       b'{"prompt_tokens": 10, "completion_tokens": 5}}'
answer = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body

async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\\r\\n")[0]))
            if delay:
                await asyncio.sleep(delay)
            writer.write(answer)
    except (ConnectionError, asyncio.IncompleteReadError):
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


async def measure(port: int, cache_dir: str | None) -> tuple[float, float]:
    """Returns requests a second, of the clock and of this process's CPU time."""
    settings = ChatSettings(f"http://127.0.0.1:{port}/v1", "m", max_concurrent=CONCURRENCY,
                            requests_per_minute=10**9, cache_dir=cache_dir)
    async with ChatClient(settings, api_key="") as client:

        async def ask(numbers):
            for number in numbers:
                await client.complete([{"role": "user", "content": PROMPT}], sample_index=number)

        async def ask_all(start, count):
            numbers = iter(range(start, start + count))
            await asyncio.gather(*(ask(numbers) for _ in range(CONCURRENCY)))

        await ask_all(0, 2 * CONCURRENCY)  # opens the connections
        clock, cpu = time.perf_counter(), time.process_time()
        await ask_all(2 * CONCURRENCY, REQUESTS)
        return REQUESTS / (time.perf_counter() - clock), REQUESTS / (time.process_time() - cpu)


def main():
    rows = []
    for delay in (0.2, 0.0):
        for cached in (False, True):
            with subprocess.Popen([sys.executable, "-c", _SERVER, str(delay)],
                                  stdout=subprocess.PIPE, text=True) as server, \
                    tempfile.TemporaryDirectory() as folder:
                try:
                    port = int(server.stdout.readline())
                    runs = [asyncio.run(measure(port, os.path.join(folder, str(run))
                                                if cached else None)) for run in range(3)]
                finally:
                    server.kill()
            best, cpu = (max(figures) for figures in zip(*runs))
            rows.append({"server_seconds": delay, "cache_and_journal": cached,
                         "requests_per_second": round(best, 1),
                         "requests_per_cpu_second": round(cpu, 1)})
            print(f"server {1000 * delay:3.0f} ms  cache and journal {'yes' if cached else 'no ':3}  "
                  f"{best:6.0f} requests/s  {cpu:6.0f} per second of CPU time", flush=True)
    print(json.dumps({"concurrency": CONCURRENCY, "requests": REQUESTS, "runs": rows}))


if __name__ == "__main__":
    main()
