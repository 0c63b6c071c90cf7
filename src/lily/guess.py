"""Guesses of what comes next, looked up in what came before: a draft that costs no model.

Source: Saxena, "Prompt lookup decoding", 2023. A guess is checked by the model in one pass, so that it
changes how fast an answer comes and nothing else.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lily import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lily._core import State
    from lily.completion import Request, Written
    from lily.engine import Engine

LONGEST, SHORTEST = 3, 2  # tokens that have to be the same for what followed them to be guessed again


class Guesser:
    """The tokens of a prompt and its answer so far, by the tokens before each."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        """Begin with some tokens."""
        self._tokens: list[int] = []
        self._followed_at: dict[
            tuple[int, ...], int
        ] = {}  # where the latest token stands that followed these
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take the next token in."""
        end = len(self._tokens)
        for length in range(SHORTEST, min(LONGEST, end) + 1):
            self._followed_at[tuple(self._tokens[end - length :])] = end
        self._tokens.append(token)

    def guess(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens that may come next, none if the last ones have not been seen before."""
        for length in range(LONGEST, SHORTEST - 1, -1):
            at = self._followed_at.get(tuple(self._tokens[-length:]))
            if at is not None:
                return self._tokens[at : at + most]
        return ()


class Steps:
    """The decode steps of one answer, several at a time where what comes next can be guessed."""

    def __init__(self, engine: "Engine", request: "Request", written: "Written", state: "State") -> None:
        """Begin after a prompt, whose state grows with the steps."""
        self._engine, self._request, self._written, self._state = engine, request, written, state
        self._sampling, self._history = request.sampling.core(), _core.History()
        self._drawn: deque[int] = deque()  # tokens of a guess that was right, and the one drawn after them
        self._most = int(engine.session.options["speculate"])
        if request.guide is not None or request.top_logprobs is not None:
            self._most = 0  # both look at the state after every single token
        self._guesser = Guesser([*request.held_ids, *request.tokens.tolist()]) if self._most else None

    def after(self, token: int, allowed: "NDArray[np.uint32] | None") -> int:
        """Return the token that follows one that was drawn."""
        if self._guesser is not None:
            self._guesser.add(token)
        if not self._drawn:
            started = time.perf_counter()
            self._step(token, allowed)
            self._written.decode_seconds += time.perf_counter() - started
            self._written.decode_tokens += len(self._drawn)
        return self._drawn.popleft()

    def _step(self, token: int, allowed: "NDArray[np.uint32] | None") -> None:
        session, guess = self._engine.session, self._guess()
        if not guess:
            drawn = session.step(self._state, token, self._sampling, self._history, allowed)
            self._drawn.append(drawn)
            return
        ids = np.asarray(guess, np.int32)
        self._drawn.extend(session.step_with(self._state, token, ids, self._sampling, self._history))
        self._written.guessed_tokens += len(guess)
        self._written.accepted_tokens += len(self._drawn) - 1

    def _guess(self) -> Sequence[int]:
        """Return tokens that may come, up to where the answer ends at the latest."""
        if self._guesser is None:
            return ()
        room = self._request.max_tokens - len(self._written.tokens) - 1
        guess = self._guesser.guess(min(self._most, room)) if room > 0 else ()
        ends = (i for i, token in enumerate(guess) if token in self._request.stop_tokens)
        return guess[: next(ends, len(guess))]
