"""Whose turn it is at the server, who has left, and what it says of itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import make_dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

import lily
from scripted import make_checkpoint
from serving import (
    CLIENT,
    DIALECTS,
    PATHS,
    body_of,
    error_of,
    events,
    plain,
    post,
    queue,
    quick,
    thinking_of,
)

pytestmark = pytest.mark.unsanitized


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Wait until something is so."""
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience, "it did not come to be"
        time.sleep(0.01)


def test_silence_is_filled(model: lily.Model) -> None:
    """While the first token is held back, something comes by the clock."""
    mark = {"chat": ": still at work", "responses": ": still at work", "messages": "event: ping"}
    with model.serve(background=True, port=0, keep_alive=0.05) as server:
        for dialect in DIALECTS:
            with quick(model, "</think>Yes.", hold_at=0) as script:
                path, body = server.url + PATHS[dialect], body_of(dialect, stream=True)
                with CLIENT.stream("POST", path, json=body) as answer:
                    lines, seen = answer.iter_lines(), 0
                    for line in lines:
                        seen += line.startswith(mark[dialect])
                        if seen == 4:
                            break
                    script.release.set()
                    rest = "\n".join(lines)
            assert "Yes" in rest
            assert '"error"' not in rest.replace('"error":null', "")


def test_first_come_first_served_and_a_full_queue_says_so(
    model: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes while the first is at work is served in the order of coming, whatever threads do."""
    order: list[int] = []
    engine = model._engine
    begin = engine.take_in_prompt

    def noted(request: Any, *more: Any) -> Any:
        order.append(request.sampling.seed)
        return begin(request, *more)

    monkeypatch.setattr(engine, "take_in_prompt", noted)
    with (
        queue(model, 1, 5) as scheduler,
        model.serve(background=True, port=0) as server,
        ThreadPoolExecutor(8) as pool,
        quick(model, "</think>Yes.", hold_at=0) as script,  # before there is a chunk to be slow with
    ):
        asked = []
        for i in range(6):
            asked.append(pool.submit(post, server.url, "chat", stream=i % 2 == 0, seed=i))
            until(lambda i=i: scheduler.active + scheduler.waiting == i + 1)
        for dialect in DIALECTS:
            answer = post(server.url, dialect, stream=True)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
        health = CLIENT.get(f"{server.url}/health").json()
        assert (health["running"], health["waiting"]) == (1, 5)
        script.release.set()
        assert [each.result(10).status_code for each in asked] == [200] * 6
        assert order == list(range(6))
        until(lambda: scheduler.active == 0)
        assert scheduler.waiting == 0


def test_several_answers_to_a_request_have_one_place(model: lily.Model) -> None:
    """The second of them does not line up again, and is not refused when others wait."""
    with (
        queue(model, 1, 1) as scheduler,
        model.serve(background=True, port=0) as server,
        ThreadPoolExecutor(2) as pool,
        quick(model, "</think>Yes.", hold_at=0) as script,
    ):
        first = pool.submit(post, server.url, "chat", n=3)
        assert script.waits.wait(5)
        second = pool.submit(post, server.url, "chat")
        until(lambda: scheduler.waiting == 1)
        script.release.set()
        assert len(first.result(10).json()["choices"]) == 3
        assert second.result(10).status_code == 200


def test_what_there_is_no_memory_for_is_refused_before_any_is_taken(
    model: lily.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the room for states of a much smaller machine; streams are refused before they begin, too."""
    engine = model._engine
    monkeypatch.setattr(engine.scheduler, "limit", engine.bytes_for(600))
    long = {"messages": [{"role": "user", "content": "word " * 2000}], "max_tokens": 5}
    with model.serve(background=True, port=0) as server:
        assert post(server.url, "chat", max_tokens=5).status_code == 200
        before = engine.session.state_bytes
        engine.session.reset_state_peak()
        for dialect in DIALECTS:
            for stream in (True, False):
                body = {"input": "word " * 2000} if dialect == "responses" else long
                answer = post(server.url, dialect, stream=stream, **body)
                assert answer.status_code == 503
                assert answer.headers["x-should-retry"] == "false"
                assert "memory: this request needs" in answer.json()["error"]["message"]
        assert engine.session.state_peak == before
        assert post(server.url, "chat", max_tokens=5).status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_who_leaves_is_not_worked_for(
    model: lily.Model, url: str, dialect: str, stream: bool, hold_at: int
) -> None:
    """In the first token's draw and later, in a stream and before a whole answer."""
    with queue(model, 1) as scheduler, model.serve(background=True, port=0) as server:
        with quick(model, "</think>" + "word " * 500, hold_at=hold_at) as script:
            body = json.dumps(body_of(dialect, stream=stream)).encode()
            address = urlsplit(server.url)
            connection = socket.create_connection((address.hostname, address.port))
            head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert script.waits.wait(5)
            waiting = threading.Thread(target=lambda: post(server.url, "chat", max_tokens=1))
            waiting.start()
            until(lambda: scheduler.waiting == 1)
            connected = server._server.server_state.connections
            connection.close()
            until(lambda: len(connected) == 1)  # who waits
            time.sleep(0.2)
            script.release.set()
            waiting.join(5)
            assert not waiting.is_alive()
            assert script.drawn <= hold_at + 4
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        assert server.app.metrics.cancelled == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_who_leaves_a_fast_stream_is_noticed(model: lily.Model, dialect: str) -> None:
    """Also between two pieces, when a write is just done."""
    with model.serve(background=True, port=0) as server:
        for lines in range(4, 24, 4):
            with quick(model, "</think>" + "word " * 1500) as script:
                body = body_of(dialect, stream=True, **thinking_of(dialect, True))
                if dialect == "messages":
                    body["max_tokens"] = 3000
                with CLIENT.stream("POST", server.url + PATHS[dialect], json=body) as answer:
                    read = answer.iter_lines()
                    for _ in range(lines):
                        next(read)
                until(lambda: server.app.scheduler.active == 0)
                assert script.drawn < 1500
        assert server.app.metrics.cancelled == 5


def test_who_leaves_while_the_prompt_is_taken_in(model: lily.Model) -> None:
    """The core stops within a layer of a chunk; who waits leaves the queue at once."""
    long = body_of("chat", messages=[{"role": "user", "content": "word " * 3000}], stream=True)
    with queue(model, 1) as scheduler, model.serve(background=True, port=0) as server:
        for _ in range(2):
            with CLIENT.stream("POST", f"{server.url}/v1/chat/completions", json=long) as answer:
                assert answer.status_code == 200
                until(lambda: scheduler.active == 1)
            until(lambda: scheduler.active == 0)
        assert plain("chat", post(server.url, "chat", max_tokens=2).json())["finish"] == "length"


def test_who_waits_may_leave(model: lily.Model) -> None:
    with queue(model, 1) as scheduler, model.serve(background=True, port=0) as server:
        with quick(model, "</think>Yes.", hold_at=1) as script, ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server.url, "chat")
            assert script.waits.wait(5)
            with CLIENT.stream(
                "POST", f"{server.url}/v1/chat/completions", json=body_of("chat", stream=True)
            ):
                until(lambda: scheduler.waiting == 1)
            until(lambda: scheduler.waiting == 0)
            script.release.set()
            assert first.result(5).status_code == 200
        assert scheduler.active == 0


