"""Measures prefill and decode in tokens per second.

    python -m bench.speed DIRECTORY [--prefill 128,512,2K] [--decode 128,2K] [--steps 32] [--rounds 5]
                                    [--option NAME=VALUE ...] [--record [FILE]]

prefill@N takes N random tokens into an empty state; decode@N writes greedily after N of them. Every round
goes through all cases, every other one backwards, so that a machine that slows down slows all of them. A
round before the first is not counted.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import record, run
from bench.synthetic_config import describe
from lily import _core, stages
from lily.speed import Case, alternate, decode, prefill


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


def lengths(text: str) -> list[int]:
    """Read lengths of a command line, such as 128,2K."""
    try:
        found = [stages.tokens(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if 0 in found:
        raise argparse.ArgumentTypeError(f"wanted lengths of at least 1, such as 128,2K, got {text}")
    return found


def option(text: str) -> tuple[str, str]:
    """Read an option of a command line, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, got {text}")
    return name, value


def about(directory: Path, session: _core.Session, options: Mapping[str, str]) -> dict[str, Any]:
    """Return what a record says of a session: its checkpoint, its device and its other options."""
    rest = {name: value for name, value in options.items() if name not in ("device", "kernels")}
    return {**describe(directory), "device": session.device, **rest}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description="Measure prefill and decode.")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--prefill", type=lengths, default=[128, 512, 2048], help="lengths, with commas between"
    )
    parser.add_argument("--decode", type=lengths, default=[128, 2048], help="contexts, with commas between")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a decode sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case")
    parser.add_argument(
        "--option", type=option, action="append", default=[], help="an option of Lily, NAME=VALUE"
    )
    record.add_option(parser)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1 or not options.prefill + options.decode:
        parser.error("wanted at least one step, one round and one length")

    weights = _core.Weights(str(options.directory))
    session = _core.Session(weights, dict(options.option))
    made = cases(session, weights.config["vocab"], options.prefill, options.decode, options.steps)
    about = {**describe(options.directory), "device": session.device, **dict(options.option)}
    print(f"{options.directory}: {about}")
    for case, samples in alternate(made, options.rounds).items():
        record.keep(
            options.record,
            bench="speed",
            case=case,
            unit="tok/s",
            samples=samples,
            options=about,
            device=session.device,
        )


if __name__ == "__main__":
    run(main)
