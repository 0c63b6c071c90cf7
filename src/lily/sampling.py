"""How the next token is drawn: the numbers, their defaults from the checkpoint, and their checks.

The drawing itself is the core's; docs/sampling.md has its formulas.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict

from lily import _core
from lily.errors import ModelFilesError
from lily.files import read_json


class SamplingArguments(TypedDict, total=False):
    """What a call may say about sampling. None, or nothing, leaves it to the checkpoint."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The numbers a token is drawn by. The defaults are those of the published Qwen3.6-35B-A3B.

    temperature: float in [0, 1000]; 0 takes the likeliest token.
    top_k: int >= 0, how many of the likeliest tokens to draw from; 0 for all.
    top_p: float in [0, 1], the probability that the tokens drawn from hold together; 1 for all.
    min_p: float in [0, 1], the least probability to draw from, as a part of the likeliest token's; 0 for all.
    repetition_penalty: float in [0.01, 100]; the logit of a token of the answer is divided by it, or, if
        negative, multiplied; 1 for none.
    presence_penalty, frequency_penalty: float in [-2, 2], taken off the logit of a token of the answer once,
        and each time that it is there; 0 for none.
    logit_bias: dict of token ids, as int or str, and addends to their logits, in [-100, 100]; -inf excludes a
        token.
    seed: int in [0, 2**64).
    Raises ValueError for anything else.
    """

    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each value, and turn NumPy's numbers into Python's."""
        checked = {
            "temperature": number("temperature", self.temperature, 0, 1000),
            "top_k": integer("top_k", self.top_k, 0, 2**31),
            "top_p": number("top_p", self.top_p, 0, 1),
            "min_p": number("min_p", self.min_p, 0, 1),
            "repetition_penalty": number("repetition_penalty", self.repetition_penalty, 0.01, 100),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": biases("logit_bias", self.logit_bias),
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
        values = {name: config[name] for name in cls().numbers() if config.get(name) is not None}
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            return cls(**values)
        except ValueError as error:
            raise ModelFilesError(f"{file}: {error}") from error

    def numbers(self) -> dict[str, float]:
        """Return what a checkpoint may set: all but logit_bias and seed."""
        return {name: value for name, value in asdict(self).items() if name not in ("logit_bias", "seed")}

    def resolve(self, given: SamplingArguments) -> "Sampling":
        """Return these numbers with those given in their place; without a seed, a random one.

        Raises TypeError for a name that is none of them.
        """
        known = {name: getattr(self, name) for name in (each.name for each in fields(self))}
        for name in given:
            if name not in known:
                raise TypeError(f"unexpected argument {name!r}; of sampling there are {', '.join(known)}")
        said = {name: value for name, value in given.items() if value is not None}
        return Sampling(**(known | {"seed": secrets.randbits(64)} | said))

    def core(self) -> _core.Sampling:
        """Return the core's form of it."""
        return _core.Sampling(**asdict(self))


def number(name: str, value: Any, least: float, most: float) -> float:
    """Return a number of [least, most] as a float; ValueError, which names it, for anything else."""
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not (valid and least <= value <= most):
        raise ValueError(f"{name}: wanted a number from {least} to {most}, got {value!r}")
    return float(value)


def integer(name: str, value: Any, least: int, end: int) -> int:
    """Return a whole number of [least, end) as an int; ValueError, which names it, for anything else."""
    valid = isinstance(value, Integral) and not isinstance(value, bool)
    if not (valid and least <= value < end):
        raise ValueError(f"{name}: wanted an int of at least {least} and below {end}, got {value!r}")
    return int(value)


def biases(name: str, value: Any) -> dict[int, float]:
    """Return addends by token id; JSON has the ids as text. ValueError, which names it, for anything else."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: wanted a dict of token ids and numbers, got {value!r}")
    found = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key
        token = integer(f"{name}: a token id", token, 0, 2**31)
        if token in found:
            raise ValueError(f"{name}: wanted each token once, got {token} twice")
        found[token] = -math.inf if bias == -math.inf else number(f"{name}[{key!r}]", bias, -100, 100)
    return found
