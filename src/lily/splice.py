"""Earlier answers' own tokens in the prompts that follow.

A model may write a text with other tokens than a tokenizer would, and a call with other spaces than a
template does. A client sends back what it read, so the next prompt would part ways with what was taken in.
Where it says the same, the tokens that were written are put back.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.cache import Borders, Tokens
from lily.toolcalls import CLOSE, OPEN, CallReader

if TYPE_CHECKING:
    from lily.tokenizer import Tokenizer

_MOST = 1 << 20  # tokens of answers that are remembered
_SAME_PLACE = 8  # answers that are remembered to the same prompt

Said = list[bytes | int]
"""What tokens say: the bytes of texts, and the ids of the markers between them."""


class Splices:
    """The answers that a model wrote, by the prompts they were written to. Safe to call from any thread."""

    def __init__(self, tokenizer: "Tokenizer", borders: Borders) -> None:
        """Begin with none."""
        self._tokenizer = tokenizer
        self._borders = borders
        self._end = tokenizer.token_id("<|im_end|>")
        calls = {tokenizer.token_id(OPEN): OPEN.encode(), tokenizer.token_id(CLOSE): CLOSE.encode()}
        self._calls = {token: text for token, text in calls.items() if token is not None}
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, list[Tokens]] = OrderedDict()
        self._tokens = 0

    def remember(self, prompt: Tokens, answer: Sequence[int]) -> None:
        """Remember an answer to a prompt whose last message it goes on with."""
        begins = self._borders.answers(prompt)
        if not begins or not answer:
            return
        written = np.concatenate([prompt[begins[-1] :], np.asarray(answer, np.int32)])
        with self._lock:
            key = hashlib.blake2b(prompt[: begins[-1]].tobytes()).digest()
            known = self._answers.setdefault(key, [])
            self._answers.move_to_end(key)
            if any(np.array_equal(written, other) for other in known):
                return
            known.insert(0, written)  # the latest is the likeliest to come back
            self._tokens += len(written)
            for forgotten in known[_SAME_PLACE:]:
                self._tokens -= len(forgotten)
            del known[_SAME_PLACE:]
            while self._tokens > _MOST and len(self._answers) > 1:
                _, oldest = self._answers.popitem(last=False)
                self._tokens -= sum(map(len, oldest))

    def splice(self, tokens: Tokens, tools: Sequence[Mapping[str, Any]]) -> tuple[Tokens, int]:
        """Return a rendered prompt with the tokens that its answers were written with, and their number.

        tools: as check_tools returns them; they say what a call's text stands for.
        """
        pieces: list[Tokens] = []
        hasher = hashlib.blake2b()
        done = spliced = 0

        def add(piece: Tokens) -> None:
            pieces.append(piece)
            hasher.update(piece.tobytes())

        ends = [] if self._end is None else np.flatnonzero(tokens == self._end).tolist()
        for begin in self._borders.answers(tokens):
            end = next((end for end in ends if end >= begin), None)
            if end is None or begin < done:
                continue
            add(tokens[done:begin])
            rendered = tokens[begin:end]
            written = self._find(hasher.digest(), rendered, tools)
            if written is not None:
                spliced += len(written)
            add(rendered if written is None else written)
            done = end
        add(tokens[done:])
        return (np.concatenate(pieces), spliced) if spliced else (tokens, 0)

    def _find(self, key: bytes, rendered: Tokens, tools: Sequence[Mapping[str, Any]]) -> Tokens | None:
        """Return the answer in this place that says what was rendered by other tokens, if there is one."""
        with self._lock:
            known = list(self._answers.get(key, ()))
            if known:
                self._answers.move_to_end(key)
        if not known or any(np.array_equal(written, rendered) for written in known):
            return None
        said = self._said(rendered)
        for written in known:
            if self._same(self._said(written), said, tools):
                return written
        return None

    def _said(self, tokens: Tokens) -> Said:
        said: Said = []
        for token in tokens.tolist():
            if self._tokenizer.is_marker(token):
                said.append(token)
            elif said and isinstance(said[-1], bytes):
                said[-1] += self._tokenizer.token_bytes(token)
            else:
                said.append(self._tokenizer.token_bytes(token))
        return said

    def _same(self, written: Said, rendered: Said, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether two answers say the same: to the byte, but calls may be of equal value."""
        if written == rendered:
            return True
        if not tools:
            return False
        first, other = self._first_call(written), self._first_call(rendered)
        if written[:first] != rendered[:other]:
            return False
        calls = self._read_calls(written[first:], tools)
        return bool(calls) and calls == self._read_calls(rendered[other:], tools)

    def _first_call(self, said: Said) -> int:
        return next((at for at, piece in enumerate(said) if piece in self._calls), len(said))

    def _read_calls(self, said: Said, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]] | None:
        """Return the names and arguments of calls, None if there is more, or one is not whole."""
        if any(isinstance(piece, int) and piece not in self._calls for piece in said):
            return None
        spelled = [piece if isinstance(piece, bytes) else self._calls[piece] for piece in said]
        opened, closed = spelled.count(OPEN.encode()), spelled.count(CLOSE.encode())
        try:
            text = b"".join(spelled).decode()
        except UnicodeDecodeError:
            return None
        reader = CallReader(tools)
        before, _ = reader.push(text)
        behind, _ = reader.finish()
        if (before + behind).strip() or not reader.closed == opened == closed:
            return None
        return [(call.name, _canonical(call.parsed)) for call in reader.calls]


def _canonical(value: object) -> str:
    """Return a text that is equal for equal JSON values, and only for these: 1, 1.0 and true all differ."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
