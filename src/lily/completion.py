"""What a generation gives back: a stream of chunks while it runs, a Completion when it is done."""

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lily.answer import Reader
from lily.errors import DeadlineError, LilyError
from lily.guess import Steps
from lily.logprobs import TokenLogprob, token_logprob
from lily.progress import Report
from lily.scheduler import Place
from lily.toolcalls import CallReader, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lily._core import State
    from lily.engine import Engine
    from lily.guide import Guide
    from lily.sampling import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a completion took.

    prompt_tokens: int, the whole prompt, a prefix's tokens among them.
    completion_tokens: int, the tokens of the answer; the end token is not one of them.
    cached_tokens: int, the part of the prompt that a prefix, or the cache, had already taken in.
    reasoning_tokens: int, the part of the answer that its thoughts took, with their tags.
    spliced_tokens: int, the part of the prompt that consists of earlier answers' own tokens where the text of
        the messages would be written by others.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    spliced_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The prompt and the answer together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went. The caller's own time between chunks is not counted.

    queue_seconds: float, until the request took part.
    prefill_seconds: float, until the first token was drawn; prefill_tokens: int, taken in until then.
    decode_seconds: float, for all later tokens; decode_tokens: int, drawn in that time, the end token among
        them.
    guessed_tokens: int, taken in with the option speculate before they were drawn; accepted_tokens: int, how
        many of them were drawn then.
    """

    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    queue_seconds: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0

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
    """A piece of an answer: some whole characters, or pieces of tool calls, and the tokens they came with.

    text, reasoning: str, one of them "".  tokens: tuple of int.
    logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    tool_calls: tuple of ToolCallDelta.
    reasoning_tokens: int, how many of the tokens, which come first, are part of the thoughts.
    Over a stream each adds up to the completion's.
    """

    text: str
    tokens: tuple[int, ...]
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """An answer. str() of it is its text.

    text: str, without thoughts, end token and stop string.
    tokens: tuple of int, all that were drawn, but for the end token.
    finish_reason: "stop" at an end token or a stop string, or "tool_calls" if it calls tools then; "length"
        at max_tokens or the context's end; None if it was cut short by cancel(), close() or an exception.
    seed: int, which gives the same answer again.
    reasoning: str, its thoughts, "" for none.
    stop: str, the stop string that ended it, or None.
    logprobs: tuple of TokenLogprob, one a token, or None if not asked for.
    tool_calls: tuple of ToolCall, in the order in which they were written; they are no part of text.
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
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """This answer as a message, to be put behind those that it answers."""
        message = {"role": "assistant", "content": self.text, "reasoning_content": self.reasoning}
        calls = [call.message for call in self.tool_calls]
        return message | ({"tool_calls": calls} if calls else {})

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

    tokens: (n,) int32, the part of the prompt to take in first; n is 0 if a prefix holds the whole of it.
    held: the prefix's state that the tokens continue, None for none; never changed.
    held_ids: the tokens that it holds, () for none.
    stop_tokens, stop: the tokens and the strings that end the answer.
    thinking: bool, whether the answer begins inside its thoughts.
    top_logprobs: int, how many tokens to give beside each one's logprob; None for no logprobs.
    report: what to call while the prompt is taken in.
    timeout: float, seconds from the beginning of the work to its end; None for any time.
    reuse: "auto", "strict" or "off", as for Model.generate.  spliced_tokens: int, as in Usage.
    tools: the functions that the answer may call, () for none.
    parallel_tool_calls: bool, whether it may be several; if not, the first one ends it.
    guide: what the answer is held to, None for nothing. It follows one answer only.
    """

    tokens: "NDArray[np.int32]"
    held: "State | None"
    held_ids: Sequence[int]
    sampling: "Sampling"
    max_tokens: int
    stop_tokens: frozenset[int]
    stop: tuple[str, ...]
    thinking: bool
    top_logprobs: int | None = None
    report: Report | None = None
    timeout: float | None = None
    reuse: str = "auto"
    spliced_tokens: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    guide: "Guide | None" = None

    @property
    def held_tokens(self) -> int:
        """How many tokens the prefix holds."""
        return len(self.held_ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.held_tokens + len(self.tokens)


class Stream(Iterator[Chunk]):
    """An answer while it is written: iterate over it for its chunks, from one thread at a time.

    Work is done only when a chunk is asked for. It may be left or closed at any chunk. In a notebook, a
    stream that ends a cell is written out as it goes.
    """

    def __init__(self, engine: "Engine", request: Request) -> None:
        """Set a generation up; Model.stream and Prefix.stream make one."""
        self._request = request
        self._needed = engine.bytes_for(request.prompt_tokens + request.max_tokens)
        self._written = Written(
            logprobs=None if request.top_logprobs is None else [],
            calls=CallReader(request.tools) if request.tools else None,
        )
        self._chunks = _write(engine, request, self._needed, self._written)
        self._read = threading.Lock()  # held by whoever iterates

    def __iter__(self) -> "Stream":
        """Return itself."""
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk."""
        with self._alone():
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

    def take_place(self, place: Place) -> None:
        """Have it wait and take part in a place that is the caller's to leave, perhaps with others in turn.

        Raises MemoryLimitError if it needs more memory than there may be.
        """
        place.scheduler.check(self._needed)
        place.needed = max(place.needed, self._needed)
        self._written.place = place

    def cancel(self) -> None:
        """Have the generation end with the token, or the part of the prompt, that it is at.

        Any thread may call it at any time. Whoever iterates gets no further chunk, and no error.
        """
        self._written.cancelled = True

    def close(self) -> None:
        """End the generation here and free its state. For the thread that iterates; others call cancel()."""
        with self._alone():
            self._chunks.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread, or a callback of the first one: what they got would be chance."""
        if not self._read.acquire(blocking=False):
            raise LilyError(
                "the stream: another thread is iterating over it; have one thread read it, and others call "
                "cancel() or so_far()"
            )
        try:
            yield
        finally:
            self._read.release()

    def completion(self) -> Completion:
        """Write the rest, if there is one, and return the whole answer."""
        for _ in self:
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
                request.prompt_tokens,
                len(written.tokens),
                request.held_tokens + written.found_tokens,
                written.reasoning_tokens,
                request.spliced_tokens,
            ),
            timings=Timings(
                written.prefill_seconds,
                len(request.tokens) - written.found_tokens,
                written.decode_seconds,
                written.decode_tokens,
                written.queue_seconds,
                written.guessed_tokens,
                written.accepted_tokens,
            ),
            seed=request.sampling.seed,
            logprobs=None if written.logprobs is None else tuple(written.logprobs),
            tool_calls=written.calls.calls if written.calls else (),
        )

    def _ipython_display_(self) -> None:
        """Write the answer into a notebook's cell as it comes."""
        from lily.notebook import show

        show(self)


