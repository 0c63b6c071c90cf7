"""Requests that are wrong, and requests from where none should come."""

import hmac
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import lily
from lily.server.config import Config
from serving import (
    CLIENT,
    DIALECTS,
    PATHS,
    QUESTION,
    TOOL,
    body_of,
    error_of,
    events,
    plain,
    post,
    quick,
    tools_of,
)

pytestmark = pytest.mark.unsanitized


@pytest.mark.parametrize(
    ("dialect", "more", "param"),
    [
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ("chat", {"messages": [7]}, "messages[0]"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"temperature": -1}, "temperature"),
        ("chat", {"top_p": 2}, "top_p"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": -1}, "max_tokens"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"stop": ""}, "stop"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 10_000}, "n"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"99999999": 1}}, "logit_bias"),
        ("chat", {"seed": -1}, "seed"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "schema": {"type": "x"}}},
            "response_format.schema",
        ),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0]"),
        (
            "chat",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
        ),
        ("chat", {"reasoning_effort": "much"}, "reasoning_effort"),
        ("chat", {"functions": [{"name": "f"}]}, "functions"),
        ("chat", {"audio": {}}, "audio"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"store": True}, "store"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"prompt": [[1], "a", 3]}, "prompt"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"background": True}, "background"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_what_is_wrong_is_named(url: str, dialect: str, more: dict[str, Any], param: str) -> None:
    status, error = error_of(url, dialect, **more)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_what_is_wrong_is_named_to_anthropics_clients(url: str, more: dict[str, Any], said: str) -> None:
    status, error = error_of(url, "messages", **more)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]


