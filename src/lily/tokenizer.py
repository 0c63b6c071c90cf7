"""Text to token ids and back, from a checkpoint's tokenizer.json.

Markers such as <|im_end|> and <think> are tokens of their own, which only the chat template may write. A
user's text is never searched for them; letters that spell one stay letters.
"""

import codecs
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from lily.errors import ContextError, ModelFilesError
from lily.files import read_bytes, read_json
from lily.sampling import integer

# Put behind every character of a message at which a marker could begin, so that whatever the template then
# does to the text, only the template's own markers match. A noncharacter: Unicode keeps it for a program's
# private use.
_GUARD = "\ufdd0"
_GUARDED = re.compile(f"{_GUARD}({_GUARD}?)")  # a guard that was in the text is doubled

LONG = 10_000  # characters of a text that takes a while to encode
_CHARACTERS = 6  # a token: more than prose has, so that a text that has as many for all tokens has too many
_MARGIN = 64  # tokens by which a beginning's may differ from the whole text's
_BORDER = re.compile(r"\S(\s)(?=\S)")  # between two words


class Tokenizer:
    """The byte-level BPE tokenizer of a checkpoint.

    stop: frozenset of int, the tokens that end an answer: every end token that any file of the checkpoint
        names, <|im_end|> and <|endoftext|>.
    digest: str, SHA-256 of the file it was read from, "" if it was read from none.
    """

    def __init__(self, core: tokenizers.Tokenizer, stop: Iterable[int] = (), digest: str = "") -> None:
        """Wrap a tokenizer of the tokenizers library; Tokenizer.load makes one from a checkpoint."""
        added = core.get_added_tokens_decoder()
        self._core = core
        # The same model without the added tokens. The library's own switch, encode_special_tokens, leaves
        # <think> and <tool_call> in, since their entries aren't flagged as special.
        self._plain = tokenizers.Tokenizer(core.model)
        self._plain.normalizer = core.normalizer
        self._plain.pre_tokenizer = core.pre_tokenizer
        self._markers = {token.content: number for number, token in added.items()}
        self._marker_ids = frozenset(added)
        self._special = frozenset(number for number, token in added.items() if token.special)
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._starts = re.escape("".join(sorted({marker[0] for marker in self._markers})))
        self.stop = frozenset(stop)
        self.digest = digest

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint.

        Raises ModelFilesError if tokenizer.json is missing, damaged or of another kind.
        """
        file = folder / "tokenizer.json"
        text = read_bytes(file)
        if text is None:
            raise ModelFilesError(f"{file}: no such file; fetch it from where the checkpoint came from")
        try:
            core = tokenizers.Tokenizer.from_buffer(text)
        except Exception as error:  # the library raises nothing narrower
            raise ModelFilesError(f"{file}: wanted a tokenizer, got {error}; fetch the file again") from error
        if not isinstance(core.decoder, tokenizers.decoders.ByteLevel):
            raise ModelFilesError(
                f"{file}: wanted a byte-level BPE tokenizer, got decoder {type(core.decoder).__name__}; "
                "it does not belong to a Qwen3.6 checkpoint"
            )
        return cls(core, _stop_tokens(folder, core), hashlib.sha256(text).hexdigest())

    def __len__(self) -> int:
        """Return the number of tokens that have a text; a model's vocabulary may be padded beyond it."""
        return self._core.get_vocab_size()

    def __repr__(self) -> str:
        """Show the sizes."""
        return f"<lily.Tokenizer: {len(self)} tokens, {len(self._markers)} of them markers>"

    def encode(self, text: str, *, markers: bool = False, most: int | None = None) -> list[int]:
        """Return the token ids of a text.

        markers: also turn the text of a marker, such as "<|im_end|>", into its token. Never for a text that
            came from somebody else.
        most: int, how many may be of use: ContextError if a beginning of the text shows that there are more.
        Raises TypeError if text is no str, ValueError if it can't be written in UTF-8.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: wanted a str, got {type(text).__name__}")
        return self._encode_markers(text, most=most) if markers else self._encode_plain(text, most=most)

    def decode(self, tokens: Iterable[int], *, markers: bool = False) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD.

        markers: write out the special ones too; those not flagged as special, such as <think>, always are.
        Raises ValueError for an id that is no int or is negative.
        """
        if not isinstance(tokens, Iterable):
            raise TypeError(f"tokens: wanted token ids, got {type(tokens).__name__}")
        decoder = self.decoder(markers=markers)
        return "".join([decoder.push(token) for token in tokens]) + decoder.finish()

    def decoder(self, *, markers: bool = False) -> "Decoder":
        """Return a decoder that takes one token at a time."""
        return Decoder(self, markers)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is written as `text`, markers included; None if there is none."""
        if not isinstance(text, str):
            raise TypeError(f"text: wanted a str, got {type(text).__name__}")
        try:
            return self._core.token_to_id(text)
        except UnicodeEncodeError:  # half a surrogate pair, which no token holds
            return None

    def is_marker(self, token: int) -> bool:
        """Return whether a token is a marker, whose text no message can spell."""
        return token in self._marker_ids

    def token_bytes(self, token: int, *, markers: bool = True) -> bytes:
        """Return the UTF-8 bytes, perhaps part of a character only, that a token stands for.

        markers: False for no bytes from a token flagged as special. A padding id has none either.
        Raises ValueError for what is no int or is negative.
        """
        token = integer("token", token, 0, 2**32)
        if token in self._special and not markers:
            return b""
        text = self._core.id_to_token(token)
        if text is None:
            return b""
        if text in self._markers:
            return text.encode()
        return b"".join([_BYTES.get(character) or character.encode() for character in text])

    def guard(self, text: str) -> str:
        """Return a message's text such that no marker can be found in it, for the chat template to render."""
        text = text.replace(_GUARD, _GUARD + _GUARD)
        return re.sub(f"([{self._starts}])", rf"\1{_GUARD}", text) if self._starts else text

    def encode_guarded(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of a rendered template: its markers as tokens, guarded text as plain text."""
        return self._encode_markers(text, guarded=True, most=most)

    def _encode_markers(self, text: str, *, guarded: bool = False, most: int | None = None) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._marker.finditer(text):
            ids += self._encode_plain(text[start : match.start()], guarded, most, len(ids))
            ids.append(self._markers[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:], guarded, most, len(ids))

    def _encode_plain(
        self, text: str, guarded: bool = False, most: int | None = None, before: int = 0
    ) -> list[int]:
        if guarded:
            text = _GUARDED.sub(r"\1", text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: wanted Unicode text, got half a surrogate pair, {text[error.start]!r}; "
                "decode its bytes with errors='replace'"
            ) from None
        if most is not None:
            self._check_length(text, most, before)
        if len(text) < LONG:
            return self._plain.encode(text, add_special_tokens=False).ids
        # Of the library's calls only the one for many texts lets other threads go on: a second for 300 kB.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _check_length(self, text: str, most: int, before: int) -> None:
        """Raise ContextError if a text has more tokens than may be, as far as its beginning shows."""
        found = before
        beginning = _CHARACTERS * (max(0, most - before) + _MARGIN)
        if before <= most + _MARGIN and len(text) > max(beginning, LONG):
            # Tokens end where words do, so those of the beginning are the whole text's, but for the last few.
            words = [match.start(1) for match in _BORDER.finditer(text, max(0, beginning - LONG), beginning)]
            if words:
                found += len(self._encode_plain(text[: words[-1]]))
        if found > most + _MARGIN:
            raise ContextError(
                f"at least {found - _MARGIN} tokens do not fit the context of {most}; shorten the prompt"
            )


class Decoder:
    """Turns tokens into text one at a time, and never gives out part of a character."""

    def __init__(self, tokenizer: Tokenizer, markers: bool = False) -> None:
        """Start at the beginning of a text; Tokenizer.decoder is the way to make one."""
        self._tokenizer = tokenizer
        self._markers = markers
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take a token in and return the text that is complete with it, perhaps none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token, markers=self._markers))

    def finish(self) -> str:
        """Return what is left at the end: one U+FFFD if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)


