"""A judge on this machine that fails at random, in every way that endpoints fail.

    python faulty_judge.py SEED SHARE

Prints its port. Answers /v1/chat/completions with the ideal levels, and at GET /seen tells what it
saw: requests by the number in the judged response, good replies that went out whole, and the most
requests at once.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter

FAULTS = ("429", "500", "503", "slow", "drop", "cut", "malformed", "wrong_atom", "twice", "empty",
          "html")


class Judge:
    def __init__(self, seed, share):
        self.random = random.Random(seed)
        self.share = share
        self.seen, self.good, self.faults = Counter(), Counter(), Counter()
        self.out = self.most = 0
        self.arrivals = []

    async def serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    self.write(writer, 200, json.dumps({
                        "seen": self.seen, "good": self.good, "faults": self.faults,
                        "most": self.most, "arrivals": self.arrivals}))
                    continue
                length = next(line for line in head.lower().split(b"\r\n")
                              if line.startswith(b"content-length:"))
                body = await reader.readexactly(int(length.split(b":")[1]))
                self.out += 1
                self.most = max(self.most, self.out)
                try:
                    if not await self.answer(reader, writer, json.loads(body)):
                        break
                finally:
                    self.out -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        writer.close()

    async def answer(self, reader, writer, body):
        """Answers, or fails; says whether the connection goes on."""
        payload = json.loads(body["messages"][-1]["content"])
        name = payload["response"].split()[-1]
        self.seen[name] += 1
        self.arrivals.append(time.monotonic())
        fault = self.random.choice(FAULTS) if self.random.random() < self.share else ""
        self.faults[fault] += 1
        await asyncio.sleep(0.01)
        atoms = [{"atom_id": atom["atom_id"], "u_star": atom["u_star"],
                  "predicted_usage_level": atom["u_star"], "evidence_quote": "", "reason": name}
                 for atom in payload["atoms"]]
        if fault in ("429", "500", "503"):
            self.write(writer, int(fault), "later", "Retry-After: 0.05\r\n" if fault == "429"
                       else "")
            return True
        if fault == "slow":
            # Until the client hangs up.
            await asyncio.wait_for(reader.read(1), 60)
            return False
        if fault == "drop":
            return False
        if fault == "html":
            self.write(writer, 200, "<html><body>Gateway</body></html>")
            return True
        if fault == "wrong_atom":
            atoms[0]["atom_id"] = "nobody"
        if fault == "twice":
            atoms.append(atoms[0])
        text = json.dumps({"atom_judgments": atoms})
        if fault == "malformed":
            text = text[:len(text) // 2]
        content = json.dumps({
            "choices": [{"message": {"content": "" if fault == "empty" else text},
                         "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10}})
        if fault == "cut":
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n"
                         f"{content[:50]}".encode())
            return False
        self.write(writer, 200, content)
        await writer.drain()
        if not fault:
            self.good[name] += 1
        return True

    def write(self, writer, status, content, headers=""):
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
                     f"{content}".encode())


async def main():
    judge = Judge(int(sys.argv[1]), float(sys.argv[2]))
    server = await asyncio.start_server(judge.serve, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
