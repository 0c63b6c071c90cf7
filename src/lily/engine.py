"""A loaded checkpoint: what Model, Prefix and Stream share, and who may still use it.

Nobody may after close(), and nobody in a forked child, whose copy of the core has lost its threads.
"""

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import _core, hub
from lily.answer import check_stop, thinks
from lily.cache import LEAST, NEAR, Borders, CacheStats, Hit, PrefixCache
from lily.chat import ChatTemplate
from lily.completion import Request
from lily.disk import DiskTier
from lily.errors import ContextError, LilyError, MemoryLimitError
from lily.guide import ToolChoice, guide_of, tokenizer_of
from lily.messages import check_tools
from lily.progress import Report
from lily.sampling import Sampling, SamplingArguments, integer
from lily.scheduler import Place, Scheduler, memory_for_states
from lily.settings import Generation, check_names, of
from lily.splice import Splices
from lily.tokenizer import Tokenizer

_log = logging.getLogger("lily")
_log.addHandler(logging.NullHandler())

MAX_TOKENS = 32_768  # of an answer for which the caller set no limit: one that never ends must end somewhere

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model may take and how many it serves; Model.load's arguments of the same names."""

    cache_bytes: int | None = None
    memory_bytes: int | None = None
    max_active: int = 8
    max_waiting: int = 64
    cache_dir: str | os.PathLike[str] | None = None
    cache_dir_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError for a number that can't be."""
        for name, least in (
            ("cache_bytes", 0),
            ("memory_bytes", 1),
            ("max_active", 1),
            ("max_waiting", 0),
            ("cache_dir_bytes", 0),
        ):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), least, 2**63)


