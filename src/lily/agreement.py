"""How far two runs of a model agree: what the precision contract is stated in, and what `lily agree` prints.

Both are teacher-forced: each is given the same text, and asked after every token what it would have put next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lily import _core

LEAST = 192  # positions, as many as the article compared
ROWS = 256  # whose logits are held at a time: of the 35B, a quarter of a gigabyte
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


class Side(Protocol):
    """A run of a model. name: str, what it runs on."""

    name: str

    def blocks(self, tokens: NDArray[np.int32]) -> Iterator[Array]:
        """Yield the logits (ROWS or fewer, V) after each of tokens, from the start."""
        ...


class Lily:
    """A checkpoint in Lily, with some options."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        """Load it."""
        self._session = _core.Session(_core.Weights(str(folder)), dict(options))
        said = [f"{name}={value}" for name, value in options.items() if name not in ("device", "kernels")]
        self.name = " ".join(["lily", self._session.device, *said])

    def blocks(self, tokens: NDArray[np.int32]) -> Iterator[Array]:
        """Yield the logits (ROWS or fewer, V) after each of tokens, from the start."""
        state = self._session.new_state()
        for begin in range(0, len(tokens), ROWS):
            yield self._session.logits(state, tokens[begin : begin + ROWS])


@dataclass(frozen=True)
class Agreement:
    """What came of a comparison over a text."""

    ours: str
    theirs: str
    positions: int
    same_best: float  # share of positions
    our_perplexity: float
    their_perplexity: float
    mean_kl: float  # KL(theirs || ours), nats

    @property
    def perplexity_difference(self) -> float:
        """By how many per cent our perplexity is above theirs."""
        return 100 * (self.our_perplexity / self.their_perplexity - 1)

    def __str__(self) -> str:
        """Say it in a few lines, the article's two figures first."""
        return "\n".join(
            (
                f"{self.ours} against {self.theirs}, teacher-forced over {self.positions} positions",
                f"same best token   {100 * self.same_best:.3f} %",
                f"perplexity        {self.our_perplexity:.6g} against {self.their_perplexity:.6g} "
                f"({self.perplexity_difference:+.4f} %)",
                f"mean KL           {self.mean_kl:.4g} nat",
            )
        )


def compare(ours: Side, theirs: Side, tokens: Sequence[int] | NDArray[np.int32]) -> Agreement:
    """Run both over a text.

    Raises ValueError if it has fewer positions than are worth comparing.
    """
    ids = np.asarray(tokens, np.int32)
    if len(ids) < LEAST:
        raise ValueError(f"text: wanted at least {LEAST} tokens, got {len(ids)}")
    same, kl, given = [], [], ([], [])  # type: ignore[var-annotated]
    begin = 0
    for mine, other in zip(ours.blocks(ids), theirs.blocks(ids), strict=True):
        following = ids[begin : begin + len(mine) + 1]  # the last block has nothing after its last position
        same.append(mine.argmax(-1) == other.argmax(-1))
        kl.append(kl_divergence(other, mine))
        for side, logits in zip(given, (mine, other), strict=True):
            rows = logits[: len(following) - 1]
            side.append(log_softmax(rows)[np.arange(len(rows)), following[1:]])
        begin += len(mine)
    mine_given, other_given = (np.concatenate(side) for side in given)
    return Agreement(
        ours.name,
        theirs.name,
        len(ids),
        float(np.concatenate(same).mean()),
        perplexity(mine_given),
        perplexity(other_given),
        float(np.concatenate(kl).mean()),
    )