def test_fields_that_mean_nothing_here_are_passed_over(model: lily.Model, url: str) -> None:
    nothing = {"user": "u", "metadata": {"user_id": "u"}, "service_tier": "auto", "never_heard_of": [1]}
    fields: dict[str, dict[str, Any]] = {
        "chat": {"store": False, "modalities": ["text"]}
        | dict.fromkeys(("temperature", "max_tokens", "tools")),
        "messages": {"context_management": {"edits": []}, "output_config": {"effort": "high"}},
        "responses": {"store": False, "include": ["reasoning.encrypted_content"], "truncation": "disabled"},
    }
    with quick(model, "</think>Yes."):
        for dialect, more in fields.items():
            assert post(url, dialect, **more, **nothing).status_code == 200, dialect
        body = body_of("messages", thinking={"type": "adaptive"})
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "authorization": "Bearer any"}
        answer = CLIENT.post(f"{url}/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200
    assert CLIENT.head(url).status_code == 200


def test_fields_that_are_passed_over_are_logged_once(
    model: lily.Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "lily.server")
    more: dict[str, Any] = {"user": "my secret", "never_heard_of": ["my secret"], "temperature": 1}
    with model.serve(background=True, port=0) as server, quick(model, "</think>Yes."):
        for dialect in DIALECTS:
            for _ in range(2):
                assert post(server.url, dialect, **more).status_code == 200
        assert post(server.url, "chat", **{f"name_{i}": i for i in range(300)}).status_code == 200
    said = [each.getMessage() for each in caplog.records if "is passed over" in each.getMessage()]
    for path in (PATHS[dialect] for dialect in DIALECTS):
        for name in ("user", "never_heard_of"):
            assert said.count(f"{path}: the field {name!r} is passed over") == 1
    assert len(said) < 120
    assert "temperature" not in "".join(said)
    assert "secret" not in caplog.text


def test_a_prompt_that_is_too_long_says_so(model: lily.Model, url: str) -> None:
    long = "word " * (model.info.context + 10)
    for dialect in DIALECTS:
        text = (
            {"input": long} if dialect == "responses" else {"messages": [{"role": "user", "content": long}]}
        )
        for stream in (False, True):
            status, error = error_of(url, dialect, **text, stream=stream)
            assert status == 400
            assert f"maximum context length is {model.info.context} tokens" in error["message"]
            assert "prompt is too long" in error["message"]
            if dialect != "messages":
                assert error["code"] == "context_length_exceeded"
    card = CLIENT.get(f"{url}/v1/models").json()["data"][0]
    assert card["context_length"] == card["max_model_len"] == model.info.context


def test_failures_on_the_way_are_said_before_the_end(model: lily.Model, url: str) -> None:
    for dialect in DIALECTS:
        with quick(model, "</think>Yes, and so on.") as script:
            draw, left = script._draw, iter(range(4))

            def fail(draw: Callable[[], int] = draw, left: Iterator[int] = left) -> int:
                if next(left, None) is None:
                    raise lily.DeviceError("the device is gone")
                return draw()

            script._draw = fail  # type: ignore[method-assign]
            answer = post(url, dialect, stream=True)
            found = events(answer.text)
            assert answer.status_code == 200
            failed = found[-1]["response"] if dialect == "responses" else found[-1]
            assert failed["error"]["message"] == "the device is gone"
        with quick(model, "</think>Yes.") as script:
            script._draw = lambda: (_ for _ in ()).throw(lily.DeviceError("the device is gone"))
            status, error = error_of(url, dialect)
            assert (status, error["message"]) == (500, "the device is gone")


@pytest.mark.parametrize(
    ("error", "text", "code", "message"),
    [
        (KeyError, "a prompt's words", "internal_error", "internal error: KeyError"),
        (MemoryError, "", "out_of_memory", "out of memory; send a shorter prompt"),
        (lily.MemoryLimitError, "memory: too little", "out_of_memory", "memory: too little"),
        (lily.ModelFilesError, "a file is damaged", "model_error", "a file is damaged"),
    ],
)
def test_what_would_fail_again_is_not_sent_again(
    model: lily.Model,
    url: str,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    text: str,
    code: str,
    message: str,
) -> None:
    """Clients retry 5xx unless they are told not to; a bug's own words may be the prompt's."""
    with quick(model, "</think>Yes.") as script:
        script._draw = lambda: (_ for _ in ()).throw(error(text) if text else error())  # type: ignore[method-assign]
        for stream in (False, True):
            answer = post(url, "chat", stream=stream)
            said = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
            assert (said["code"], said["message"]) == (code, message)
            if not stream:
                assert answer.status_code == (503 if error is lily.MemoryLimitError else 500)
                assert answer.headers["x-should-retry"] == "false"
    assert f"/v1/chat/completions: {error.__name__}: " in caplog.text
    assert "in _draw" in caplog.text or "in sample" in caplog.text  # where it came from
    assert "words" not in caplog.text


def test_the_default_limit_is_large_and_the_servers_own_counts(model: lily.Model, url: str) -> None:
    with quick(model, "</think>" + "word " * 700):
        got = plain("chat", post(url, "chat").json())
        assert got["finish"] == "stop"
        assert got["usage"]["completion"] > 600
        with model.serve(background=True, port=0, max_tokens=9) as server:
            for limit, want in ((None, 9), (5, 5), (12, 12)):
                for name in ("max_tokens", "max_completion_tokens"):
                    got = plain("chat", post(server.url, "chat", **{name: limit}).json())
                    assert (got["finish"], got["usage"]["completion"]) == ("length", want)


def test_the_name_of_the_model(model: lily.Model, url: str) -> None:
    own = CLIENT.get(f"{url}/v1/models").json()["data"][0]["id"]
    with quick(model, "</think>Yes."):
        assert post(url, "chat", model="gpt-x").json()["model"] == "gpt-x"
        assert post(url, "chat").json()["model"] == own
        with model.serve(background=True, port=0, name="mine", strict_model=True) as server:
            assert post(server.url, "chat", model="mine").status_code == 200
            status, error = error_of(server.url, "chat", model="org/other")
    assert (status, error["code"]) == (404, "model_not_found")
    assert CLIENT.get(f"{url}/v1/models/{own}").json()["id"] == own
    assert CLIENT.get(f"{url}/v1/models/other").status_code == 404
    assert "temperature" in CLIENT.get(f"{url}/v1/models/{own}").json()["sampling"]


def test_tokens_are_counted(model: lily.Model, url: str) -> None:
    with quick(model, "Yes."):
        answer = post(url, "messages", system="Rules.", tools=tools_of("messages")).json()
    more = {"messages": QUESTION, "system": "Rules.", "tools": tools_of("messages")}
    counted = CLIENT.post(f"{url}/v1/messages/count_tokens", json=more)
    assert counted.json() == {"input_tokens": plain("messages", answer)["usage"]["prompt"]}
    assert CLIENT.post(f"{url}/v1/messages/count_tokens", json={}).status_code == 400
    # Tools that are left out are no part of the prompt, and an earlier answer counts by its own tokens.
    several = [token for letter in "Yes, it is." for token in model.tokenizer.encode(letter)]
    head = model.tokenizer.encode("</think>", markers=True)
    for none in ({"tool_choice": {"type": "none"}}, {}):
        more: dict[str, Any] = {"tools": tools_of("messages"), **none, "thinking": {"type": "adaptive"}}
        with quick(model, head + several):
            first = post(url, "messages", **more).json()
        turns = [*QUESTION, {"role": "assistant", "content": first["content"]}, *QUESTION]
        with quick(model, "Yes."):
            answer = post(url, "messages", **more | {"messages": turns}).json()
        counted = CLIENT.post(f"{url}/v1/messages/count_tokens", json=more | {"messages": turns})
        assert counted.json() == {"input_tokens": plain("messages", answer)["usage"]["prompt"]}
    long = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert CLIENT.post(f"{url}/v1/messages/count_tokens", json=long).json()["input_tokens"] > 5000


@pytest.mark.parametrize(
    ("dialect", "more", "param"),
    [
        (
            "messages",
            {"system": 2 * [{"type": "text", "text": "A."}], "messages": [{"role": "judge"}]},
            "messages[0].role",
        ),
        ("messages", {"system": [{"type": "image"}]}, "system.content[0].type"),
        ("messages", {"tools": [{"name": "a>b"}]}, "tools[0].name"),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": {"oneOf": []}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema.oneOf",
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config.format.schema",
        ),
        ("messages", {"stop_sequences": [""]}, "stop_sequences"),
        (
            "responses",
            {
                "instructions": "Be brief.",
                "input": [
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "2"},
                    {"role": "judge", "content": "x"},
                ],
            },
            "input[2].role",
        ),
        (
            "responses",
            {
                "tools": [
                    {"type": "web_search"},
                    {"type": "namespace", "tools": [{"type": "function", "name": "f ", "parameters": {}}]},
                ]
            },
            "tools[1].tools[0].name",
        ),
        (
            "responses",
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"not": {}}}]},
            "tools[0].parameters.not",
        ),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ("responses", {"input": "word " * 5000}, "input"),
        ("completions", {"prompt": "word " * 5000}, "prompt"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format.json_schema.schema",
        ),
        ("chat", {"response_format": {"type": "regex", "regex": "("}}, "response_format.regex"),
    ],
)
def test_errors_name_the_requests_own_field(url: str, dialect: str, more: Any, param: str) -> None:
    """Not what the library calls it, nor the place that it has there."""
    status, error = error_of(url, dialect, **more)
    assert status == 400
    if dialect == "messages":
        assert error["message"].startswith(f"{param}: "), error
    else:
        assert error["param"] == param, error


