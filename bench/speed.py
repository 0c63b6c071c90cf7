"""Measures prefill and decode in tokens per second.

    python -m bench.speed DIRECTORY [--prefill 128,512,2048] [--decode 128,2048] [--steps 32] [--rounds 5]
                                    [--option NAME=VALUE ...] [--record]

prefill@N takes N random tokens into an empty state; decode@N writes greedily after N of them. Every round
goes through all cases, every other one backwards, so that a machine that slows down slows all of them. A
round before the first is not counted.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import record
from bench.synthetic_config import describe
from lily import _core

Case = Callable[[], float]  # takes one sample, in tok/s
BEST = _core.Sampling()  # the best token each time


def prefill(session: _core.Session, tokens: NDArray[np.int32]) -> float:
    """Take tokens into an empty state; return tokens per second."""
    state = session.new_state()
    started = time.perf_counter()
    session.extend(state, tokens)
    return len(tokens) / (time.perf_counter() - started)


def decode(session: _core.Session, state: _core.State, steps: int) -> float:
    """Write `steps` tokens after a state, which is left as it is; return tokens per second."""
    grown = session.fork(state)
    history = _core.History()
    token = session.sample(grown, BEST)
    token = session.step(grown, token, BEST, history)  # copies what the fork shared, so it is not counted
    started = time.perf_counter()
    for _ in range(steps):
        token = session.step(grown, token, BEST, history)
    return steps / (time.perf_counter() - started)


def cases(
    session: _core.Session, vocab: int, prefills: list[int], contexts: list[int], steps: int
) -> dict[str, Case]:
    """Return what to measure, by name, with the states that decoding starts from already made."""
    tokens = np.random.default_rng(0).integers(0, vocab, max(prefills + contexts), dtype=np.int32)
    made: dict[str, Case] = {}
    for length in prefills:
        made[f"prefill@{length}"] = partial(prefill, session, tokens[:length])
    for context in contexts:
        state = session.new_state()
        session.extend(state, tokens[:context])
        made[f"decode@{context}"] = partial(decode, session, state, steps)
    return made


def alternate(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Take `rounds` samples of each case in turns, after one that is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(rounds + 1):
        names = list(cases) if k % 2 == 0 else list(cases)[::-1]
        for name in names:
            figure = cases[name]()
            if k > 0:
                samples[name].append(figure)
    return samples


def _lengths(text: str) -> list[int]:
    parts = text.split(",") if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"wanted lengths of at least 1, such as 128,2048, got {text}")
    return [int(part) for part in parts]


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, got {text}")
    return name, value


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description="Measure prefill and decode.")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--prefill", type=_lengths, default=[128, 512, 2048], help="lengths, with commas between"
    )
    parser.add_argument("--decode", type=_lengths, default=[128, 2048], help="contexts, with commas between")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a decode sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case")
    parser.add_argument(
        "--option", type=_option, action="append", default=[], help="an option of Lily, NAME=VALUE"
    )
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1 or not options.prefill + options.decode:
        parser.error("wanted at least one step, one round and one length")

    weights = _core.Weights(str(options.directory))
    session = _core.Session(weights, dict(options.option))
    made = cases(session, weights.config["vocab"], options.prefill, options.decode, options.steps)
    about = {**describe(options.directory), "device": session.device, **dict(options.option)}
    print(f"{options.directory}: {about}")
    for case, samples in alternate(made, options.rounds).items():
        print(record.line(case, "tok/s", record.summarise(samples)))
        if options.record:
            record.append(bench="speed", case=case, unit="tok/s", samples=samples, options=about)


if __name__ == "__main__":
    main()
