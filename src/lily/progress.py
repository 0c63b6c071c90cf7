"""What `progress=` means: nothing, a bar on a terminal, or the caller's own function."""

import sys
from collections.abc import Callable
from typing import TextIO

Report = Callable[[int, int], None]
"""Called between chunks with (tokens done, tokens in all). What it raises stops the work."""


def reporter(progress: bool | Report | None) -> Report | None:
    """Return the function to call between chunks, None for none.

    progress: None or False for none, True for a bar on stderr if that is a terminal, or a function of
    (tokens done, tokens in all).
    Raises TypeError for anything else.
    """
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"progress: wanted a bool or a function of (done, total), got {type(progress).__name__}"
        )
    if progress and sys.stderr is not None and sys.stderr.isatty():
        return lambda done, total: _bar(sys.stderr, done, total)
    return None


def _bar(stream: TextIO, done: int, total: int, width: int = 30) -> None:
    filled = width * done // max(total, 1)
    bar = "#" * filled + "." * (width - filled)
    stream.write(f"\rprompt [{bar}] {done}/{total} tokens" + ("\n" if done >= total else ""))
    stream.flush()
