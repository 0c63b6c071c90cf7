"""Serves the embedded checkpoint to many clients at once, some of which leave, and compares every answer.

    python -m bench.serve [--clients 32] [--seconds 300] [--record]

The server is a process of its own, by `lily serve`. Each client asks, again and again, one of a few seeded
questions in one of three dialects, as a stream or not; one in four leaves on the way. An answer that was
completed must be the one that was given when nobody else asked. Meanwhile a thread of its own asks /health
twenty times a second, and reads the server's resident memory every second.
"""

import argparse
import asyncio
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench import record, run

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages"}
ANIMALS = ("fox", "hen", "dog", "crow", "mouse", "bear")
QUESTIONS = [(dialect, i) for dialect in PATHS for i in range(len(ANIMALS))]
LEAVES = 0.25  # of the requests, on the way


@dataclass(slots=True)
class Outcome:
    """What happened.

    completed, left: int, requests.  tokens: int, of completed answers.  seconds: float, from first to last.
    faults: what was not as it should be.  health: seconds that each request to /health took.
    resident: bytes, once a second.
    """

    completed: int = 0
    left: int = 0
    tokens: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def health_p99(self) -> float:
        """The latency in seconds that one request in a hundred to /health exceeds."""
        return sorted(self.health)[int(len(self.health) * 0.99)]

    @property
    def growth(self) -> float:
        """Resident bytes at the end by those after a fifth, less one; medians of a tenth of the time."""
        part = max(1, len(self.resident) // 10)
        start = self.resident[2 * part : 3 * part] or self.resident
        return statistics.median(self.resident[-part:]) / statistics.median(start) - 1


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Run `lily serve` and give its address; Ctrl-C ends it."""
    command = [sys.executable, "-m", "lily", "serve", "--port", "0", "--max-tokens", "12", *arguments]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = ""
    for said in run.stderr:
        if found := re.search(r"http://[\w.:]+", said):
            break
    else:
        raise RuntimeError(f"the server did not begin: {said}")
    rest = threading.Thread(target=run.stderr.read, daemon=True)
    rest.start()
    try:
        yield found[0]
    finally:
        run.send_signal(2)
        run.wait(30)
        rest.join()
        run.stderr.close()


def body_of(dialect: str, i: int, stream: bool) -> dict[str, Any]:
    """Return a question, the same words for the same i."""
    text = f"Tell me a story about a {ANIMALS[i]}." + " Go on." * (40 * i)
    asked: dict[str, Any] = {"stream": stream, "temperature": 0.9}
    if dialect == "completions":
        return asked | {"prompt": text, "seed": i}
    asked["messages"] = [{"role": "user", "content": text}]
    return asked | ({"max_tokens": 12, "temperature": 0} if dialect == "messages" else {"seed": i})


def text_of(dialect: str, answer: dict[str, Any]) -> str:
    """Return the text of a whole answer, or of a stream's event."""
    if dialect == "messages":
        delta = answer.get("delta", {})
        return "".join(block["text"] for block in answer.get("content", [])) or str(delta.get("text", ""))
    choice = answer["choices"][0]
    if dialect == "completions":
        return str(choice["text"])
    return (choice.get("message") or choice["delta"]).get("content") or ""


async def ask(
    client: httpx.AsyncClient, dialect: str, i: int, stream: bool, leave: float | None
) -> str | None:
    """Return an answer's text; None if the client left after so many seconds, or the queue was full."""
    body = body_of(dialect, i, stream)
    try:
        async with asyncio.timeout(leave):
            if not stream:
                answer = await client.post(PATHS[dialect], json=body)
                if answer.status_code == 429:
                    return None
                assert answer.status_code == 200, answer.text
                return text_of(dialect, answer.json())
            async with client.stream("POST", PATHS[dialect], json=body) as answer:
                if answer.status_code == 429:
                    return None
                assert answer.status_code == 200
                text = ""
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        text += text_of(dialect, event)
                return text
    except TimeoutError:
        return None


async def _client(
    client: httpx.AsyncClient,
    number: int,
    end: float,
    alone: dict[tuple[str, int], str],
    outcome: Outcome,
) -> None:
    choose = random.Random(number)
    while time.monotonic() < end:
        dialect, i = choose.choice(list(alone))
        leave = choose.uniform(0, 1.5) if choose.random() < LEAVES else None
        try:
            text = await ask(client, dialect, i, choose.random() < 0.7, leave)
        except (httpx.HTTPError, AssertionError, ValueError) as error:
            outcome.faults.append(f"{dialect} {i}: {type(error).__name__}: {error}")
            continue
        if text is None:
            outcome.left += 1
            continue
        outcome.completed += 1
        outcome.tokens += 12
        if text != alone[dialect, i]:
            outcome.faults.append(f"{dialect} {i}: wanted {alone[dialect, i]!r}, got {text!r}")


def _watch(url: str, ended: threading.Event, outcome: Outcome) -> None:
    """Ask /health and, once a second, /metrics, over a connection of its own."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    for count in range(10**9):
        if ended.wait(0.05):
            break
        started = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        outcome.health.append(time.perf_counter() - started)
        if answer.status != 200:
            outcome.faults.append(f"/health: {answer.status}")
        if count % 20 == 0:
            connection.request("GET", "/metrics")
            found = re.search(rb"^lily_resident_bytes (\S+)$", connection.getresponse().read(), re.MULTILINE)
            if found:
                outcome.resident.append(int(float(found[1])))
    connection.close()


async def load(
    url: str, clients: int, seconds: float, questions: Sequence[tuple[str, int]] = QUESTIONS
) -> Outcome:
    """Have clients ask for so many seconds and return what happened."""
    outcome = Outcome()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as client:
        alone = {}
        for question in questions:
            answers = {await ask(client, *question, stream, None) for stream in (True, False)}
            (text,) = answers
            assert text is not None
            alone[question] = text
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(url, ended, outcome))
        watch.start()
        started = time.monotonic()
        work = [_client(client, i, started + seconds, alone, outcome) for i in range(clients)]
        await asyncio.gather(*work)
        outcome.seconds = time.monotonic() - started
        ended.set()
        await asyncio.to_thread(watch.join)
        await asyncio.sleep(1)
        idle = (await client.get("/health")).json()
        if (idle["running"], idle["waiting"]) != (0, 0):
            outcome.faults.append(f"not idle at the end: {idle}")
    return outcome


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Serve many clients and compare every answer.")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--record", action="store_true", help="write a record if there was no fault")
    options = parser.parse_args()
    with serving() as url:
        outcome = asyncio.run(load(url, options.clients, options.seconds))
    print(f"{outcome.completed} completed, {outcome.left} left, {len(outcome.faults)} faults")
    print("\n".join(outcome.faults[:10]))
    samples: dict[str, tuple[str, list[float]]] = {
        "answers": ("1/s", [outcome.completed / outcome.seconds]),
        "health, 99th percentile": ("ms", [1000 * outcome.health_p99]),
        "health": ("ms", [1000 * each for each in outcome.health]),
        "resident, growth after the first fifth": ("%", [100 * outcome.growth]),
        "faults": ("", [float(len(outcome.faults))]),
    }
    for case, (unit, values) in samples.items():
        print(record.line(case, unit, record.summarise(values)))
    if options.record and not outcome.faults:
        said = {"clients": options.clients, "seconds": options.seconds}
        note = f"{outcome.completed} answers completed, each as given alone; {outcome.left} clients left"
        for case, (unit, values) in samples.items():
            record.append(
                bench="serve", case=f"demo, {case}", unit=unit, samples=values, options=said, note=note
            )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    run(main)
