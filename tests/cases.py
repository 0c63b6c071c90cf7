"""The one list of op cases: which op, on which checkpoint, for how many rows, after how long a past.

A case feeds an op what reference.py feeds it, and compares what it writes, and the state it leaves, with what
reference.py gets. Every backend passes every case. Draws are cases of the op `sample`, which must
agree exactly.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily import reference

Array = NDArray[Any]

# The reference's function of each op, with the activations it reads and writes; "state" is the layer's.
OPS: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "gdn_in": (reference.gdn_in, ("x",), ("qkv", "z", "b", "a")),
    "gdn_mix": (reference.gdn_mix, ("qkv", "b", "a", "state"), ("y", "state")),
    "gdn_out": (reference.gdn_out, ("x", "y", "z"), ("x",)),
    "attn_in": (reference.attn_in, ("x",), ("qg", "k", "v")),
    "attn_mix": (reference.attn_mix, ("qg", "k", "v", "state"), ("y", "state")),
    "attn_out": (reference.attn_out, ("x", "y"), ("x",)),
    "moe_route": (reference.moe_route, ("x",), ("h", "router", "shared_gate", "shared")),
    "moe_up": (reference.moe_up, ("h", "router"), ("expert", "weight", "hidden")),
    "moe_down": (
        lambda layer, x, *routed: reference.moe_down(layer, x, reference.Routed(*routed)),
        ("x", "shared_gate", "shared", "expert", "weight", "hidden"),
        ("x",),
    ),
}

ROWS = (1, 2, 3, 31, 32, 33, 63, 65, 257)  # around the sizes that kernels block by
PASTS = (0, 1, 255, 300)  # around a page of keys and values; two of them also shorter than the convolution


@dataclass(frozen=True)
class Case:
    """One op on the first layer of its kind (the fourth layer for attention), T rows after `past` tokens."""

    op: str
    checkpoint: str
    rows: int
    past: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.checkpoint}-{self.rows}-after-{self.past}"


def cases() -> list[Case]:
    """Return every case. Rows and pasts are crossed where a state is read, and on one checkpoint only."""
    found = []
    for op, (_, reads, _) in OPS.items():
        for checkpoint in ("tiny", "small", "demo"):
            pasts = PASTS if "state" in reads else (0,)
            if checkpoint == "tiny":
                found += [Case(op, checkpoint, rows, past) for rows in ROWS for past in pasts]
            else:
                found += [
                    Case(op, checkpoint, rows, past)
                    for rows in (1, 2, 33, 65)
                    for past in {pasts[0], pasts[-1]}
                ]
    return found


def inputs(case: Case, config: reference.Config, widths: dict[str, int], seed: int = 0) -> dict[str, Array]:
    """Draw the activations that an op reads: normal, but for chosen experts and their weights."""
    rng = np.random.default_rng([seed, case.rows, case.past, len(case.op)])
    _, reads, _ = OPS[case.op]
    mixer = config.heads * config.head_dim if case.op == "attn_out" else config.value_heads * config.value_dim
    widths = {
        **widths,
        "y": mixer,
    }  # both kinds of mixer share the activation, the narrower one fills its front
    drawn = {
        name: rng.standard_normal((case.rows, widths[name])).astype(np.float32)
        for name in reads
        if name != "state"
    }
    if "expert" in drawn:
        ranked = rng.permuted(np.tile(np.arange(config.experts), (case.rows, 1)), axis=1)
        drawn["expert"] = ranked[:, : config.experts_per_token].astype(np.float32)
        drawn["weight"] = rng.dirichlet(np.ones(config.experts_per_token), case.rows).astype(np.float32)
    return drawn


@dataclass(frozen=True)
class Draw:
    """A token to draw: the arguments of reference.sample, with Sampling's as a dict."""

    logits: Array  # (V) float32
    sampling: dict[str, Any]
    position: int
    history: list[int]  # the tokens generated before
    allowed: Array | None  # (V / 32) uint32

    @property
    def counts(self) -> dict[int, int]:
        return dict(Counter(self.history))


def draws(count: int, vocabs: Sequence[int] = (1, 2, 3, 4, 5, 31, 32, 33, 100, 1000, 4097)) -> Iterator[Draw]:
    """Make `count` cases of sampling. All but a few have ties, extreme numbers or excluded tokens."""
    for number in range(count):
        rng = np.random.default_rng([number, *vocabs])
        vocab = int(rng.choice(vocabs))
        sampling: dict[str, Any] = {
            "temperature": float(rng.choice([0, 1e-6, 1e-3, 0.3, 1, 1.5, 10, 1e3])),
            "top_k": int(rng.choice([0, 1, 2, 20, 50, vocab, vocab + 5, 2**31 - 1])),
            "top_p": float(rng.choice([0, 1e-9, 0.1, 0.5, 0.95, 0.999999, 1])),
            "min_p": float(rng.choice([0, 0, 0, 1e-12, 0.01, 0.5, 1])),
            "seed": int(rng.integers(0, 2**64, dtype=np.uint64)),
        }
        history: list[int] = []
        if rng.random() < 0.5:
            sampling["repetition_penalty"] = float(rng.choice([1, 0.01, 0.5, 1.1, 100]))
            sampling["presence_penalty"] = float(rng.choice([0, -2, 0.7, 2]))
            sampling["frequency_penalty"] = float(rng.choice([0, -0.3, 0.1, 2]))
            history = rng.integers(0, vocab, rng.integers(0, 50)).tolist()
        if rng.random() < 0.5:
            tokens = rng.integers(0, vocab, 5).tolist()
            sampling["logit_bias"] = dict(
                zip(tokens, rng.choice([-np.inf, -100, -1, 0.5, 100], 5), strict=True)
            )
        allowed = None
        if rng.random() < 0.3:
            allowed = rng.integers(0, 2**32, (vocab + 31) // 32, dtype=np.uint32)
        yield Draw(_logits(rng, vocab), sampling, int(rng.integers(0, 2**40)), history, allowed)


def _logits(rng: np.random.Generator, vocab: int) -> Array:
    """Draw logits of one kind: normal and of any size, with ties, equal, zeros of both signs, subnormal."""
    x = (10.0 ** rng.uniform(-6, 3) * rng.standard_normal(vocab)).astype(np.float32)
    kind = rng.integers(0, 7)
    if kind == 0:
        x = np.round(x)
    elif kind == 1:
        x[:] = x[0]
    elif kind == 2:
        x = np.where(rng.random(vocab) < 0.5, np.float32(0), np.float32(-0.0))
    elif kind == 3:
        x = rng.choice(x[:3], vocab)
    elif kind == 4:
        x *= np.float32(1e-41)
    elif kind == 5:
        x = rng.choice(np.array([3.4e38, -3.4e38, 1], np.float32), vocab)
    return x
