"""What a generation gives back: a stream of chunks while it runs, a Completion when it is done."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lily import _core
from lily.answer import Reader
from lily.logprobs import TokenLogprob, token_logprob
from lily.progress import Report

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
    reasoning_tokens: int, the part of the answer that its thoughts took, with their tags.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

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

    text, reasoning: str, one of them "".  tokens: tuple of int.
    logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    Over a stream each adds up to the completion's.
    """

    text: str
    tokens: tuple[int, ...]
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """An answer. str() of it is its text.

    text: str, without thoughts, end token and stop string.
    tokens: tuple of int, all that were drawn, but for the end token.
    finish_reason: "stop" at an end token or a stop string, "length" at max_tokens or the context's end, None
        if it was cut short by cancel(), close() or an exception.
    seed: int, which gives the same answer again.
    reasoning: str, its thoughts, "" for none.
    stop: str, the stop string that ended it, or None.
    logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    timings: Timings
    seed: int
    reasoning: str = ""
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def message(self) -> dict[str, Any]:
        """This answer as a message, to be put behind those that it answers."""
        return {"role": "assistant", "content": self.text, "reasoning_content": self.reasoning}

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        """Show the beginning and the numbers."""
        start = self.text if len(self.text) <= 40 else self.text[:40] + "…"
        return (
            f"<lily.Completion {start!r}: {len(self.tokens)} tokens, {self.finish_reason}, seed {self.seed}>"
        )

    def _repr_html_(self) -> str:
        """Show the answer in a notebook."""
        from lily.notebook import html_of

        return html_of(self)


@dataclass(frozen=True, slots=True)
class Request:
    """A generation as asked for, checked.

    tokens: (n,) int32, the part of the prompt to take in first; n is 0 if state holds the whole of it.
    state: what the tokens continue, None for nothing; never changed.  cached_tokens: int, how many it holds.
    stop_tokens, stop: the tokens and the strings that end the answer.
    thinking: bool, whether the answer begins inside its thoughts.
    top_logprobs: int, how many tokens to give beside each one's logprob; None for no logprobs.
    report: what to call while the prompt is taken in.
    """

    tokens: "NDArray[np.int32]"
    state: "State | None"
    cached_tokens: int
    sampling: "Sampling"
    max_tokens: int
    stop_tokens: frozenset[int]
    stop: tuple[str, ...]
    thinking: bool
    top_logprobs: int | None = None
    report: Report | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.cached_tokens + len(self.tokens)


class Stream(Iterator[Chunk]):
    """An answer while it is written: iterate over it for its chunks, from one thread at a time.

    Work is done only when a chunk is asked for. It may be left or closed at any chunk. In a notebook, a
    stream that ends a cell is written out as it goes.
    """

    def __init__(self, engine: "Engine", request: Request) -> None:
        """Set a generation up; Model.stream and Prefix.stream make one."""
        self._request = request
        self._written = _Written(logprobs=None if request.top_logprobs is None else [])
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

    def cancel(self) -> None:
        """Have the generation end with the token, or the part of the prompt, that it is at.

        Any thread may call it at any time. Whoever iterates gets no further chunk, and no error.
        """
        self._written.cancelled = True

    def close(self) -> None:
        """End the generation here and free its state. For the thread that iterates; others call cancel()."""
        self._chunks.close()

    def completion(self) -> Completion:
        """Write the rest, if there is one, and return the whole answer."""
        for _ in self._chunks:
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """Return what is written by now."""
        request, written = self._request, self._written
        return Completion(
            text="".join(written.text),
            reasoning="".join(written.reasoning),
            tokens=tuple(written.tokens),
            finish_reason=written.finish_reason,
            stop=written.stop,
            usage=Usage(
                request.prompt_tokens, len(written.tokens), request.cached_tokens, written.reasoning_tokens
            ),
            timings=Timings(
                written.prefill_seconds,
                len(request.tokens),
                written.decode_seconds,
                written.decode_tokens,
            ),
            seed=request.sampling.seed,
            logprobs=None if written.logprobs is None else tuple(written.logprobs),
        )

    def _ipython_display_(self) -> None:
        """Write the answer into a notebook's cell as it comes."""
        from lily.notebook import show

        show(self)


@dataclass(slots=True)
class _Written:
    """What a generation has written so far.

    handed_out: int, how many of the tokens have gone into a chunk; the text of the others is not certain yet.

    Apart from Stream: a generator that knew its stream would be a cycle, and its state outlive the last use.
    """

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    reasoning_tokens: int = 0
    handed_out: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None
    cancelled: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    def check(self) -> None:
        """Raise unless the generation is to go on."""
        if self.cancelled:
            raise _CancelledError

    def chunk(self, piece: tuple[str, str]) -> Chunk:
        """Keep thoughts and text, and return them with the tokens that are not handed out yet."""
        reasoning, text = piece
        self.reasoning.append(reasoning)
        self.text.append(text)
        start, self.handed_out = self.handed_out, len(self.tokens)
        logprobs = None if self.logprobs is None else tuple(self.logprobs[start:])
        return Chunk(text, tuple(self.tokens[start:]), reasoning, logprobs)


class _CancelledError(Exception):
    """What ends the taking in of a prompt that nobody waits for any more."""


def _write(engine: "Engine", request: Request, written: _Written) -> Generator[Chunk, None, None]:
    reader = Reader(engine.tokenizer, request.thinking, request.stop)
    sampling, history = request.sampling.core(), _core.History()
    started = time.perf_counter()
    try:
        written.check()
        state = engine.take_in(request.tokens, request.state, request.report, written.check)
    except _CancelledError:
        return
    token = engine.session.sample(state, sampling)
    written.prefill_seconds = time.perf_counter() - started
    while token not in request.stop_tokens:
        written.tokens.append(token)
        if written.logprobs is not None:
            written.logprobs.append(token_logprob(engine, state, token, request.top_logprobs or 0))
        written.reasoning_tokens += reader.thinking
        piece = reader.push(token)
        if any(piece):
            yield written.chunk(piece)
        if reader.stopped is not None:
            written.finish_reason, written.stop = "stop", reader.stopped
            break
        if len(written.tokens) == request.max_tokens:
            written.finish_reason = "length"
            break
        if written.cancelled:
            break
        started = time.perf_counter()
        token = engine.session.step(state, token, sampling, history)
        written.decode_seconds += time.perf_counter() - started
        written.decode_tokens += 1
    else:
        written.finish_reason = "stop"
    piece = reader.finish()
    if any(piece) or written.handed_out < len(written.tokens):
        yield written.chunk(piece)
