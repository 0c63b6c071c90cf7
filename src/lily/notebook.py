"""How answers look in a notebook. IPython is imported only where it runs already."""

import html
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily.completion import Completion, Stream

_SECONDS = 0.1  # between two updates of a cell: a browser that is sent every token falls behind


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def html_of(done: "Completion") -> str:
    """Return an answer as HTML: its thoughts folded away, its text as it was written, the numbers below.

    What a model writes is never taken for HTML.
    """
    usage, timings = done.usage, done.timings
    facts = (
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f}/s"
    )
    end = "cut short" if done.finish_reason is None else done.finish_reason
    written = '<div style="white-space: pre-wrap">{}</div>'
    thoughts = ""
    if done.reasoning:
        # Open while there is nothing else to read.
        opened = "" if done.text else " open"
        thoughts = (
            f'<details{opened} style="opacity: 0.7"><summary>Thoughts</summary>'
            f"{written.format(html.escape(done.reasoning))}</details>"
        )
    return (
        f"{thoughts}{written.format(html.escape(done.text))}"
        f'<div style="opacity: 0.6; font-size: smaller">{facts}, {end}, seed {done.seed}</div>'
    )


def show(stream: "Stream") -> None:
    """Write a stream out in a cell, as it comes. Outside a notebook, leave it to its repr."""
    if not in_notebook():
        raise NotImplementedError  # IPython's word for "show me some other way"
    from IPython.display import display

    cell = display(stream.so_far(), display_id=True)  # type: ignore[no-untyped-call]
    shown = time.monotonic()
    try:
        for _ in stream:
            if time.monotonic() - shown > _SECONDS:
                cell.update(stream.so_far())
                shown = time.monotonic()
    finally:
        cell.update(stream.so_far())