def test_the_server_ends_with_a_word_to_those_it_serves(model: lily.Model) -> None:
    server = model.serve(background=True, port=0)
    found: list[dict[str, Any]] = []
    with quick(model, "</think>" + "word " * 500, hold_at=20) as script:

        def ask() -> None:
            found.extend(events(post(server.url, "chat", stream=True).text))

        asking = threading.Thread(target=ask)
        asking.start()
        assert script.waits.wait(5)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        time.sleep(3.5)
        script.release.set()
        stopping.join(10)
        asking.join(10)
        assert not stopping.is_alive()
    assert found[-1]["error"]["code"] == "shutting_down"


def test_metrics(model: lily.Model) -> None:
    with model.serve(background=True, port=0) as server, quick(model, "</think>A secret word."):
        usage = post(server.url, "chat").json()["usage"]
        post(server.url, "chat", messages=7)
        CLIENT.get(f"{server.url}/made/up")
        answer = CLIENT.get(f"{server.url}/metrics")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert lines['lily_requests_total{path="/v1/chat/completions",status="200"}'] == "1"
    assert lines['lily_requests_total{path="/v1/chat/completions",status="400"}'] == "1"
    assert lines['lily_requests_total{path="other",status="404"}'] == "1"
    assert int(lines["lily_prompt_tokens_total"]) == usage["prompt_tokens"]
    assert int(lines["lily_completion_tokens_total"]) == usage["completion_tokens"]
    assert lines["lily_time_to_first_token_seconds_count"] == "1"
    assert float(lines["lily_resident_bytes"]) > 1e6
    assert lines["lily_requests_running"] == "0.0"
    assert 0 < float(lines["lily_state_bytes"]) <= float(lines["lily_state_limit_bytes"])
    assert "secret" not in answer.text