@dataclass(slots=True)
class Written:
    """What a generation has written so far.

    handed_out: int, how many of the tokens have gone into a chunk; the text of the others is not certain yet.
    found_tokens: int, how many of the prompt's tokens the cache had.
    deadline: float, of time.monotonic(), once the work has begun.
    place: where it stands in the queue, if somebody has lined up for it.

    Apart from Stream: a generator that knew its stream would be a cycle, and its state outlive the last use.
    """

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    calls: CallReader | None = None
    reasoning_tokens: int = 0
    handed_out: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None
    cancelled: bool = False
    found_tokens: int = 0
    deadline: float | None = None
    place: Place | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    def check(self) -> None:
        """Raise unless the generation is to go on."""
        if self.cancelled:
            raise _CancelledError
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise DeadlineError(
                f"timeout: the time is up after {len(self.tokens)} tokens of the answer, which the stream's "
                "so_far() has; allow more, or ask for less"
            )

    def add(self, piece: tuple[str, str]) -> Chunk | None:
        """Keep thoughts and text; return them, if there are any, with the tokens not handed out yet."""
        reasoning, text = piece
        deltas: tuple[ToolCallDelta, ...] = ()
        if self.calls is not None and text:
            text, deltas = self.calls.push(text)
        return self._chunk(reasoning, text, deltas) if reasoning or text or deltas else None

    def end(self, piece: tuple[str, str]) -> Chunk | None:
        """Keep what was held back until the answer's end; return it, if anything, with the tokens left."""
        reasoning, text = piece
        deltas: tuple[ToolCallDelta, ...] = ()
        if self.calls is not None:
            text, deltas = self.calls.push(text)
            cut = self.stop is not None and self.calls.open  # by a stop string: nobody should act on it
            more, rest = self.calls.finish()
            text, deltas = text + more, deltas + rest
            if self.calls.calls and self.finish_reason == "stop" and not cut:
                self.finish_reason = "tool_calls"
        left = self.handed_out < len(self.tokens)
        return self._chunk(reasoning, text, deltas) if reasoning or text or deltas or left else None

    def _chunk(self, reasoning: str, text: str, deltas: tuple[ToolCallDelta, ...]) -> Chunk:
        self.reasoning.append(reasoning)
        self.text.append(text)
        start, self.handed_out = self.handed_out, len(self.tokens)
        logprobs = None if self.logprobs is None else tuple(self.logprobs[start:])
        thoughts = max(0, self.reasoning_tokens - start)
        return Chunk(text, tuple(self.tokens[start:]), reasoning, logprobs, deltas, thoughts)


