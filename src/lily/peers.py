"""Other engines, run on the same checkpoint in the same process, for `lily bench` and `lily agree`."""

import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily.agreement import ROWS
from lily.errors import LilyError
from lily.speed import Tokens


class MlxLm:
    """mlx-lm, on the device that MLX chose."""

    def __init__(self, folder: Path) -> None:
        """Load a checkpoint. Raises LilyError if mlx-lm is not installed."""
        try:
            import mlx.core as mx
            from mlx.utils import tree_map
            from mlx_lm.generate import generate_step
            from mlx_lm.models.cache import make_prompt_cache
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise LilyError(f"mlx-lm cannot be used: {error}; pip install mlx-lm") from error
        self._mx: Any = mx
        self._generate_step: Callable[..., Any] = generate_step
        self._make_cache: Callable[..., Any] = make_prompt_cache
        self._model: Any = load_model(folder)[0]
        self.name = f"mlx-lm {_version('mlx-lm')}"
        if mx.default_device() == mx.Device(mx.cpu):  # where bfloat16 sums err by per cents
            self.name += " float32"
            widened = tree_map(
                lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
                self._model.parameters(),
            )
            self._model.update(widened)

    def trial(self, tokens: Tokens, steps: int) -> tuple[float, float]:
        """Take tokens in and write `steps`, as stream_generate does; return tokens per second of either."""
        started = time.perf_counter()
        written = self._generate_step(self._mx.array(tokens), self._model, max_tokens=steps + 2)
        next(written)
        first = time.perf_counter()
        next(written)  # as one of Lily's, not counted
        second = time.perf_counter()
        for _ in range(steps):
            next(written)
        ended = time.perf_counter()
        self._mx.clear_cache()
        return len(tokens) / (first - started), steps / (ended - second)

    def blocks(self, tokens: Tokens) -> Iterator[NDArray[Any]]:
        """Yield the logits (ROWS or fewer, V) after each of tokens, from the start."""
        cache = self._make_cache(self._model)
        for begin in range(0, len(tokens), ROWS):
            rows = self._model(self._mx.array(tokens[begin : begin + ROWS])[None], cache=cache)
            yield np.array(rows[0].astype(self._mx.float32))


PEERS = {"mlx-lm": MlxLm}


def load(name: str, folder: Path) -> MlxLm:
    """Load a checkpoint in another engine.

    Raises ValueError for one that is not known here, LilyError for one that is not installed.
    """
    if name not in PEERS:
        raise ValueError(f"peer: wanted one of {', '.join(PEERS)}, got {name!r}")
    return PEERS[name](folder)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
