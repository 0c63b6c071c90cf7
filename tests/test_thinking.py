"""Thoughts, tools and stop strings from prompt to completion: a model that says what it is told to."""

import pytest

import lily
from scripted import scripted

QUESTION = [{"role": "user", "content": "Why?"}]


def text_of(model: lily.Model, tokens: object) -> str:
    return model.tokenizer.decode(tokens, markers=True)


def test_thoughts_and_answer_come_apart(model: lily.Model) -> None:
    with scripted(model, "I wonder.\n</think>\n\nBecause."):
        done = model.generate(QUESTION)
        stream = model.stream(QUESTION)
        chunks = list(stream)
    assert (done.reasoning, done.text, str(done)) == ("I wonder.", "Because.", "Because.")
    assert done.finish_reason == "stop"
    assert "".join(chunk.reasoning for chunk in chunks) == done.reasoning
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert all(not (chunk.reasoning and chunk.text) for chunk in chunks)
    assert sum((chunk.tokens for chunk in chunks), ()) == done.tokens
    assert stream.completion().reasoning == done.reasoning
    thought = len(model.tokenizer.encode("I wonder.\n")) + 1
    assert done.usage.reasoning_tokens == thought < done.usage.completion_tokens == len(done.tokens)


def test_without_thinking_all_is_text(model: lily.Model) -> None:
    with scripted(model, "Because."):
        done = model.generate(QUESTION, thinking=False)
        other = model.generate(QUESTION, template_kwargs={"enable_thinking": False})
    assert (done.reasoning, done.text, done.usage.reasoning_tokens) == ("", "Because.", 0)
    assert (other.reasoning, other.text) == ("", "Because.")


def test_only_thoughts_are_no_answer(model: lily.Model) -> None:
    with scripted(model, "I wonder."):
        done = model.generate(QUESTION)
        cut = model.generate(QUESTION, max_tokens=1)
    assert (done.reasoning, done.text, done.finish_reason) == ("I wonder.", "", "stop")
    assert (cut.text, cut.finish_reason) == ("", "length")
    assert "I wonder.".startswith(cut.reasoning)


