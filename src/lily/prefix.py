"""A prompt that was paid for once."""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from lily import _core
from lily.asynchronous import AsyncStream
from lily.completion import Completion, Stream
from lily.engine import Engine
from lily.progress import Report, reporter
from lily.settings import Generation, spelled_out


class Prefix:
    """Tokens with the model's state after them: a value, which nothing changes.

    tokens: tuple of int, all that it holds.

    A prefix made from messages ends where the assistant's answer begins, so `prefix.generate()` answers them.
    """

    def __init__(self, engine: Engine, tokens: tuple[int, ...], state: _core.State) -> None:
        """Hold a state; Model.prefill makes one."""
        self.tokens = tokens
        self._engine = engine
        self._state = state

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        """Show the sizes."""
        return f"<lily.Prefix: {len(self)} tokens, {self._state.nbytes / 1e6:.1f} MB>"

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
        Raises ContextError if they do not fit, before any work; TypeError or ValueError if they are no
            tokens.
        """
        engine = self._engine
        report = reporter(progress)
        _ = engine.session  # a closed model says so before it looks at the tokens
        tokens = engine.tokens("more", engine.tokenizer.encode(more) if isinstance(more, str) else more)
        engine.check_room(len(self) + len(tokens))
        return Prefix(
            engine, self.tokens + tuple(tokens.tolist()), engine.take_in(tokens, self._state, report)
        )

    def fork(self) -> "Prefix":
        """Return a second prefix that shares this one's memory. Raises LilyError after close()."""
        return Prefix(self._engine, self.tokens, self._engine.session.fork(self._state))

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of what follows, (vocab,) float32. Raises LilyError after the model's close()."""
        return self._engine.session.last_logits(self._state)
