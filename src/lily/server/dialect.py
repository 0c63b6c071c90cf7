"""What every dialect has in common: a request becomes an Ask, an Answer is written in the dialect's terms.

Which fields a dialect knows is declared once, in its request's Struct and its table of refused fields; the
table in docs/server.md is made from those.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from lily.completion import Chunk, Completion, Usage
from lily.server.config import Config
from lily.server.errors import ApiError, invalid, unsupported

_log = logging.getLogger("lily.server")

_MOST_NAMES = 100  # of fields that are passed over, to remember


@dataclass(slots=True)
class Ask:
    """What a request asks of the model.

    prompts: one a generation: messages, or token ids.  settings: Model.stream's arguments, one dict a prompt.
    model: str, the name to answer with.  stream: bool.  headers: more headers of the answer.
    places: the request's paths of what errors of the library have another name for: an argument, or
        "messages[3]", or "tools[1].function".
    """

    prompts: list[Any]
    settings: list[dict[str, Any]]
    model: str
    stream: bool
    headers: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def fault(self, error: TypeError | ValueError) -> Exception:
        """Return an error of the library's by the names that the request has for things."""
        said = str(error)
        for name in sorted(self.places, key=len, reverse=True):
            if said.startswith(name) and said[len(name) : len(name) + 1] in (":", ".", "["):
                return type(error)(self.places[name] + said[len(name) :])
        return error


class Answer:
    """Writes one answer in a dialect: its events in order, or the whole of it."""

    keep_alive = b": still at work\n\n"

    def begin(self, usage: Any) -> Iterable[bytes]:
        """Return the events that come before any work; usage is of the first generation, so far."""
        return ()

    def chunk(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Return the events of a piece of the index-th generation."""
        raise NotImplementedError

    def take(self, index: int, chunk: Chunk) -> None:
        """Take a piece in of an answer that doesn't stream, where its whole depends on the pieces' order."""

    def end(self, index: int, done: Completion) -> Iterable[bytes]:
        """Return the events that end a generation."""
        raise NotImplementedError

    def close(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """Return the events that end the answer."""
        raise NotImplementedError

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return the events of a failure on the way."""
        raise NotImplementedError

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer to a request that doesn't stream."""
        raise NotImplementedError


class Dialect:
    """An endpoint's requests and answers."""

    path: ClassVar[str]
    prompt_field: ClassVar[str] = "messages"
    request: ClassVar[type[msgspec.Struct]]
    # Fields that are refused unless they have one of these values, beside null.
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Fields that change nothing here.
    ignored: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Config) -> None:
        """Answer by a server's settings."""
        self.config = config
        self._passed_over: set[str] = set()

    def ask(self, request: Any) -> Ask:
        """Return what a request asks. Raises ApiError, ValueError or TypeError."""
        raise NotImplementedError

    def answer(self, request: Any, ask: Ask) -> Answer:
        """Return what writes the answer."""
        raise NotImplementedError

    def check(self, body: bytes) -> None:
        """Refuse the fields that are not supported, by name; log those that are passed over, each once."""
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in fields.keys() - {*self.request.__struct_fields__, *self.refused} - self._passed_over:
            if len(self._passed_over) < _MOST_NAMES:  # whoever asks makes them up
                self._passed_over.add(name)
                _log.debug("%s: the field %.60r is passed over", self.path, name)
        for name, harmless in self.refused.items():
            if name in fields:
                value = msgspec.json.decode(fields[name])
                if value is not None and value not in harmless:
                    raise unsupported(name)

    def limits(self, name: str, messages: Sequence[Any] | None, tools: Sequence[Any] | None) -> None:
        """Refuse more messages or tools than the server takes."""
        if messages is not None and len(messages) > self.config.messages:
            raise invalid(name, f"wanted at most {self.config.messages}, got {len(messages)}")
        if tools is not None and len(tools) > self.config.tools:
            raise invalid("tools", f"wanted at most {self.config.tools}, got {len(tools)}")


def given(**settings: object) -> dict[str, Any]:
    """Return those settings that say something."""
    return {name: value for name, value in settings.items() if value is not None}


