"""OpenAI's responses, without a store: every request brings its whole conversation."""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lily.completion import Chunk, Completion
from lily.server.chat import MOST_TOP_LOGPROBS, behind_break, first, logprob
from lily.server.dialect import (
    Answer,
    Ask,
    Dialect,
    given,
    now,
    place_of_schema,
    places_of_tools,
    prompt_details,
    schema_of,
    thinking_of,
)
from lily.server.errors import ApiError, invalid, unsupported
from lily.server.exchange import event


class ResponsesRequest(msgspec.Struct):
    """The fields that are read."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None


class Responses(Dialect):
    """POST /v1/responses."""

    path = "/v1/responses"
    prompt_field = "input"
    request = ResponsesRequest
    refused = {  # noqa: RUF012
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "store": (False,),
        "truncation": ("disabled",),
        "max_tool_calls": (),
    }
    ignored = (
        "client_metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
        "stream_options", "user",
    )  # fmt: skip

    def ask(self, request: ResponsesRequest) -> Ask:
        """Return what a request asks."""
        items = (
            [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
        )
        self.limits("input", items, request.tools)
        tools = _tools(request.tools or [])
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
            raise invalid("top_logprobs", f"wanted 0 to {MOST_TOP_LOGPROBS}, got {request.top_logprobs}")
        wanted = "message.output_text.logprobs" in (request.include or ())
        messages, where = _messages(items, tools.spaces)
        if request.instructions:
            messages.insert(0, {"role": "system", "content": request.instructions})
            where.insert(0, "instructions")
        kwargs = request.chat_template_kwargs
        settings = given(
            max_tokens=first(request.max_output_tokens, self.config.max_tokens),
            temperature=request.temperature,
            top_p=request.top_p,
            logprobs=True if wanted else None,
            top_logprobs=request.top_logprobs if wanted else None,
            tools=tools.functions or None,
            tool_choice=_choice(request.tool_choice) if tools.functions else None,
            parallel_tool_calls=request.parallel_tool_calls,
            thinking=first(thinking_of(kwargs, reasoning=request.reasoning), self.config.thinking),
            template_kwargs=kwargs,
            **schema_of("text.format", (request.text or {}).get("format")),
        )
        headers = {"x-lily-ignored-tools": ", ".join(sorted(tools.dropped))} if tools.dropped else {}
        places = {
            **{f"messages[{i}]": place for i, place in enumerate(where)},
            **places_of_tools(tools.places, "parameters"),
            **place_of_schema("text.format", (request.text or {}).get("format")),
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "prompt": "input",
        }
        return Ask([messages], [settings], request.model or "", bool(request.stream), headers, places)

    def answer(self, request: ResponsesRequest, ask: Ask) -> "ResponsesAnswer":
        """Return what writes the answer."""
        return ResponsesAnswer(request, ask)


@dataclass(slots=True)
class _Tools:
    """Functions as chat completions have them, their paths and namespaces, and the kinds left out."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # by the model's name: space and name
    dropped: set[str] = field(default_factory=set)

    def add(self, where: str, tool: Mapping[str, Any]) -> None:
        self.functions.append(_function(where, tool))
        self.places.append(where)


def _tools(tools: Sequence[Mapping[str, Any]]) -> _Tools:
    found = _Tools()
    spaces: dict[int, str] = {}  # by the number of the function
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "function":
            found.add(f"tools[{i}]", tool)
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            for j, inner in enumerate(tool["tools"]):
                if isinstance(inner, Mapping) and inner.get("type") == "function":
                    found.add(f"tools[{i}].tools[{j}]", inner)
                    spaces[len(found.functions) - 1] = str(tool.get("name"))
                else:
                    found.dropped.add("namespace")
        elif isinstance(kind, str):
            found.dropped.add("".join(c for c in kind[:64] if c.isascii() and (c.isalnum() or c in "_-.")))
        else:
            raise invalid(f"tools[{i}].type", f"wanted function, got {kind!r:.40}")
    often = Counter(tool["function"]["name"] for tool in found.functions)
    for i, space in spaces.items():
        function = found.functions[i]["function"]
        name = function["name"]
        if often[name] > 1:  # the model has to tell them apart
            function["name"] = f"{space}.{name}"
        found.spaces[function["name"]] = (space, name)
    return found


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise invalid(f"{where}.name", f"wanted a str, got {type(tool.get('name')).__name__}")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") not in ("function", None):
        raise unsupported("tool_choice.type", "wanted function")
    return choice