def test_an_answer_goes_back_as_a_message(model: lily.Model) -> None:
    """The next prompt begins with this one and what was written, token for token."""
    with scripted(model, "I wonder.\n</think>\n\nBecause."):
        done = model.generate(QUESTION)
    later = model.encode([*QUESTION, done.message, {"role": "user", "content": "And?"}])
    before = [*model.encode(QUESTION), *done.tokens]
    assert later[: len(before)] == before
    assert text_of(model, later).endswith(
        "Because.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_a_prefix_knows_where_its_answer_begins(model: lily.Model) -> None:
    with scripted(model, "I wonder.</think>Because."):
        for prefix in (model.prefill(QUESTION), model.prefill(model.encode(QUESTION)).fork()):
            assert prefix.generate().reasoning == "I wonder."
        shut = model.prefill(QUESTION, thinking=False)
        assert shut.generate().text == "I wonder.</think>Because."
        # Thoughts may also be closed by hand.
        closed = model.prefill(QUESTION).extend(model.tokenizer.encode("Enough.\n</think>\n\n", markers=True))
        assert closed.generate().reasoning == ""


def test_the_last_message_is_continued_and_not_repeated(model: lily.Model) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "Because of"}]
    with scripted(model, " the sea."):
        done = model.generate(begun, continue_final_message=True)
        thought = [*QUESTION, {"role": "assistant", "content": None, "reasoning_content": "The sea"}]
        asked_on = model.generate(thought, continue_final_message=True)
    assert (done.text, done.reasoning) == (" the sea.", "")
    assert (asked_on.text, asked_on.reasoning) == ("", " the sea.")
    assert text_of(model, model.encode(begun, continue_final_message=True)).endswith("\n\nBecause of")


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Do it.",
        "parameters": {"properties": {"a": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def test_calls_come_apart_from_the_text(model: lily.Model) -> None:
    with scripted(model, f"I must.\n</think>\n\nWait.\n\n{CALL}\n{CALL}"):
        done = model.generate(QUESTION, tools=[TOOL])
        stream = model.stream(QUESTION, tools=[TOOL])
        deltas = [delta for chunk in stream for delta in chunk.tool_calls]
        single = model.generate(QUESTION, tools=[TOOL], parallel_tool_calls=False)
    assert (done.reasoning, done.text, done.finish_reason) == ("I must.", "Wait.", "tool_calls")
    assert [(call.name, call.arguments, call.parsed) for call in done.tool_calls] == [
        ("f", '{"a": 1}', {"a": 1})
    ] * 2
    assert [delta.name for delta in deltas if delta.id] == ["f", "f"]
    assert "".join(delta.arguments for delta in deltas if delta.index == 1) == '{"a": 1}'
    assert stream.completion().finish_reason == "tool_calls"
    assert (len(single.tool_calls), single.finish_reason) == (1, "tool_calls")
    assert '"description": "Do it."' in text_of(model, model.encode(QUESTION, tools=[TOOL]))


def test_an_answer_that_calls_goes_back_as_a_message(model: lily.Model) -> None:
    with scripted(model, f"I must.\n</think>\n\nWait.\n\n{CALL}"):
        done = model.generate(QUESTION, tools=[TOOL])
    later = model.encode([*QUESTION, done.message, {"role": "tool", "content": "2"}], tools=[TOOL])
    before = [*model.encode(QUESTION, tools=[TOOL]), *done.tokens]
    assert later[: len(before)] == before


def test_a_call_in_the_thoughts_is_none(model: lily.Model) -> None:
    with scripted(model, f"Say {CALL}"):
        done = model.generate(QUESTION, tools=[TOOL])
    assert (done.tool_calls, done.text, done.finish_reason) == ((), "", "stop")
    assert CALL in done.reasoning


def test_without_tools_nothing_is_taken_for_a_call(model: lily.Model) -> None:
    with scripted(model, f"</think>{CALL}"):
        for settings in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
            done = model.generate(QUESTION, **settings)
            assert (done.text, done.tool_calls, done.finish_reason) == (CALL, (), "stop")
    plain = model.encode(QUESTION)
    assert model.stream(QUESTION, tools=[TOOL], tool_choice="none")._request.tokens.tolist() == plain


def test_a_call_that_is_cut_is_valid_and_says_so(model: lily.Model) -> None:
    with scripted(model, f"</think>{CALL}"):
        whole = model.generate(QUESTION, tools=[TOOL])
        for tokens in range(1, len(whole.tokens), 7):
            done = model.generate(QUESTION, tools=[TOOL], max_tokens=tokens)
            assert done.finish_reason == "length"
            assert all(isinstance(call.parsed, dict) for call in done.tool_calls)
            assert done.tool_calls or done.text or tokens == 1


def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(model: lily.Model) -> None:
    with scripted(model, f"</think>{CALL}"):
        done = model.generate(QUESTION, tools=[TOOL], stop="</parameter>")
        assert (done.finish_reason, done.stop) == ("stop", "</parameter>")
        whole = model.generate(QUESTION, tools=[TOOL], stop="beyond the call")
        assert (whole.finish_reason, whole.stop) == ("tool_calls", None)


def test_a_stop_string_ends_a_generation(model: lily.Model) -> None:
    with scripted(model, "beta gamma\n</think>\n\nalpha beta gamma delta") as script:
        done = model.generate(QUESTION, stop=["beta gamma", "delta"])
        drawn = script.drawn
        whole = model.generate(QUESTION)
    assert (done.reasoning, done.text) == ("beta gamma", "alpha ")
    assert (done.finish_reason, done.stop) == ("stop", "beta gamma")
    assert drawn == len(done.tokens) < len(whole.tokens)
    assert done.tokens == whole.tokens[: len(done.tokens)]
    assert (whole.text, whole.stop) == ("alpha beta gamma delta", None)
    with scripted(model, "</think>alpha beta"):
        assert model.generate(QUESTION, stop="beta gamma").text == "alpha beta"
        assert model.generate(QUESTION, stop="alpha").text == ""
        assert list(model.stream(QUESTION, stop="alpha"))[-1].text == ""


def test_a_stop_string_is_never_begun_in_a_stream(model: lily.Model) -> None:
    with scripted(model, "alpha beta gam, beta gamma"):
        texts = []
        for chunk in model.stream(QUESTION, thinking=False, stop="beta gamma"):
            texts.append(chunk.text)
            assert "alpha beta gam, ".startswith("".join(texts))
    assert "".join(texts) == "alpha beta gam, "


def test_stop_strings_are_checked_before_any_work(model: lily.Model) -> None:
    prefix = model.prefill(QUESTION)
    for work in (lambda **stop: model.stream(QUESTION, **stop), prefix.stream):
        with pytest.raises(ValueError, match=r"^stop: wanted at least one character, got ''"):
            work(stop="")
        with pytest.raises(TypeError, match=r"^stop: wanted a str or a list of str, got 7"):
            work(stop=[7])


def test_text_that_spells_a_tag_is_text(model: lily.Model) -> None:
    letters = model.tokenizer.encode("It says </think> and <|im_end|> here.")
    with scripted(model, letters):
        done = model.generate(QUESTION, thinking=False)
        inside = model.generate(QUESTION)
    assert done.text == "It says </think> and <|im_end|> here."
    assert (inside.text, inside.reasoning) == ("", done.text)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("enable_thinking", "did you mean thinking?"),
        ("zzz", "there are add_generation_prompt, continue_final_message, "),
    ],
)
def test_an_unknown_argument_is_named(model: lily.Model, name: str, hint: str) -> None:
    for work in (model.generate, model.stream):
        with pytest.raises(TypeError) as caught:
            work(QUESTION, **{name: 1})
        assert str(caught.value).startswith(f"unexpected argument {name!r}; {hint}")
    for work in (lambda **given: model.prefill(QUESTION, **given), model.prefill(QUESTION).generate):
        with pytest.raises(TypeError, match=r"^unexpected argument 'temperatur'; "):
            work(temperatur=1)


