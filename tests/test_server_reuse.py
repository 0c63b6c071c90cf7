"""What a prompt costs the second time, as the server says it: cached and spliced tokens, saved prefixes."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lily
from scripted import make_checkpoint, scripted
from serving import DIALECTS, QUESTION, fold, plain, post, streamed, thinking_of, tools_of

pytestmark = pytest.mark.unsanitized
SYSTEM = [{"role": "system", "content": "You are a fox, and tell stories about the sea. " * 12}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lily.Model]:
    with lily.Model.load(folder) as model:
        yield model


def letters(model: lily.Model, text: str) -> list[int]:
    """Return tokens that the tokenizer would not choose: a letter each."""
    tokens = [model.tokenizer.encode(letter) for letter in text]
    assert all(len(each) == 1 for each in tokens)
    assert len(tokens) > len(model.tokenizer.encode(text))
    return [each[0] for each in tokens]


def cached_of(dialect: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Return cached and all tokens of a prompt."""
    usage = answer["usage"]
    if dialect == "messages":
        cached = usage["cache_read_input_tokens"]
        return cached, usage["input_tokens"] + cached
    details = usage["input_tokens_details" if dialect == "responses" else "prompt_tokens_details"]
    return details["cached_tokens"], usage["input_tokens" if dialect == "responses" else "prompt_tokens"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tools", [False, True])
def test_usage_is_whole_whatever_was_there(url: str, dialect: str, tools: bool) -> None:
    """The same request again: in a stream and not, with tools and without, found and not."""
    asked = f"What does the fox sing to the {dialect} by the sea? " * 9
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asked}]}
    if dialect == "responses":
        body = {"input": asked, "max_output_tokens": 9, "temperature": 0}
    else:
        body |= {"max_tokens": 9, "temperature": 0}
    body |= {"tools": tools_of(dialect)} if tools else {}
    want = None
    for i in range(5):
        if i % 2 == 0:
            answer = post(url, dialect, **body).json()
            cached, prompt = cached_of(dialect, answer)
            found = plain(dialect, answer)
        else:
            more = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
            events = streamed(url, dialect, **body, **more)
            found = fold(dialect, events)
        assert found["usage"]["prompt"] == prompt
        assert found["usage"]["completion"] == 9
        assert found["text"] or found["reasoning"]
        want = want or found
        assert found == want
        if i == 0:
            assert cached < prompt - 50  # the question is new
        elif i % 2 == 0:
            assert cached >= prompt - 8  # all but the answer's beginning


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answers_own_tokens_are_counted(model: lily.Model, url: str, dialect: str) -> None:
    question = [{"role": "user", "content": f"Why is the sea {dialect}?"}]
    more = {"role": "user", "content": "And?"}
    with scripted(model, letters(model, "The sky is blue.")):
        first = plain("chat", post(url, "chat", messages=question, **thinking_of("chat", False)).json())
    later = [*question, {"role": "assistant", "content": first["text"]}, more]
    with scripted(model, "So."):
        body: dict[str, Any] = {"input": later} if dialect == "responses" else {"messages": later}
        body |= thinking_of(dialect, False)
        usage = post(url, dialect, **body).json()["usage"]
    if dialect == "messages":
        assert "spliced_tokens" not in str(usage)
        return
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    spliced = model.stream(later, thinking=False)._request.spliced_tokens
    assert details["spliced_tokens"] == spliced >= len("The sky is blue.")
    assert details["cached_tokens"] >= spliced


# Saved prefixes


def saved(model: lily.Model, folder: Path) -> Path:
    """Save the beginning that prompts with this system message have."""
    one, other = (model.encode([*SYSTEM, {"role": "user", "content": text}]) for text in ("A?", "But?"))
    same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    model.prefill(one[:same]).save(folder / "system.lily")
    return folder / "system.lily"


def test_the_first_prompt_begins_with_a_saved_prefix(
    model: lily.Model, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved(model, tmp_path)
    body = {"messages": [*SYSTEM, *QUESTION], "max_tokens": 9, "temperature": 0}
    with lily.Model.load(folder) as fresh, fresh.serve(background=True, port=0, prefix=file) as server:
        answer = post(server.url, "chat", **body).json()
    with lily.Model.load(folder, cache_bytes=0) as cold:
        want = cold.generate(body["messages"], max_tokens=9, temperature=0)
    cached, prompt = cached_of("chat", answer)
    assert (cached, prompt) == (len(model.load_prefix(file)), want.usage.prompt_tokens)
    assert cached > 100
    assert (answer["choices"][0]["message"].get("reasoning_content") or "") == want.reasoning
    assert not caplog.records or all(each.levelno < logging.WARNING for each in caplog.records)


def test_another_models_prefix_is_warned_of_once(
    model: lily.Model, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved(model, tmp_path)
    with (
        lily.Model.load(folder, kv="int8") as other,
        other.serve(background=True, port=0, prefix=file) as server,
    ):
        for _ in range(2):
            answer = post(server.url, "chat", messages=[*SYSTEM, *QUESTION], max_tokens=2).json()
            assert answer["choices"][0]["finish_reason"] == "length"
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "system.lily: kv: wanted int8, got bf16" in warnings[0]
    assert "prompts are taken in anew" in warnings[0]


def test_a_prefix_that_cannot_be_read_is_said_at_once(model: lily.Model, tmp_path: Path) -> None:
    (tmp_path / "bad.lily").write_bytes(b"no prefix")
    for file in (tmp_path / "none.lily", tmp_path / "bad.lily"):
        with pytest.raises(lily.PrefixFileError, match=file.name):
            model.serve(background=True, port=0, prefix=file)


def test_the_command_takes_a_prefix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from lily.__main__ import main

    assert main(["serve", "--port", "0", "--prefix", str(tmp_path / "none.lily")]) == 1
    assert "none.lily: cannot be read" in capsys.readouterr().err
