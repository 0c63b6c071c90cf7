"""OpenAI's older completions: a text, or tokens, and what follows."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lily.completion import Chunk, Completion
from lily.logprobs import TokenLogprob
from lily.server.chat import MOST_CHOICES, MOST_TOP_LOGPROBS, SampledRequest, first, sampling_of
from lily.server.config import Config
from lily.server.dialect import (
    Answer,
    Ask,
    Dialect,
    given,
    now,
    place_of_schema,
    schema_of,
    timings_of,
    usage_of,
)
from lily.server.errors import ApiError, invalid
from lily.server.exchange import event


class CompletionRequest(SampledRequest, kw_only=True):
    """The fields that are read."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class Completions(Dialect):
    """POST /v1/completions. The prompt is taken as it is, its markers as tokens: no template is applied."""

    path = "/v1/completions"
    prompt_field = "prompt"
    request = CompletionRequest
    refused = {"echo": (False,), "suffix": ("",), "best_of": (1,)}  # noqa: RUF012
    ignored = ("user",)

    def __init__(self, config: Config, encode: Callable[[str], list[int]]) -> None:
        """Answer by a server's settings; encode makes tokens of a text with markers."""
        super().__init__(config)
        self._encode = encode

    def ask(self, request: CompletionRequest) -> Ask:
        """Return what a request asks."""
        prompts = self._prompts(request.prompt)
        n = 1 if request.n is None else request.n
        if n < 1 or n * len(prompts) > MOST_CHOICES:
            raise invalid("n", f"wanted 1 to {MOST_CHOICES} answers, got {n} to each of {len(prompts)}")
        if request.logprobs is not None and not 0 <= request.logprobs <= MOST_TOP_LOGPROBS:
            raise invalid("logprobs", f"wanted 0 to {MOST_TOP_LOGPROBS}, got {request.logprobs}")
        settings = given(
            **sampling_of(request),
            max_tokens=first(request.max_tokens, self.config.max_tokens),
            stop=request.stop,
            logprobs=None if request.logprobs is None else True,
            top_logprobs=request.logprobs,
            thinking_budget=request.thinking_budget,
            **schema_of("response_format", request.response_format),
        )
        several = [prompt for prompt in prompts for _ in range(n)]
        seeded = [settings for _ in several]
        if "seed" in settings:
            seeded = [{**settings, "seed": (settings["seed"] + i % n) % 2**64} for i in range(len(several))]
        places = place_of_schema("response_format", request.response_format)
        return Ask(several, seeded, request.model or "", bool(request.stream), places=places)

    def _prompts(self, prompt: Any) -> list[list[int]]:
        whole = isinstance(prompt, str) or all(isinstance(each, int) for each in prompt)
        prompts = [prompt] if whole else prompt
        if any(isinstance(each, int) for each in prompts):
            raise invalid("prompt", "wanted a text, tokens, or a list of either, got tokens beside texts")
        encoded = [self._encode(each) if isinstance(each, str) else list(each) for each in prompts]
        if not encoded or not all(encoded):
            raise invalid("prompt", "wanted at least one token, got none")
        return encoded

    def answer(self, request: CompletionRequest, ask: Ask) -> "CompletionAnswer":
        """Return what writes the answer."""
        options = request.stream_options
        return CompletionAnswer(ask, request.n or 1, bool(options and options.include_usage))


class CompletionAnswer(Answer):
    """Writes text_completion objects."""

    def __init__(self, ask: Ask, answers: int, include_usage: bool) -> None:
        """Begin an answer; answers: to each prompt."""
        self._answers = answers
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": now(),
            "model": ask.model,
        }
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}

    def _event(self, index: int, text: str, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": None, **more}
        return event(self._head | {"choices": [choice]})

    def chunk(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """Return a piece of text."""
        more: dict[str, Any] = {} if not chunk.reasoning else {"reasoning_content": chunk.reasoning}
        if chunk.logprobs:
            more["logprobs"] = self._logprobs(index, chunk.logprobs)
        if chunk.text or more:
            yield self._event(index, chunk.text, **more)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets, at = [], self._offsets.get(index, 0)
        for each in tokens:
            offsets.append(at)
            at += len(each.text)
        self._offsets[index] = at
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{top.text: top.logprob for top in each.top} for each in tokens],
            "text_offset": offsets,
        }

    def end(self, index: int, done: Completion) -> Iterable[bytes]:
        """Return a choice's last event."""
        yield self._event(index, "", done.finish_reason or "stop", seed=done.seed)

    def close(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """Return the usage, if it is asked for, and the end."""
        if self._include_usage:
            yield event(
                self._head
                | {"choices": [], "usage": usage_of(done, self._answers), "timings": timings_of(done[-1])}
            )
        yield b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return an error, which clients raise."""
        yield event(error.openai())

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return a text_completion."""
        choices = []
        for index, each in enumerate(done):
            choice: dict[str, Any] = {
                "index": index,
                "text": each.text,
                "finish_reason": each.finish_reason or "stop",
                "logprobs": None if each.logprobs is None else self._logprobs(index, each.logprobs),
                "seed": each.seed,
            }
            choices.append(choice | ({"reasoning_content": each.reasoning} if each.reasoning else {}))
        return self._head | {
            "choices": choices,
            "usage": usage_of(done, self._answers),
            "timings": timings_of(done[-1]),
        }
