"""Lily runs Qwen3.6-35B-A3B from its MLX checkpoint.

>>> import lily
>>> model = lily.Model.load(lily.DEMO)
>>> print(model.generate("Tell me a story about a fox."))

Importing this package loads nothing else: every name below brings its own module in when it is first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from lily.errors import ContextError, DeviceError, LilyError, ModelFilesError

if TYPE_CHECKING:
    from lily.asynchronous import AsyncStream
    from lily.completion import Chunk, Completion, Stream, Timings, Usage
    from lily.logprobs import TokenLogprob
    from lily.model import Model, ModelInfo
    from lily.prefix import Prefix
    from lily.sampling import Sampling
    from lily.tokenizer import Tokenizer

    __version__: str

__all__ = [
    "DEMO",
    "AsyncStream",
    "Chunk",
    "Completion",
    "ContextError",
    "DeviceError",
    "LilyError",
    "Model",
    "ModelFilesError",
    "ModelInfo",
    "Prefix",
    "Sampling",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "Usage",
    "__version__",
]

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo", "lily-tales-22m-4bit")
"""Folder of the embedded checkpoint (str). It tells little stories and does nothing else."""

_MODULES = {
    "AsyncStream": "asynchronous",
    "Chunk": "completion",
    "Completion": "completion",
    "Stream": "completion",
    "Timings": "completion",
    "Usage": "completion",
    "TokenLogprob": "logprobs",
    "Model": "model",
    "ModelInfo": "model",
    "Prefix": "prefix",
    "Sampling": "sampling",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    """Import the module that owns a public name, the first time the name is used."""
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("lily-llm")
    elif name in _MODULES:
        value = getattr(import_module(f"lily.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'lily' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not yet imported among them."""
    return sorted(__all__)
