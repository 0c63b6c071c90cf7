"""What the server makes of requests: messages, switches, fields, failures, whose turn it is, who may ask."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

import lily
from lily.server.admission import Admission
from lily.server.config import Config
from scripted import make_checkpoint
from serving import (
    CALL,
    CLIENT,
    PATHS,
    QUESTION,
    TOOL,
    body_of,
    events,
    fold,
    plain,
    post,
    quick,
    streamed,
    thinking_of,
    tools_of,
)

pytestmark = pytest.mark.unsanitized
DIALECTS = ("chat", "messages", "responses")
SHUT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lily.Model]:
    with lily.Model.load(make_checkpoint(tmp_path_factory.mktemp("served"))) as model:
        yield model


@pytest.fixture(scope="module")
def url(model: lily.Model) -> Iterator[str]:
    with model.serve(background=True, port=0) as server:
        yield server.url


@pytest.fixture
def prompt_of(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return the text of the last prompt that the model was given."""
    prompts: list[str] = []
    stream = model.stream

    def watched(*arguments: Any, **settings: Any) -> lily.Stream:
        made = stream(*arguments, **settings)
        prompts.append(model.tokenizer.decode(made._request.tokens.tolist(), markers=True))
        return made

    monkeypatch.setattr(model, "stream", watched)
    return lambda: prompts[-1]


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Wait until something is so."""
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience, "it did not come to be"
        time.sleep(0.01)


def error_of(url: str, dialect: str, **more: Any) -> tuple[int, dict[str, Any]]:
    answer = post(url, dialect, **more)
    body = answer.json()
    assert answer.headers["x-should-retry"] == ("true" if answer.status_code in (429, 503) else "false")
    if dialect == "messages":
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, body["error"]


# Messages


def test_leading_system_messages_are_one_and_later_ones_stay(
    model: lily.Model, url: str, prompt_of: Callable[[], str]
) -> None:
    def system(text: str) -> dict[str, str]:
        return {"role": "system", "content": text}

    with quick(model, "</think>Yes."):
        assert post(url, "chat", messages=[system("AAA"), system("BBB"), *QUESTION]).status_code == 200
        assert prompt_of().startswith("<|im_start|>system\nAAA\n\nBBB<|im_end|>")
        before = [*QUESTION, {"role": "assistant", "content": "Because."}]
        assert post(url, "chat", messages=[*before, system("CCC"), *QUESTION]).status_code == 200
        late = prompt_of()
        assert post(url, "chat", messages=[*before, *QUESTION]).status_code == 200
    assert late.count("CCC") == 1
    head = late[: late.index("CCC")].rpartition("<|im_start|>")[0]
    assert prompt_of().startswith(head)


def test_system_messages_inside_anthropics_messages(
    model: lily.Model, url: str, prompt_of: Callable[[], str]
) -> None:
    messages = [*QUESTION, {"role": "system", "content": "A reminder of the sort." * 20}]
    with quick(model, "Yes."):
        answer = post(url, "messages", messages=messages, system="Rules.")
        assert "A reminder" in prompt_of()
        short = post(url, "messages", messages=QUESTION, system="Rules.")
    assert answer.json()["usage"]["input_tokens"] > short.json()["usage"]["input_tokens"] + 50


def test_the_developer_is_the_system(model: lily.Model, url: str, prompt_of: Callable[[], str]) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "AAA"}]},
        {"type": "message", "role": "developer", "content": "BBB"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Two."}]},
    ]
    with quick(model, "</think>Yes."):
        assert post(url, "responses", input=items, instructions="Rules.").status_code == 200
    assert prompt_of().startswith(
        "<|im_start|>system\nRules.\n\nAAA\n\nBBB<|im_end|>\n<|im_start|>user\nOne."
    )


def test_a_line_for_accounts_and_marks_for_caches_change_no_prompt(
    model: lily.Model, url: str, prompt_of: Callable[[], str]
) -> None:
    prompts = []
    with quick(model, "Yes."):
        for version, mark in (("1.2.3", {}), ("9.8.7", {"cache_control": {"type": "ephemeral"}})):
            line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version};"}
            system = [line, {"type": "text", "text": "Rules.", **mark}]
            messages = [{"role": "user", "content": [{"type": "text", "text": "Why?", **mark}]}]
            assert post(url, "messages", system=system, messages=messages).status_code == 200
            prompts.append(prompt_of())
    assert prompts[0] == prompts[1]
    assert "cc_version" not in prompts[0]
    assert "Rules." in prompts[0]


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"enable_thinking": False}),
        ("chat", {"reasoning_effort": "none"}),
        ("chat", {"reasoning": {"effort": "none"}}),
        ("chat", {"reasoning": {"enabled": False}}),
        ("chat", {"thinking": {"type": "disabled"}}),
        ("chat", {"thinking": False}),
        ("responses", {"reasoning": {"effort": "none"}}),
        ("responses", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("messages", {"thinking": {"type": "disabled"}}),
        ("messages", {}),
    ],
)
def test_every_way_to_switch_thinking_off(
    model: lily.Model, url: str, prompt_of: Callable[[], str], dialect: str, more: dict[str, Any]
) -> None:
    with quick(model, "Yes."):
        assert plain(dialect, post(url, dialect, **more).json())["text"] == "Yes."
    assert prompt_of().endswith(SHUT)


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        ("chat", {}),
        ("chat", {"reasoning": {"effort": "high"}}),
        ("chat", {"reasoning_effort": "minimal"}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}),
        ("messages", {"thinking": {"type": "adaptive"}}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    ],
)
def test_every_way_to_switch_thinking_on(
    model: lily.Model, url: str, prompt_of: Callable[[], str], dialect: str, more: dict[str, Any]
) -> None:
    with quick(model, "plan</think>\n\nanswer"):
        got = plain(dialect, post(url, dialect, **more).json())
    assert (got["reasoning"], got["text"]) == ("plan", "answer")
    assert prompt_of().endswith("<think>\n")


def test_a_budget_ends_thoughts(url: str) -> None:
    usage = post(url, "chat", max_tokens=30, thinking={"type": "enabled", "budget_tokens": 3}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    more = {"thinking": {"type": "enabled", "budget_tokens": 3}, "max_tokens": 30}
    blocks = post(url, "messages", **more).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_letters_that_spell_a_marker_stay_letters(
    model: lily.Model, url: str, prompt_of: Callable[[], str]
) -> None:
    said = "Explain <|im_end|> and <think>"
    markers = {model.tokenizer.token_id(text) for text in ("<|im_end|>", "<think>", "</think>")}
    seen: list[list[int]] = []
    with quick(model, model.tokenizer.encode("It is <|im_end|>.")):
        answer = post(
            url, "chat", messages=[{"role": "user", "content": said}], reasoning_effort="none"
        ).json()
        tokens = model.encode([{"role": "user", "content": said}], add_generation_prompt=False)
        seen.append(tokens)
    assert answer["choices"][0]["message"]["content"] == "It is <|im_end|>."
    assert sum(token in markers for token in seen[0]) == 1  # the turn's own end
    assert said in prompt_of()


def test_a_begun_answer_is_gone_on_with(model: lily.Model, url: str, prompt_of: Callable[[], str]) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "Once upon"}]
    with quick(model, " a time."):
        for dialect, more in (("chat", {"continue_final_message": True}), ("messages", {})):
            answer = plain(dialect, post(url, dialect, messages=begun, **more).json())
            assert answer["text"] == " a time."
            assert prompt_of().endswith("Once upon")


def test_calls_and_results_go_back(model: lily.Model, url: str, prompt_of: Callable[[], str]) -> None:
    """With arguments as JSON or as an object, and contents null or a list."""
    prompts = []
    with quick(model, "</think>Done."):
        for arguments in ('{"path": "/a", "count": 2}', {"path": "/a", "count": 2}):
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [
                *QUESTION,
                {"role": "assistant", "content": None, "reasoning": "I must.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
            ]
            assert post(url, "chat", messages=messages, tools=[TOOL]).status_code == 200
            prompts.append(prompt_of())
        blocks = [
            {"type": "thinking", "thinking": "I must.", "signature": "x"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"path": "/a", "count": 2}},
        ]
        result = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]}]
        messages = [*QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
        tools = [{"name": "f", "description": "Do it.", "input_schema": TOOL["function"]["parameters"]}]
        assert (
            post(url, "messages", messages=messages, tools=tools, **thinking_of("messages", True)).status_code
            == 200
        )
        prompts.append(prompt_of())
        items = [
            {"role": "user", "content": "Why?"},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "I must."}]},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "f",
                "arguments": '{"path": "/a", "count": 2}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ]
        tools = [{"type": "function", **TOOL["function"]}]
        assert post(url, "responses", input=items, tools=tools).status_code == 200
        prompts.append(prompt_of())
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert "<parameter=count>\n2\n</parameter>" in prompts[0]
    assert "<think>\nI must.\n</think>" in prompts[0]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "document", "audio", "file"])
@pytest.mark.parametrize("source", ["file:///etc/passwd", "http://127.0.0.1:1/x.png"])
def test_what_is_no_text_is_refused_and_nothing_fetched(
    url: str, kind: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"type": kind, "source": {"type": "url", "url": source}, "image_url": {"url": source}}
    connect, reached = socket.socket.connect, []

    def watched(self: socket.socket, address: Any) -> None:
        reached.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    for dialect in ("chat", "messages"):
        status, error = error_of(url, dialect, messages=[{"role": "user", "content": [part]}])
        assert status == 400
        assert "does not support" in error["message"]
    assert not [address for address in reached if address[1] == 1]


# Tools and structured output


def test_tools_are_called_and_left_out(model: lily.Model, url: str, prompt_of: Callable[[], str]) -> None:
    with quick(model, f"</think>Look. {CALL}"):
        for dialect in DIALECTS:
            tools = tools_of(dialect)
            more = thinking_of(dialect, True)
            got = plain(dialect, post(url, dialect, tools=tools, **more).json())
            assert got["calls"] == [["f", '{"path": "/a"}']]
            none = {"type": "none"} if dialect == "messages" else "none"
            got = plain(dialect, post(url, dialect, tools=tools, tool_choice=none, **more).json())
            assert (got["text"], got["calls"]) == (f"Look. {CALL}", [])
            assert "# Tools" not in prompt_of()
            got = plain(dialect, post(url, dialect, **more).json())
            assert (got["text"], got["calls"]) == (f"Look. {CALL}", [])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_can_be_asked_for(url: str, dialect: str) -> None:
    """The model has never seen a tool: what it writes is the grammar's doing."""
    parameters = {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["count"],
    }
    names = ("f", "g")
    if dialect == "messages":
        tools = [{"name": name, "input_schema": parameters} for name in names]
        required, named = {"type": "any"}, {"type": "tool", "name": "g"}
        required["disable_parallel_tool_use"] = named["disable_parallel_tool_use"] = True
    elif dialect == "chat":
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
        required, named = "required", {"type": "function", "function": {"name": "g"}}
    else:
        tools = [{"type": "function", "name": name, "parameters": parameters} for name in names]
        required, named = "required", {"type": "function", "name": "g"}
    more = {} if dialect == "messages" else {"parallel_tool_calls": False}
    for choice in (required, named):
        got = fold(
            dialect,
            streamed(url, dialect, tools=tools, tool_choice=choice, **more, **thinking_of(dialect, False)),
        )
        ((name, arguments),) = got["calls"]
        assert name == "g" or choice is required
        jsonschema.validate(json.loads(arguments), parameters)
        assert got["text"] == ""


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "hen"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("dialect", "more", "schema"),
    [
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            SCHEMA,
        ),
        ("chat", {"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ("chat", {"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, SCHEMA),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, SCHEMA),
        ("completions", {"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_a_schema_is_followed(url: str, dialect: str, more: dict[str, Any], schema: dict[str, Any]) -> None:
    answer = post(url, dialect, **more, **thinking_of(dialect, False)).json()
    text = answer["choices"][0]["text"] if dialect == "completions" else plain(dialect, answer)["text"]
    jsonschema.validate(json.loads(text), schema)


def test_a_schema_is_followed_behind_thoughts(url: str) -> None:
    more = {"response_format": {"type": "json_schema", "schema": SCHEMA}}
    got = fold("chat", streamed(url, "chat", **more, thinking_budget=4, seed=3))
    jsonschema.validate(json.loads(got["text"]), SCHEMA)
    assert got["reasoning"]
    assert got["finish"] == "stop"


def test_json_objects_patterns_and_cut_answers(url: str) -> None:
    off = thinking_of("chat", False)
    pattern = {"response_format": {"type": "regex", "regex": "[ab]{3}"}}
    assert set(plain("chat", post(url, "chat", **pattern, **off).json())["text"]) <= {"a", "b"}
    got = plain(
        "chat", post(url, "chat", response_format={"type": "json_object"}, max_tokens=5, **off).json()
    )
    assert got["text"].startswith("{")
    assert got["finish"] in ("length", "stop")


# Fields and failures


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
        ("chat", {"max_completion_tokens": 0}, "max_tokens"),
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
        ("chat", {"response_format": {"type": "json_schema", "schema": {"type": "x"}}}, "schema"),
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
            "messages[0].content[0].type",
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


def test_the_default_limit_is_large_and_the_servers_own_counts(model: lily.Model, url: str) -> None:
    with quick(model, "</think>" + "word " * 700):
        got = plain("chat", post(url, "chat").json())
        assert got["finish"] == "stop"
        assert got["usage"]["completion_tokens"] > 600
        with model.serve(background=True, port=0, max_tokens=9) as server:
            got = plain("chat", post(server.url, "chat").json())
            assert (got["finish"], got["usage"]["completion_tokens"]) == ("length", 9)


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
        usage = post(url, "messages", system="Rules.", tools=tools_of("messages")).json()["usage"]
    more = {"messages": QUESTION, "system": "Rules.", "tools": tools_of("messages")}
    counted = CLIENT.post(f"{url}/v1/messages/count_tokens", json=more)
    assert counted.json() == {"input_tokens": usage["input_tokens"]}
    assert CLIENT.post(f"{url}/v1/messages/count_tokens", json={}).status_code == 400


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


# Bodies


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


# Who may ask


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


# Whose turn it is


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


def test_first_come_first_served_and_a_full_queue_says_so(model: lily.Model) -> None:
    order: list[int] = []
    with (
        model.serve(background=True, port=0, concurrency=1, queue=2) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        admission = server.app.admission

        def ask(i: int) -> int:
            status = post(server.url, "chat", stream=i % 2 == 0).status_code
            order.append(i)
            return status

        with quick(model, "</think>Yes.", hold_at=1) as script:
            asked = []
            for i in range(3):
                asked.append(pool.submit(ask, i))
                until(lambda i=i: admission.running + admission.waiting == i + 1)
            for dialect in DIALECTS:
                answer = post(server.url, dialect, stream=True)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-should-retry"] == "true"
            assert CLIENT.get(f"{server.url}/health").json()["waiting"] == "2"
            script.release.set()
            assert [each.result(10) for each in asked] == [200, 200, 200]
        assert order == [0, 1, 2]
        assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_who_leaves_is_not_worked_for(
    model: lily.Model, url: str, dialect: str, stream: bool, hold_at: int
) -> None:
    """In the first token's draw and later, in a stream and before a whole answer."""
    with model.serve(background=True, port=0, concurrency=1) as server:
        admission = server.app.admission
        with quick(model, "</think>" + "word " * 500, hold_at=hold_at) as script:
            body = json.dumps(body_of(dialect, stream=stream)).encode()
            address = urlsplit(server.url)
            connection = socket.create_connection((address.hostname, address.port))
            head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert script.waits.wait(5)
            waiting = threading.Thread(target=lambda: post(server.url, "chat", max_tokens=1))
            waiting.start()
            until(lambda: admission.waiting == 1)
            connection.close()
            time.sleep(0.2)
            script.release.set()
            waiting.join(5)
            assert not waiting.is_alive()
            assert script.drawn <= hold_at + 4
        assert (admission.running, admission.waiting) == (0, 0)
        assert server.app.metrics.cancelled == 1


def test_who_leaves_while_the_prompt_is_taken_in(model: lily.Model) -> None:
    """The core stops within a layer of a chunk; who waits leaves the queue at once."""
    long = body_of("chat", messages=[{"role": "user", "content": "word " * 3000}], stream=True)
    with model.serve(background=True, port=0, concurrency=1) as server:
        admission = server.app.admission
        for _ in range(2):
            with CLIENT.stream("POST", f"{server.url}/v1/chat/completions", json=long) as answer:
                assert answer.status_code == 200
                until(lambda: admission.running == 1)
            until(lambda: admission.running == 0)
        assert plain("chat", post(server.url, "chat", max_tokens=2).json())["finish"] == "length"


def test_who_waits_may_leave(model: lily.Model) -> None:
    with model.serve(background=True, port=0, concurrency=1) as server:
        admission = server.app.admission
        with quick(model, "</think>Yes.", hold_at=1) as script, ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server.url, "chat")
            assert script.waits.wait(5)
            with CLIENT.stream(
                "POST", f"{server.url}/v1/chat/completions", json=body_of("chat", stream=True)
            ):
                until(lambda: admission.waiting == 1)
            until(lambda: admission.waiting == 0)
            script.release.set()
            assert first.result(5).status_code == 200
        assert admission.running == 0


def test_a_turn_that_comes_as_its_owner_leaves_goes_on() -> None:
    import asyncio

    async def run() -> None:
        admission = Admission(1, 10)
        inside, out = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with admission.turn():
                inside.set()
                await out.wait()

        async def take() -> None:
            async with admission.turn():
                pass

        first = asyncio.ensure_future(hold())
        await inside.wait()
        second, third = asyncio.ensure_future(take()), asyncio.ensure_future(take())
        await asyncio.sleep(0)
        out.set()
        await first
        second.cancel()  # its turn has come, and it has not run yet
        await asyncio.wait({second, third})
        assert (admission.running, admission.waiting) == (0, 0)
        assert third.exception() is None

    asyncio.run(run())


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


# What it says of itself


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
    assert "secret" not in answer.text


def test_prompts_are_not_logged(model: lily.Model, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    with quick(model, "</think>An answer of no concern."):
        post(url, "chat", messages=[{"role": "user", "content": "my secret"}])
        post(url, "chat", messages=[{"role": "my secret", "content": "my secret"}])
    said = caplog.text
    assert "/v1/chat/completions 200" in said.replace("POST ", "")
    assert "secret" not in said
    assert "no concern" not in said


def test_the_command_serves_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    command = [sys.executable, "-m", "lily", "serve", "--port", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        lines = [run.stderr.readline() for _ in range(2)]
        where = lines[1].removeprefix("lily: ").partition(",")[0].removesuffix("/v1")
        got = plain("chat", post(where, "chat").json())
        assert got["usage"]["completion_tokens"] <= 300
        with CLIENT.stream(
            "POST", f"{where}/v1/chat/completions", json=body_of("chat", stream=True)
        ) as answer:
            next(answer.iter_lines())
            run.send_signal(signal.SIGINT)
        assert run.wait(10) == 130
        assert run.stdout is not None
        assert run.stdout.read() == ""
        assert "Traceback" not in run.stderr.read()
    finally:
        run.kill()
        run.communicate()


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
    assert status == 500
    assert "is closed" in error["message"]


def test_a_port_that_is_taken(model: lily.Model) -> None:
    with model.serve(background=True, port=0) as server, pytest.raises(OSError, match=r"in use"):
        model.serve(background=True, port=urlsplit(server.url).port)


def test_settings_are_checked(model: lily.Model) -> None:
    with pytest.raises(TypeError, match="prot"):
        lily.asgi(model, prot=1)
    with pytest.raises(ValueError, match=r"^concurrency: wanted at least 1, got 0$"):
        lily.asgi(model, concurrency=0)


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
