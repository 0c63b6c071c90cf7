"""A stream adds up to the answer that does not stream: whatever it is, in any pieces, in each dialect."""

import itertools
import json
import random
from typing import Any

import pytest

import lily
from serving import (
    ALL_DIALECTS,
    CALL,
    DIALECTS,
    body_of,
    fold,
    plain,
    post,
    quick,
    streamed,
    thinking_of,
    tools_of,
)
from test_toolcalls import ANSWERS

pytestmark = pytest.mark.unsanitized


def compare(url: str, dialect: str, **more: Any) -> dict[str, Any]:
    """Return an answer, after it was asked for both ways."""
    options = {"stream_options": {"include_usage": True}}
    usage = options if dialect in ("chat", "completions") else {}
    got = fold(dialect, streamed(url, dialect, **more, **usage))
    answer = post(url, dialect, **more)
    assert answer.status_code == 200, answer.text
    wanted = plain(dialect, answer.json())
    assert got == wanted
    return wanted


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("i", range(len(ANSWERS)))
def test_a_stream_adds_up_to_the_answer(model: lily.Model, url: str, dialect: str, i: int) -> None:
    """In the tokenizer's pieces, and with every byte a token of its own."""
    head = model.tokenizer.encode("I wonder.\n</think>\n\n", markers=True)
    for tokens in (
        model.tokenizer.encode(ANSWERS[i], markers=True),
        [token for character in ANSWERS[i] for token in model.tokenizer.encode(character)],
    ):
        with quick(model, head + tokens):
            with_tools = compare(url, dialect, tools=tools_of(dialect), **thinking_of(dialect, True))
            without = plain(dialect, post(url, dialect, **thinking_of(dialect, True)).json())
        assert with_tools["reasoning"] == without["reasoning"] == "I wonder."
        assert without["calls"] == []
        assert without["text"] == ANSWERS[i].lstrip("\n")
        for _, arguments in with_tools["calls"]:
            json.loads(arguments)
        finish = {"chat": "tool_calls", "messages": ("tool_use", None), "responses": ("completed", None)}
        if with_tools["calls"]:
            assert with_tools["finish"] == finish[dialect]


LOGPROBS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 1},
    "completions": {"logprobs": 1},
    "messages": {},
    "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
}
BETWEEN = [
    f"{CALL}\n\nThat was it.\n\n{CALL} More \n",
    f"Look:\n{CALL}{CALL} and then 🦊",
    f"{CALL}\nwords{CALL}",
    f"a {CALL}\n\n  {CALL} stop",
    f"{CALL.replace('/a', 'x')} ```\n{CALL}\n```",
]


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_any_pieces_in_any_order_add_up(model: lily.Model, url: str, dialect: str) -> None:
    """For every sample, with text behind calls too, and with tokens that begin and end anywhere."""
    choose = random.Random(1)
    turn = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    plainly = {"prompt": turn} if dialect == "completions" else {"tools": tools_of(dialect)}
    for answer in (*BETWEEN, *choose.sample(ANSWERS, 12), f"{choose.choice(ANSWERS)}{CALL} words{CALL}"):
        cuts = [0, *sorted(choose.sample(range(len(answer)), min(6, len(answer)))), len(answer)]
        pieces = [answer[a:b] for a, b in itertools.pairwise(cuts)]
        tokens = [token for piece in ("Hm.\n", "</think>", "\n\n", *pieces) for token in encode(model, piece)]
        with quick(model, tokens):
            got = compare(url, dialect, **plainly, **thinking_of(dialect, True), **LOGPROBS[dialect])
        assert got["reasoning"] == "Hm."
        if dialect != "completions":
            assert answer not in BETWEEN or (got["text"].strip() and got["calls"])
        if dialect != "messages":
            assert got["logprobs"] or not got["text"]


def encode(model: lily.Model, text: str) -> list[int]:
    return model.tokenizer.encode(text, markers=True)


def test_text_behind_a_call_stays_there(model: lily.Model, url: str) -> None:
    with quick(model, f"</think>First.\n{CALL}\nThen words."):
        kinds = [part[0] for part in compare(url, "messages", tools=tools_of("messages"))["parts"]]
        items = compare(url, "responses", tools=tools_of("responses"))["parts"]
    assert kinds == ["text", "tool_use", "text"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]