def test_what_a_cache_holds_is_among_the_metrics(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = make_dataclass("CacheStats", [("bytes", int), ("hits", int)])(bytes=7, hits=2)
    monkeypatch.setattr(model, "cache_stats", lambda: stats)
    with model.serve(background=True, port=0) as server:
        text = CLIENT.get(f"{server.url}/metrics").text
    assert "\nlily_cache_bytes 7.0\n" in text
    assert "\nlily_cache_hits 2.0\n" in text


def test_prompts_are_not_logged(model: lily.Model, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    with quick(model, "</think>An answer of no concern."):
        post(url, "chat", messages=[{"role": "user", "content": "my secret"}])
        post(url, "chat", messages=[{"role": "my secret", "content": "my secret"}])
    said = caplog.text
    assert "/v1/chat/completions 200" in said.replace("POST ", "")
    assert "secret" not in said
    assert "no concern" not in said


@contextmanager
def served(**environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; give the process and where it answers."""
    command = [sys.executable, "-m", "lily", "serve", "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, env=os.environ | environment, **pipes)
    try:
        assert run.stderr is not None
        lines = [run.stderr.readline() for _ in range(2)]
        yield run, lines[1].removeprefix("lily: ").partition(",")[0].removesuffix("/v1")
    finally:
        run.kill()
        run.communicate()


def ended(run: subprocess.Popen[str]) -> None:
    assert run.wait(10) == 130
    assert run.stdout is not None
    assert run.stdout.read() == ""
    assert run.stderr is not None
    assert "Traceback" not in run.stderr.read()


@pytest.mark.parametrize("times", [1, 2])
def test_the_command_serves_and_ends(times: int) -> None:
    """With a stream open; a second Ctrl-C does not wait for it."""
    with served() as (run, where):
        got = plain("chat", post(where, "chat").json())
        assert got["usage"]["completion"] <= 300
        with CLIENT.stream(
            "POST", f"{where}/v1/chat/completions", json=body_of("chat", stream=True)
        ) as answer:
            next(answer.iter_lines())
            for _ in range(times):
                run.send_signal(signal.SIGINT)
        ended(run)


def test_the_command_ends_while_nobody_asks() -> None:
    with served(LILY_API_KEY="secret") as (run, where):
        assert CLIENT.get(f"{where}/v1/models").status_code == 401
        run.send_signal(signal.SIGINT)
        ended(run)


def test_it_is_an_application_of_its_own(model: lily.Model) -> None:
    import asyncio

    import httpx

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=lily.asgi(model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=body_of("chat"))

    with quick(model, "</think>Yes."):
        assert asyncio.run(ask()).json()["choices"][0]["message"]["content"] == "Yes."


def test_a_model_that_is_closed_is_not_healthy(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = lily.Model.load(make_checkpoint(tmp_path_factory.mktemp("closed")))
    with model.serve(background=True, port=0) as server:
        assert CLIENT.get(f"{server.url}/health").status_code == 200
        model.close()
        assert CLIENT.get(f"{server.url}/health").status_code == 503
        status, error = error_of(server.url, "chat")
        assert "lily_requests_total" in CLIENT.get(f"{server.url}/metrics").text
    assert status == 500
    assert "is closed" in error["message"]


def test_a_port_that_is_taken(model: lily.Model) -> None:
    with model.serve(background=True, port=0) as server, pytest.raises(OSError, match=r"in use"):
        model.serve(background=True, port=urlsplit(server.url).port)


def test_settings_are_checked(model: lily.Model) -> None:
    with pytest.raises(TypeError, match="prot"):
        lily.asgi(model, prot=1)
    with pytest.raises(ValueError, match=r"^depth: wanted at least 1, got 0$"):
        lily.asgi(model, depth=0)


def test_others_are_heard_while_a_long_body_is_read(url: str) -> None:
    """A body that is all brackets, and nearly as long as may be."""
    data = b'{"messages": [], "x": [' + b"[]," * 3_000_000 + b"[]]}"
    with ThreadPoolExecutor(1) as pool:
        headers = {"content-type": "application/json"}
        asked = pool.submit(CLIENT.post, f"{url}/v1/chat/completions", content=data, headers=headers)
        waits = []
        while not asked.done():
            started = time.monotonic()
            assert CLIENT.get(f"{url}/health").status_code == 200
            waits.append(time.monotonic() - started)
    assert asked.result().json()["error"]["param"] == "messages"
    assert max(waits) < 2
