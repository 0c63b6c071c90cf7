"""What `progress=` means: nothing, a bar where a person looks, or the caller's own function."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from lily.notebook import in_notebook

Report: TypeAlias = Callable[[int, int], None]
"""Called between chunks with (tokens done, tokens in all). What it raises stops the work."""

_DELAY = 0.5  # seconds; what is done sooner needs no bar


def reporter(progress: bool | Report | None) -> Report | None:
    """Return the function to call between chunks, None for none.

    progress: None or False for none; True for a bar on stderr if that is a terminal, or in a notebook's cell;
        or a function of (tokens done, tokens in all).
    Raises TypeError for anything else.
    """
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"progress: wanted a bool or a function of (done, total), got {type(progress).__name__}"
        )
    return _bar() if progress and watched() else None


def watched() -> bool:
    """Return whether a person looks at what is drawn: on a terminal, or in a notebook."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def bar_class() -> Any:
    """Return tqdm's class of bars, the notebook's in a notebook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has to draw with letters where ipywidgets are missing
        from tqdm.auto import tqdm
    return tqdm


def _bar() -> Report:
    tqdm = bar_class()
    bar = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc="prompt", unit=" tokens", delay=_DELAY, leave=False)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
