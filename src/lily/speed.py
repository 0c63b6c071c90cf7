"""How fast a model runs: tokens per second of prompts taken in and of tokens written, engine beside engine.

What `lily bench` shows. An engine takes a prompt of random ids into an empty state and then writes greedily,
as mlx_lm.benchmark has it. Every round goes through all lengths and engines, every other one backwards, so
that a machine that slows down slows all of them. A round before the first is not counted.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lily import _core

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # the article's sweep
STEPS = 64  # tokens that it writes after each
Tokens = NDArray[np.int32]
Case = Callable[[], float]  # takes one sample, in tok/s
BEST = _core.Sampling()  # the best token each time


def prefill(session: _core.Session, tokens: Tokens) -> float:
    """Take tokens into an empty state; return tokens per second."""
    return _taken_in(session, tokens)[0]


def _taken_in(session: _core.Session, tokens: Tokens) -> tuple[float, _core.State, int]:
    """Return tokens per second to the first token drawn, the state and that token."""
    state = session.new_state()
    started = time.perf_counter()
    session.extend(state, tokens)
    token = session.sample(state, BEST)
    return len(tokens) / (time.perf_counter() - started), state, token


def decode(session: _core.Session, state: _core.State, steps: int) -> float:
    """Write `steps` tokens after a state, which is left as it is; return tokens per second."""
    grown = session.fork(state)
    return _written(session, grown, session.sample(grown, BEST), steps)


def _written(session: _core.Session, state: _core.State, token: int, steps: int) -> float:
    history = _core.History()
    token = session.step(state, token, BEST, history)  # copies what a fork shares, so it is not counted
    started = time.perf_counter()
    for _ in range(steps):
        token = session.step(state, token, BEST, history)
    return steps / (time.perf_counter() - started)


def alternate(cases: Mapping[str, Case], rounds: int) -> dict[str, list[float]]:
    """Take `rounds` samples of each case in turns, after one that is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(rounds + 1):
        names = list(cases) if k % 2 == 0 else list(cases)[::-1]
        for name in names:
            figure = cases[name]()
            if k > 0:
                samples[name].append(figure)
    return samples


class Runner(Protocol):
    """An engine with a model loaded. name: str, with its version."""

    name: str

    def trial(self, tokens: Tokens, steps: int) -> tuple[float, float]:
        """Take tokens in and write `steps`; return tokens per second of either."""
        ...


class Lily:
    """Lily itself."""

    def __init__(self, session: _core.Session, version: str) -> None:
        """Measure a session."""
        self.name = f"lily {version}"
        self._session = session

    def trial(self, tokens: Tokens, steps: int) -> tuple[float, float]:
        """Take tokens in and write `steps`; return tokens per second of either."""
        rate, state, token = _taken_in(self._session, tokens)
        return rate, _written(self._session, state, token, steps)


@dataclass(frozen=True)
class Row:
    """The samples, in tokens per second, of one engine at one length."""

    engine: str
    length: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]


def sweep(
    runners: Sequence[Runner], lengths: Iterable[int], vocab: int, steps: int, trials: int, seed: int = 0
) -> list[Row]:
    """Measure every engine at every length, all on the same random ids."""
    lengths = list(lengths)
    ids = np.random.default_rng(seed).integers(0, vocab, max(lengths), dtype=np.int32)
    cases = [(runner, length) for length in lengths for runner in runners]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {(r.name, length): [] for r, length in cases}
    for k in range(trials + 1):
        for runner, length in cases if k % 2 == 0 else cases[::-1]:
            rates = runner.trial(ids[:length], steps)
            if k > 0:
                found[runner.name, length].append(rates)
    return [
        Row(name, length, tuple(p for p, _ in rates), tuple(d for _, d in rates))
        for (name, length), rates in found.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Lay rows out: medians with their spread, and the first engine's over each other's."""
    first = {row.length: row for row in rows if row.engine == rows[0].engine}
    lines = [f"{'tokens':>8} {'engine':24} {'prefill tok/s':>30} {'decode tok/s':>30}  {'ratio':>13}"]
    for row in sorted(rows, key=lambda row: row.length):
        cells = [_spread(row.prefill), _spread(row.decode)]
        mine, ratio = first[row.length], ""
        if row is not mine:
            pairs = ((mine.prefill, row.prefill), (mine.decode, row.decode))
            ratio = " ".join(f"{statistics.median(a) / statistics.median(b):.3f}x" for a, b in pairs)
        lines.append(f"{row.length:8} {row.engine:24} {cells[0]:>30} {cells[1]:>30}  {ratio:>13}".rstrip())
    return "\n".join(lines)


def _spread(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):.1f} ({min(samples):.1f} ... {max(samples):.1f})"


def document(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows as what JSON holds: samples, and the figures of mlx_lm.benchmark's names."""
    return {
        **about,
        "rows": [
            {
                "engine": row.engine,
                "prompt_tokens": row.length,
                "prompt_tps": statistics.median(row.prefill),
                "generation_tps": statistics.median(row.decode),
                "prompt_tps_samples": list(row.prefill),
                "generation_tps_samples": list(row.decode),
            }
            for row in rows
        ],
    }
