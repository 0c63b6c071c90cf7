"""How far two runs of a model agree: what the precision contract is stated in."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def log_softmax(logits: ArrayLike) -> Array:
    """Return log probabilities over the last axis, float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def top1_agreement(truth: Array, other: Array) -> float:
    """Return the share of positions at which two runs' logits (T, V) put the same token first."""
    return float(np.mean(truth.argmax(-1) == other.argmax(-1)))


def kl_divergence(truth: Array, other: Array) -> Array:
    """Return KL(truth || other) in nats at each position, (T), of two runs' logits (T, V)."""
    p, q = log_softmax(truth), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def perplexity(log_probabilities: ArrayLike) -> float:
    """Return exp(-mean) of the log probabilities that a run gave to the tokens that came."""
    return float(np.exp(-np.mean(np.asarray(log_probabilities, np.float64))))


def target_log_probabilities(logits: ArrayLike, tokens: ArrayLike) -> Array:
    """Return (T - 1) log probabilities that logits (T, V) after each of tokens (T) gave to the next token."""
    following = np.asarray(tokens)[1:]
    return log_softmax(logits)[np.arange(len(following)), following]
