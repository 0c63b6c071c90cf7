"""Chat templates render as transformers renders them, and as a second engine does.

The oracle is tests/golden/chats.json, by transformers (tools/make_chats.py); minijinja is asked live.
"""

import json
from pathlib import Path
from typing import Any

import minijinja
import pytest

from conversations import CONVERSATIONS, Message, cases
from lily.chat import ChatTemplate
from lily.messages import check_messages

HERE = Path(__file__).parent
FILE = HERE / "templates" / "thinking.jinja"
TEMPLATE = ChatTemplate(FILE.read_text(encoding="utf-8"), FILE.name)
RENDERS: dict[str, dict[str, str]] = json.loads((HERE / "golden" / "chats.json").read_text())["renders"]
CASES = cases()


class RefusalError(Exception):
    """What a template raises in minijinja."""


def refuse(message: str) -> None:
    raise RefusalError(message)


def with_minijinja(messages: list[Message], variables: dict[str, Any]) -> str:
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.add_filter("tojson", lambda value: json.dumps(value, ensure_ascii=False))
    environment.add_function("raise_exception", refuse)
    return environment.render_str(TEMPLATE.source, messages=messages, **variables)


def test_there_are_enough() -> None:
    assert list(RENDERS) == list(CASES)
    texts = [render["text"] for render in RENDERS.values() if "text" in render]
    refusals = {render["refusal"] for render in RENDERS.values() if "refusal" in render}
    assert len(CONVERSATIONS) >= 30
    assert len(set(texts)) >= 100
    assert len(refusals) == 4


@pytest.mark.parametrize("name", CASES)
def test_a_render_is_the_golden_one(name: str) -> None:
    messages, variables = CASES[name]
    want = RENDERS[name]
    if "text" in want:
        assert TEMPLATE.render(messages, **variables) == want["text"]
        assert with_minijinja(messages, variables) == want["text"]
        # What is brought into one form for every template says the same.
        assert TEMPLATE.render(check_messages(messages), **variables) == want["text"]
    else:
        with pytest.raises(ValueError, match=r"^messages: the chat template refuses them: ") as caught:
            TEMPLATE.render(messages, **variables)
        assert str(caught.value).endswith(want["refusal"])
        with pytest.raises(RefusalError) as other:
            with_minijinja(messages, variables)
        assert str(other.value) == want["refusal"]
