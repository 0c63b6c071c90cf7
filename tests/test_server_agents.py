"""Coding agents' requests, and their second turns: an answer goes back in and changes nothing before it."""

import copy
from typing import Any

import pytest

import lily
from agents import AGENTS
from serving import CLIENT, events, fold, post, quick

pytestmark = pytest.mark.unsanitized
SAID = "I look.\n</think>\n\nLet me see.\n\n"
CALL = "<tool_call>\n<function=tool_0>\n<parameter=path>\né/a\n\n</parameter>\n</function>\n</tool_call>"
DIALECTS = {"/v1/messages?beta=true": "messages", "/v1/responses": "responses"}


@pytest.fixture
def prompts(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the list to which each prompt's tokens are added."""
    seen: list[list[int]] = []
    stream = model.stream

    def watched(*arguments: Any, **settings: Any) -> lily.Stream:
        made = stream(*arguments, **settings)
        seen.append(made._request.tokens.tolist())
        return made

    monkeypatch.setattr(model, "stream", watched)
    return seen


def ask(url: str, agent: dict[str, Any], body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answer = CLIENT.post(url + agent["path"], json=body, headers=agent["headers"])
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    return fold(DIALECTS.get(agent["path"], "chat"), found), found


@pytest.mark.parametrize("name", AGENTS)
def test_a_first_request(model: lily.Model, url: str, name: str) -> None:
    agent = AGENTS[name]
    calls = CALL if agent["body"].get("tools") else ""
    with quick(model, SAID + calls):
        got, found = ask(url, agent, agent["body"])
    assert (got["reasoning"], got["text"].strip()) == ("I look.", "Let me see.")
    assert got["calls"] == ([["tool_0", '{"path": "é/a\\n"}']] if calls else [])
    if agent["body"].get("stream_options"):
        assert got["usage"]["prompt"] > 20
    if name == "codex":
        assert found[-1]["type"] == "response.completed"


def _second(name: str, body: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Put an answer and a tool's result behind a request as the agent does."""
    if name == "claude code":
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": "I look.", "signature": "any"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "tool_0", "input": {"path": "é/a\n"}},
        ]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "none", "is_error": True}
        body["messages"][0]["content"][0].pop("cache_control")  # the mark moves with each turn
        marked = {**result, "cache_control": {"type": "ephemeral"}}
        body["messages"] += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [marked]}]
    elif name == "codex":
        output = found[-1]["response"]["output"]
        call = next(item for item in output if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "none"}
        body["input"] += [*output, result]
    else:
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "tool_0", "arguments": '{"path":"é/a\\n"}'},
        }
        message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
        if name.startswith("opencode"):
            message["reasoning_content"] = "I look."
        body["messages"] += [message, {"role": "tool", "tool_call_id": "c", "content": "none"}]


@pytest.mark.parametrize("name", ["claude code", "codex", "opencode", "cline"])
def test_the_second_turn_begins_as_the_first_did(
    model: lily.Model, url: str, prompts: list[list[int]], name: str
) -> None:
    """With the thoughts echoed, token for token and with the answer's own behind it."""
    agent = AGENTS[name]
    body = copy.deepcopy(agent["body"])
    with quick(model, SAID + CALL) as script:
        _, found = ask(url, agent, body)
        _second(name, body, found)
        ask(url, agent, body)
        answer = script._tokens[:-1]
    first, second = prompts
    # Cline leaves the thoughts out, so the last newline of its first prompt becomes two.
    whole = first[:-1] if name == "cline" else [*first, *answer]
    assert second[: len(whole)] == whole


def test_tools_of_other_kinds_are_left_out_by_name(model: lily.Model, url: str) -> None:
    agent = copy.deepcopy(AGENTS["codex"])
    inner = CALL.replace("tool_0", "tool_6")
    with quick(model, SAID + inner):
        answer = CLIENT.post(url + agent["path"], json={**agent["body"], "stream": False})
    assert answer.headers["x-lily-ignored-tools"] == "web_search"
    call = answer.json()["output"][-1]
    assert (call["name"], call["namespace"]) == ("tool_6", "space")


def test_spaces_tell_functions_of_one_name_apart(
    model: lily.Model, url: str, prompts: list[list[int]]
) -> None:
    inner = {"type": "function", "name": "search", "parameters": {}}
    spaces = [{"type": "namespace", "name": name, "tools": [inner]} for name in ("files", "web")]
    said = "</think><tool_call>\n<function=web.search>\n</function>\n</tool_call>"
    with quick(model, said):
        (call,) = post(url, "responses", tools=spaces).json()["output"]
    assert (call["name"], call["namespace"]) == ("search", "web")
    items = [{"role": "user", "content": "Why?"}, call]
    items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "So."})
    with quick(model, "</think>So."):
        assert post(url, "responses", tools=spaces, input=items).status_code == 200
    text = model.tokenizer.decode(prompts[-1], markers=True)
    assert "<function=web.search>" in text
    assert '"files.search"' in text


def test_a_title_between_turns_changes_no_prompt(
    model: lily.Model, url: str, prompts: list[list[int]]
) -> None:
    with quick(model, SAID):
        for name in ("opencode", "opencode's title", "opencode"):
            ask(url, AGENTS[name], AGENTS[name]["body"])
    assert prompts[0] == prompts[2] != prompts[1]
