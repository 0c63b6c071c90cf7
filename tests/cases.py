"""The one list of op cases: which op, on which checkpoint, for how many rows, after how long a past.

A case feeds an op what reference.py feeds it, and compares what it writes, and the state it leaves, with what
reference.py gets. Every backend passes every case.
"""

from collections.abc import Callable
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
