"""The ops of a pass, one by one, as measuring programs run them."""

from collections.abc import Mapping
from typing import Any

ATTENTION = ("attn_in", "attn_mix", "attn_out")
DELTA = ("gdn_in", "gdn_mix", "gdn_out")
MIXTURE = ("moe_route", "moe_up", "moe_down")


def of_layer(config: Mapping[str, Any], layer: int) -> list[tuple[str, int]]:
    """Return the ops of a layer, each with its number."""
    mixer = ATTENTION if config["attention"][layer] else DELTA
    return [(op, layer) for op in (*mixer, *MIXTURE)]


def of_pass(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the ops of a pass without its head."""
    return [("embed", 0), *(op for layer in range(config["layers"]) for op in of_layer(config, layer))]


def layers_with(config: Mapping[str, Any], op: str) -> list[int]:
    """Return the layers that have an op."""
    return [layer for layer in range(config["layers"]) if (op, layer) in of_layer(config, layer)]
