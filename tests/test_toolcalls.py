"""Tool calls from text: in any pieces, malformed or cut, nothing of it is lost and nothing made up."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lily.toolcalls import CallReader, ToolCallDelta

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Level": {"enum": ["low", "high"]}, "Count": {"type": "integer"}},
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "null"]},
        "level": {"$ref": "#/$defs/Level"},
        "number": {"$ref": "#/$defs/Count"},
        "list": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object"},
        "any": {},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def read(*pieces: str) -> tuple[str, list[tuple[str, str]], list[ToolCallDelta]]:
    """Read an answer that comes in pieces; give its text, its calls and the pieces of them."""
    reader = CallReader(TOOLS)
    text, deltas = "", []
    for piece in pieces:
        more, found = reader.push(piece)
        text, deltas = text + more, [*deltas, *found]
    more, found = reader.finish()
    deltas += found
    calls = [(each.name, each.arguments) for each in reader.calls]
    joined = [""] * len(calls)
    for delta in deltas:
        assert (delta.id is None) == (delta.name is None) == (joined[delta.index] != "")
        joined[delta.index] += delta.arguments
    assert joined == [arguments for _, arguments in calls]
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    return text + more, calls, deltas


def arguments(text: str) -> dict[str, Any]:
    said, [(_, found)], _ = read(text)
    assert said == ""
    value: dict[str, Any] = json.loads(found)
    return value


ANSWERS = [
    "No call at all.\n\n",
    "  White space \n around\t\n",
    f"Let me look.\n\n{call('f', parameter('path', '/a'), parameter('count', '3'))}",
    call("f", parameter("path", "a"), parameter("text", "    if x:\n        return 1\n")),
    call("f") + "\n" + call("g"),
    call("f", parameter("count", "1")) + call("f", parameter("count", "2")),
    "<tool_call><function=f><parameter=path>/a</parameter></function></tool_call>\n" + call("g"),
    call("f", parameter("text", "<b>&amp; </b> </p> <parameter> a</parameter>b <tool_call> x < y")),
    call("f", parameter("text", 'q"\\\x00\u2028é中🦊\r\n\t')),
    call("f", parameter("text", "")) + " and more words\n",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</tool_call>\n" + call("g"),
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n" + call("g"),
    '<tool_call>\n<function=f>\n{"path": "/a", "count": 2}\n</function>\n</tool_call>',
    "<tool_call>\n<function=f>\nsome words\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>",
    f"```xml\n{call('f', parameter('path', 'a'))}\n```\nThat is how.",
    f"Write `{call('g')}` for that.",
    "A <tool_call> is written so: <function=f>, then <parameter=x>.",
    "<function=g>\n</function>",
    "words <function=g> words",
    "<function=other>\n</function>",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a",
    "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</param",
    "<tool_call>\n<function=f>\n<parameter=count>\n12",
    "<tool_call>\n<function=f>\n",
    "<tool_call>\n<function=f",
    "<tool_call>\n",
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    call("unknown", parameter("x", "1"), parameter("x", "2")),
    f"{call('g')}\n\nThen words, and {call('g')}\n",
    "~~~\n" + call("g") + "\n~~~\n" + call("g"),
    "x < y, a<b> <tool_cal",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_character_by_character_is_the_same(answer: str) -> None:
    assert read(*answer)[:2] == read(answer)[:2]


@given(st.data())
def test_chunking_never_matters(data: st.DataObject) -> None:
    tags = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=path>"]
    tags += ["<parameter=count>", "</parameter>"]
    parts = st.sampled_from([*ANSWERS, *tags, *"<>/=\n`~ x", "```\n", "ab 1", "null"])
    answer = "".join(data.draw(st.lists(parts, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=20)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(*pieces)[:2] == read(answer)[:2]


@given(st.text(), st.text())
def test_any_string_is_kept_to_the_byte(path: str, text: str) -> None:
    if "<" in path + text:  # what looks like a tag has its own tests
        path, text = path.replace("<", "("), text.replace("<", "(")
    answer = call("f", parameter("path", path), parameter("text", text))
    assert arguments(answer) == {"path": path, "text": text}


@pytest.mark.parametrize(
    "value", ["</b>", "a</parameter>b", "</function> x", "<tool_call>", "<parameter=x>\ny"]
)
def test_tags_inside_a_value_belong_to_it(value: str) -> None:
    assert arguments(call("f", parameter("text", value))) == {"text": value}


def test_calls_stand_apart_from_the_text() -> None:
    text, calls, deltas = read("Look.\n\n" + call("f", parameter("path", "a")) + call("g"))
    assert text == "Look."
    assert calls == [("f", '{"path": "a"}'), ("g", "{}")]
    ids = [delta.id for delta in deltas if delta.id]
    assert len(set(ids)) == 2
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)


def test_a_strings_arguments_come_as_they_are_written() -> None:
    reader = CallReader(TOOLS)
    reader.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert [delta.arguments for delta in reader.push("Once upon")[1]] == ["Once upon"]
    assert [delta.arguments for delta in reader.push(' a "time"\n')[1]] == [' a \\"time\\"']


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "null", "null"),
        ("path", "123", "123"),
        ("path", "true", "true"),
        ("path", '"quoted"', '"quoted"'),
        ("count", "9007199254740993", 9007199254740993),
        ("count", " 12\n", 12),
        ("count", "abc", "abc"),
        ("count", "1.5", "1.5"),
        ("count", "007", "007"),
        ("ratio", "1", 1),
        ("ratio", "-2.50", -2.5),
        ("ratio", "1e400", "1e400"),
        ("ratio", "NaN", "NaN"),
        ("on", "true", True),
        ("on", "False", False),
        ("on", "yes", "yes"),
        ("maybe", "10", 10),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "x", "x"),
        ("either", "null", None),
        ("either", "None", "None"),
        ("either", "word", "word"),
        ("level", "low", "low"),
        ("level", "other", "other"),
        ("number", "3", 3),
        ("list", '["a", "b"]', ["a", "b"]),
        ("list", '["a"', '["a"'),
        ("object", '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("object", "[" * 100_000, "[" * 100_000),
        ("any", "[1]", [1]),
        ("any", "words", "words"),
        ("unknown", "12", "12"),
    ],
)
def test_values_have_the_type_that_the_schema_asks_for(key: str, text: str, value: object) -> None:
    found = arguments(call("f", parameter(key, text)))
    assert found == {key: value}
    assert type(found[key]) is type(value)


def test_huge_integers_are_written_out() -> None:
    digits = "7" * 4000
    _, [(_, found)], _ = read(call("f", parameter("count", digits)))
    assert found == f'{{"count": {digits}}}'
    assert arguments(call("f", parameter("count", "7" * 5000))) == {"count": "7" * 5000}


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        (ANSWERS[10], [("f", {"path": "/a", "text": "b"})]),
        (ANSWERS[11], [("f", {"path": "/a"})]),
        (ANSWERS[12], [("f", {"path": "/a"}), ("g", {})]),
        (ANSWERS[13], [("f", {"path": "/a"})]),
        (ANSWERS[14], [("f", {"path": "/a"}), ("g", {})]),
        (ANSWERS[15], [("f", {"path": "/a", "count": 2})]),
        ("<function=g>\n</function>", [("g", {})]),
        ("<tool_call>\n<function=f>\n<parameter=path>\n/a", [("f", {"path": "/a"})]),
        ("<tool_call>\n<function=f>\n<parameter=path>\n/a\n</param", [("f", {"path": "/a"})]),
        ("<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n</func", [("f", {"path": "/a"})]),
        ("<tool_call>\n<function=f>\n<parameter=count>\n12", [("f", {"count": 12})]),
        (call("unknown", parameter("x", "1"), parameter("x", "2")), [("unknown", {"x": "1"})]),
    ],
)
def test_what_is_missing_is_made_up_for(answer: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    text, found, _ = read(answer)
    assert text == ""
    assert [(name, json.loads(each)) for name, each in found] == calls


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f",
        "<tool_call>\n",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        "<function=other>\n</function>",
        "words <function=g> words",
        "A <tool_call> is written so: <function=f>, then <parameter=x>.",
        f"```xml\n{call('f', parameter('path', 'a'))}\n```\nThat is how.",
        f"  ~~~~\n{call('g')}\n~~~\n~~~~",
        "Write `<tool_call><function=g></function></tool_call>` for that.",
        " \n white space \n ",
    ],
)
def test_what_is_no_call_stays_text_to_the_byte(answer: str) -> None:
    assert read(answer)[:2] == (answer, [])


def test_words_inside_a_call_are_not_lost() -> None:
    text, calls, _ = read(ANSWERS[16])
    assert text == "some words"
    assert calls == [("f", '{"path": "/a"}')]


def test_a_block_of_code_that_is_closed_hides_no_later_call() -> None:
    text, calls, _ = read(f"```\n{call('g')}\n```\n{call('g')}")
    assert text == f"```\n{call('g')}\n```"
    assert calls == [("g", "{}")]