def test_a_long_prompt_of_plain_text_does_not_stop_others(model: lily.Model, url: str) -> None:
    """Its tokens are made beside the event loop."""
    begun, over = threading.Event(), threading.Event()
    encode = model.tokenizer.encode

    def held(text: str, **more: Any) -> list[int]:
        begun.set()
        assert over.wait(10)
        return encode(text, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.tokenizer, "encode", held)
        work = threading.Thread(target=post, args=(url, "completions"), kwargs={"prompt": "a b\n" * 50_000})
        work.start()
        assert begun.wait(10)
        try:
            assert httpx.get(f"{url}/health", timeout=5).status_code == 200
        finally:
            over.set()
            work.join()


def test_seeds(url: str) -> None:
    def text(**more: Any) -> str:
        got = plain("chat", post(url, "chat", max_tokens=12, temperature=1, **more).json())
        return got["text"] + got["reasoning"]

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=2), text(seed=3), text(), text()}) == 4
    answer = post(url, "chat", max_tokens=12, temperature=1).json()["choices"][0]
    assert text(seed=answer["seed"]) == answer["message"]["content"] + answer["message"].get("reasoning", "")


def test_numbers_of_sampling_reach_the_model(
    model: lily.Model, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[lily.Sampling] = []
    stream = model.stream

    def watched(*arguments: Any, **settings: Any) -> lily.Stream:
        made = stream(*arguments, **settings)
        seen.append(made._request.sampling)
        return made

    monkeypatch.setattr(model, "stream", watched)
    numbers = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": -100}, "seed": 11,
    }  # fmt: skip
    with quick(model, "</think>Yes."):
        post(url, "chat", **numbers)
        post(url, "chat")
    for name, value in numbers.items():
        assert getattr(seen[0], name) == ({5: -100} if name == "logit_bias" else value)
    own = CLIENT.get(f"{url}/v1/models").json()["data"][0]["sampling"]
    assert {name: getattr(seen[1], name) for name in own} == own


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"null", {}, 400),
        (b"", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', {}, 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', {}, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        (b'{"messages": ' + b"[" * 100_000, {}, 400),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
        (b'{"tools": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": ""}, 415),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, 415),
        (b"x" * 70_000, {}, 413),
    ],
)
def test_bodies_that_are_no_request(
    model: lily.Model, body: bytes, headers: dict[str, str], status: int
) -> None:
    with model.serve(background=True, port=0, body_bytes=65_000 if len(body) == 70_000 else 2**20) as server:
        for path in PATHS.values():
            given = {"content-type": "application/json", **headers}
            answer = CLIENT.post(server.url + path, content=body, headers=given)
            assert answer.status_code == status, answer.text
            assert "error" in answer.json()
            assert answer.headers["x-should-retry"] == "false"


