"""How far two runs of a model agree: what the precision contract is stated in, and how the core keeps it.

    python -m bench.agree [--record]

The vectors compared with are mlx-lm's in float32; tests/golden says how they were made.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bench import record

Array = NDArray[Any]


def log_softmax(logits: ArrayLike) -> Array:
    """Return log probabilities over the last axis, float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def top1_agreement(truth: Array, other: Array) -> float:
    """Return the share of positions at which two runs' logits (T, V) put the same token first."""
    return float(np.mean(truth.argmax(-1) == other.argmax(-1)))


def kl_divergence(truth: Array, other: Array) -> Array:
    """Return KL(truth || other) in nats at each position, (T), of two runs' logits (T, V)."""
    p, q = log_softmax(truth), log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def perplexity(log_probabilities: ArrayLike) -> float:
    """Return exp(-mean) of the log probabilities that a run gave to the tokens that came."""
    return float(np.exp(-np.mean(np.asarray(log_probabilities, np.float64))))


def target_log_probabilities(logits: ArrayLike, tokens: ArrayLike) -> Array:
    """Return (T - 1) log probabilities that logits (T, V) after each of tokens (T) gave to the next token."""
    following = np.asarray(tokens)[1:]
    return np.asarray(log_softmax(logits)[np.arange(len(following)), following])


ROOT = Path(__file__).parent.parent
DEMO = ROOT / "src" / "lily" / "demo" / "lily-tales-22m-4bit"
GOLDEN = ROOT / "tests" / "golden"


def core_logits(directory: Path, windows: Array, options: dict[str, str]) -> tuple[str, Array]:
    """Run the core over windows (N, T) of tokens; return its device and float32 logits (N, T, V)."""
    from lily import _core

    session = _core.Session(_core.Weights(directory), options)
    return session.device, np.stack([session.logits(session.new_state(), window) for window in windows])


def text_figures(logits: Array, golden: dict[str, Array]) -> dict[str, tuple[str, float]]:
    """Compare logits over the held-out text with what mlx-lm recorded of it; return case: (unit, figure)."""
    pairs = zip(logits, golden["tokens"], strict=True)
    ours = perplexity(np.stack([target_log_probabilities(*pair) for pair in pairs]))
    theirs = perplexity(golden["target_log_probability"])
    shown = logits.reshape(-1, logits.shape[-1])[golden["shown"]]
    return {
        "demo, same best token": ("%", 100 * float(np.mean(logits.argmax(-1) == golden["top1"]))),
        "demo, perplexity difference": ("%", 100 * (ours / theirs - 1)),
        "demo, mean KL": ("nat", float(kl_divergence(golden["shown_logits"], shown).mean())),
    }


def random_figures(preset: str, options: dict[str, str]) -> tuple[str, dict[str, tuple[str, float]]]:
    """Compare logits of a random checkpoint over its recorded tokens; return the device and the figure."""
    with np.load(GOLDEN / f"{preset}.npz") as golden:
        directory = ROOT / "tests" / "checkpoints" / preset
        device, logits = core_logits(directory, golden["random_tokens"][None], options)
        largest = float(np.abs(logits[0] - golden["random_logits"]).max())
    return device, {f"{preset}, largest logit difference": ("logit", largest)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.agree", description="Compare the core with what mlx-lm computes in float32."
    )
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    keep = parser.parse_args(arguments).record
    with np.load(GOLDEN / "demo.npz") as file:
        golden = dict(file)
    for kv in ("bf16", "f32"):
        options = {"kv": kv}
        device, logits = core_logits(DEMO, golden["tokens"], options)
        runs = [(device, text_figures(logits, golden))]
        if kv == "f32":
            runs += [random_figures(preset, options) for preset in ("tiny", "small")]
        for device, figures in runs:
            for case, (unit, figure) in figures.items():
                print(f"kv={kv} {record.line(case, unit, record.summarise([figure]))}")
                if keep:
                    against = "mlx-lm 0.32.2, float32, over " + (
                        f"{golden['tokens'].size} positions" if case.startswith("demo") else "70 positions"
                    )
                    record.append(
                        bench="agree",
                        case=case,
                        unit=unit,
                        samples=[figure],
                        options={**options, "device": device},
                        note=against,
                    )


if __name__ == "__main__":
    main()
