"""A loaded checkpoint: what Model, Prefix and Stream share, and who may still use it.

Nobody may after close(), and nobody in a forked child, whose copy of the core has lost its threads.
"""

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import _core, hub
from lily.answer import check_stop, thinks
from lily.chat import ChatTemplate
from lily.completion import Request
from lily.errors import ContextError, LilyError
from lily.progress import Report
from lily.sampling import Sampling, SamplingArguments, integer
from lily.settings import Generation, check_names, of
from lily.tokenizer import Tokenizer

_log = logging.getLogger("lily")
_log.addHandler(logging.NullHandler())

MAX_TOKENS = 32_768  # of an answer for which the caller set no limit: one that never ends must end somewhere

_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """The core's session for one checkpoint, with what belongs to the checkpoint beside the weights.

    tokenizer, template (None if the checkpoint has none), defaults: what the files say.
    config: dict of the model's dimensions.  context, vocab: int, in tokens.
    """

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        """Load a checkpoint.

        Raises ModelFilesError for files at fault, ValueError for an option, DeviceError from the device.
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
        _engines.add(self)

    @property
    def session(self) -> _core.Session:
        """The core's session; LilyError if it can't be used any more."""
        session = self._session  # read once: another thread may close it at any moment
        if session is None:
            if self._ending:
                raise SystemExit  # ends the thread that asks, without a word
            raise LilyError(self._gone)
        return session

    @property
    def closed(self) -> bool:
        """Whether it can't be used any more."""
        return self._session is None

    def close(self) -> None:
        """Let go of the weights and of the core's memory, once the calls under way are done."""
        if self._session is not None:
            self._gone = f"the model of {self.folder} is closed; load it again with lily.Model.load"
            self._session = None

    def tokens(self, name: str, values: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Return token ids as an (n,) int32 array.

        name: what to call them in errors.
        Raises TypeError unless they are a flat sequence of ints, ValueError if one is outside the vocabulary
        or there is none.
        """
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
    ) -> _core.State:
        """Return the state after more tokens, perhaps none.

        state: what they continue, None for nothing; stays as it is.
        interrupt: called several times a second; what it raises ends the work.
        """
        session = self.session
        grown = session.new_state() if state is None else session.fork(state)
        if tokens.size:
            session.extend(grown, tokens, report, interrupt)
        return grown

    def request(
        self,
        tokens: NDArray[np.int32],
        held: Sequence[int],
        state: _core.State | None,
        settings: Generation,
        report: Report | None = None,
    ) -> Request:
        """Check a generation that takes tokens in behind those that a state holds.

        Raises what Model.generate does.
        """
        check_names(settings, Generation)
        prompt = len(held) + len(tokens)
        self.check_room(prompt, room_for=1)
        max_tokens, stop_tokens = settings.get("max_tokens"), settings.get("stop_tokens")
        if max_tokens is None:
            max_tokens = MAX_TOKENS
        stop = self.tokenizer.stop
        if stop_tokens is not None:
            if not isinstance(stop_tokens, Iterable):
                raise TypeError(f"stop_tokens: wanted token ids, got {type(stop_tokens).__name__}")
            stop = frozenset(integer("stop_tokens", token, 0, self.vocab) for token in stop_tokens)
        sampling = self.defaults.resolve(of(SamplingArguments, settings))
        outside = [token for token in sampling.logit_bias if token >= self.vocab]
        if outside:
            raise ValueError(f"logit_bias: wanted token ids from 0 to {self.vocab - 1}, got {outside[0]}")
        return Request(
            tokens,
            state,
            len(held),
            sampling,
            max_tokens=min(integer("max_tokens", max_tokens, 1, 2**63), self.context - prompt),
            stop_tokens=stop,
            stop=check_stop(settings.get("stop")),
            thinking=thinks([*held, *tokens.tolist()], self.tokenizer),
            top_logprobs=self._top_logprobs(settings),
            report=report,
        )

    def _top_logprobs(self, settings: Generation) -> int | None:
        """Return how many tokens to give beside each one's logprob, None for no logprobs."""
        logprobs = settings.get("logprobs", False)
        top = integer("top_logprobs", settings.get("top_logprobs", 0), 0, self.vocab + 1)
        if not isinstance(logprobs, bool):
            raise ValueError(f"logprobs: wanted True or False, got {logprobs!r}; top_logprobs is how many")
        if top > 0 and not logprobs:
            raise ValueError(f"top_logprobs: wanted logprobs=True beside it, got {top} alone")
        return top if logprobs else None


def _lose_sessions() -> None:
    for engine in list(_engines):
        if engine._session is not None:
            engine._session = None
            engine._gone = (
                f"the model of {engine.folder} was loaded before this process was forked, and its threads "
                "stayed with the parent; load it in the child, or start the child by multiprocessing's spawn"
            )


def _end_sessions() -> None:
    """Before the interpreter ends, let daemon threads out of the core: later they would be torn out of it."""
    sessions = [session for engine in list(_engines) if (session := engine._session) is not None]
    for engine in list(_engines):
        engine.close()
        engine._ending = True
    for session in sessions:
        session.end()
    patience = time.monotonic() + 10
    while any(session.calls for session in sessions) and time.monotonic() < patience:
        time.sleep(0.005)


atexit.register(_end_sessions)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_sessions)
