"""What the server's tests share: a model that says what it is told to, and a reader of its streams."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import lily
from lily.scheduler import Scheduler
from scripted import Scripted

# One for all: to make one takes a tenth of a second, for certificates that nobody asks for.
CLIENT = httpx.Client(timeout=60, verify=False, trust_env=False)
QUESTION = [{"role": "user", "content": "Why?"}]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["path"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "Do it.", "parameters": PARAMETERS}}
DIALECTS = ("chat", "messages", "responses")  # those that have messages
ALL_DIALECTS = (*DIALECTS, "completions")
CALL = "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>"


class Quick(Scripted):
    """A scripted session that only draws: nothing is computed."""

    def step(self, state: object, token: int, *_: object) -> int:
        return self._draw()

    def extend(self, state: object, tokens: object, *_: object) -> None:
        pass

    def logprobs(self, state: object, token: int, top: int) -> list[tuple[int, float]]:
        return [(token, -0.5), *((i, -1.0 - i) for i in range(top))]


@contextmanager
def quick(model: lily.Model, answer: str | list[int], hold_at: int | None = None) -> Iterator[Quick]:
    """Have a model write this, over and over, without computing anything."""
    tokens = model.tokenizer.encode(answer, markers=True) if isinstance(answer, str) else answer
    engine = model._engine
    session = engine._session
    engine._session = forced = Quick(session, [*tokens, min(model.info.stop_tokens)], hold_at)
    try:
        yield forced
    finally:
        engine._session = session


@contextmanager
def queue(model: lily.Model, active: int, waiting: int = 64) -> Iterator[Scheduler]:
    """Let so many requests of a model take part, and so many wait."""
    scheduler = model._engine.scheduler
    before = scheduler.most_active, scheduler.most_waiting
    scheduler.most_active, scheduler.most_waiting = active, waiting
    try:
        yield scheduler
    finally:
        scheduler.most_active, scheduler.most_waiting = before


def body_of(dialect: str, **more: Any) -> dict[str, Any]:
    """Return a plain request in a dialect."""
    plain: dict[str, dict[str, Any]] = {
        "chat": {"messages": QUESTION},
        "completions": {"prompt": "Why?"},
        "responses": {"input": "Why?"},
        "messages": {"messages": QUESTION, "max_tokens": 2000},
    }
    return plain[dialect] | more


def tools_of(dialect: str) -> list[dict[str, Any]]:
    """Return the tools as a dialect has them."""
    if dialect == "messages":
        return [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
    functions = [TOOL["function"], {"name": "g", "parameters": PARAMETERS}]
    if dialect == "responses":
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


def thinking_of(dialect: str, on: bool) -> dict[str, Any]:
    """Return how a dialect switches thoughts on or off."""
    if dialect == "messages":
        return {"thinking": {"type": "adaptive" if on else "disabled"}}
    if dialect == "responses":
        return {"reasoning": {"effort": "high" if on else "none"}}
    return {"reasoning_effort": "high" if on else "none"} if dialect == "chat" else {}


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, without comments, the end mark as {"done": True}."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if not fields:
            continue
        value = {"done": True} if fields["data"] == "[DONE]" else json.loads(fields["data"])
        assert fields.get("event") in (None, value.get("type")), fields
        found.append(value)
    return found


def post(url: str, dialect: str, **more: Any) -> httpx.Response:
    """Send a request in a dialect."""
    return CLIENT.post(url + PATHS[dialect], json=body_of(dialect, **more))


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


def streamed(url: str, dialect: str, **more: Any) -> list[dict[str, Any]]:
    """Send a request in a dialect and return the events of its answer."""
    answer = post(url, dialect, stream=True, **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def counted(usage: dict[str, Any] | None) -> dict[str, int]:
    """Return a usage's figures under the same names, whatever the dialect and whatever a cache had."""
    if usage is None:
        return {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get(
        "cache_read_input_tokens", 0
    )
    completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    assert usage.get("total_tokens", prompt + completion) == prompt + completion
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details["cached_tokens"] if details else usage["cache_read_input_tokens"]
    assert 0 <= cached <= prompt
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return {"prompt": prompt, "completion": completion, **details}


def fold(dialect: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a stream's events add up to: text, reasoning, calls, finish, usage, logprobs."""
    folds = {
        "chat": _fold_chat,
        "completions": _fold_completions,
        "messages": _fold_messages,
        "responses": _fold_responses,
    }
    return folds[dialect](found)


def plain(dialect: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the same of an answer that did not stream."""
    plains = {
        "chat": _plain_chat,
        "completions": _plain_completions,
        "messages": _plain_messages,
        "responses": _plain_responses,
    }
    return plains[dialect](answer)


def _fold_chat(found: list[dict[str, Any]]) -> dict[str, Any]:
    assert found[-1] == {"done": True}
    text, reasoning, finish, calls, logprobs = "", "", None, [], []
    usage = None
    assert len({(each["id"], each["created"], each["model"]) for each in found[:-1]}) == 1
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for each in found[:-1]:
        usage = each.get("usage") or usage
        for choice in each["choices"]:
            delta = choice["delta"]
            assert choice["index"] == 0
            assert finish is None, "a piece behind the end"
            text += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning_content") or ""
            logprobs += (choice["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["function"]["arguments"] == ""
                    calls.append([call["function"]["name"], ""])
                assert ("name" in call["function"]) == ("id" in call)
                calls[call["index"]][1] += call["function"]["arguments"]
            finish = choice["finish_reason"]
    return {
        "text": text,
        "reasoning": reasoning,
        "calls": calls,
        "finish": finish,
        "usage": counted(usage),
        "logprobs": logprobs,
    }


def _plain_chat(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    assert message["content"] is not None or message["tool_calls"]
    calls = [
        [each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls", [])
    ]
    return {
        "text": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
        "finish": choice["finish_reason"],
        "usage": counted(answer["usage"]),
        "logprobs": (choice["logprobs"] or {}).get("content", []),
    }


def _fold_completions(found: list[dict[str, Any]]) -> dict[str, Any]:
    assert found[-1] == {"done": True}
    text, reasoning, finish, usage = "", "", None, None
    logprobs: dict[str, list[Any]] = {}
    for each in found[:-1]:
        usage = each.get("usage") or usage
        for choice in each["choices"]:
            assert finish is None, "a piece behind the end"
            text += choice["text"]
            reasoning += choice.get("reasoning_content", "")
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[name] = logprobs.get(name, []) + values
            finish = choice["finish_reason"]
    return _completions(text, reasoning, finish, usage, logprobs)


def _plain_completions(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    reasoning, logprobs = choice.get("reasoning_content", ""), choice["logprobs"] or {}
    return _completions(choice["text"], reasoning, choice["finish_reason"], answer["usage"], logprobs)


def _completions(text: str, reasoning: str, finish: Any, usage: Any, logprobs: Any) -> dict[str, Any]:
    parts = {"text": text, "reasoning": reasoning, "calls": [], "finish": finish}
    return {**parts, "usage": counted(usage), "logprobs": logprobs}


def _fold_messages(found: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
    for each in found:
        if each["type"] == "content_block_start":
            assert each["index"] == len(blocks)
            assert not any(each["content_block"].get(key) for key in ("text", "thinking", "input"))
            blocks.append({**each["content_block"], "json": ""})
        elif each["type"] == "content_block_delta":
            delta, block = each["delta"], blocks[each["index"]]
            assert each["index"] == len(blocks) - 1
            for key, target in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                block[target] = block.get(target, "") + delta.get(key, "")
            block |= {"signature": delta["signature"]} if "signature" in delta else {}
    for block in blocks:
        block["json"] = json.dumps(json.loads(block["json"] or "{}"), ensure_ascii=False)
    end = found[-2]
    return _messages(blocks, end["delta"], end["usage"])


def _plain_messages(answer: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {**block, "json": json.dumps(block["input"], ensure_ascii=False)} if "input" in block else block
        for block in answer["content"]
    ]
    return _messages(blocks, answer, answer["usage"])


def _messages(blocks: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    assert blocks
    assert all(block["signature"] for block in blocks if block["type"] == "thinking")
    kinds = {"text": "text", "thinking": "thinking", "tool_use": "json"}
    return {
        "parts": [(block["type"], block.get("name"), block[kinds[block["type"]]]) for block in blocks],
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "reasoning": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "calls": [
            [block["name"], json.dumps(json.loads(block["json"]), ensure_ascii=False)]
            for block in blocks
            if block["type"] == "tool_use"
        ],
        "finish": (end["stop_reason"], end["stop_sequence"]),
        "usage": counted(usage),
        "logprobs": [],
    }


def _fold_responses(found: list[dict[str, Any]]) -> dict[str, Any]:
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    items = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    whole = _plain_responses(found[-1]["response"])
    assert items == found[-1]["response"]["output"]
    for kind, key in (("output_text", "text"), ("reasoning_summary_text", "reasoning")):
        deltas = [each["delta"] for each in found if each["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == whole[key]
    return whole


def _plain_responses(answer: dict[str, Any]) -> dict[str, Any]:
    output = answer["output"]
    texts = [part for item in output if item["type"] == "message" for part in item["content"]]
    assert all(item["id"] for item in output)
    return {
        "parts": [
            {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output
        ],
        "text": "".join(part["text"] for part in texts),
        "reasoning": "".join(
            part["text"] for item in output if item["type"] == "reasoning" for part in item["summary"]
        ),
        "calls": [[item["name"], item["arguments"]] for item in output if item["type"] == "function_call"],
        "finish": (answer["status"], answer["incomplete_details"]),
        "usage": counted(answer["usage"]),
        "logprobs": [each for part in texts for each in part["logprobs"]],
    }
