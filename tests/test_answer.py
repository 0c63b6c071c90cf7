"""Reading an answer: thoughts, text, stop strings and whole characters, however it was cut into tokens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily.answer import Reader, check_stop, thinks
from lily.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(lily.DEMO))
THINK, END_THINK, IM_START, IM_END = (
    TOKENIZER.token_id(marker) for marker in ("<think>", "</think>", "<|im_start|>", "<|im_end|>")
)
TOKENS: dict[bytes, int] = {}  # by the bytes they stand for
for number in reversed(range(len(TOKENIZER))):
    TOKENS[TOKENIZER.token_bytes(number)] = number
LONGEST = max(map(len, TOKENS))
END = "\N{PILE OF POO}END"  # stands for the token </think> in what follows


def cut(text: str, choose: "st.DataObject | None") -> list[int]:
    """Return tokens of a text, cut anywhere; whole characters or not. END is the token </think>."""
    tokens: list[int] = []
    for i, part in enumerate(text.split(END)):
        tokens += [END_THINK] if i else []
        data = part.encode()
        while data:
            lengths = [n for n in range(1, LONGEST + 1) if TOKENS.get(data[:n], END_THINK) < 4087]
            length = choose.draw(st.sampled_from(lengths)) if choose else lengths[0]
            tokens.append(TOKENS[data[:length]])
            data = data[length:]
    return tokens


def read(tokens: list[int], thinking: bool, stop: tuple[str, ...] = ()) -> tuple[str, str, str | None]:
    """Return thoughts, text and the stop string found."""
    reader = Reader(TOKENIZER, thinking, stop)
    pieces = []
    for token in tokens:
        pieces.append(reader.push(token))
        assert not all(pieces[-1])
        if reader.stopped is not None:
            break
    pieces.append(reader.finish())
    thoughts, text = ("".join(parts) for parts in zip(*pieces, strict=True))
    return thoughts, text, reader.stopped


def wanted(text: str, thinking: bool, stop: tuple[str, ...]) -> tuple[str, str, str | None]:
    """Say the same of a whole answer, in the plainest way."""
    thoughts = ""
    if thinking:
        thoughts, ended, text = text.partition(END)
        thoughts = thoughts.strip("\n")
        text = text.lstrip("\n") if ended else ""
    text = text.replace(END, "</think>")
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return thoughts, text[: end - len(longest)], longest
    return thoughts, text, None


PIECES = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        "\n",
        "\n\n",
        " ",
        "fox",
        "é",
        "日本",
        "👩‍👩‍👧",
        "\N{FOX FACE}",
        "<think>x",
        "</think>",
        END,
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
STOPS = st.lists(
    st.sampled_from(
        ["a", "ab", "abab", "b\n", "\n\n", "fox", "ox", "日", "👩", "本a", "é👩‍👩‍👧", "zz", "</think>"]
    ),
    max_size=5,
).map(tuple)


@given(TEXTS, st.booleans(), STOPS, st.data())
def test_any_cut_of_an_answer_reads_the_same(
    text: str, thinking: bool, stop: tuple[str, ...], data: st.DataObject
) -> None:
    want = wanted(text, thinking, stop)
    assert read(cut(text, data), thinking, stop) == want
    assert read(cut(text, None), thinking, stop) == want


@given(TEXTS, STOPS, st.data())
def test_what_was_given_out_was_certain(text: str, stop: tuple[str, ...], data: st.DataObject) -> None:
    """No part of a stop string, no part of a character, nothing that a later token takes back."""
    want = wanted(text, False, stop)[1]
    reader = Reader(TOKENIZER, False, stop)
    given_out = ""
    for token in cut(text, data):
        given_out += reader.push(token)[1]
        assert want.startswith(given_out)
        assert "\ufffd" not in given_out
        if reader.stopped is not None:
            break
    assert given_out + reader.finish()[1] == want


@pytest.mark.parametrize(
    ("text", "stop", "want", "stopped"),
    [
        ("alpha beta gamma delta", ["beta gamma"], "alpha ", "beta gamma"),
        ("alpha beta gam", ["beta gamma"], "alpha beta gam", None),
        ("alpha beta gambeta gamma", ["beta gamma"], "alpha beta gam", "beta gamma"),
        ("abc", ["c"], "ab", "c"),
        ("ab👩‍👩‍👧c", ["👩‍👩‍👧"], "ab", "👩‍👩‍👧"),
        ("ab日本c", ["日"], "ab", "日"),
        ("aab", ["ab"], "a", "ab"),
        ("xabcd", ["abcd", "bc"], "xa", "bc"),
        ("xabc", ["bc", "abc", "c"], "x", "abc"),
        ("one two three four five", ["six", "five", "four", "three", "seven"], "one two ", "three"),
        ("", ["a"], "", None),
        ("aaa", ["aaaa"], "aaa", None),
        ("aaaa", ["aaaa"], "", "aaaa"),
    ],
)
def test_a_stop_string_ends_the_answer_before_itself(
    text: str, stop: list[str], want: str, stopped: str | None
) -> None:
    for tokens in (TOKENIZER.encode(text), cut(text, None)):
        assert read(tokens, False, check_stop(stop)) == ("", want, stopped)


@pytest.mark.parametrize(
    ("text", "thinking", "want"),
    [
        (f"plan{END}\n\nanswer", True, ("plan", "answer")),
        (f"\nplan\n\nmore\n{END}answer\n", True, ("plan\n\nmore", "answer\n")),
        ("answer", False, ("", "answer")),
        ("\n answer", False, ("", "\n answer")),
        ("plan, cut sho", True, ("plan, cut sho", "")),
        (f"plan{END}", True, ("plan", "")),
        (f"{END}\n\nanswer", True, ("", "answer")),
        (f"plan{END}\n\n\n  answer{END}", True, ("plan", "  answer</think>")),
        ("the letters </think> are no tag", True, ("the letters </think> are no tag", "")),
    ],
)
def test_thoughts_are_told_from_the_text(text: str, thinking: bool, want: tuple[str, str]) -> None:
    """The opening tag is the prompt's, so an answer begins within its thoughts; the tags are in neither."""
    assert read(cut(text, None), thinking)[:2] == want


