"""Count what a decode step of the 35B asks of memory, in the instrumented simulator.

    python -m bench.traffic DIRECTORY [--record]

DIRECTORY is a checkpoint of bench.synthetic with every real width: four layers, 256 experts, the whole
vocabulary. One step goes through the embedding, one Gated DeltaNet layer, one attention layer and the head;
the 35B has 30 and 10 such layers, so their counts are taken 30 and 10 times. What depends on the context is
run once for each. Lines and bytes are the same on every machine, to the few lines that a buffer begins or
ends within; sectors vary by some per cent with where buffers lie.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import record, run
from bench.synthetic_config import describe
from lily import _core, stages

DELTA_LAYERS, ATTENTION_LAYERS = 30, 10  # of the 35B
STEP = 4096  # tokens before the step that is looked at kernel by kernel


class Counts(NamedTuple):
    """Sums over dispatches: lines distinct within each, bytes that all threads together asked for."""

    lines: int  # of 64 bytes, read and written
    asked: int  # bytes
    accesses: int  # of SIMD-groups
    sectors: int  # of 32 bytes, in all accesses

    def __add__(self, other: tuple[int, ...]) -> "Counts":  # type: ignore[override]
        """Add each."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n: int) -> "Counts":
        """Multiply each."""
        return Counts(*(n * a for a in self))


class Bench:
    """A session of the instrumented simulator, and what a step of it was seen to do."""

    def __init__(self, directory: Path, kernels: str) -> None:
        """Load a checkpoint. kernels: an instrumented library of the GPU kernels."""
        given = {"device": "sim", "kernels": kernels, "prefill_chunk": "64"}
        self.session = _core.Session(_core.Weights(str(directory)), given)
        self.attention = _core.read_config(directory)["attention"].index(True)

    def step(self, context: int) -> list[_core.Dispatch]:
        """Decode one token after `context` that were never computed: what a step touches is the same."""
        state = self._state(context)
        self.session.extend(state, np.zeros(1, np.int32))
        self.session.sample(state, _core.Sampling())
        return self._seen()

    def attend(self, context: int) -> list[_core.Dispatch]:
        """Run attn_mix alone, the one op that depends on the context."""
        self.session._run("attn_mix", self.attention, [(self._state(context), np.zeros(1, np.int32))])
        self.session._finish()
        return self._seen()

    def _state(self, context: int) -> _core.State:
        state = self.session.new_state()
        self.session._advance(state, context)
        self._seen()
        return state

    def _seen(self) -> list[_core.Dispatch]:
        return self.session._recorded()


def count(dispatches: Iterable[_core.Dispatch]) -> Counts:
    """Add up what dispatches were seen to do."""
    total = Counts(0, 0, 0, 0)
    for dispatch in dispatches:
        for t in dispatch.memory:
            total += (t.read_lines + t.written_lines, t.asked_read + t.asked_written, t.accesses, t.sectors)
    return total


def layers_of(step: list[_core.Dispatch]) -> list[list[_core.Dispatch]]:
    """Split a step into what comes before the first layer, the layers, and what comes after the last."""
    parts: list[list[_core.Dispatch]] = [[]]
    for dispatch in step:
        if dispatch.kernel in ("gdn_in", "attn_in", "head"):
            parts.append([])
        parts[-1].append(dispatch)
    return parts


def of_the_35b(step: list[_core.Dispatch], attend: list[_core.Dispatch]) -> Counts:
    """Make the whole model's counts of a step of few layers, with attn_mix as in `attend`."""
    start, *layers, end = layers_of(step)
    if end[-1].kernel == "sample":  # which looks up the next token's row, so that embed is left out
        start = []
    delta = next(layer for layer in layers if layer[0].kernel == "gdn_in")
    attention = next(layer for layer in layers if layer[0].kernel == "attn_in")
    rest = [dispatch for dispatch in attention if not dispatch.kernel.startswith("attn_mix")]
    return (
        count(start)
        + count(delta).times(DELTA_LAYERS)
        + (count(rest) + count(attend)).times(ATTENTION_LAYERS)
        + count(end)
    )


def figures(counts: Counts) -> dict[str, float]:
    """Return what is recorded of counts, in megabytes."""
    in_bytes = {"lines": counts.lines * stages.LINE, "asked": counts.asked, "sectors": counts.sectors * 32}
    return {name: count / 1e6 for name, count in in_bytes.items()}


def measure(bench: Bench) -> Iterator[tuple[str, Counts, str]]:
    """Yield (case, counts, note) of every kernel of a step in one layer, and of the 35B's step by context."""
    step = bench.step(STEP)
    seen = {dispatch.kernel: dispatch for dispatch in reversed(step)}
    for dispatch in sorted(seen.values(), key=lambda d: d.stage):
        yield f"{dispatch.kernel}@{STEP}", count([dispatch]), "one layer"
    for context in stages.CONTEXTS:
        note = "30 x one Gated DeltaNet layer, 10 x one attention layer, embedding and head"
        yield f"step@{context}", of_the_35b(step, bench.attend(context)), note


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    options = parser.parse_args(arguments)
    kinds = set(_core.read_config(options.directory)["attention"])
    if kinds != {True, False}:
        raise ValueError(f"{options.directory}: wanted layers of both kinds, as bench.synthetic makes them")
    from tools.metal.compile import compile

    sources = sorted((record.ROOT / "metal").glob("*.metal"))
    bench = Bench(options.directory, str(compile(sources, instrumented=True)))
    about = {**describe(options.directory), "device": bench.session.device}
    for case, counts, note in measure(bench):
        for name, figure in figures(counts).items():
            print(record.line(f"{case} {name}", "MB", record.summarise([figure])), flush=True)
            if options.record:
                record.append(
                    bench="traffic",
                    case=f"{case} {name}",
                    unit="MB",
                    samples=[figure],
                    options=about,
                    note=note,
                )


if __name__ == "__main__":
    run(main)
