"""The exceptions Lily raises beside Python's own. The core raises them by these names."""


class LilyError(RuntimeError):
    """Base of every error that is Lily's own."""


class ModelFilesError(LilyError):
    """A checkpoint is missing, incomplete, damaged, or not one that Lily reads."""


class ContextError(LilyError):
    """A prompt or a generation does not fit the model's context."""


class DeviceError(LilyError):
    """The device refused or failed."""
