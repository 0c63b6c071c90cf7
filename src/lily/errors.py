"""The exceptions Lily raises beside Python's own. The core raises them by these names."""


class LilyError(RuntimeError):
    """Base of every error that is Lily's own."""


class UnsupportedPlatformError(LilyError):
    """Lily's core can't be loaded here: another system, processor or Python than it was built for."""


class ModelFilesError(LilyError):
    """A checkpoint is missing, incomplete, damaged, or not one that Lily reads."""


class ContextError(LilyError):
    """A prompt or a generation does not fit the model's context."""


class MemoryLimitError(LilyError):
    """What was asked for would take more memory than is allowed."""


class PrefixFileError(LilyError):
    """A prefix can't be saved, or a saved one can't be read: missing, damaged, of another kind."""


class PrefixMismatchError(PrefixFileError):
    """A saved prefix is whole, but of other weights, another tokenizer or another way to run the model."""


class DeviceError(LilyError):
    """The device refused or failed."""


class QueueFullError(LilyError):
    """As many requests wait for the model as may; try again later.

    active, waiting: int, requests at work and in the queue.
    retry_after: int, seconds after which there may be room, by how long the last requests took.
    """

    def __init__(self, message: str, active: int, waiting: int, retry_after: int) -> None:
        """Hold the message and its numbers."""
        super().__init__(message)
        self.active, self.waiting, self.retry_after = active, waiting, retry_after


class DeadlineError(LilyError, TimeoutError):
    """A request took longer than its `timeout` allows."""


def how_to_install(extra: str) -> str:
    """Return the command that brings an extra's packages."""
    return f"pip install '.[{extra}]' in a checkout of Lily, or `make .venv/extra-{extra}` for its own .venv"