def _stop_tokens(folder: Path, core: tokenizers.Tokenizer) -> set[int]:
    """Gather the end tokens that a checkpoint's files name, each of which may know only some of them."""
    stop: set[int] = set()
    config = folder / "config.json"
    fields: list[tuple[Path, dict[str, Any]]] = [
        (folder / "generation_config.json", read_json(folder / "generation_config.json")),
        (config, read_json(config)),
        (config, read_json(config).get("text_config") or {}),
    ]
    for file, values in fields:
        found = values.get("eos_token_id") if isinstance(values, dict) else None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        for number in ids:
            if isinstance(number, bool) or not isinstance(number, int):
                raise ModelFilesError(f"{file}: eos_token_id: wanted an int or a list of ints, got {found!r}")
            stop.add(number)
    end = read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    for text in (end, "<|im_end|>", "<|endoftext|>"):
        number = core.token_to_id(text) if isinstance(text, str) else None
        if number is not None:
            stop.add(number)
    return stop


def _byte_alphabet() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; characters from U+0100 for the other bytes, in order.
    Source: the encoder of GPT-2, which every byte-level BPE file follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(0x100)} - {*printable})
    characters = [*map(chr, printable), *(chr(0x100 + i) for i in range(len(others)))]
    return {character: bytes([byte]) for character, byte in zip(characters, printable + others, strict=True)}


_BYTES = _byte_alphabet()
