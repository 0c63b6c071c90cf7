"""Messages as clients write them: what they are brought to, and what is refused by name."""

import json
import math

import pytest

from lily.messages import ROLES, check_messages, check_tools

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def assistant(**keys: object) -> list[dict[str, object]]:
    return [{"role": "assistant", **keys}]


def system(content: str, role: str = "system") -> list[dict[str, object]]:
    return [{"role": role, "content": content}]


def reminder(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": NaN}',
        '{"a": [1e999]}',
        {"a": math.nan},
        {"a": {"b": [-math.inf]}},
        {"a": object()},
        {"a": b"x"},
    ],
)
def test_arguments_that_json_cannot_say(arguments: object) -> None:
    """A template would write whatever Python calls them."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises((ValueError, TypeError), match=r"^messages\[0\]\.tool_calls\[0\]\.arguments: wanted "):
        check_messages([{"role": "assistant", "tool_calls": [call]}])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": arguments}}}
    if not isinstance(arguments, str):
        with pytest.raises((ValueError, TypeError), match=r"^tools\[0\]\.function: wanted what JSON can say"):
            check_tools([tool])


def test_system_messages_at_the_beginning_become_one() -> None:
    said = [*system("A"), *system("B", "developer"), *system("C"), *user("Hi")]
    assert check_messages(said) == [*system("A\n\nB\n\nC"), *user("Hi")]


def test_a_late_system_message_stays_where_it_is() -> None:
    """So all before it is the prompt it was, and what a prefix holds stays good."""
    before = [*system("A"), *user("Hi"), *assistant(content="Hello.")]
    got = check_messages([*before, *system("B", "developer"), *user("And?")])
    assert got == [*check_messages(before), reminder("B"), *user("And?")]
    assert check_messages([*user("Hi"), *system("A" * 6000)]) == [*user("Hi"), reminder("A" * 6000)]


def test_a_developer_is_a_system_and_users_may_follow_each_other() -> None:
    said = [*system("A", "developer"), *system("B", "developer"), *user("One."), *user("Two.")]
    assert check_messages(said) == [*system("A\n\nB"), *user("One."), *user("Two.")]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_that_are_text_are_joined(kind: str) -> None:
    parts = [{"type": kind, "text": "Go"}, {"type": "text", "text": " on", "cache_control": {"type": "e"}}]
    assert check_messages(user(parts)) == user("Go on")
    assert check_messages(user([])) == user("")


def test_a_document_of_text_is_text() -> None:
    part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A report."}}
    assert check_messages(user([part])) == user("A report.")


def test_parts_of_thoughts_are_told_apart() -> None:
    parts = [
        {"type": "thinking", "thinking": "Plan.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Hello."},
    ]
    assert check_messages(assistant(content=parts)) == assistant(content="Hello.", reasoning_content="Plan.")


@pytest.mark.parametrize(
    ("content", "more", "want"),
    [
        ("<think>\nPlan.\n</think>\n\nHello.", {}, ("Plan.", "Hello.")),
        ("Plan.</think>Hello.", {}, ("Plan.", "Hello.")),
        ("</think>", {}, ("", "")),
        ("The tag </think> ends it.", {"reasoning": "Plan."}, ("Plan.", "The tag </think> ends it.")),
        ("The tag </think> ends it.", {"reasoning_content": ""}, ("", "The tag </think> ends it.")),
        ("Hello.", {"reasoning_content": "A", "reasoning": "B"}, ("A", "Hello.")),
        ("Hello.", {"reasoning_content": None, "reasoning": "B"}, ("B", "Hello.")),
    ],
)
def test_thoughts_are_found_under_either_name_or_within(
    content: str, more: dict[str, object], want: tuple[str, str]
) -> None:
    (got,) = check_messages(assistant(content=content, **more))
    assert (got["reasoning_content"], got["content"]) == want


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"b": [9007199254740993, "é", true], "a": null}', {"b": [9007199254740993, "é", True], "a": None}),
        ("", {}),
        (None, {}),
        ("{}", {}),
    ],
)
def test_arguments_are_a_dict_or_its_json(arguments: object, want: dict[str, object]) -> None:
    calls = [
        {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}},
        {"name": "f", "arguments": arguments},
    ]
    (got,) = check_messages(assistant(content=None, tool_calls=calls))
    called = {"type": "function", "function": {"name": "f", "arguments": want}}
    assert got == {"role": "assistant", "content": "", "tool_calls": [called | {"id": "1"}, called]}
    assert list(got["tool_calls"][0]["function"]["arguments"]) == list(want)


def test_calls_and_results_may_be_parts() -> None:
    said = [
        *assistant(content=[{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]),
        *user(
            [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "tool_result", "content": "also", "is_error": False},
                {"type": "tool_result"},
                {"type": "text", "text": "And?"},
            ]
        ),
        *user([{"type": "tool_result", "content": "alone"}]),
    ]
    assert check_messages(said) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "1"}]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
        {"role": "tool", "content": "also"},
        {"role": "tool", "content": ""},
        *user("And?"),
        {"role": "tool", "content": "alone"},
    ]


def test_what_a_client_library_returns_can_be_given_back() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "Plan.",
        "tool_calls": [{**CALL, "id": "1"}],
    }
    before = json.dumps(message)
    assert check_messages([message, {"role": "tool", "tool_call_id": "1", "name": "f", "content": "ok"}]) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Plan.",
            "tool_calls": [{**CALL, "id": "1"}],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "1", "name": "f"},
    ]
    assert json.dumps(message) == before


def test_marks_for_caches_change_nothing() -> None:
    marked = [{"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}]
    assert check_messages(marked) == user("Hi")


ALL = ", ".join(ROLES)
PART = 'wanted {"type": "text", "text": ...}, got '
FUNCTION = 'wanted {"function": {"name": ..., "arguments": ...}}, got '


@pytest.mark.parametrize(
    ("messages", "kind", "where", "what"),
    [
        ("Hi", TypeError, "", "wanted a list of messages, got str"),
        ({"role": "user", "content": "Hi"}, TypeError, "", "wanted a list of messages, got dict"),
        (None, TypeError, "", "wanted a list of messages, got NoneType"),
        ([], ValueError, "", "wanted at least one message, got none"),
        (["Hi"], TypeError, "[0]", "wanted a dict with role and content, got str"),
        ([{"content": "Hi"}], ValueError, "[0].role", f"wanted one of {ALL}, got None"),
        ([{"role": ["user"]}], ValueError, "[0].role", f"wanted one of {ALL}, got ['user']"),
        (user(None), TypeError, "[0].content", "wanted a str or a list of text parts, got NoneType"),
        (user({"text": "Hi"}), TypeError, "[0].content", "wanted a str or a list of text parts, got dict"),
        (user(b"Hi"), TypeError, "[0].content", "wanted a str or a list of text parts, got bytes"),
        (user(["Hi"]), TypeError, "[0].content[0]", PART + "str"),
        (user([{"type": "text"}]), TypeError, "[0].content[0].text", "wanted a str, got NoneType"),
        (
            [*user("Hi"), *assistant(content="", reasoning=7)],
            TypeError,
            "[1].reasoning",
            "wanted a str, got int",
        ),
        (
            assistant(tool_calls="f"),
            TypeError,
            "[0].tool_calls",
            "wanted a list of calls, got str",
        ),
        (assistant(tool_calls=["f"]), TypeError, "[0].tool_calls[0]", FUNCTION + "str"),
        (assistant(tool_calls=[{}]), TypeError, "[0].tool_calls[0].name", "wanted a str, got NoneType"),
        (
            assistant(tool_calls=[{"name": "f", "arguments": [1]}]),
            ValueError,
            "[0].tool_calls[0].arguments",
            "wanted a dict or its JSON, got [1]",
        ),
        (
            assistant(tool_calls=[{"name": "f", "arguments": '{"a": '}]),
            ValueError,
            "[0].tool_calls[0].arguments",
            "wanted a JSON object, got '{\"a\": ': Expecting value: line 1 column 7 (char 6)",
        ),
        (
            user([{"type": "thinking", "thinking": "x"}]),
            ValueError,
            "[0].content[0].type",
            "wanted text in a message of role user, got 'thinking'",
        ),
        (
            user([{"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}]),
            ValueError,
            "[0].content[0].source.type",
            "wanted text, got 'base64'; pass its text",
        ),
        (
            [{"role": "user", "content": "Look.", "images": ["fox.png"]}],
            ValueError,
            "[0].images",
            "this model reads text only; leave it out",
        ),
    ],
)
def test_what_is_no_message_is_named(messages: object, kind: type[Exception], where: str, what: str) -> None:
    with pytest.raises(kind) as caught:
        check_messages(messages)
    assert str(caught.value) == f"messages{where}: {what}"


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("image", "image"),
        ("image_url", "image"),
        ("input_image", "image"),
        ("input_audio", "audio"),
        ("video_url", "video"),
        ("input_file", "file"),
        ("document", "document"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_what_is_no_text_is_refused_and_never_dropped(kind: str, family: str, role: str) -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "fox.png"}}]
    with pytest.raises(ValueError, match="does not support") as caught:
        check_messages([{"role": role, "content": parts}])
    wanted = f"messages[0].content[1].type: this model does not support {family} inputs, got {kind!r}"
    assert str(caught.value) == wanted


def test_pictures_in_a_tools_result_are_refused_too() -> None:
    result = {"type": "tool_result", "content": [{"type": "image", "source": {}}]}
    with pytest.raises(
        ValueError, match=r"^messages\[0\]\.content\[0\]\.content\[0\]\.type: .* image inputs"
    ):
        check_messages(user([result]))


def test_json_without_an_end_is_no_drama() -> None:
    with pytest.raises(ValueError, match=r"arguments: wanted a JSON object, got '\[\[\["):
        check_messages(assistant(tool_calls=[{"name": "f", "arguments": "[" * 100_000}]))


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("f", "tools: wanted a list of tools, got str"),
        ([len], "tools[0]: wanted {'type': 'function'"),
        ([{"name": "f"}], "tools[0]: wanted"),
        ([{"function": {"description": "x"}}], "tools[0].function.name: wanted a str, got NoneType"),
    ],
)
def test_what_is_no_tool_is_named(tools: object, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_tools(tools)
    assert str(caught.value).replace('"', "'").startswith(text)
