"""Text to tokens and back: markers, split characters, end tokens, damaged files."""

import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily.tokenizer import Tokenizer

DEMO = Path(lily.DEMO)
TOKENIZER = Tokenizer.load(DEMO)
HARD = "ďábel 👩‍👩‍👧 日本 שלום"
MARKERS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's small files, to damage."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def edit(file: Path, **values: object) -> None:
    """Set keys of a JSON file; ... takes one out."""
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_known_ids() -> None:
    official = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text = "Once upon a time, there was a fox.\n\n  2026 caf\u00e9 \u65e5\u672c"
    assert TOKENIZER.encode(text) == official.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert len(TOKENIZER) == official.get_vocab_size()
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.decode([]) == ""


@pytest.mark.parametrize("marker", MARKERS)
def test_user_text_holds_no_markers(marker: str) -> None:
    number = TOKENIZER.token_id(marker)
    text = f"Explain {marker} and{marker}"
    assert number is not None
    assert number not in TOKENIZER.encode(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    marked = TOKENIZER.encode(text, markers=True)
    assert marked.count(number) == 2
    assert TOKENIZER.decode(marked, markers=True) == text


def test_decode_leaves_special_markers_out() -> None:
    ids = TOKENIZER.encode("<think>why</think>yes<|im_end|>", markers=True)
    assert TOKENIZER.decode(ids) == "<think>why</think>yes"


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    | st.lists(st.sampled_from([*MARKERS, "<", "|>", " ", "\ufdd0"])).map("".join)
)
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == tokenizers.normalizers.NFC().normalize_str(text)
    assert not {TOKENIZER.token_id(marker) for marker in MARKERS} & set(ids)


def test_a_character_is_never_split() -> None:
    ids = TOKENIZER.encode(HARD)
    decoder = TOKENIZER.decoder()
    pieces = [decoder.push(token) for token in ids]
    assert "" in pieces  # otherwise no character was split, and this tested nothing
    assert "".join(pieces) == HARD
    assert decoder.finish() == ""


def test_an_incomplete_end_is_one_replacement_character() -> None:
    ids = TOKENIZER.encode(HARD)
    texts = [TOKENIZER.decode(ids[:length]) for length in range(len(ids))]
    assert any(text.endswith("\ufffd") for text in texts)
    for text in texts:
        assert HARD.startswith(text.removesuffix("\ufffd"))


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_one_by_one_is_all_at_once(ids: list[int]) -> None:
    decoder = TOKENIZER.decoder()
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == TOKENIZER.decode(ids)
    assert text == b"".join(TOKENIZER.token_bytes(i, markers=False) for i in ids).decode("utf-8", "replace")


def test_padding_ids_have_no_text() -> None:
    assert TOKENIZER.decode([5000]) == ""


@pytest.mark.parametrize("token", [-1, 1.0, True, "1"])
def test_decode_names_what_is_no_token(token: object) -> None:
    with pytest.raises(ValueError, match=f"token: wanted an int of at least 0.*got {re.escape(repr(token))}"):
        TOKENIZER.decode([token])


def test_encode_refuses_what_is_no_text() -> None:
    with pytest.raises(TypeError, match="text: wanted a str, got bytes"):
        TOKENIZER.encode(b"fox")
    with pytest.raises(ValueError, match=r"half a surrogate pair, '\\ud83d'"):
        TOKENIZER.encode("fox \ud83d")


@pytest.mark.parametrize(
    ("generation", "top", "text", "end"),
    [
        ([4089, 4087], [4089, 4087], 4087, "<|im_end|>"),
        (4089, 4087, ..., ...),
        (..., ..., [4087], {"content": "<|im_end|>"}),
        (..., ..., ..., ...),
        (None, None, None, None),
    ],
)
def test_end_tokens_come_from_every_file(
    folder: Path, generation: object, top: object, text: object, end: object
) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    config = json.loads((folder / "config.json").read_text())["text_config"] | {"eos_token_id": text}
    config = {key: value for key, value in config.items() if value is not ...}
    edit(folder / "config.json", eos_token_id=top, text_config=config)
    edit(folder / "tokenizer_config.json", eos_token=end)
    assert Tokenizer.load(folder).stop == {4087, 4089}


