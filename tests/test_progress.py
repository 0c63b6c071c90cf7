"""Bars are drawn where a person looks, and nowhere else; nothing is ever written to stdout."""

import os
import subprocess
import sys
import termios

import pytest

CODE = """
import lily, lily.progress
lily.progress._DELAY = {delay}
model = lily.Model.load(lily.DEMO, prefill_chunk=32)
model.prefill([5] * 64, progress={progress})
model.generate([5] * 64, max_tokens=2, progress={progress})
"""


def drawn(progress: bool, delay: float) -> tuple[bytes, str]:
    """Return what such a program writes to stdout, and to the terminal that stderr is."""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 80))
    code = CODE.format(progress=progress, delay=delay)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=end, check=True)
    os.write(end, b"\0")  # so that there is something to read
    text = ""
    while not text.endswith("\0"):
        text += os.read(terminal, 10_000).decode()
    os.close(terminal)
    os.close(end)
    return done.stdout, text.removesuffix("\0")


def test_a_bar_counts_the_prompts_tokens_on_a_terminal() -> None:
    stdout, text = drawn(progress=True, delay=0)
    assert stdout == b""
    assert text.count("prompt:") >= 2
    assert "0/64 [" in text
    assert text.endswith("\r")  # it leaves nothing behind


@pytest.mark.parametrize(("progress", "delay"), [(False, 0), (True, 60)])
def test_no_bar_unasked_nor_for_what_is_done_at_once(progress: bool, delay: float) -> None:
    assert drawn(progress, delay) == (b"", "")


def test_no_bar_without_a_terminal() -> None:
    code = CODE.format(progress=True, delay=0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
