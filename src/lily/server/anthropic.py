"""Anthropic's messages, and the count of a prompt's tokens."""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lily.completion import Chunk, Completion
from lily.server.chat import first
from lily.server.dialect import (
    Answer,
    Ask,
    Dialect,
    budget_of,
    given,
    place_of_schema,
    places_of_tools,
    schema_of,
    thinking_of,
)
from lily.server.errors import ApiError, invalid, unsupported
from lily.server.exchange import event

# Claude Code begins its rules with a line for its maker's accounts, which differs from conversation to
# conversation: in a prompt it would only keep prefixes from being used again.
_BILLING = re.compile(r"\s*x-anthropic-billing-header:")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountRequest(msgspec.Struct):
    """The fields that make a prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(msgspec.Struct):
    """The fields that are read."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class Messages(Dialect):
    """POST /v1/messages. Without `thinking` answers have no thoughts, as that API's have none."""

    path = "/v1/messages"
    request = MessagesRequest
    refused = {"container": (), "mcp_servers": ([],)}  # noqa: RUF012
    ignored = ("cache_control", "context_management", "metadata", "service_tier")

    def ask(self, request: MessagesRequest) -> Ask:
        """Return what a request asks."""
        prompt, settings = self.prompt(request)
        output = request.output_config or {}
        thinking = settings["thinking"]
        settings |= given(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=request.stop_sequences or None,
            thinking_budget=budget_of(request.thinking) if thinking else None,
            **schema_of("output_config.format", output.get("format") or request.output_format),
        )
        before = len(prompt) - len(request.messages)
        places = {
            **{f"messages[{i}]": "system" for i in range(before)},
            **{
                f"messages[{before + i}]": f"messages[{i}]"
                for i in range(len(request.messages) if before else 0)
            },
            **places_of_tools([f"tools[{i}]" for i in range(len(request.tools or ()))], "input_schema"),
            **place_of_schema("output_config.format" if output.get("format") else "output_format", None),
            "stop": "stop_sequences",
        }
        return Ask([prompt], [settings], request.model or "", bool(request.stream), places=places)

    def prompt(self, request: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return messages, and the settings that they are rendered by."""
        self.limits("messages", request.messages, request.tools)
        if not request.messages:
            raise invalid("messages", "wanted at least one message, got none")
        messages = [*_system(request.system), *request.messages]
        prefill = messages[-1].get("role") == "assistant"
        thinking = first(thinking_of(thinking=request.thinking), False)
        return messages, given(
            thinking=thinking and not prefill,
            tools=None if request.tools is None else [_tool(i, each) for i, each in enumerate(request.tools)],
            continue_final_message=True if prefill else None,
            **_choice(request.tool_choice),
        )

    def answer(self, request: MessagesRequest, ask: Ask) -> "MessagesAnswer":
        """Return what writes the answer."""
        return MessagesAnswer(ask)


class CountTokens(Messages):
    """POST /v1/messages/count_tokens."""

    path = "/v1/messages/count_tokens"
    request = CountRequest  # type: ignore[assignment]


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    kept = [part for part in system if not _BILLING.match(str(part.get("text", "")))]
    blocks = [{"role": "system", "content": [part]} for part in kept]
    return blocks


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            f"tools[{i}].type", f"{kind!r:.60} would run at its maker's; describe it by a schema"
        )
    if not isinstance(tool.get("name"), str):
        raise invalid(f"tools[{i}].name", f"wanted a str, got {type(tool.get('name')).__name__}")
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, Mapping):
        raise invalid(f"tools[{i}].input_schema", f"wanted an object, got {type(schema).__name__}")
    function = {"name": tool["name"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function |= {"parameters": schema} if schema is not None else {}
    function |= {"strict": True} if tool.get("strict") is True else {}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"wanted auto, any, tool or none, got {kind!r:.40}")
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise invalid("tool_choice.name", f"wanted a str, got {type(choice.get('name')).__name__}")
    asked = {"name": choice["name"]} if kind == "tool" else "required" if kind == "any" else kind
    single = choice.get("disable_parallel_tool_use") is True
    return {"tool_choice": asked, **({"parallel_tool_calls": False} if single else {})}


class MessagesAnswer(Answer):
    """Writes a message's content block by block."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, ask: Ask) -> None:
        """Begin an answer."""
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = ask.model
        self._content: list[dict[str, Any]] = []
        self._open = ""  # the type of the block that is being written, the last one
        self._input = ""  # the JSON of a call that is

    def _event(self, name: str, **more: Any) -> bytes:
        return event({"type": name, **more}, name)

    def begin(self, usage: Any) -> Iterable[bytes]:
        """Return the message's beginning."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        yield self._event("message_start", message=message)
        yield self.keep_alive

    def chunk(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Return the deltas of a piece, in the blocks that they belong to."""
        if chunk.reasoning:
            yield from self._enter("thinking", {"thinking": "", "signature": ""})
            self._content[-1]["thinking"] += chunk.reasoning
            yield self._delta({"type": "thinking_delta", "thinking": chunk.reasoning})
        if chunk.text:
            yield from self._enter("text", {"text": ""})
            self._content[-1]["text"] += chunk.text
            yield self._delta({"type": "text_delta", "text": chunk.text})
        for delta in chunk.tool_calls:
            if delta.id is not None:
                yield from self._leave()
                yield from self._enter(
                    "tool_use", {"id": _call_id(delta.id), "name": delta.name, "input": {}}
                )
            if delta.arguments:
                self._input += delta.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def take(self, index: int, chunk: Chunk) -> None:
        """Put a piece into the block that it belongs to."""
        for _ in self.chunk(index, chunk):
            pass

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if self._open == kind:
            return
        yield from self._leave()
        self._content.append({"type": kind, **block})
        self._open, self._input = kind, ""
        index = len(self._content) - 1
        yield self._event("content_block_start", index=index, content_block=self._content[-1])

    def _leave(self) -> Iterable[bytes]:
        if self._open == "thinking":
            self._content[-1]["signature"] = self._id
            yield self._delta({"type": "signature_delta", "signature": self._id})
        elif self._open == "tool_use":
            self._content[-1]["input"] = msgspec.Raw(self._input.encode())  # as it is written
        if self._open:
            yield self._event("content_block_stop", index=len(self._content) - 1)
        self._open = ""

    def end(self, index: int, done: Completion) -> Iterable[bytes]:
        """Return the end of the last block."""
        if not self._content:  # clients read the first block without looking
            yield from self._enter("text", {"text": ""})
        yield from self._leave()

    def close(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """Return the reason of the end, and the usage."""
        yield self._event("message_delta", delta=_end(done[0]), usage=_usage(done[0].usage))
        yield self._event("message_stop")

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return an error, which clients raise."""
        yield event(error.anthropic(), "error")

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return a message."""
        (answer,) = done
        for _ in self.end(0, answer):
            pass
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            **_end(answer),
            "usage": _usage(answer.usage),
        }


def _call_id(key: str) -> str:
    return "toolu_" + key.removeprefix("call_")


def _end(done: Completion) -> dict[str, Any]:
    if done.stop is not None and done.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop}
    return {"stop_reason": _REASONS.get(done.finish_reason or "stop"), "stop_sequence": None}


def _usage(usage: Any) -> dict[str, Any]:
    """Return the usage in Anthropic's form: cached tokens are not among input_tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