def test_a_length_that_is_too_great_is_believed(url: str) -> None:
    address = urlsplit(url)
    with closing(socket.create_connection((address.hostname, address.port), timeout=5)) as connection:
        head = "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_body_in_chunks_has_a_limit_too(model: lily.Model) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    with model.serve(background=True, port=0, body_bytes=10_000) as server:
        headers = {"content-type": "application/json"}
        answer = CLIENT.post(f"{server.url}/v1/chat/completions", content=chunks(), headers=headers)
        assert answer.status_code == 413


def test_many_messages_and_tools_have_a_limit(model: lily.Model, url: str) -> None:
    status, error = error_of(url, "chat", messages=QUESTION * 10_001)
    assert (status, error["param"]) == (400, "messages")
    status, error = error_of(url, "chat", tools=[TOOL] * 1025)
    assert (status, error["param"]) == (400, "tools")


def test_a_slow_request_is_given_up(model: lily.Model) -> None:
    with model.serve(background=True, port=0, body_seconds=0.3) as server:
        address = urlsplit(server.url)
        begun = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for head in (b"POST /v1/chat/comp", begun + b"Content-Length: 10\r\n\r\n{"):
            with closing(socket.create_connection((address.hostname, address.port), timeout=5)) as connection:
                connection.sendall(head)
                answer = connection.recv(4096)
                assert answer == b"" or b"408" in answer.split(b"\r\n")[0]