def test_a_model_may_open_its_thoughts_itself() -> None:
    plan, answer = TOKENIZER.encode("plan"), TOKENIZER.encode("answer")
    assert read([THINK, *plan, END_THINK, *answer], False)[:2] == ("plan", "answer")
    assert read([*answer, THINK, *plan, END_THINK], False)[:2] == ("", "answer<think>plan</think>")


def test_stop_strings_are_not_looked_for_in_thoughts() -> None:
    tokens = cut(f"one two{END}\n\nthree two four", None)
    assert read(tokens, True, ("two",)) == ("one two", "three ", "two")
    assert read(tokens, True, ("two\n\nthree", "\n\nthree")) == ("one two", "three two four", None)


def test_a_character_cut_at_the_end_is_one_replacement() -> None:
    fox = cut("\N{FOX FACE}", None)
    assert len(fox) == 4
    assert read(fox[:3], False) == ("", "\ufffd", None)
    assert read([*fox[:3], END_THINK, *fox], True) == ("\ufffd", "\N{FOX FACE}", None)


def test_where_an_answer_begins_is_read_off_the_prompt() -> None:
    assert not thinks([], TOKENIZER)
    assert not thinks([1, 2], TOKENIZER)
    assert thinks([IM_START, 1, THINK, 2], TOKENIZER)
    assert not thinks([IM_START, 1, THINK, 2, END_THINK, 2], TOKENIZER)
    assert not thinks([THINK, IM_END, IM_START, 1], TOKENIZER)


@pytest.mark.parametrize(
    ("stop", "kind", "text"),
    [
        ("", ValueError, "stop: wanted at least one character, got ''; leave it out to stop nowhere"),
        (["a", ""], ValueError, "stop: wanted at least one character, got ''; leave it out to stop nowhere"),
        (7, TypeError, "stop: wanted a str or a list of str, got int"),
        (b"a", TypeError, "stop: wanted a str or a list of str, got bytes"),
        (["a", 7], TypeError, "stop: wanted a str or a list of str, got 7"),
    ],
)
def test_what_is_no_stop_string_is_named(stop: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        check_stop(stop)
    assert str(caught.value) == text


def test_what_a_stop_string_may_be() -> None:
    assert check_stop(None) == check_stop([]) == ()
    assert check_stop("a") == check_stop(["a"]) == check_stop(iter("a")) == ("a",)
