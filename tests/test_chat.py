"""Messages to a prompt: what the template writes, what no text can make it write, what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily.chat import ChatTemplate, check_messages
from lily.tokenizer import Tokenizer

DEMO = Path(lily.DEMO)
TOKENIZER = Tokenizer.load(DEMO)
TEMPLATE = ChatTemplate.load(DEMO)
IM_START, IM_END, THINK, END_THINK = map(
    TOKENIZER.token_id, ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"]

# Does to history what the published template does: looks into the text of messages, splits thoughts off an
# answer, and drops them before the last user message.
QWEN_LIKE = ChatTemplate(
    """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == "user" and not message.content.startswith("<tool_response>") %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("System message must be at the beginning.") }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = "" %}
        {%- if "</think>" in content %}
            {%- set thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\\n") %}
            {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {%- set content = "<think>\\n" + thoughts + "\\n</think>\\n\\n" + content %}
        {%- endif %}
        {{- "<|im_start|>assistant\\n" + content + "<|im_end|>\\n" }}
        {%- continue %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n<think>\\n" }}
{%- endif %}
""",
    "qwen-like",
)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_is_what_the_template_writes() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Hi \n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": " on"}]},
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert TEMPLATE.render(check_messages(messages)) == text
    assert TEMPLATE.encode(messages, TOKENIZER) == TOKENIZER.encode(text, markers=True)


@pytest.mark.parametrize("template", [TEMPLATE, QWEN_LIKE], ids=["demo", "qwen-like"])
@given(
    parts=st.lists(
        st.sampled_from(
            [*MARKERS, "<", "|im_end|>", "<|im_", "\ufdd0", " ", "\n", "fox", "日本", "a<b & 'q'"]
        ),
        max_size=8,
    )
)
def test_no_text_can_write_a_marker(template: ChatTemplate, parts: list[str]) -> None:
    text = "".join(parts)
    for role in ("system", "user"):
        messages = [{"role": role, "content": text}]
        ids = template.encode(messages, TOKENIZER)
        plain = template.encode([{"role": role, "content": "x"}], TOKENIZER)
        special = [i for i in ids if i >= IM_START - 1]
        assert special == [i for i in plain if i >= IM_START - 1]
        expected = TOKENIZER.decode(plain, markers=True).replace(
            "\nx<|im_end|>", f"\n{text.strip()}<|im_end|>"
        )
        assert TOKENIZER.decode(ids, markers=True) == expected


def test_markers_cut_in_two_stay_text() -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = TEMPLATE.encode(user(parts), TOKENIZER)
    assert ids == TEMPLATE.encode(user("<|im_end|>"), TOKENIZER)
    assert ids.count(IM_END) == 1


def test_text_and_template_are_one_text_to_the_tokenizer() -> None:
    text = "\n\n 'tis 12 o'clock <b>"
    rendered = QWEN_LIKE.render(user(text))
    assert QWEN_LIKE.encode(user(text), TOKENIZER) == TOKENIZER.encode(rendered, markers=True)


def test_an_answers_thoughts_are_told_apart() -> None:
    answer = {"role": "assistant", "content": "<think>\nplan <|im_end|>\n</think>\n\nHello <tool_call>"}
    now = QWEN_LIKE.encode([*user("Hi"), answer], TOKENIZER)
    assert (
        TOKENIZER.decode(now, markers=True).count(
            "<think>\nplan <|im_end|>\n</think>\n\nHello <tool_call><|im_end|>"
        )
        == 1
    )
    assert now.count(END_THINK) == 1
    assert now.count(IM_END) == 2
    assert TOKENIZER.token_id("<tool_call>") not in now
    later = QWEN_LIKE.encode([*user("Hi"), answer, *user("And?")], TOKENIZER)
    assert "plan" not in TOKENIZER.decode(later)
    assert END_THINK not in later


def test_tojson_is_the_plain_one() -> None:
    tool = {"name": "f", "description": "a<b & 'q' é中", "a": [1, True, None]}
    template = ChatTemplate("{{ tools[0] | tojson }}|{{ tools | tojson(indent=2) }}", "t")
    plain = json.dumps(tool, ensure_ascii=False)
    assert template.render([], tools=[tool]) == f"{plain}|{json.dumps([tool], ensure_ascii=False, indent=2)}"


def test_variables_and_the_date_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ strftime_now('%Y') | length }}", "t")
    assert template.render([], enable_thinking=False) == "False 4"


def test_a_template_that_refuses_says_why() -> None:
    messages = [*user("Hi"), {"role": "system", "content": "Late."}]
    with pytest.raises(
        ValueError, match=r"messages: the chat template refuses them: System message must be at"
    ):
        QWEN_LIKE.encode(messages, TOKENIZER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ messages | no_such_filter }}",
        "{{ undefined.field }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'secrets' %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_at_fault_is_named(source: str) -> None:
    with pytest.raises(lily.ModelFilesError, match=r"^some\.jinja: "):
        ChatTemplate(source, "some.jinja").encode(user("Hi"), TOKENIZER)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "old {{ messages[0].content }}"}))
    assert ChatTemplate.load(tmp_path).render(user("Hi")) == "old Hi"
    config.write_text(
        json.dumps(
            {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}
        )
    )
    assert ChatTemplate.load(tmp_path).render(user("Hi")) == "d"
    shutil.copy(DEMO / "chat_template.jinja", tmp_path)
    assert ChatTemplate.load(tmp_path).source == TEMPLATE.source
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(lily.ModelFilesError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.load(tmp_path)


def test_a_template_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 7}')
    with pytest.raises(
        lily.ModelFilesError, match=r"tokenizer_config\.json: chat_template: wanted a str, got int"
    ):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("messages", "kind", "where", "what"),
    [
        ("Hi", TypeError, "", "wanted a list of messages, got str"),
        ({"role": "user", "content": "Hi"}, TypeError, "", "wanted a list of messages, got dict"),
        (None, TypeError, "", "wanted a list of messages, got NoneType"),
        ([], ValueError, "", "wanted at least one message, got none"),
        (["Hi"], TypeError, "[0]", "wanted a dict with role and content, got str"),
        ([{"content": "Hi"}], ValueError, "[0].role", "wanted one of system, user, assistant, got None"),
        ([{"role": "robot"}], ValueError, "[0].role", "wanted one of system, user, assistant, got 'robot'"),
        ([{"role": ["user"]}], ValueError, "[0].role", "wanted one of system, user, assistant, got ['user']"),
        (user(None), TypeError, "[0].content", "wanted a str or a list of text parts, got NoneType"),
        (user({"text": "Hi"}), TypeError, "[0].content", "wanted a str or a list of text parts, got dict"),
        (user(b"Hi"), TypeError, "[0].content", "wanted a str or a list of text parts, got bytes"),
        (user(["Hi"]), TypeError, "[0].content[0]", 'wanted {"type": "text", "text": ...}, got str'),
        (
            user([{"type": "image_url"}]),
            ValueError,
            "[0].content[0].type",
            "wanted text, the only kind this model reads, got 'image_url'",
        ),
        (user([{"type": "text"}]), TypeError, "[0].content[0].text", "wanted a str, got NoneType"),
        (
            [*user("Hi"), {"role": "assistant", "content": "", "tool_calls": []}],
            ValueError,
            "[1].tool_calls",
            "wanted role and content only, got []; leave it out",
        ),
    ],
)
def test_messages_are_checked(messages: object, kind: type[Exception], where: str, what: str) -> None:
    with pytest.raises(kind) as caught:
        TEMPLATE.encode(messages, TOKENIZER)
    assert str(caught.value) == f"messages{where}: {what}"


def test_keys_that_say_nothing_are_taken() -> None:
    assert check_messages([{"role": "user", "content": "Hi", "name": None}]) == user("Hi")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="half a surrogate pair"):
        TEMPLATE.encode(user("fox \ud83d"), TOKENIZER)
