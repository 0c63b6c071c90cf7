"""Requests that are wrong in every way that chance finds: each gets an answer, and none is a crash."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import lily
from agents import AGENTS
from scripted import make_checkpoint
from serving import CLIENT, PATHS, Quick, body_of, thinking_of, tools_of

pytestmark = pytest.mark.unsanitized

SAID = "I.</think>Yes.<tool_call>\n<function=f>\n</function>\n</tool_call>"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308),
    *("", "x", "none", "auto", "required", "\ud83e", "\x00", "<|im_end|>", "\ufdd0\ufdd1", "a" * 5000),
    *([], [[]], [None], [1, "a"], [["a"] * 3] * 3, [{"type": "text", "text": 1}]),
    *({}, {"a": {}}, {"type": None}, {"role": "assistant"}, {"name": "f"}, {"function": {"name": "f"}}),
    *({"type": name} for name in ("text", "function", "json_schema", "tool_use", ["string", 3])),
    *({"$ref": "#"}, {"properties": []}, {"enum": []}, {"anyOf": [{"$ref": "#/anyOf/0"}]}),
]
NAMES = [
    *("type", "text", "role", "content", "name", "function", "parameters", "properties", "tools", "id"),
    *("tool_choice", "stop", "schema", "format", "thinking", "reasoning", "arguments", "input", "n", "seed"),
    *("logprobs", "top_logprobs", "max_tokens", "max_output_tokens", "temperature", "logit_bias", "store"),
    *("response_format", "chat_template_kwargs", "stream", "system", "regex", "grammar", "tool_calls"),
    *("stream_options", "continue_final_message", "prompt"),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every container in a value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def spoil(choose: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Change one thing, or a few, somewhere in a request."""
    body = copy.deepcopy(body)
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        found = list(places(body))
        if not found:
            return body
        holder, key = choose.choice(found)
        way = choose.randrange(5)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[choose.choice(NAMES)] = copy.deepcopy(choose.choice(VALUES))
        elif way == 2 and isinstance(holder, list):
            holder += copy.deepcopy(holder[:3])
        elif way == 3:
            other, there = choose.choice(found)
            holder[key] = copy.deepcopy(other[there]) if there in other or isinstance(other, list) else None
        else:
            holder[key] = copy.deepcopy(choose.choice(VALUES))
    return body


def damage(choose: random.Random, data: bytes) -> bytes:
    """Change some bytes."""
    damaged = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(damaged))
        damaged[at : at + choose.randint(0, 3)] = choose.randbytes(choose.randint(0, 3))
        if not damaged:
            return b""
    return bytes(damaged[: choose.randrange(len(damaged))] if choose.random() < 0.2 else damaged)


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return sound requests of every kind, to be spoilt."""
    found = []
    for agent in AGENTS.values():
        body = copy.deepcopy(agent["body"])
        body |= {"tools": [*body["tools"][:2], *body["tools"][-2:]]} if "tools" in body else {}
        found.append((agent["path"], body))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    for dialect, path in PATHS.items():
        if dialect != "completions":
            found.append((path, body_of(dialect, tools=tools_of(dialect), **thinking_of(dialect, False))))
    chat = PATHS["chat"]
    found += [
        (
            chat,
            body_of(
                "chat", messages=turns, tools=tools_of("chat"), n=2, seed=1, logprobs=True, top_logprobs=3
            ),
        ),
        (
            chat,
            body_of(
                "chat",
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            ),
        ),
        (
            chat,
            body_of(
                "chat", response_format={"type": "regex", "regex": "[a-z]{1,3}"}, stop=["a"], stream=True
            ),
        ),
        (
            chat,
            body_of("chat", tools=tools_of("chat"), tool_choice="required", logit_bias={"5": 1.5}, min_p=0.1),
        ),
        (
            chat,
            body_of("chat", chat_template_kwargs={"enable_thinking": False}, continue_final_message=False),
        ),
        (PATHS["completions"], body_of("completions", prompt=["a", [1, 2]], logprobs=2, stream=True)),
        (
            PATHS["responses"],
            body_of("responses", text={"format": {"type": "json_schema", "name": "a", "schema": schema}}),
        ),
        ("/v1/messages/count_tokens", {"messages": turns[:1], "system": "x", "tools": tools_of("messages")}),
    ]
    return found


class Obedient(Quick):
    """Draws what the masks allow, and what ends an answer as soon as it may."""

    def sample(self, state: object, sampling: object, history: object = None, allowed: Any = None) -> int:
        return self._pick(allowed) if allowed is not None else super().sample(state)

    def step(self, state: object, token: int, sampling: object, history: object, allowed: Any = None) -> int:
        return self._pick(allowed) if allowed is not None else super().step(state, token)

    def _pick(self, allowed: Any) -> int:
        tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        end = self._tokens[-1]
        return end if end in tokens else int(tokens[len(tokens) // 2])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with lily.Model.load(make_checkpoint(tmp_path_factory.mktemp("served"))) as model:
        tokens = [*model.tokenizer.encode(SAID, markers=True), min(model.info.stop_tokens)]
        session = model._engine._session
        model._engine._session = Obedient(session, tokens, None)
        with model.serve(background=True, port=0, max_tokens=64) as server:
            yield server.url
            assert (server.app.scheduler.active, server.app.scheduler.waiting) == (0, 0)
        model._engine._session = session


def send(url: str, path: str, body: bytes, choose: random.Random) -> httpx.Response:
    headers = {"content-type": "application/json"}
    if choose.random() < 0.02:
        headers["content-type"] = choose.choice(
            ["text/plain", "", "application/json; charset=latin-1", "é".encode()]
        )
    if choose.random() < 0.02:
        path = choose.choice(
            ["/v1", "/v1/chat", "//", "/v1/models/" + "x" * 300, "/v1/messages/x", "/health?a=b"]
        )
    method = choose.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS"]) if choose.random() < 0.02 else "POST"
    return CLIENT.request(method, url + path, content=body, headers=headers)


def campaign(url: str, count: int, seed: int) -> dict[int, int]:
    """Send so many requests and return how often each status was the answer."""
    statuses: dict[int, int] = {}
    sound = requests()
    for i in range(count):
        choose = random.Random(seed + i)
        path, body = choose.choice(sound)
        data = json.dumps(spoil(choose, body)).encode()
        if choose.random() < 0.2:
            data = damage(choose, data)
        answer = send(url, path, data, choose)
        status = answer.status_code
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500, (seed + i, path, data[:3000], answer.text)
        assert "internal error" not in answer.text, (seed + i, path, data[:3000], answer.text)
        if status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
            assert "data: " in answer.text, (seed + i, data[:3000])
            assert '"server_error"' not in answer.text, (seed + i, path, data[:3000], answer.text)
        elif status >= 400 and answer.text:
            assert answer.json()["error"]["message"], (seed + i, answer.text)
    return statuses


def test_sound_requests_are_answered(url: str) -> None:
    for path, body in requests():
        answer = CLIENT.post(url + path, json=body)
        assert answer.status_code == 200, (path, answer.text)


def test_wrong_requests_are_answered(url: str) -> None:
    statuses = campaign(url, 300, seed=0)
    assert statuses[400] > 60
    assert statuses[200] > 60


@pytest.mark.long
def test_twenty_thousand_wrong_requests_are_answered(url: str) -> None:
    statuses = campaign(url, 20_000, seed=1_000_000)
    assert {200, 400, 404, 405, 415} <= set(statuses)
    assert CLIENT.get(f"{url}/health").json()["running"] == 0
