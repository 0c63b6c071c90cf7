"""How the next token is drawn: the numbers, their defaults from the checkpoint, and their checks.

The drawing itself is the core's; its random numbers depend on seed and position alone.
"""

import secrets
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lily.errors import ModelFilesError
from lily.files import read_json


@dataclass(frozen=True, slots=True)
class Sampling:
    """The numbers a token is drawn by. The defaults are those of the published Qwen3.6-35B-A3B.

    temperature: float in [0, 1000]; 0 takes the likeliest token.
    top_k: int >= 0, how many of the likeliest tokens to draw from; 0 for all.
    top_p: float in [0, 1], the probability that the tokens drawn from hold together; 1 for all.
    seed: int in [0, 2**64).
    Raises ValueError for anything else.
    """

    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each value, and turn NumPy's numbers into Python's."""
        checked = {
            "temperature": number("temperature", self.temperature, 1000),
            "top_k": integer("top_k", self.top_k, 0, 2**31),
            "top_p": number("top_p", self.top_p, 1),
            "seed": integer("seed", self.seed, 0, 2**64),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, folder: Path) -> "Sampling":
        """Read a checkpoint's own defaults from generation_config.json, if it has one.

        Raises ModelFilesError if a value in it makes no sense.
        """
        file = folder / "generation_config.json"
        config = read_json(file)
        values = {
            name: config[name] for name in ("temperature", "top_k", "top_p") if config.get(name) is not None
        }
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            return cls(**values)
        except ValueError as error:
            raise ModelFilesError(f"{file}: {error}") from error

    def resolve(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> "Sampling":
        """Return these numbers with those given in their place; without a seed, a random one."""
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
            secrets.randbits(64) if seed is None else seed,
        )


def number(name: str, value: Any, most: float) -> float:
    """Return a number from 0 to `most` as a float; ValueError, which names it, for anything else."""
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not (valid and 0 <= value <= most):
        raise ValueError(f"{name}: wanted a number from 0 to {most}, got {value!r}")
    return float(value)


def integer(name: str, value: Any, least: int, end: int) -> int:
    """Return a whole number of [least, end) as an int; ValueError, which names it, for anything else."""
    valid = isinstance(value, Integral) and not isinstance(value, bool)
    if not (valid and least <= value < end):
        raise ValueError(f"{name}: wanted an int of at least {least} and below {end}, got {value!r}")
    return int(value)
