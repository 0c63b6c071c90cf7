from collections.abc import Callable, Mapping
import os
from typing import Any

import numpy
import numpy.typing
from numpy.typing import NDArray


class Weights:
    """A checkpoint's files, checked and mapped."""

    def __init__(self, directory: str | os.PathLike[str]) -> None: ...

    @property
    def config(self) -> dict[str, Any]:
        """The model's dimensions."""

    @property
    def nbytes(self) -> int:
        """Bytes of the bound tensors."""

    @property
    def tensors(self) -> int:
        """How many are bound."""

    @property
    def skipped(self) -> int:
        """Vision and multi-token-prediction tensors, not read."""

    @property
    def warnings(self) -> list[str]: ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal checkpoints, however sharded."""

    def tensor_table(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of every bound tensor, under the core's names."""

    def tensor_bytes(self, name: str) -> bytes:
        """A copy of one bound tensor's bytes."""

class State:
    """Everything one sequence leaves behind after its tokens."""

    @property
    def length(self) -> int:
        """Tokens taken in so far."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory this state refers to, shared with forks or not."""

    @property
    def has_logits(self) -> bool:
        """Whether the logits of the last token are at hand."""

class Session:
    """A checkpoint on a device, and the loops that drive it."""

    def __init__(self, weights: Weights, options: Mapping[str, str]) -> None: ...

    @property
    def device(self) -> str:
        """The backend and its code path."""

    @property
    def threads(self) -> int:
        """Threads that share the work."""

    @property
    def scratch_bytes(self) -> int:
        """
        Bytes allocated besides weights and states; fixed when the session is made.
        """

    @property
    def options(self) -> dict[str, str]:
        """The options in force."""

    def new_state(self) -> State: ...

    def fork(self, state: State) -> State:
        """A copy that shares memory until one of the two is extended."""

    def extend(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None) -> None:
        """Take tokens in; the state then holds the last one's logits."""

    def sample(self, state: State, temperature: float, top_k: int, top_p: float, seed: int) -> int:
        """Draw the token that follows."""

    def step(self, state: State, token: int, temperature: float, top_k: int, top_p: float, seed: int) -> int:
        """Take a token in and draw the next."""

    def logits(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None) -> numpy.typing.NDArray[numpy.float32]:
        """Take tokens in; returns (T, V) float32, every row's logits."""

    def last_logits(self, state: State) -> NDArray[numpy.float32]:
        """The last token's logits, (V,) float32."""

    def layer_state(self, state: State, layer: int) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
        """
        A layer's state in float32: keys and values (G, T, Dh), or conv (C - 1, channels) and S (Hv, Dv, Dk).
        """

def option_list() -> list[tuple[str, str, str, str]]:
    """Every option: name, type, default, what it does."""