def _messages(
    items: Sequence[Mapping[str, Any]], spaces: Mapping[str, tuple[str, str]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return items as messages, and their paths; what the assistant did in a row is one message."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    names = {space_and_name: name for name, space_and_name in spaces.items()}

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": []})
        return messages[-1]

    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            _add_message(where, item, messages, assistant)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            said = "".join(text for text in texts if isinstance(text, str))
            if said:
                assistant()["reasoning_content"] = said
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            name = names.get((str(item.get("namespace")), str(item.get("name"))), item.get("name"))
            call["function"] = {"name": name, "arguments": item.get("arguments")}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "content": item.get("output")}
            messages.append(result | {"tool_call_id": item.get("call_id")})
        else:
            raise unsupported(f"{where}.type", f"{kind!r:.60} is an item of another server's; leave it out")
        places += [where] * (len(messages) - len(places))
    return messages, places


def _add_message(where: str, item: Mapping[str, Any], messages: list[dict[str, Any]], assistant: Any) -> None:
    if item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": item.get("content")})
        return
    content = item.get("content")
    parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise invalid(f"{where}.content", f"wanted a str or a list of parts, got {type(content).__name__}")
    assistant()["content"] += parts


class ResponsesAnswer(Answer):
    """Writes a response item by item."""

    def __init__(self, request: ResponsesRequest, ask: Ask) -> None:
        """Begin an answer."""
        self._spaces = _tools(request.tools or []).spaces
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._response = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": now(),
            "model": ask.model,
            "status": "in_progress",
            "output": [],
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
            "tools": request.tools or [],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "reasoning": request.reasoning,
            "text": request.text or {"format": {"type": "text"}},
            "metadata": request.metadata or {},
            "previous_response_id": None,
            "store": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _event(self, name: str, **more: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **more}, name)

    def begin(self, usage: Any) -> Iterable[bytes]:
        """Return the response's beginning."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def chunk(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Return the events of a piece, in the items that they belong to."""
        if chunk.reasoning:
            yield from self._enter("reasoning")
            item = self._items[-1]
            item["summary"][0]["text"] += chunk.reasoning
            yield self._event(
                "response.reasoning_summary_text.delta",
                **self._place(),
                summary_index=0,
                delta=chunk.reasoning,
            )
        if chunk.text:
            behind_thoughts = bool(self._items) and self._items[-1]["type"] == "reasoning"
            found = (chunk.logprobs or ())[chunk.reasoning_tokens :]
            tokens = [logprob(each) for each in (behind_break(found) if behind_thoughts else found)]
            yield from self._enter("message")
            part = self._items[-1]["content"][0]
            part["text"] += chunk.text
            part["logprobs"] += tokens
            yield self._event(
                "response.output_text.delta",
                **self._place(),
                content_index=0,
                delta=chunk.text,
                logprobs=tokens,
            )
        for delta in chunk.tool_calls:
            if delta.id is not None:
                yield from self._leave()
                yield from self._enter("function_call", delta.id, delta.name)
            if delta.arguments:
                self._items[-1]["arguments"] += delta.arguments
                yield self._event(
                    "response.function_call_arguments.delta", **self._place(), delta=delta.arguments
                )

    def take(self, index: int, chunk: Chunk) -> None:
        """Put a piece into the item that it belongs to."""
        for _ in self.chunk(index, chunk):
            pass

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _enter(self, kind: str, key: str = "", name: str | None = None) -> Iterable[bytes]:
        if self._open and self._items[-1]["type"] == kind:
            return
        yield from self._leave()
        item = _item(kind, key, name, self._spaces)
        self._items.append(item)
        self._open = True
        empty = item | {"summary": []} if kind == "reasoning" else item
        empty = empty | {"content": []} if kind == "message" else empty
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        if kind == "reasoning":
            yield self._event(
                "response.reasoning_summary_part.added",
                **self._place(),
                summary_index=0,
                part=item["summary"][0],
            )
        elif kind == "message":
            yield self._event(
                "response.content_part.added", **self._place(), content_index=0, part=item["content"][0]
            )

    def _leave(self, status: str = "completed") -> Iterable[bytes]:
        if not self._open:
            return
        self._open = False
        item, place = self._items[-1], self._place()
        if item["type"] == "reasoning":
            part = item["summary"][0]
            done = {"summary_index": 0, "text": part["text"]}
            yield self._event("response.reasoning_summary_text.done", **place, **done)
            yield self._event("response.reasoning_summary_part.done", **place, summary_index=0, part=part)
        elif item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **place, **done)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.done", **place, arguments=arguments)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def end(self, index: int, done: Completion) -> Iterable[bytes]:
        """Return the end of the last item."""
        if not self._items:
            yield from self._enter("message")
        yield from self._leave("incomplete" if done.finish_reason == "length" else "completed")

    def close(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """Return the whole response."""
        self._finish(done[0])
        name = "response.incomplete" if done[0].finish_reason == "length" else "response.completed"
        yield self._event(name, response=self._response)

    def _finish(self, done: Completion) -> None:
        cut = done.finish_reason == "length"
        usage = done.usage
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": prompt_details(usage),
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return a failed response."""
        failure = {"code": error.code or "server_error", "message": error.message}
        self._response |= {"status": "failed", "error": failure, "output": self._items}
        yield self._event("response.failed", response=self._response)

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return a response."""
        (answer,) = done
        for _ in self.end(0, answer):
            pass
        self._finish(answer)
        return self._response


def _item(kind: str, key: str, name: str | None, spaces: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    item: dict[str, Any] = {"type": kind, "status": "in_progress"}
    if kind == "reasoning":
        summary = [{"type": "summary_text", "text": ""}]
        return item | {"id": f"rs_{secrets.token_hex(12)}", "summary": summary, "encrypted_content": None}
    if kind == "message":
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return item | {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "content": [part]}
    space, name = spaces.get(name or "", (None, name))
    item |= {"id": f"fc_{secrets.token_hex(12)}", "call_id": key, "name": name, "arguments": ""}
    return item | ({} if space is None else {"namespace": space})
