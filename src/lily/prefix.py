"""A prompt that was paid for once."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.asynchronous import AsyncStream
from lily.cache import Hit
from lily.completion import Completion, Stream
from lily.engine import Engine
from lily.progress import Report, reporter
from lily.sampling import integer
from lily.settings import Generation, spelled_out

_MOST_CHECKPOINTS = 8  # on the token grid: each is as large as the recurrent states


class Prefix:
    """Tokens with the model's state after them: a value, which nothing changes.

    tokens: tuple of int, all that it holds.

    A prefix made from messages ends where the assistant's answer begins, so `prefix.generate()` answers them.
    What extend, rollback and fork return shares its memory, as far as the tokens are the same.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: tuple[int, ...],
        state: _core.State,
        checkpoints: Sequence[_core.State] = (),
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        """Hold a state; Model.prefill makes one.

        checkpoints: states of the same tokens, shorter ones first.  pinned: the lengths of those to keep
        whatever comes.
        """
        self.tokens = tokens
        self._engine = engine
        self._state = state
        self._checkpoints = tuple(checkpoints)
        self._pinned = pinned

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        """Show the sizes."""
        return f"<lily.Prefix: {len(self)} tokens, {self.nbytes / 1e6:.1f} MB>"

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds, alone or together with others."""
        return _core.bytes_of([self._state, *self._checkpoints])

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The lengths at which it keeps the recurrent states, so that rollback can go on from there."""
        return tuple(checkpoint.length for checkpoint in self._checkpoints)

    @spelled_out
    def generate(self, **settings: Unpack[Generation]) -> Completion:
        """Write what follows and return it whole; the arguments are those of Model.generate for the answer.

        The answer is the one that Model.generate gives for the same tokens and seed.
        Raises ContextError if there is no room left, ValueError or TypeError for an argument, LilyError after
        the model's close().
        """
        return self.stream(**settings).completion()

    @spelled_out
    def stream(self, **settings: Unpack[Generation]) -> Stream:
        """Return an iterator that writes what follows. Takes, and raises, what generate does."""
        engine = self._engine
        nothing = np.empty(0, np.int32)
        return Stream(engine, engine.request(nothing, self.tokens, self._state, settings))

    @spelled_out
    async def agenerate(self, **settings: Unpack[Generation]) -> Completion:
        """Write what follows without keeping the event loop waiting; see Model.agenerate."""
        return await self.astream(**settings).completion()

    @spelled_out
    def astream(self, **settings: Unpack[Generation]) -> AsyncStream:
        """Return an asynchronous iterator that writes what follows; see Model.astream."""
        return AsyncStream(lambda: self.stream(**settings))

    def extend(
        self, more: str | Sequence[int] | NDArray[np.integer[Any]], progress: bool | Report | None = None
    ) -> "Prefix":
        """Return a new prefix that goes on with more tokens.

        more: token ids, or a str, which is taken as plain text: no message is made of it, and it holds no
            markers.
        progress: as for Model.prefill.
        Its logits are, bit for bit, those of Model.prefill for all the tokens. Where the device sums in
        blocks of positions, the last few tokens are therefore taken in anew.
        Raises ContextError if they do not fit, before any work; TypeError or ValueError if they are no
            tokens.
        """
        engine = self._engine
        report = reporter(progress)
        _ = engine.session  # a closed model says so before it looks at the tokens
        tokens = engine.tokens("more", engine.tokenizer.encode(more) if isinstance(more, str) else more)
        engine.check_room(len(self) + len(tokens))
        return take_in(engine, self.tokens + tuple(tokens.tolist()), self._states(), self._pinned, report)

    def rollback(self, tokens: int, progress: bool | Report | None = None) -> "Prefix":
        """Return a new prefix without the last tokens.

        tokens: int, how many to take back, fewer than it holds.  progress: as for Model.prefill.
        The recurrent states can't be rewound: it goes on from the nearest checkpoint before, and takes what
        lies between in anew. Its logits are, bit for bit, those of Model.prefill for the tokens left.
        Raises ValueError if there are not so many, LilyError after the model's close().
        """
        report = reporter(progress)
        _ = self._engine.session
        left = len(self) - integer("tokens", tokens, 0, len(self))
        return take_in(self._engine, self.tokens[:left], self._states(), self._pinned, report)

    def fork(self) -> "Prefix":
        """Return a second prefix that shares this one's memory. Raises LilyError after close()."""
        _ = self._engine.session
        return Prefix(self._engine, self.tokens, self._state, self._checkpoints, self._pinned)

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of what follows, (vocab,) float32. Raises LilyError after the model's close()."""
        return self._engine.session.last_logits(self._state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, from which Model.load_prefix restores it without taking the tokens in again.

        path: of a regular file, which is replaced once the new one is complete and on the disk.
        The file holds the tokens and everything computed from them, in safetensors format, readable by its
        owner alone. It can be loaded by the same checkpoint by the same code path, which
        model.info.device names.
        Raises PrefixFileError if it can't be written, and then leaves no trace; LilyError after the model's
        close().
        """
        from lily import saved

        saved.write(path, self._engine, self.tokens, self._states(), self._pinned)

    def remember(self) -> None:
        """Have the model's cache hold it, so that prompts which begin with its tokens go on from there.

        Its checkpoints serve those that begin with a part. Does nothing where there is no cache, or no room
        in it. Raises LilyError after the model's close().
        """
        _ = self._engine.session
        if (cache := self._engine.cache) is None:
            return
        tokens = np.array(self.tokens, np.int32)
        for state in self._states():
            cache.put(tokens[: state.length], state, Hit(None, 0, follows=True, exact=True))

    def _states(self) -> tuple[_core.State, ...]:
        return (*self._checkpoints, self._state)


def take_in(
    engine: Engine,
    tokens: tuple[int, ...],
    states: Iterable[_core.State],
    pinned: frozenset[int],
    report: Report | None = None,
) -> Prefix:
    """Return the prefix of some tokens.

    states: of beginnings of them, or of longer texts that share a beginning only up to a shorter state's
        length; the longest that can be gone on from is.
    pinned: the lengths at which to keep a checkpoint beside those on the token grid.
    """
    session, end = engine.session, len(tokens)
    known = {state.length: state for state in states if session.resumes(state.length, end)}
    wanted = {
        position
        for position in pinned | _grid(int(session.options["checkpoint_tokens"]), session.grid, end)
        if 0 < position < end and session.resumes(position, end)
    }
    start = max((n for n in known if n < end or known[n].has_logits), default=0)
    state = known.get(start)
    fresh = sorted(position for position in wanted if position > start)
    grown, made = engine.take_in(np.array(tokens[start:], np.int32), state, report, checkpoints=fresh)
    kept = {n: checkpoint for n, checkpoint in known.items() if n in wanted and n < end}
    kept |= {checkpoint.length: checkpoint for checkpoint in made}
    return Prefix(engine, tokens, session.fork(grown), [kept[n] for n in sorted(kept)], pinned)


def _grid(spacing: int, grid: int, end: int) -> set[int]:
    """Return where a prefix of `end` tokens keeps checkpoints.

    They are evenly spaced; and one lies in front of the tokens that extend has to take in anew.
    """
    positions = {(end - 1) // grid * grid} if grid > 1 else set()
    if spacing > 0:
        step = (spacing + grid - 1) // grid * grid
        while end // step > _MOST_CHECKPOINTS:
            step *= 2
        positions |= set(range(step, end, step))
    return positions
