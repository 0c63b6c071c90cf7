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

class Sampling:
    """What tokens are drawn by; by default, the best each time."""

    def __init__(self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] = {}, seed: int = 0) -> None: ...

class History:
    """The tokens of an answer so far, counted for the penalties."""

    def __init__(self) -> None: ...

    def add(self, token: int) -> None:
        """Count a token once more; Session.step does so by itself."""

    @property
    def counts(self) -> dict[int, int]:
        """How often each token is there."""

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

    def extend(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None, interrupt: Callable[[], None] | None = None) -> None:
        """
        Take tokens in; the state then holds the last one's logits. progress is called between chunks, interrupt every 50 ms or so; what they raise ends the work.
        """

    def sample(self, state: State, sampling: Sampling, history: History | None = None, allowed: numpy.typing.NDArray[numpy.uint32] | None = None) -> int:
        """
        Draw the token that follows. allowed: a bit for each token, bit i % 32 of word i / 32 for token i.
        """

    def step(self, state: State, token: int, sampling: Sampling, history: History, allowed: numpy.typing.NDArray[numpy.uint32] | None = None) -> int:
        """Take a drawn token in, and into the history, and draw the next."""

    def logprobs(self, state: State, token: int, top: int) -> list[tuple[int, float]]:
        """
        (token, logprob) of a token that could follow, then of the `top` likeliest: the log-softmax of the last token's logits as they are.
        """

    def logits(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None, interrupt: Callable[[], None] | None = None) -> numpy.typing.NDArray[numpy.float32]:
        """Take tokens in; returns (T, V) float32, every row's logits."""

    def last_logits(self, state: State) -> NDArray[numpy.float32]:
        """The last token's logits, (V,) float32."""

    def layer_state(self, state: State, layer: int) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
        """
        A layer's state in float32: keys and values (G, T, Dh), or conv (C - 1, channels) and S (Hv, Dv, Dk).
        """

    def end(self) -> None:
        """Let calls under way end their threads at their next chance."""

    @property
    def calls(self) -> int: ...

def record_decode(directory: str | os.PathLike[str], position: int, options: Mapping[str, str]) -> list[tuple[str, int, int, int, int]]:
    """
    The dispatches of a decode step for a folder's config.json: kernel, stage, groups, threads, bytes bound.
    """

def option_list() -> list[tuple[str, str, str, str]]:
    """Every option: name, type, default, what it does."""