class _CancelledError(Exception):
    """What ends the taking in of a prompt that nobody waits for any more."""


def _write(engine: "Engine", request: Request, needed: int, written: Written) -> Generator[Chunk, None, None]:
    asked = time.perf_counter()
    if request.timeout is not None:
        written.deadline = time.monotonic() + request.timeout
    try:
        written.check()
        place = engine.scheduler.admit(needed, written.check, written.place)
        try:
            written.queue_seconds = time.perf_counter() - asked
            yield from _answer(engine, request, written, place)
        finally:
            place.forget()
            if place is not written.place:
                place.leave()
    except _CancelledError:
        return


def _answer(
    engine: "Engine", request: Request, written: Written, place: Place
) -> Generator[Chunk, None, None]:
    started = time.perf_counter()
    state, hit = engine.take_in_prompt(request, place, written.check)
    if hit is not None:
        written.found_tokens = hit.length
    guide = request.guide
    allowed = guide.allowed(request.thinking, 0) if guide else None
    token = engine.session.sample(state, request.sampling.core(), None, allowed)
    written.prefill_seconds = time.perf_counter() - started
    closed = True
    try:
        for chunk in _decode(engine, request, written, state, token):
            place.rest()
            yield chunk
            place.resume()
        closed = False
    finally:
        if hit is not None:
            engine.keep_answer(request, written.tokens, state, hit, dropped=closed)


def _decode(
    engine: "Engine", request: Request, written: Written, state: "State", token: int
) -> Iterator[Chunk]:
    reader = Reader(engine.tokenizer, request.thinking, request.stop)
    guide = request.guide
    steps = Steps(engine, request, written, state)
    while token not in request.stop_tokens:
        written.tokens.append(token)
        if written.logprobs is not None:
            written.logprobs.append(token_logprob(engine, state, token, request.top_logprobs or 0))
        written.reasoning_tokens += reader.thinking
        if guide and not reader.thinking:
            guide.take(token)
        chunk = written.add(reader.push(token))
        if chunk is not None:
            yield chunk
        if written.calls is not None and written.calls.closed and not request.parallel_tool_calls:
            written.finish_reason = "stop"
            break
        if guide and guide.finished:
            written.finish_reason = "stop"
            break
        if reader.stopped is not None:
            written.finish_reason, written.stop = "stop", reader.stopped
            break
        if len(written.tokens) == request.max_tokens:
            written.finish_reason = "length"
            break
        if written.cancelled:
            break
        written.check()
        allowed = guide.allowed(reader.thinking, written.reasoning_tokens) if guide else None
        token = steps.after(token, allowed)
    else:
        written.finish_reason = "stop"
    chunk = written.end(reader.finish())
    if chunk is not None:
        yield chunk
