"""A model whose answers are told to it: the demo checkpoint under a chat template that thinks and calls.

Everything but the choice of the next token is as it always is.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import lily

TEMPLATE = Path(__file__).parent / "templates" / "thinking.jinja"


def make_checkpoint(folder: Path) -> Path:
    """Fill a folder with the demo checkpoint, under that template."""
    for file in Path(lily.DEMO).iterdir():
        if file.name != TEMPLATE.with_stem("chat_template").name:
            os.symlink(file, folder / file.name)
    os.symlink(TEMPLATE, folder / "chat_template.jinja")
    return folder


class Scripted:
    """The core's session, but for what it draws.

    drawn: int, how many tokens were.  waits: threading.Event, set while the next token is held back.
    """

    def __init__(self, session: object, tokens: list[int], hold_at: int | None) -> None:
        self._session = session
        self._tokens = tokens
        self._left = iter(tokens)
        self._hold_at = hold_at
        self.drawn = 0
        self.waits = threading.Event()
        self.release = threading.Event()

    def sample(self, state: object, *_: object) -> int:
        """Draw the first token of an answer."""
        self._left = iter(self._tokens)
        return self._draw()

    def step(self, state: object, token: int, *_: object) -> int:
        # Taken in for good, so that the state is as long as the answer.
        self._session.extend(state, np.array([token], np.int32))
        return self._draw()

    def _draw(self) -> int:
        if self.drawn == self._hold_at:
            self.waits.set()
            assert self.release.wait(10)
        self.drawn += 1
        return next(self._left)

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


@contextmanager
def scripted(model: lily.Model, answer: str | list[int], hold_at: int | None = None) -> Iterator[Scripted]:
    """Have a model write this, over and over: a text, its markers as tokens, and the end token; or tokens.

    hold_at: which token is held back until `release` is set.
    """
    tokens = model.tokenizer.encode(answer, markers=True) if isinstance(answer, str) else answer
    tokens = [*tokens, min(model.info.stop_tokens)]
    engine = model._engine
    session = engine._session
    forced = Scripted(session, tokens, hold_at)
    engine._session = forced
    try:
        yield forced
    finally:
        engine._session = session
