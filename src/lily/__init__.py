"""Lily runs Qwen3.6-35B-A3B from its MLX checkpoint.

>>> import lily
>>> model = lily.Model.load(lily.DEMO)
>>> print(model.generate("Tell me a story about a fox."))

Importing this package loads nothing else: every name below brings its own module in when it is first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from lily.errors import (
    ContextError,
    DeadlineError,
    DeviceError,
    LilyError,
    MemoryLimitError,
    ModelFilesError,
    PrefixFileError,
    PrefixMismatchError,
    QueueFullError,
    UnsupportedPlatformError,
)

if TYPE_CHECKING:
    from lily.asynchronous import AsyncStream
    from lily.cache import CacheStats
    from lily.completion import Chunk, Completion, Stream, Timings, Usage
    from lily.logprobs import TokenLogprob
    from lily.model import Model, ModelInfo
    from lily.prefix import Prefix
    from lily.sampling import Sampling
    from lily.scheduler import QueueStats
    from lily.server import Server, asgi
    from lily.tokenizer import Tokenizer
    from lily.toolcalls import ToolCall, ToolCallDelta

    __version__: str

__all__ = [
    "DEMO",
    "AsyncStream",
    "CacheStats",
    "Chunk",
    "Completion",
    "ContextError",
    "DeadlineError",
    "DeviceError",
    "LilyError",
    "MemoryLimitError",
    "Model",
    "ModelFilesError",
    "ModelInfo",
    "Prefix",
    "PrefixFileError",
    "PrefixMismatchError",
    "QueueFullError",
    "QueueStats",
    "Sampling",
    "Server",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "UnsupportedPlatformError",
    "Usage",
    "__version__",
    "asgi",
]

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo", "lily-tales-22m-4bit")
"""Folder of the embedded checkpoint (str). It tells little stories and does nothing else."""

_MODULES = {
    "AsyncStream": "asynchronous",
    "CacheStats": "cache",
    "Chunk": "completion",
    "Completion": "completion",
    "Stream": "completion",
    "Timings": "completion",
    "Usage": "completion",
    "TokenLogprob": "logprobs",
    "Model": "model",
    "ModelInfo": "model",
    "Prefix": "prefix",
    "QueueStats": "scheduler",
    "Sampling": "sampling",
    "Server": "server",
    "asgi": "server",
    "Tokenizer": "tokenizer",
    "ToolCall": "toolcalls",
    "ToolCallDelta": "toolcalls",
}


def __getattr__(name: str) -> object:
    """Import the module that owns a public name, the first time the name is used."""
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("lily-llm")
    elif name in _MODULES:
        try:
            value = getattr(import_module(f"lily.{_MODULES[name]}"), name)
        except ImportError:
            _check_core()
            raise
    else:
        raise AttributeError(f"module 'lily' has no attribute {name!r}")
    globals()[name] = value
    return value


def _check_core() -> None:
    """Raise UnsupportedPlatformError if it is the core that can't be imported."""
    try:
        import_module("lily._core")
    except ImportError as error:
        from lily.platforms import explained

        raise explained(error) from error


def __dir__() -> list[str]:
    """List the public names, those not yet imported among them."""
    return sorted(__all__)
