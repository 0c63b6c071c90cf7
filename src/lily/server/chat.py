"""OpenAI's chat completions."""

import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lily.completion import Chunk, Completion
from lily.logprobs import TokenLogprob
from lily.sampling import SamplingArguments
from lily.server.dialect import (
    Answer,
    Ask,
    Dialect,
    budget_of,
    given,
    now,
    place_of_schema,
    schema_of,
    thinking_of,
    timings_of,
    usage_of,
)
from lily.server.errors import ApiError, invalid
from lily.server.exchange import event

MOST_CHOICES, MOST_TOP_LOGPROBS = 16, 20


class StreamOptions(msgspec.Struct):
    """How a stream ends."""

    include_usage: bool | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """The fields that chat completions and plain ones have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    thinking_budget: int | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """The fields that are read."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class Chat(Dialect):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    request = ChatRequest
    refused = {  # noqa: RUF012
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "store": (False,),
        "best_of": (1,),
    }
    ignored = (
        "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user",
        "verbosity",
    )  # fmt: skip

    def ask(self, request: ChatRequest) -> Ask:
        """Return what a request asks."""
        self.limits("messages", request.messages, request.tools)
        if not request.messages:
            raise invalid("messages", "wanted at least one message, got none")
        n = 1 if request.n is None else request.n
        if not 1 <= n <= MOST_CHOICES:
            raise invalid("n", f"wanted 1 to {MOST_CHOICES}, got {n}")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
            raise invalid("top_logprobs", f"wanted 0 to {MOST_TOP_LOGPROBS}, got {request.top_logprobs}")
        settings = given(
            **sampling_of(request),
            max_tokens=first(request.max_completion_tokens, request.max_tokens, self.config.max_tokens),
            stop=request.stop,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            tools=request.tools,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
            thinking=first(
                thinking_of(
                    request.chat_template_kwargs,
                    request.enable_thinking,
                    request.thinking,
                    request.reasoning_effort,
                    request.reasoning,
                ),
                self.config.thinking,
            ),
            thinking_budget=budget_of(request.thinking, request.thinking_budget),
            template_kwargs=request.chat_template_kwargs,
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt,
            **schema_of("response_format", request.response_format),
        )
        seeded = [settings if i == 0 else {**settings, "seed": _seed(settings, i)} for i in range(n)]
        places = place_of_schema("response_format", request.response_format)
        if request.max_completion_tokens is not None:
            places["max_tokens"] = "max_completion_tokens"
        return Ask([request.messages] * n, seeded, request.model or "", bool(request.stream), places=places)

    def answer(self, request: ChatRequest, ask: Ask) -> "ChatAnswer":
        """Return what writes the answer."""
        options = request.stream_options
        return ChatAnswer(ask, bool(options and options.include_usage))


def _seed(settings: dict[str, Any], i: int) -> int | None:
    seed = settings.get("seed")
    return None if seed is None else (seed + i) % 2**64


def first(*values: Any) -> Any:
    """Return the first value that says something."""
    return next((value for value in values if value is not None), None)


def sampling_of(request: SampledRequest) -> dict[str, Any]:
    """Return the fields of sampling that OpenAI's dialects share with Model.generate."""
    return {name: getattr(request, name) for name in SamplingArguments.__annotations__}


class ChatAnswer(Answer):
    """Writes chat.completion.chunk objects, or a chat.completion."""

    def __init__(self, ask: Ask, include_usage: bool) -> None:
        """Begin an answer."""
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": now(), "model": ask.model}
        self._n = len(ask.prompts)
        self._include_usage = include_usage
        self._begun: set[int] = set()

    def _event(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None, **more}
        return event(self._head | {"object": "chat.completion.chunk", "choices": [choice]})

    def begin(self, usage: Any) -> Iterable[bytes]:
        """Return each choice's first event."""
        for index in range(self._n):
            yield self._event(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Return a delta of thoughts, text or calls."""
        tokens = None if chunk.logprobs is None else self._logprobs(index, chunk)
        logprobs: dict[str, Any] = {"logprobs": {"content": tokens, "refusal": None}} if tokens else {}
        if chunk.reasoning:
            yield self._event(index, {"reasoning_content": chunk.reasoning, "reasoning": chunk.reasoning})
        if chunk.text or (logprobs and not chunk.tool_calls):
            yield self._event(index, {"content": chunk.text}, **logprobs)
            logprobs = {}
        for delta in chunk.tool_calls:
            call: dict[str, Any] = {"index": delta.index}
            if delta.id is not None:
                call |= {"id": delta.id, "type": "function"}
                yield self._event(
                    index,
                    {"tool_calls": [call | {"function": {"name": delta.name, "arguments": ""}}]},
                    **logprobs,
                )
                logprobs, call = {}, {"index": delta.index}
            if delta.arguments:
                call |= {"function": {"arguments": delta.arguments}}
                yield self._event(index, {"tool_calls": [call]}, **logprobs)
                logprobs = {}

    def _logprobs(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the tokens of the text, without those between it and the thoughts."""
        found = list((chunk.logprobs or ())[chunk.reasoning_tokens :])
        return self._trimmed(index, found, bool(chunk.reasoning_tokens))

    def _trimmed(self, index: int, found: list[TokenLogprob], thought: bool) -> list[dict[str, Any]]:
        if thought:
            self._begun.add(-1 - index)  # there are thoughts before it
        if index not in self._begun and -1 - index in self._begun:
            found = behind_break(found)
        if found:
            self._begun.add(index)
        return [logprob(each) for each in found]

    def end(self, index: int, done: Completion) -> Iterable[bytes]:
        """Return a choice's last event."""
        yield self._event(index, {}, done.finish_reason or "stop", seed=done.seed)

    def close(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """Return the usage, if it is asked for, and the end."""
        if self._include_usage:
            last = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage_of(done)}
            yield event(last | {"timings": timings_of(done[-1])})
        yield b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return an error, which clients raise."""
        yield event(error.openai())

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return a chat.completion."""
        return self._head | {
            "object": "chat.completion",
            "choices": [self._choice(i, each) for i, each in enumerate(done)],
            "usage": usage_of(done),
            "timings": timings_of(done[-1]),
            "system_fingerprint": None,
        }

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": done.text, "refusal": None}
        if done.reasoning:
            message |= {"reasoning_content": done.reasoning, "reasoning": done.reasoning}
        if done.tool_calls:
            message |= {"tool_calls": [call.message for call in done.tool_calls]}
            message["content"] = done.text or None
        logprobs = None
        if done.logprobs is not None:
            tokens = self._trimmed(
                index, list(done.logprobs[done.usage.reasoning_tokens :]), bool(done.usage.reasoning_tokens)
            )
            logprobs = {"content": tokens, "refusal": None}
        return {
            "index": index,
            "message": message,
            "finish_reason": done.finish_reason or "stop",
            "logprobs": logprobs,
            "seed": done.seed,
        }


def behind_break(tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Return the tokens of a text behind thoughts, without the newlines that part them."""
    return list(itertools.dropwhile(lambda each: not each.utf8.strip(b"\n"), tokens))


def logprob(token: TokenLogprob) -> dict[str, Any]:
    """Return a token's logprob in OpenAI's form."""
    described = {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
    top = [{"token": each.text, "logprob": each.logprob, "bytes": list(each.utf8)} for each in token.top]
    return described | {"top_logprobs": top}
