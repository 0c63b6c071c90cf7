"""What each technique is worth: every option of the core that has an alternative, flipped alone, end to end.

    python -m bench.ablate DIRECTORY [--option device=cuda --option kernels=FILE ...] [--only NAME,...]
                           [--prefill 512,2K] [--decode 3840,32K,64K,128K] [--steps 32] [--rounds 5]
                           [--record [FILE]]

The list of options is the core's own, so that a new one cannot be forgotten. Two sessions are loaded at a
time: the one with all defaults stays, the other has one option changed. Every round measures both, every
other one in the opposite order, and gives one sample: by how many per cent the default is faster, which is
the technique's gain. Both decode after the same states, which the first session takes in once. What an
option of prefill alone could do to decoding is not measured, nor the other way round.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

import lily
from bench import record, run
from bench.speed import lengths, option
from bench.synthetic_config import describe
from lily import _core
from lily.speed import Tokens, decode, prefill


@dataclass(frozen=True)
class Flip:
    """One option with another value, and what of a run it may change."""

    name: str
    value: str
    phases: tuple[str, ...]


def flips(only: Sequence[str] = ()) -> Iterator[Flip]:
    """Yield every alternative of every technique, in the core's order.

    An option's text begins with where it matters: "GPU prefill: ...", "GPU decode: ..."; if not, everywhere.
    Raises ValueError for a name in `only` that has no alternatives.
    """
    alternatives = _core.option_alternatives()
    for name in only:
        if not alternatives.get(name):
            known = ", ".join(key for key, values in alternatives.items() if values)
            raise ValueError(f"{name}: wanted an option with alternatives: {known}")
    for name, _, _, text in _core.option_list():
        where = [phase for phase in ("prefill", "decode") if phase in text.partition(":")[0].lower()]
        for value in alternatives[name] if not only or name in only else ():
            yield Flip(name, value, tuple(where) or ("prefill", "decode"))


class Side:
    """A session, and the states that it decodes after."""

    def __init__(self, weights: _core.Weights, options: Mapping[str, str]) -> None:
        """Load weights with some options."""
        self.session = _core.Session(weights, dict(options))
        self.states: dict[int, _core.State] = {}
        self._files: dict[int, tuple[IO[bytes], int, int]] = {}
        self._open = ExitStack()

    def take_in(self, contexts: Sequence[int], tokens: Tokens) -> None:
        """Make the states after the first of tokens, each going on from the one before."""
        state = self.session.new_state()
        for context in sorted(contexts):
            self.session.extend(state, tokens[state.length : context])
            self.states[context] = self.session.fork(state)

    def take_over(self, other: "Side", tokens: Tokens) -> None:
        """Have the states of another session; take in anew what can't be read in this one's layout."""
        mine, theirs = self.session, other.session
        if (mine.state_order, mine.state_sizes) != (theirs.state_order, theirs.state_sizes):
            return self.take_in(list(other.states), tokens)
        for context in other.states:
            file, recurrent, logits = other.written(context)
            size = os.fstat(file.fileno()).st_size
            (self.states[context],) = mine.restore(file.fileno(), size, 0, [(context, recurrent, logits)])

    def written(self, context: int) -> tuple[IO[bytes], int, int]:
        """Return a file with a state's memory, written once, and where recurrent states and logits begin."""
        if context not in self._files:
            pages, recurrent, logits = self.session.parts(self.states[context])
            assert logits is not None
            file = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by close()
            for part in (*pages, recurrent, logits):
                file.write(part.data)
            file.flush()
            at = sum(page.nbytes for page in pages)
            self._files[context] = file, at, at + recurrent.nbytes
        return self._files[context]

    def close(self) -> None:
        """Remove the files."""
        self._open.close()


@dataclass(frozen=True)
class Shape:
    """What is measured: the lengths of prompts, the contexts decoded after, and how often."""

    prefill: Sequence[int]
    decode: Sequence[int]
    steps: int
    rounds: int

    def cases(self, phases: Sequence[str]) -> list[str]:
        """Name the cases of some phases."""
        return [
            f"{phase}@{length}"
            for phase, those in (("prefill", self.prefill), ("decode", self.decode))
            for length in (those if phase in phases else ())
        ]


