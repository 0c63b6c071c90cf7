"""What a generation gives back: a stream of chunks while it runs, a Completion when it is done."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lily import _core
from lily.logprobs import TokenLogprob, token_logprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lily._core import State
    from lily.engine import Engine
    from lily.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a completion took.

    prompt_tokens: int, the whole prompt, a prefix's tokens among them.
    completion_tokens: int, the tokens of the answer; the end token is not one of them.
    cached_tokens: int, the part of the prompt that a prefix had already taken in.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """The prompt and the answer together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. The caller's own time between chunks is not counted.

    prefill_seconds: float, until the first token was drawn; prefill_tokens: int, taken in until then.
    decode_seconds: float, for all later tokens; decode_tokens: int, drawn in that time, the end token among
        them.
    """

    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt taken in per second; 0 if there were none."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens drawn per second after the first; 0 if there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: some whole characters, and the tokens they came with.

    text: str.  tokens: tuple of int.  logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    Over a stream each adds up to the completion's.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """An answer. str() of it is its text.

    text: str, without the end token's.
    tokens: tuple of int, without the end token.
    finish_reason: "stop" at an end token, "length" at max_tokens or the context's end, None if it was cut
        short by close() or an exception.
    seed: int, which gives the same answer again.
    logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        """Show the beginning and the numbers."""
        start = self.text if len(self.text) <= 40 else self.text[:40] + "…"
        return (
            f"<lily.Completion {start!r}: {len(self.tokens)} tokens, {self.finish_reason}, seed {self.seed}>"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A generation as asked for, checked.

    tokens: (n,) int32, the part of the prompt to take in first; n is 0 if state holds the whole of it.
    state: what the tokens continue, None for nothing; never changed.  cached_tokens: int, how many it holds.
    top_logprobs: int, how many tokens to give beside each one's logprob; None for no logprobs.
    """

    tokens: "NDArray[np.int32]"
    state: "State | None"
    cached_tokens: int
    sampling: "Sampling"
    max_tokens: int
    stop: frozenset[int]
    top_logprobs: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.cached_tokens + len(self.tokens)


class Stream(Iterator[Chunk]):
    """An answer while it is written: iterate over it for its chunks, from one thread at a time.

    Work is done only when a chunk is asked for. It may be left or closed at any chunk.
    """

    def __init__(self, engine: "Engine", request: Request) -> None:
        """Set a generation up; Model.stream and Prefix.stream make one."""
        self._request = request
        self._written = _Written()
        self._chunks = _write(engine, request, self._written)

    def __iter__(self) -> "Stream":
        """Return itself."""
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk."""
        return next(self._chunks)

    def __enter__(self) -> "Stream":
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Show how far it is."""
        written = self._written
        return f"<lily.Stream: {len(written.tokens)} tokens, {written.finish_reason or 'unfinished'}>"

    def close(self) -> None:
        """End the generation here and free its state."""
        self._chunks.close()

    def completion(self) -> Completion:
        """Write the rest, if there is one, and return the whole answer."""
        for _ in self._chunks:
            pass
        request, written = self._request, self._written
        return Completion(
            text="".join(written.text),
            tokens=tuple(written.tokens),
            finish_reason=written.finish_reason,
            usage=Usage(request.prompt_tokens, len(written.tokens), request.cached_tokens),
            timings=Timings(
                written.prefill_seconds,
                len(request.tokens),
                written.decode_seconds,
                written.decode_tokens,
            ),
            seed=request.sampling.seed,
            logprobs=None if request.top_logprobs is None else tuple(written.logprobs),
        )


@dataclass(slots=True)
class _Written:
    """What a generation has written so far.

    Apart from Stream: a generator that knew its stream would be a cycle, and its state outlive the last use.
    """

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


def _write(engine: "Engine", request: Request, written: _Written) -> Generator[Chunk, None, None]:
    decoder = engine.tokenizer.decoder()
    sampling, history = request.sampling.core(), _core.History()
    handed_out = 0  # tokens whose text is complete

    def chunk(text: str) -> Chunk:
        nonlocal handed_out
        start, handed_out = handed_out, len(written.tokens)
        written.text.append(text)
        logprobs = None if request.top_logprobs is None else tuple(written.logprobs[start:])
        return Chunk(text, tuple(written.tokens[start:]), logprobs)

    started = time.perf_counter()
    state = engine.take_in(request.tokens, request.state)
    token = engine.session.sample(state, sampling)
    written.prefill_seconds = time.perf_counter() - started
    while token not in request.stop:
        written.tokens.append(token)
        if request.top_logprobs is not None:
            written.logprobs.append(token_logprob(engine, state, token, request.top_logprobs))
        if text := decoder.push(token):
            yield chunk(text)
        if len(written.tokens) == request.max_tokens:
            written.finish_reason = "length"
            break
        started = time.perf_counter()
        token = engine.session.step(state, token, sampling, history)
        written.decode_seconds += time.perf_counter() - started
        written.decode_tokens += 1
    else:
        written.finish_reason = "stop"
    text = decoder.finish()
    if text or handed_out < len(written.tokens):
        yield chunk(text)
