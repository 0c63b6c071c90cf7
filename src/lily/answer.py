"""From tokens to what a reader sees: thoughts apart from text, and the end where a stop string begins.

Tool calls stay in the text, as the model wrote them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily.tokenizer import Tokenizer

MOST_STOPS = 64  # strings, each of which is looked for in every piece of an answer
THINK, END_THINK = "<think>", "</think>"


def thinks(tokens: Sequence[int], tokenizer: "Tokenizer") -> bool:
    """Return whether an answer to a prompt begins inside its thoughts.

    Templates of models that think write the opening <think> themselves, at the prompt's end.
    """
    think = tokenizer.token_id(THINK)
    borders = {tokenizer.token_id(END_THINK), tokenizer.token_id("<|im_start|>")}
    for token in reversed(tokens):
        if token == think or token in borders:
            return token == think
    return False


def check_stop(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises TypeError unless they are str, ValueError if one is empty
    or there are too many.
    """
    if stop is None:
        return ()
    if not isinstance(stop, str | Iterable) or isinstance(stop, bytes):
        raise TypeError(f"stop: wanted a str or a list of str, got {type(stop).__name__}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MOST_STOPS:
        raise ValueError(f"stop: wanted at most {MOST_STOPS} strings, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop: wanted a str or a list of str, got {string!r}")
        if not string:
            raise ValueError("stop: wanted at least one character, got ''; leave it out to stop nowhere")
    return strings


class Reader:
    """Reads an answer token by token. All that push and finish return, joined, is the answer.

    thinking: bool, whether the next token is part of the thoughts.
    stopped: str, the stop string that ended the answer, or None. What comes after it is not to be read.
    """

    def __init__(self, tokenizer: "Tokenizer", thinking: bool, stop: tuple[str, ...] = ()) -> None:
        """Begin an answer, inside its thoughts or not. Stop strings are looked for in the text alone."""
        self.thinking = thinking
        self.stopped: str | None = None
        self._think = tokenizer.token_id(THINK)
        self._end_think = tokenizer.token_id(END_THINK)
        self._decoder = tokenizer.decoder()
        self._stop = stop
        self._held = ""  # what may turn out to be a stop string, or the newlines that end the thoughts
        self._begun = False  # whether the thoughts, or the text, have a character other than a newline
        self._verbatim = not thinking  # whether newlines that begin the text belong to it

    def push(self, token: int) -> tuple[str, str]:
        """Take a token in; return the thoughts and the text that are certain with it, one of them ""."""
        if self.thinking and token == self._end_think:
            thoughts = self._add_thoughts(self._decoder.finish())
            self.thinking, self._held, self._begun = False, "", False
            return thoughts, ""
        if token == self._think and not self.thinking and not self._begun:
            self.thinking, self._verbatim = True, False
            return "", ""
        piece = self._decoder.push(token)
        return (self._add_thoughts(piece), "") if self.thinking else ("", self._add_text(piece))

    def finish(self) -> tuple[str, str]:
        """Return what was held back when the answer ends here."""
        if self.stopped is not None:
            return "", ""
        piece = self._decoder.finish()
        if self.thinking:
            return self._add_thoughts(piece), ""
        text = self._add_text(piece)
        held, self._held = self._held, ""
        return "", text if self.stopped is not None else text + held

    def _add_thoughts(self, piece: str) -> str:
        """Return the thoughts without the newlines that part them from their tags."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = text != ""
        certain = text.rstrip("\n")
        self._held = text[len(certain) :]
        return certain

    def _add_text(self, piece: str) -> str:
        """Return the text as far as no stop string can reach back into it."""
        if not self._begun:
            if not self._verbatim:
                piece = piece.lstrip("\n")
            self._begun = piece.strip() != ""
            self._verbatim = self._verbatim or piece != ""
        text = self._held + piece
        # The first to be complete ends the answer; of those that are so with the same character, the longest.
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of text are the beginning of stop, which text does not hold."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
