"""What the server makes of messages and switches, tools and schemas, in each dialect."""

import json
import socket
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

import lily
from serving import (
    CALL,
    DIALECTS,
    QUESTION,
    TOOL,
    error_of,
    fold,
    plain,
    post,
    quick,
    streamed,
    thinking_of,
    tools_of,
)

pytestmark = pytest.mark.unsanitized
SHUT = "<think>\n\n</think>\n\n"


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
    long, brief = (plain("messages", each.json())["usage"]["prompt"] for each in (answer, short))
    assert long > brief + 50


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