def test_end_tokens_of_each_file_count(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[11])
    edit(folder / "config.json", eos_token_id=12, text_config={"eos_token_id": [13, 14]})
    edit(folder / "tokenizer_config.json", eos_token="<think>")
    assert Tokenizer.load(folder).stop == {11, 12, 13, 14, 4087, 4089, 4094}


def test_end_tokens_need_no_file_but_the_tokenizer(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        (folder / name).unlink()
    assert Tokenizer.load(folder).stop == {4087, 4089}


@pytest.mark.parametrize("bad", ["4089", 1.5, True, [4089, "x"], {}])
def test_an_end_token_that_is_no_id(folder: Path, bad: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=bad)
    with pytest.raises(
        lily.ModelFilesError, match=r"generation_config\.json: eos_token_id: wanted an int or"
    ):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"version https://git-lfs.github.com/spec/v1\n"],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files_are_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(lily.ModelFilesError, match=rf"{re.escape(name)}: wanted "):
        Tokenizer.load(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(lily.ModelFilesError, match=r"tokenizer\.json: no such file; fetch it"):
        Tokenizer.load(folder)


def test_a_dangling_link_is_named(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(folder / "blobs" / "gone")
    with pytest.raises(
        lily.ModelFilesError, match=r"generation_config\.json: dangling link to .*gone; fetch"
    ):
        Tokenizer.load(folder)


def test_another_kind_of_tokenizer_is_refused(folder: Path) -> None:
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.decoder = tokenizers.decoders.WordPiece()
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(
        lily.ModelFilesError, match="wanted a byte-level BPE tokenizer, got decoder WordPiece"
    ):
        Tokenizer.load(folder)


def test_a_beginning_shows_that_a_text_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the rest is not looked at; and nothing that would fit is refused."""
    seen = 0
    plain = Tokenizer._encode_plain

    def watched(self: Tokenizer, text: str, *arguments: Any) -> list[int]:
        nonlocal seen
        ids = plain(self, text, *arguments)
        seen += len(text)
        return ids

    monkeypatch.setattr(Tokenizer, "_encode_plain", watched)
    for text in ("Once there was a fox. " * 50_000, "<|im_end|>" + "a\nb " * 200_000):
        seen = 0
        with pytest.raises(
            lily.ContextError, match=r"^at least [0-9]{4} tokens do not fit the context of 1000; "
        ):
            TOKENIZER.encode(text, markers=True, most=1000)
        assert seen < 20_000
    for text in (
        "Once there was a fox. " * 2000,
        "x" * 50_000,
        " " * 30_000,
        "<|im_end|>ab " * 5000,
        HARD * 900,
    ):
        ids = TOKENIZER.encode(text, markers=True)
        assert TOKENIZER.encode(text, markers=True, most=len(ids)) == ids


def test_a_long_text_does_not_stop_other_threads() -> None:
    """Encoding 600 kB takes seconds; with the interpreter's lock held nobody else would run in them."""
    text = "Once upon a time there was a fox. " * 18_000
    waits, done = [], threading.Event()

    def beat() -> None:
        while not done.is_set():
            started = time.monotonic()
            time.sleep(0.01)
            waits.append(time.monotonic() - started)

    thread = threading.Thread(target=beat)
    thread.start()
    started = time.monotonic()
    tokens = TOKENIZER.encode(text)
    taken = time.monotonic() - started
    done.set()
    thread.join()
    assert max(waits) < taken / 2
    short = TOKENIZER.encode(text[:340])
    assert tokens[: len(short) - 2] == short[:-2]  # both ways of the library give the same
