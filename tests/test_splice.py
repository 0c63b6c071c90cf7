"""Answers that come back as messages are taken in by the tokens they were written with, or not at all."""

from typing import Any

import numpy as np
import pytest

import lily
import lily.splice
from scripted import scripted

pytestmark = pytest.mark.unsanitized  # the core does nothing new in it
QUESTION = [{"role": "user", "content": "Why is the sea so blue today?"}]
MORE = {"role": "user", "content": "And?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "deep": {"type": "boolean"},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "code": {"type": "string"},
                },
            },
        },
    }
]


def otherwise(model: lily.Model, text: str) -> list[int]:
    """Return tokens of a text that the tokenizer would not choose: a letter each, markers aside."""
    tokens: list[int] = []
    for token in model.tokenizer.encode(text, markers=True):
        if model.tokenizer.is_marker(token):
            tokens.append(token)
        else:
            for byte in model.tokenizer.token_bytes(token):
                tokens.append(BYTES(model)[byte])
    assert model.tokenizer.decode(tokens, markers=True) == text
    return tokens


def BYTES(model: lily.Model) -> dict[int, int]:  # noqa: N802
    found = getattr(model, "_bytes_for_tests", None)
    if found is None:
        found = {}
        for token in range(len(model.tokenizer)):
            spelled = model.tokenizer.token_bytes(token)
            if len(spelled) == 1:
                found.setdefault(spelled[0], token)
        model._bytes_for_tests = found  # type: ignore[attr-defined]
    return found


def answer(model: lily.Model, messages: Any, text: str | list[int], **settings: Any) -> lily.Completion:
    with scripted(model, text):
        return model.generate(messages, **settings)


ANSWER = "I wonder about the sea.\n</think>\n\nBecause the sky is."


def test_an_answer_keeps_its_tokens(model: lily.Model) -> None:
    written = otherwise(model, ANSWER)
    done = answer(model, QUESTION, written)
    later = [*QUESTION, done.message, MORE]
    second = answer(model, later, "So.")
    # The opening tag, which the prompt had, and all that was drawn.
    assert second.usage.spliced_tokens == len(written) + 2
    canonical = model.encode(later)
    assert second.usage.prompt_tokens > len(canonical)
    prompt = [*model.encode(QUESTION), *written]
    assert second.usage.cached_tokens >= len(prompt)
    third = answer(model, [*later, second.message, MORE], "Well.")
    assert third.usage.spliced_tokens == second.usage.spliced_tokens  # in every later turn
    assert third.usage.cached_tokens >= second.usage.prompt_tokens - 3


def test_strict_never_splices(model: lily.Model) -> None:
    later = [*QUESTION, answer(model, QUESTION, otherwise(model, ANSWER)).message, MORE]
    for reuse in ("strict", "off"):
        done = answer(model, later, "So.", reuse=reuse)
        assert done.usage.spliced_tokens == 0
        assert done.usage.prompt_tokens == len(model.encode(later))
    assert (done.usage.cached_tokens > 0) == (reuse == "strict")
    # What a strict request writes is not remembered either.
    other = [{"role": "user", "content": "Something else."}]
    done = answer(model, other, otherwise(model, ANSWER), reuse="strict")
    assert answer(model, [*other, done.message, MORE], "So.").usage.spliced_tokens == 0


def test_tokens_that_are_the_tokenizers_own_need_no_splicing(model: lily.Model) -> None:
    question = [{"role": "user", "content": "A question of its own."}]
    done = answer(model, question, ANSWER)
    assert answer(model, [*question, done.message, MORE], "So.").usage.spliced_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Because the sky is!"},
        {"content": "Because the sky is. </think>"},
        {"reasoning_content": ""},
        {"reasoning_content": "I wonder about the Sea."},
    ],
)
def test_other_bytes_are_never_spliced(model: lily.Model, change: dict[str, str]) -> None:
    done = answer(model, QUESTION, otherwise(model, ANSWER))
    later = [*QUESTION, done.message | change, MORE]
    second = answer(model, later, "So.")
    assert (second.usage.spliced_tokens, second.usage.prompt_tokens) == (0, len(model.encode(later)))