class Engine:
    """The core's session for one checkpoint, with what belongs to the checkpoint beside the weights.

    tokenizer, template (None if the checkpoint has none), defaults: what the files say.
    config: dict of the model's dimensions.  context, vocab: int, in tokens.
    scheduler: who takes part.  cache: what was taken in, None for nothing.  splices: what was written.
    """

    def __init__(self, folder: Path, options: dict[str, str], capacity: Capacity) -> None:
        """Load a checkpoint.

        Raises ModelFilesError for files at fault, ValueError for an option, DeviceError from the device,
        MemoryLimitError if the machine is too small.
        """
        weights = _core.Weights(str(folder))
        for warning in weights.warnings:
            _log.warning("%s: %s", folder, warning)
        if weights.skipped:
            _log.info("%s: %d vision and multi-token-prediction tensors not read", folder, weights.skipped)
        self.folder = folder
        self.name = hub.name_of(folder)
        self.config: dict[str, Any] = weights.config
        self.context = int(self.config["max_positions"])
        self.vocab = int(self.config["vocab"])
        self.weight_bytes = weights.nbytes
        self.tensors = weights.tensors
        self.skipped_tensors = weights.skipped
        self.fingerprint = weights.fingerprint
        self.tokenizer = Tokenizer.load(folder)
        self.template = ChatTemplate.load(folder)
        self.defaults = Sampling.load(folder)
        self._session: _core.Session | None = _core.Session(weights, options)
        self._gone = ""
        self._ending = False
        self._borders = Borders(self.tokenizer)
        self.splices = Splices(self.tokenizer, self._borders)
        self._set_capacity(capacity, self._session)
        _engines.add(self)

    def _set_capacity(self, capacity: Capacity, session: _core.Session) -> None:
        limit = capacity.memory_bytes
        if limit is None:
            limit = memory_for_states(self.weight_bytes, session.scratch_bytes)
        least = self.bytes_for(LEAST)
        if limit < least:
            raise MemoryLimitError(
                f"memory: wanted {least / 1e6:.1f} MB for a short prompt, got {limit / 1e6:.1f} MB "
                f"beside {self.weight_bytes / 1e9:.2f} GB of weights and "
                f"{session.scratch_bytes / 1e6:.1f} MB of scratch; take a larger machine, a smaller "
                "prefill_chunk, or say memory_bytes"
            )
        session.state_limit = limit  # for prefixes too, which ask nobody
        budget = limit // 4 if capacity.cache_bytes is None else min(capacity.cache_bytes, limit)
        # Neither may hold the engine: a model that is dropped is freed at once.
        this = weakref.ref(self)

        def core() -> _core.Session:
            engine = this()
            assert engine is not None  # whoever asks has it
            return engine.session

        def room() -> PrefixCache | None:
            engine = this()
            return engine.cache if engine else None

        def save(tokens: NDArray[np.int32], state: _core.State) -> None:
            engine = this()
            if engine is not None and engine.disk is not None:
                engine.disk.save(tokens, state, engine)

        self.disk, self._disk_hits = None, 0
        if capacity.cache_dir is not None:
            folder = Path(capacity.cache_dir)
            self.disk = DiskTier(folder, capacity.cache_dir_bytes, f"{self.fingerprint} {session.device}")
        self.cache = PrefixCache(budget, core, save if self.disk else None) if budget > 0 else None
        self.scheduler = Scheduler(
            capacity.max_active,
            capacity.max_waiting,
            limit,
            live_bytes=lambda: core().state_bytes,
            make_room=lambda needed: cache.make_room(needed) if (cache := room()) else 0,
        )

    @property
    def session(self) -> _core.Session:
        """The core's session; LilyError if it can't be used any more."""
        session = self._session  # read once: another thread may close it at any moment
        if session is None:
            if self._ending:
                raise SystemExit  # ends the thread that asks, without a word
            raise LilyError(self._gone)
        return session

    @cached_property
    def grammar_tokenizer(self) -> Any:
        """The tokenizer as grammars are followed with it. LilyError without llguidance."""
        return tokenizer_of(self)

    @property
    def closed(self) -> bool:
        """Whether it can't be used any more."""
        return self._session is None

    def close(self) -> None:
        """Let go of the weights and of the core's memory, once the calls under way are done."""
        if self.disk is not None and self.cache is not None and not self._ending:
            self.cache.save()
        self._let_go()

    def _let_go(self) -> None:
        if self._session is not None:
            self._gone = f"the model of {self.folder} is closed; load it again with lily.Model.load"
            self._session = None
            self.cache = None

    def tokens(self, name: str, values: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return token ids as an (n,) int32 array.

        name: what to call them in errors.
        Raises TypeError unless they are a flat sequence of ints, ValueError if one is outside the vocabulary
        or there is none.
        """
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
            raise TypeError(f"{name}: wanted a flat sequence of int token ids, got {type(values).__name__}")
        try:
            array = np.asarray(values)
        except ValueError as error:  # ragged
            raise TypeError(f"{name}: wanted a flat sequence of int token ids: {error}") from None
        if not isinstance(values, np.ndarray):  # which has one type: a list's True would pass for a 1
            flags = [i for i, value in enumerate(values) if isinstance(value, bool | np.bool_)]
            if flags:
                raise TypeError(f"{name}[{flags[0]}]: wanted an int token id, got {values[flags[0]]}")
        if array.size == 0:
            raise ValueError(f"{name}: wanted at least one token, got none")
        # Ints past int64 make an array of objects, and at least one of them is outside.
        ints = array.dtype.kind in "iu" or all(isinstance(value, int) for value in array.flat)
        if array.ndim == 1 and ints and (outside := np.flatnonzero((array < 0) | (array >= self.vocab))).size:
            i = int(outside[0])
            raise ValueError(f"{name}[{i}]: wanted a token id from 0 to {self.vocab - 1}, got {array[i]}")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(
                f"{name}: wanted a flat sequence of int token ids, got shape {array.shape} of {array.dtype}"
            )
        return array.astype(np.int32)

    def check_room(self, tokens: int, room_for: int = 0) -> None:
        """Raise ContextError unless the context holds `tokens`, and `room_for` more."""
        if tokens + room_for > self.context:
            if tokens > self.context:
                fault = f"{tokens} tokens do not fit the context of {self.context}"
            else:
                fault = f"{tokens} tokens leave no room for an answer in the context of {self.context}"
            raise ContextError(f"{fault}; shorten the prompt")

    def take_in(
        self,
        tokens: NDArray[np.int32],
        state: _core.State | None = None,
        report: Report | None = None,
        interrupt: Callable[[], None] | None = None,
        checkpoints: Sequence[int] = (),
        place: Place | None = None,
    ) -> tuple[_core.State, list[_core.State]]:
        """Return the state after more tokens, perhaps none, and those at the checkpoints on the way.

        state: what they continue, None for nothing; stays as it is.
        interrupt: called several times a second; what it raises ends the work.
        checkpoints: lengths, ascending, that session.resumes allows.
        place: the request that it is done for, if it is one that the scheduler has let in.
        """
        session = self.session
        if place is None:
            self.scheduler.require(self.bytes_for(tokens.size, checkpoints=len(checkpoints)))
        grown = session.new_state() if state is None else state.fork()
        if place is not None:
            place.note(grown)
        made = session.extend(grown, tokens, report, interrupt, checkpoints) if tokens.size else []
        return grown, made

    def bytes_for(self, tokens: int, *, checkpoints: int = 0) -> int:
        """Return the most bytes that a request takes whose prompt and answer have so many tokens.

        Beside its own state, a chunk that can be interrupted has the one before it; a GPU's step writes a
        second one; a checkpoint is one until the cache has it. The last page, if it is shared, is copied when
        it is written to.
        """
        page, recurrent, logits = self.session.state_sizes
        return (tokens + 511) // 256 * page + (4 + checkpoints) * (recurrent + logits)

    def take_in_prompt(
        self, request: Request, place: Place, interrupt: Callable[[], None]
    ) -> tuple[_core.State, Hit | None]:
        """Return the state after a request's whole prompt, and what the cache had of it.

        The cache keeps what is worth it on the way, also of a prompt that is not finished.
        """
        tokens, cache, total = request.tokens, self.cache, len(request.tokens)
        if request.held is not None or cache is None or request.reuse == "off":
            state, _ = self.take_in(tokens, request.held, request.report, interrupt, place=place)
            return state, None
        session = self.session
        answers = self._borders.answers(tokens)
        hit = cache.find(tokens, answers[0] if answers else 0, exact=request.reuse == "strict")
        if self.disk is not None and (session.grid == 1 or request.reuse != "strict"):
            hit = self._find_on_disk(self.disk, tokens, hit)
        state = session.new_state() if hit.state is None else hit.state.fork()
        place.note(state)
        done = kept = hit.length
        if done == total and request.report is not None:
            request.report(done, done)  # all of it was there
        try:
            for cut in self._borders.cuts(tokens, done, session.grid):
                if cut < total and not session.resumes(cut, total):
                    continue
                report = _from(done, total, cut == total, request.report)
                made = session.extend(
                    state, tokens[done:cut], report, interrupt, [cut] if cut < total else (), total
                )
                done = cut
                place.note()
                if made or cut - kept >= (NEAR if kept else LEAST):
                    cache.put(tokens[:cut], made[0] if made else state.fork(), hit)
                    kept = cut
        except (LilyError, MemoryError):
            raise
        except BaseException:  # interrupted: what is taken in can be gone on with
            if state.length - kept >= NEAR and session.resumes(state.length, total):
                cache.put(tokens[: state.length], state.fork(), hit)
            raise
        return state, hit

    def _find_on_disk(self, disk: DiskTier, tokens: NDArray[np.int32], hit: Hit) -> Hit:
        """Return what the disk has if it is longer than what the cache has, and let the cache keep it."""
        length = disk.longest(tokens)
        if length < hit.length + NEAR or (state := disk.load(tokens, self)) is None:
            return hit
        self._disk_hits += 1
        found = Hit(state, state.length, follows=True, exact=False)
        if self.cache is not None:
            self.cache.put(tokens[: state.length], state, found)
        return found

    def cache_stats(self) -> CacheStats:
        """Return what the cache and the disk hold."""
        stats = self.cache.stats() if self.cache else CacheStats(0, 0, 0, 0, 0, 0, 0)
        if self.disk is None:
            return stats
        return replace(stats, disk_bytes=self.disk.bytes, disk_hits=self._disk_hits)

    def keep_answer(
        self, request: Request, answer: Sequence[int], state: _core.State, hit: Hit, *, dropped: bool
    ) -> None:
        """Let the cache keep a state that nobody goes on with, of the prompt and part of its answer.

        dropped: whether the stream was, perhaps in the middle of anything: then nothing is waited for.
        """
        cache = self.cache
        if request.reuse == "auto" and not dropped:
            self.splices.remember(request.tokens, answer)
        if cache is None or self._session is None:
            return
        if state.length > len(request.tokens) + len(answer):
            return  # the answer ended inside a guess that was right, which the state has whole
        tokens = np.concatenate([request.tokens, np.asarray(answer, np.int32)])[: state.length]
        if state.length - len(request.tokens) >= LEAST:
            cache.put(tokens, state.fork(), hit, written=True, wait=not dropped)

    def request(
        self,
        tokens: NDArray[np.int32],
        held: Sequence[int],
        state: _core.State | None,
        settings: Generation,
        report: Report | None = None,
        *,
        reuse: str = "auto",
        spliced_tokens: int = 0,
    ) -> Request:
        """Check a generation that takes tokens in behind those that a state holds.

        Raises what Model.generate does.
        """
        check_names(settings, Generation)
        prompt = len(held) + len(tokens)
        self.check_room(prompt, room_for=1)
        choice = ToolChoice(settings.get("tool_choice"), check_tools(settings.get("tools") or ()))
        stop_tokens = settings.get("stop_tokens")
        stop = self.tokenizer.stop
        if stop_tokens is not None:
            if not isinstance(stop_tokens, Iterable):
                raise TypeError(f"stop_tokens: wanted token ids, got {type(stop_tokens).__name__}")
            stop = frozenset(integer("stop_tokens", token, 0, self.vocab) for token in stop_tokens)
        sampling = self.defaults.resolve(of(SamplingArguments, settings))
        outside = [token for token in sampling.logit_bias if token >= self.vocab]
        if outside:
            raise ValueError(f"logit_bias: wanted token ids from 0 to {self.vocab - 1}, got {outside[0]}")
        thinking = thinks([*held, *tokens.tolist()], self.tokenizer)
        guide = guide_of(self, settings, choice, thinking)
        if guide and guide.constrained:
            stop |= self.tokenizer.stop  # a grammar ends with one of them
        return Request(
            tokens,
            state,
            held,
            sampling,
            max_tokens=self._max_tokens(prompt, settings.get("max_tokens")),
            stop_tokens=stop,
            stop=check_stop(settings.get("stop")),
            thinking=thinking,
            top_logprobs=self._top_logprobs(settings),
            report=report,
            timeout=_timeout(settings.get("timeout")),
            reuse=reuse,
            spliced_tokens=spliced_tokens,
            tools=tuple(dict(tool) for tool in choice.tools),
            parallel_tool_calls=bool(settings.get("parallel_tool_calls", True)),
            guide=guide,
        )

    def _max_tokens(self, prompt: int, asked: int | None) -> int:
        """Return how long an answer may be; if nobody says, what context and memory have room for."""
        room = self.context - prompt
        if asked is not None:
            return min(integer("max_tokens", asked, 1, 2**63), room)
        longest = min(MAX_TOKENS, room)
        if self.bytes_for(prompt + longest) <= self.scheduler.limit:
            return longest
        page, _, _ = self.session.state_sizes
        pages = (self.scheduler.limit - self.bytes_for(0)) // max(1, page)  # of 256 tokens
        return max(1, min(longest, pages * 256 - prompt))

    def _top_logprobs(self, settings: Generation) -> int | None:
        """Return how many tokens to give beside each one's logprob, None for no logprobs."""
        logprobs = settings.get("logprobs", False)
        top = integer("top_logprobs", settings.get("top_logprobs", 0), 0, self.vocab + 1)
        if not isinstance(logprobs, bool):
            raise ValueError(f"logprobs: wanted True or False, got {logprobs!r}; top_logprobs is how many")
        if top > 0 and not logprobs:
            raise ValueError(f"top_logprobs: wanted logprobs=True beside it, got {top} alone")
        return top if logprobs else None


def _from(done: int, total: int, last: bool, report: Report | None) -> Report | None:
    """Return a report on a part of a prompt that tells of the whole: its end is told of once."""
    if report is None:
        return None

    def tell(more: int, part: int) -> None:
        if last or more < part:
            report(done + more, total)

    return tell


def _timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"timeout: wanted seconds, got {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"timeout: wanted more than 0 seconds, got {seconds}")
    return float(seconds)


def _lose_sessions() -> None:
    for engine in list(_engines):
        if engine._session is not None:
            engine._session = engine.cache = None
            engine._gone = (
                f"the model of {engine.folder} was loaded before this process was forked, and its threads "
                "stayed with the parent; load it in the child, or start the child by multiprocessing's spawn"
            )


def _end_sessions() -> None:
    """Before the interpreter ends, let daemon threads out of the core: later they would be torn out of it."""
    sessions = [session for engine in list(_engines) if (session := engine._session) is not None]
    for engine in list(_engines):
        engine._let_go()
        engine._ending = True
    for session in sessions:
        session.end()
    patience = time.monotonic() + 10
    while any(session.calls for session in sessions) and time.monotonic() < patience:
        time.sleep(0.005)


atexit.register(_end_sessions)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_sessions)