def test_arguments_for_messages_need_messages(model: lily.Model) -> None:
    for work in (model.generate, model.stream, model.prefill, model.encode):
        with pytest.raises(ValueError, match=r"^thinking: wanted messages to render, got token ids$"):
            work([1, 2], thinking=True)


def test_a_prompt_can_be_looked_at(model: lily.Model) -> None:
    assert model.encode(QUESTION) == list(model.prefill(QUESTION).tokens)
    assert model.encode("Why?") == model.encode(QUESTION)
    assert model.encode([1, 2]) == [1, 2]
    assert {type(token) for token in model.encode(QUESTION)} == {int}
    whole, part = model.encode(QUESTION), model.encode(QUESTION, add_generation_prompt=False)
    assert whole[: len(part)] == part
    assert text_of(model, whole[len(part) :]) == "<|im_start|>assistant\n<think>\n"


def test_a_generation_reports_its_prompt(model: lily.Model) -> None:
    calls: list[tuple[int, int]] = []
    with scripted(model, "Because."):
        model.generate(QUESTION, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(len(model.encode(QUESTION)),) * 2]
    with pytest.raises(TypeError, match="progress: wanted a bool or a function of"):
        model.stream(QUESTION, progress="yes")


def test_many_turns_under_one_prefix_of_rules(model: lily.Model) -> None:
    """Prompts of a growing conversation each begin with the one before, so a prefix can be extended."""
    messages = [{"role": "system", "content": "Be brief."}]
    known: list[int] = []
    for turn in range(8):
        messages.append({"role": "user", "content": f"Question {turn}"})
        asked = model.encode(messages, add_generation_prompt=False)
        assert asked[: len(known)] == known
        known = asked
        with scripted(model, f"Thought {turn}.\n</think>\n\nAnswer {turn}."):
            messages.append(model.generate(messages).message)
    assert [message["content"] for message in messages if message["role"] == "assistant"] == [
        f"Answer {turn}." for turn in range(8)
    ]
