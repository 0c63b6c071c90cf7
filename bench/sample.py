"""Measures drawing one token, in milliseconds, from the vocabulary of the 35B.

    python -m bench.sample CHECKPOINT [--rounds 21] [--record]

CHECKPOINT only lends its backend: logits are normal, with forty tokens that stand out, as in a trained
model's. Every round goes through all cases, every other one backwards. A round before the first is not
counted.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import record, run
from lily import _core
from lily.speed import Case, alternate

VOCAB = 248_320
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "temperature": {"temperature": 1},
    "top_k 20, top_p 0.95": {"temperature": 1, "top_k": 20, "top_p": 0.95},
    "top_k 20, top_p 0.95, penalties": {"temperature": 1, "top_k": 20, "top_p": 0.95, **PENALTIES},
    "top_p 0.95": {"temperature": 1, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1, "min_p": 0.05},
    "temperature 1000, top_p 0.95": {"temperature": 1000, "top_p": 0.95},
}


def logits(vocab: int) -> NDArray[np.float32]:
    """Return (V,) float32."""
    rng = np.random.default_rng(0)
    x = 2 * rng.standard_normal(vocab, np.float32)
    x[rng.choice(vocab, 40, replace=False)] += np.linspace(6, 14, 40, dtype=np.float32)
    return x


def draw(session: Any, x: NDArray[np.float32], sampling: _core.Sampling, history: _core.History) -> float:
    """Draw one token; return the milliseconds."""
    started = time.perf_counter()
    session._sample_from(x, sampling, 0, history)
    return 1e3 * (time.perf_counter() - started)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.sample", description="Measure drawing a token.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=21, help="samples of each case")
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("wanted at least one round")

    session = _core.Session(_core.Weights(str(options.checkpoint)), {})
    x, history = logits(VOCAB), _core.History()
    for token in np.random.default_rng(1).integers(0, VOCAB, 1000):
        history.add(int(token))
    made: dict[str, Case] = {
        name: partial(draw, session, x, _core.Sampling(**given), history) for name, given in CASES.items()
    }
    for case, samples in alternate(made, options.rounds).items():
        print(record.line(case, "ms", record.summarise(samples)))
        if options.record:
            about = {"vocab": VOCAB, "device": session.device}
            record.append(bench="sample", case=case, unit="ms", samples=samples, options=about)


if __name__ == "__main__":
    run(main)
