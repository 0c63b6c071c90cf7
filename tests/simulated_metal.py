"""The simulated Metal that the tests of the Metal device drive: settings, what it saw, and sessions on it."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lily import _core
from support import CHECKPOINTS, ROW_BY_ROW, metal

GREEDY = _core.Sampling(temperature=0)
PROMPT = (np.arange(12, dtype=np.int32) * 31) % 600


class Simulated:
    """A library of tools/metal/apple/build.py: simulated.h lists its settings."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.lily_simulated_get.restype = ctypes.c_int64
        self._library.lily_simulated_text.restype = ctypes.c_char_p

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            self._library.lily_simulated_set(name.encode(), ctypes.c_int64(value))

    def set_text(self, name: str, value: str) -> None:
        self._library.lily_simulated_set_text(name.encode(), value.encode())

    def get(self, name: str) -> int:
        return self._library.lily_simulated_get(name.encode())

    def lines(self, name: str) -> list[str]:
        return self._library.lily_simulated_text(name.encode()).decode().splitlines()

    def events(self, *kinds: str) -> list[str]:
        """Return what was noted since the last time, of these kinds, in its order; `log` notes it."""
        return [line for line in self.lines("log") if line.split()[0] in kinds]

    def alive(self) -> dict[str, int]:
        """Count the live objects by class, once the queue's thread has let go of what it ran."""
        counts = None
        while True:
            before, counts = counts, self.lines("alive")
            if before == counts:
                return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in counts)}
            time.sleep(0.02)

    @contextmanager
    def having(self, **settings: int) -> Iterator[None]:
        before = {name: self.get(name) for name in settings}
        self.set(**settings)
        try:
            yield
        finally:
            self.set(**before)

    def session(self, checkpoint: str | Path = "tiny", notice=None, **options: str) -> _core.Session:
        path = CHECKPOINTS.get(checkpoint, checkpoint)
        given = {"device": "metal", "kernels": self.path, "prefill_chunk": "64"} | ROW_BY_ROW | options
        return _core.Session(_core.Weights(str(path)), given, notice)


def simulated(**kind: bool) -> Simulated:
    return Simulated(metal(**kind))


def begin(session, prompt=PROMPT):
    state = session.new_state()
    session.extend(state, prompt)
    return state, session.sample(state, GREEDY)


def go_on(session, state, token, count, sampling=GREEDY):
    history, tokens = _core.History(), [token]
    while len(tokens) < count:
        tokens.append(session.step(state, tokens[-1], sampling, history))
    return tokens


def greedy(session, count, prompt=PROMPT):
    tokens = go_on(session, *begin(session, prompt), count)
    session._finish()  # with the step in flight
    return tokens