def thinking_of(
    kwargs: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    thinking: object = None,
    effort: object = None,
    reasoning: object = None,
) -> bool | None:
    """Return whether to think, by the first of the ways to say so; None if none of them is used.

    Raises ApiError for a value that says neither.
    """
    if kwargs is not None and "enable_thinking" in kwargs:
        if not isinstance(kwargs["enable_thinking"], bool | None):
            raise invalid("chat_template_kwargs.enable_thinking", "wanted true or false")
        return kwargs["enable_thinking"]
    if enable_thinking is not None:
        return enable_thinking
    if thinking is not None:
        if isinstance(thinking, bool):
            return thinking
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise invalid("thinking.type", f"wanted enabled, adaptive or disabled, got {kind!r}")
        return bool(kind != "disabled")
    if effort is not None:
        return _effort("reasoning_effort", effort)
    if isinstance(reasoning, Mapping):
        if isinstance(reasoning.get("enabled"), bool):
            return bool(reasoning["enabled"])
        if reasoning.get("effort") is not None:
            return _effort("reasoning.effort", reasoning["effort"])
    return None


def _effort(where: str, effort: object) -> bool:
    if effort not in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        raise invalid(where, f"wanted none, minimal, low, medium, high, xhigh or max, got {effort!r:.40}")
    return effort != "none"


def budget_of(thinking: object, top: int | None = None) -> int | None:
    """Return after how many tokens thoughts are to end, None for no limit."""
    found = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else top
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise invalid("thinking.budget_tokens", f"wanted an int, got {found!r:.40}")
    return found


def places_of_tools(where: Sequence[str], schema: str) -> dict[str, str]:
    """Return the paths of tools that have a function's name and schema, so called, beside their type."""
    found: dict[str, str] = {}
    for i, place in enumerate(where):
        found |= {f"tools[{i}].function": place, f"tools[{i}].function.parameters": f"{place}.{schema}"}
    return found


def place_of_schema(where: str, asked: object) -> dict[str, str]:
    """Return the paths of what schema_of returns."""
    inner = isinstance(asked, Mapping) and isinstance(asked.get("json_schema"), Mapping)
    schema = f"{where}.json_schema.schema" if inner else f"{where}.schema"
    return {"schema": schema, "regex": f"{where}.regex", "grammar": f"{where}.grammar"}


def schema_of(where: str, asked: object) -> dict[str, Any]:
    """Return schema, regex or grammar as response_format asks for it."""
    if asked is None:
        return {}
    if not isinstance(asked, Mapping):
        raise invalid(where, f"wanted an object with a type, got {type(asked).__name__}")
    kind = asked.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = asked.get("schema")
        return {"schema": {"type": "object"} if schema is None else _schema(f"{where}.schema", schema)}
    if kind == "json_schema":
        inner = asked.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else asked.get("schema")
        place = "json_schema.schema" if isinstance(inner, Mapping) else "schema"
        return {"schema": _schema(f"{where}.{place}", schema)}
    if kind in ("regex", "grammar"):
        if not isinstance(asked.get(kind), str):
            raise invalid(f"{where}.{kind}", f"wanted a str, got {type(asked.get(kind)).__name__}")
        return {kind: asked[kind]}
    raise invalid(
        f"{where}.type", f"wanted text, json_object, json_schema, regex or grammar, got {kind!r:.40}"
    )


def _schema(where: str, schema: object) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise invalid(where, f"wanted a JSON schema as an object, got {type(schema).__name__}")
    return schema


def timings_of(done: Completion) -> dict[str, Any]:
    """Return where the time went, under the names that llama.cpp's server gave them."""
    timings = done.timings
    return {
        "cache_n": done.usage.cached_tokens,
        "prompt_n": timings.prefill_tokens,
        "prompt_ms": timings.prefill_seconds * 1000,
        "prompt_per_second": timings.prefill_tokens_per_second,
        "predicted_n": timings.decode_tokens,
        "predicted_ms": timings.decode_seconds * 1000,
        "predicted_per_second": timings.decode_tokens_per_second,
    }


def usage_of(done: Sequence[Completion], answers: int | None = None) -> dict[str, Any]:
    """Return the usage of a request's generations in OpenAI's form.

    answers: to each prompt, of which every one counts once; all are to one if it is left out.
    """
    prompts = [each.usage for each in done[:: answers or len(done)]]
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(each.usage.completion_tokens for each in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            name: sum(prompt_details(usage)[name] for usage in prompts) for name in prompt_details(prompts[0])
        },
        "completion_tokens_details": {"reasoning_tokens": sum(each.usage.reasoning_tokens for each in done)},
    }


def prompt_details(usage: Usage) -> dict[str, int]:
    """Return what was there of a prompt, and what was written with an earlier answer's own tokens."""
    return {"cached_tokens": usage.cached_tokens, "spliced_tokens": usage.spliced_tokens}


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())