def test_nor_are_other_places(model: lily.Model) -> None:
    done = answer(model, QUESTION, otherwise(model, ANSWER))
    for before in ([{"role": "user", "content": "Another question."}], [*QUESTION, done.message, MORE]):
        later = [*before, done.message, MORE]
        assert answer(model, later, "So.").usage.prompt_tokens <= len(model.encode(later)) + 2000
        strict = model.encode(later)
        spliced, _ = model._engine.splices.splice(np.array(strict, np.int32), ())
        behind = model.tokenizer.decode(spliced, markers=True)
        assert behind == model.tokenizer.decode(strict, markers=True)
    other = [{"role": "user", "content": "Another question."}, done.message, MORE]
    assert answer(model, other, "So.").usage.spliced_tokens == 0


def test_letters_that_spell_a_marker_are_none(model: lily.Model) -> None:
    """The bytes are the same; what is a marker and what is not differs."""
    question = [{"role": "user", "content": "How does one close a tag?"}]
    marked = model.tokenizer.encode("So.\n</think>\n\nLike </think> this.", markers=True)
    done = answer(model, question, marked)
    spelled = done.message | {"reasoning_content": "So.", "content": "Like </think> this."}
    assert answer(model, [*question, spelled, MORE], "So.").usage.spliced_tokens == 0


CALL = """<tool_call>
<function=find>
<parameter=deep>
{deep}
</parameter>
<parameter=names>
{names}
</parameter>
<parameter=code>
{code}
</parameter>
</function>
</tool_call>"""


def call(deep: str = "true", names: str = '["né", "日本"]', code: str = "x = 1\n") -> str:
    return "I must look.\n</think>\n\n" + CALL.format(deep=deep, names=names, code=code)


def called(model: lily.Model, text: str | list[int], change: dict[str, Any] | None = None) -> lily.Usage:
    """Return what the second turn took, the first having written this and the client sent back its values."""
    question = [{"role": "user", "content": f"Where is number {len(model._engine.splices._answers)}?"}]
    done = answer(model, question, text, tools=TOOLS)
    assert done.finish_reason == "tool_calls"
    message = done.message
    calls = [{"name": each.name, "arguments": each.parsed | (change or {})} for each in done.tool_calls]
    message = message | {"tool_calls": [{"type": "function", "function": each} for each in calls]}
    later = [*question, message, {"role": "tool", "content": "Found."}]
    return answer(model, later, "So.\n</think>\n\nThere.", tools=TOOLS).usage


def test_a_call_of_the_same_value_keeps_its_tokens(model: lily.Model) -> None:
    assert called(model, call()).spliced_tokens == 0
    assert called(model, otherwise(model, call())).spliced_tokens > 0
    for written in (
        call(names='["n\\u00e9","日本"]'),
        call(names='[\n "né",\n "日本"\n]'),
        call(deep=" true"),
        call().replace("</parameter>\n</function>", "</parameter>\n\n</function>"),
    ):
        usage = called(model, written)
        assert usage.spliced_tokens > 0, written
        assert usage.prompt_tokens - usage.cached_tokens < 64


@pytest.mark.parametrize(
    "change",
    [
        {"deep": False},
        {"deep": 1},
        {"code": "x = 1"},
        {"code": " x = 1\n"},
        {"names": ["né"]},
    ],
)
def test_a_call_of_another_value_does_not(model: lily.Model, change: dict[str, Any]) -> None:
    assert called(model, otherwise(model, call()), change).spliced_tokens == 0


def test_answers_are_forgotten_in_the_end(model: lily.Model) -> None:
    splices = lily.splice.Splices(model.tokenizer, model._engine._borders)
    prompts = [np.array(model.encode([{"role": "user", "content": f"{i}"}]), np.int32) for i in range(4)]
    for prompt in prompts:
        splices.remember(prompt, [5] * 400_000)
    assert len(splices._answers) == 2
    for i in range(20):
        splices.remember(prompts[0], [5] * (i + 1))
    assert len(next(reversed(splices._answers.values()))) == 8
    assert splices._tokens == sum(len(one) for known in splices._answers.values() for one in known)