def test_numbers_in_arguments_have_no_end(model: lily.Model, url: str) -> None:
    """They are handed on as they are written, also where a dialect has an object and not its text."""
    long = "9" * 40
    with quick(model, f"</think>{CALL.replace('path', 'count').replace('/a', long)}"):
        for dialect in DIALECTS:
            assert long in compare(url, dialect, tools=tools_of(dialect))["calls"][0][1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_cut_answers_add_up_too(model: lily.Model, url: str, dialect: str) -> None:
    limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
    said = f"I wonder.</think>\n\nďábel 👩‍👩‍👧 {CALL}"
    with quick(model, said):
        for tokens in range(1, 60, 3):
            got = compare(
                url, dialect, **{limit: tokens}, tools=tools_of(dialect), **thinking_of(dialect, True)
            )
            cut = {
                "chat": "length",
                "messages": ("max_tokens", None),
                "responses": ("incomplete", {"reason": "max_output_tokens"}),
            }
            assert got["finish"] == cut[dialect]
            assert got["text"].count("\ufffd") <= 1


@pytest.mark.parametrize("character", ["ď", "👩‍👩‍👧", "日本", "שלום"])
def test_no_part_of_a_character_is_sent(model: lily.Model, url: str, character: str) -> None:
    with quick(model, f"</think>{character}"):
        for dialect in DIALECTS:
            assert compare(url, dialect, **thinking_of(dialect, True))["text"] == character


def test_logprobs_add_up_to_the_text(model: lily.Model, url: str) -> None:
    for said, text in (("I wonder.\n</think>\n\nDéjà vu 🦊.", "Déjà vu 🦊."), ("</think>x", "x")):
        with quick(model, said):
            got = compare(url, "chat", logprobs=True, top_logprobs=2)
            assert b"".join(bytes(each["bytes"]) for each in got["logprobs"]).decode() == text
            assert all(len(each["top_logprobs"]) == 2 and each["logprob"] <= 0 for each in got["logprobs"])
            response = compare(url, "responses", include=["message.output_text.logprobs"], top_logprobs=1)
            assert response["logprobs"] == [
                {**each, "top_logprobs": each["top_logprobs"][:1]} for each in got["logprobs"]
            ]
    with quick(model, "</think>x"):
        assert post(url, "chat").json()["choices"][0]["logprobs"] is None


def test_usage_is_whole_in_every_case(model: lily.Model, url: str) -> None:
    with quick(model, f"I wonder.</think>\n\nWait. {CALL}"):
        for dialect in DIALECTS:
            for more in ({}, {"tools": tools_of(dialect)}):
                usage = compare(url, dialect, **more, **thinking_of(dialect, True))["usage"]
                assert usage["prompt"] > 0
                assert usage["completion"] > 0
                if dialect != "messages":
                    assert 0 < usage["reasoning_tokens"] < usage["completion"]


@pytest.mark.parametrize("options", [{}, None, {"include_usage": None}, {"include_usage": False}])
def test_usage_is_sent_only_if_asked_for(model: lily.Model, url: str, options: object) -> None:
    with quick(model, "</think>Yes."):
        found = streamed(url, "chat", stream_options=options)
    assert not any("usage" in each for each in found)


def test_stop_strings_are_kept_out(model: lily.Model, url: str) -> None:
    with quick(model, "</think>alpha beta gam, alpha beta gamma delta"):
        for dialect, key in (("chat", "stop"), ("messages", "stop_sequences")):
            got = compare(url, dialect, **{key: ["beta gamma"]}, **thinking_of(dialect, True))
            assert got["text"] == "alpha beta gam, alpha "
            assert got["finish"] == ("stop" if dialect == "chat" else ("stop_sequence", "beta gamma"))
        assert post(url, "chat", stop="").status_code == 400
        assert compare(url, "chat", stop=["1", "2", "3", "4", "🦊", "a"])["text"] == ""


def test_several_answers(model: lily.Model, url: str) -> None:
    answer = post(url, "chat", n=3, seed=5, max_tokens=6, temperature=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["seed"] for choice in answer["choices"]] == [5, 6, 7]
    texts = [choice["message"].get("reasoning_content") for choice in answer["choices"]]
    found = streamed(url, "chat", n=3, seed=5, max_tokens=6, temperature=1)
    pieces = ["", "", ""]
    for each in found[:-1]:
        for choice in each["choices"]:
            pieces[choice["index"]] += choice["delta"].get("reasoning_content") or ""
    assert pieces == texts
    alone = post(url, "chat", seed=6, max_tokens=6, temperature=1).json()
    assert alone["choices"][0]["message"].get("reasoning_content") == texts[1]
    assert answer["usage"]["completion_tokens"] == 18


def test_plain_completions(model: lily.Model, url: str) -> None:
    with quick(model, "and so on"):
        found = streamed(url, "completions", stream_options={"include_usage": True}, logprobs=2)
        whole = post(url, "completions", logprobs=2).json()
        several = post(url, "completions", prompt=["One", [5, 6]], n=2).json()
        empty = post(url, "completions", prompt="")
    text = "".join(choice["text"] for each in found[:-1] for choice in each["choices"])
    assert text == whole["choices"][0]["text"] == "and so on"
    assert found[-2]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "prompt")
    # Markers are tokens here: whoever writes a whole prompt writes its template.
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    with quick(model, "Hm.</think>Hello"):
        choice = post(url, "completions", prompt=turn).json()["choices"][0]
    assert (choice["text"], choice["reasoning_content"]) == ("Hello", "Hm.")


def test_an_answer_that_is_nothing(model: lily.Model, url: str) -> None:
    with quick(model, []):
        for dialect in DIALECTS:
            got = compare(url, dialect, **thinking_of(dialect, False))
            assert (got["text"], got["calls"]) == ("", [])
        choice = post(url, "chat").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_the_same_request_five_times(model: lily.Model, url: str) -> None:
    for dialect in DIALECTS:
        limit = "max_output_tokens" if dialect == "responses" else "max_tokens"
        answers = [compare(url, dialect, temperature=0, **{limit: 8}) for _ in range(2)]
        answers.append(plain(dialect, post(url, dialect, temperature=0, **{limit: 8}).json()))
        for answer in answers:
            answer.pop("usage")
        assert answers[0] == answers[1] == answers[2]
        assert answers[0]["text"] + answers[0]["reasoning"]
    assert body_of("chat")