def rate(side: Side, case: str, tokens: Tokens, steps: int) -> float:
    """Measure one case once."""
    phase, length = case.split("@")
    if phase == "prefill":
        return prefill(side.session, tokens[: int(length)])
    return decode(side.session, side.states[int(length)], steps)


def compare(
    default: Side, other: Side, flip: Flip, shape: Shape, tokens: Tokens
) -> dict[str, list[tuple[float, float]]]:
    """Return (default, flipped) rates of every round, by case; a first round is not counted."""
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in shape.cases(flip.phases)}
    for k in range(shape.rounds + 1):
        sides = (default, other) if k % 2 == 0 else (other, default)
        for case in list(found) if k % 2 == 0 else list(found)[::-1]:
            rates = {id(side): rate(side, case, tokens, shape.steps) for side in sides}
            if k > 0:
                found[case].append((rates[id(default)], rates[id(other)]))
    return found


def flipped(
    weights: _core.Weights,
    base: Mapping[str, str],
    flip: Flip,
    shape: Shape,
    default: Side,
    tokens: Tokens,
) -> dict[str, list[tuple[float, float]]]:
    """Load the model with an option flipped, compare it with the default, and let it go."""
    side = Side(weights, {**base, flip.name: flip.value})
    if "decode" in flip.phases:
        side.take_over(default, tokens)
    return compare(default, side, flip, shape, tokens)


def keep(
    to: str | None,
    flip: Flip,
    found: Mapping[str, list[tuple[float, float]]],
    device: str,
    about: dict[str, Any],
) -> None:
    """Print the gains, and record them if that was asked for."""
    for case, pairs in found.items():
        mine, others = (statistics.median(side) for side in zip(*pairs, strict=True))
        record.keep(
            to,
            bench="ablate",
            case=f"{flip.name}={flip.value}, {case}",
            unit="%",
            samples=[100 * (a / b - 1) for a, b in pairs],
            options=about,
            note=f"{mine:.5g} tok/s by default, {others:.5g} so",
            device=device,
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablate", description="Flip each option alone.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefill", type=lengths, default=[512, 2048], help="prompts, with commas between")
    parser.add_argument(
        "--decode",
        type=lengths,
        default=[3840, 32768, 65536, 131072],
        help="contexts, with commas between",
    )
    parser.add_argument("--steps", type=int, default=32, help="tokens of a decode sample")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of samples of each case")
    parser.add_argument("--only", default="", help="options to flip, with commas between; all by default")
    parser.add_argument("--option", type=option, action="append", default=[], help="of both, NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.rounds < 1 or not given.prefill + given.decode:
        parser.error("wanted at least one step, one round and one length")
    try:
        wanted = list(flips([name for name in given.only.split(",") if name]))
    except ValueError as error:
        parser.error(str(error))

    shape, base = Shape(given.prefill, given.decode, given.steps, given.rounds), dict(given.option)
    weights = _core.Weights(str(given.directory))
    default = Side(weights, base)
    size = max(*given.prefill, *given.decode, 0)
    tokens = np.random.default_rng(0).integers(0, weights.config["vocab"], size, dtype=np.int32)
    default.take_in(given.decode, tokens)
    device = default.session.device
    about = {**describe(given.directory), "device": device}
    about |= {name: value for name, value in base.items() if name not in ("device", "kernels")}
    print(f"{given.directory}: {about}; gains of the default, in per cent")
    failed = []
    for flip in wanted:
        print(f"{flip.name}={flip.value}", flush=True)
        try:
            keep(given.record, flip, flipped(weights, base, flip, shape, default, tokens), device, about)
        except lily.LilyError as error:  # the others are worth their time all the same
            failed.append(f"{flip.name}={flip.value}: {error}")
    default.close()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    run(main)