def test_paths_that_lead_nowhere(url: str) -> None:
    assert CLIENT.get(f"{url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert CLIENT.get(f"{url}/v1/nothing").status_code == 404
    assert CLIENT.get(f"{url}/v1/chat/completions").status_code == 405
    assert CLIENT.get(f"{url}/v1/messages").json()["type"] == "error"
    assert CLIENT.get(f"{url}/%2e%2e/%2e%2e/etc/passwd").status_code == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(ValueError, match=rf"^host: {re.escape(host)} can be reached from other machines"):
        Config(host=host)
    assert Config(host=host, api_key="k").host == host
    assert Config(host=host, allow_public=True).host == host
    with pytest.raises(ValueError, match=r"^api_key: wanted ASCII"):
        Config(api_key="")
    for local in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        assert Config(host=local).api_key is None


def test_the_command_refuses_a_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_API_KEY", raising=False)
    command = [sys.executable, "-m", "lily", "serve", "--host", "0.0.0.0", "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "there is no key" in run.stderr
    assert run.stdout == ""


def test_keys_are_compared_in_constant_time(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def watched(given: bytes, key: bytes) -> bool:
        compared.append(given)
        return compare(given, key)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    with model.serve(background=True, port=0, api_key="secret") as server:
        for key in ("s", "secreT", "\u00e9", ""):
            headers = {"x-api-key": key.encode("latin-1")}
            assert CLIENT.get(f"{server.url}/v1/models", headers=headers).status_code == 401
    assert compared == [b"s", b"secreT", "\u00e9".encode(), b""]


def test_keys(model: lily.Model) -> None:
    with model.serve(background=True, port=0, api_key="secret") as server, quick(model, "</think>Yes."):

        def ask(path: str = "/v1/chat/completions", **headers: str) -> Any:
            body = body_of("messages")
            return CLIENT.post(server.url + path, json=body, headers=headers)

        assert ask().status_code == 401
        assert ask().json()["error"]["code"] == "invalid_api_key"
        assert ask("/v1/messages").json()["error"]["type"] == "authentication_error"
        assert ask(authorization="Bearer wrong").status_code == 401
        assert ask(authorization="secret").status_code == 401
        assert ask(authorization="Bearer secret").status_code == 200
        assert ask("/v1/messages", **{"x-api-key": "secret"}).status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            assert CLIENT.get(server.url + path).status_code == 401
        assert CLIENT.get(f"{server.url}/health").status_code == 200


def test_other_names_and_other_pages_are_kept_out(model: lily.Model, url: str) -> None:
    def ask(where: str = url, **headers: str) -> int:
        return CLIENT.get(f"{where}/v1/models", headers=headers).status_code

    for host in ("localhost", "127.0.0.1:99", "[::1]:8080", "LOCALHOST"):
        assert ask(host=host) == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "10.0.0.1"):
        assert ask(host=host) == 403
    assert ask(origin="http://localhost:3000") == 200
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        assert ask(origin=origin) == 403
    settings = {"allowed_hosts": ("box.lan",), "allowed_origins": ("https://my.example",)}
    with model.serve(background=True, port=0, **settings) as server:
        assert ask(server.url, host="box.lan:1234") == 200
        assert ask(server.url, host="other.lan") == 403
        assert ask(server.url, origin="https://my.example") == 200
        flight = CLIENT.options(f"{server.url}/v1/chat/completions", headers={"origin": "https://my.example"})
        assert flight.status_code == 204
        assert flight.headers["access-control-allow-origin"] == "https://my.example"
        assert "access-control-allow-origin" not in CLIENT.get(f"{server.url}/health").headers


def test_an_answer_is_not_held_back(url: str) -> None:
    """Its head and its body are two packets; TCP's delays for such small ones are 40 ms each time."""
    with httpx.Client() as client:
        taken = []
        for _ in range(20):
            started = time.monotonic()
            client.get(f"{url}/health")
            taken.append(time.monotonic() - started)
    assert sorted(taken)[5] < 0.03  # nor are all of them held back: the system tries the first few at once


@pytest.fixture(scope="module")
def demo_url() -> Iterator[str]:
    with lily.Model.load(lily.DEMO) as loaded, loaded.serve(background=True, port=0) as server:
        yield server.url


def test_every_prompt_counts_once(demo_url: str) -> None:
    """Of two prompts with two answers each."""
    prompts = [[5], [6, 7, 8, 9]]
    alone = [
        httpx.post(f"{demo_url}/v1/completions", json={"prompt": each, "max_tokens": 2}).json()["usage"]
        for each in prompts
    ]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2}
    usage = httpx.post(f"{demo_url}/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == sum(each["prompt_tokens"] for each in alone) == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    streamed = httpx.post(
        f"{demo_url}/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert events(streamed.text)[-2]["usage"]["prompt_tokens"] == 5


def test_a_schema_without_an_end_is_the_clients_fault(demo_url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "endless", "schema": schema}},
    }
    for stream in (False, True):  # before anything is done, so before a stream's head too
        answer = httpx.post(f"{demo_url}/v1/chat/completions", json=body | {"stream": stream})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("response_format.json_schema.schema: wanted one that some text fits, got ")


def test_a_port_that_is_taken_is_named(model: lily.Model, url: str) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: .* in use; choose another port or host"):
        model.serve(background=True, port=port)
