"""Sampling and logprobs of whole answers, on the demo checkpoint."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import lily
from lily import _core, reference

PROMPT = "Tell me a story about a fox."
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SETTINGS = [
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 0, "top_p": 1},
    {"min_p": 0.05, "top_k": 0, "top_p": 1, **PENALTIES},
    {"top_k": 30, "top_p": 0.9, "logit_bias": {5: 3, 9: -100}, **PENALTIES},
]


@pytest.fixture(scope="module")
def model() -> Iterator[lily.Model]:
    with lily.Model.load(lily.DEMO) as model:
        yield model


def replay(model: lily.Model, answer: lily.Completion, prompt: tuple[int, ...], **given: object) -> None:
    """Draw each token of an answer again with reference.py, from the logits of all that stands before it."""
    numbers = model._engine.defaults.numbers() | given | {"seed": answer.seed}
    logits = model.logits(prompt + answer.tokens[:-1])[len(prompt) - 1 :]
    for i, token in enumerate(answer.tokens):
        counts = Counter(answer.tokens[:i])
        want = reference.sample(logits[i], reference.Sampling(**numbers), len(prompt) + i, counts)
        assert token == want, i


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: " ".join(given))
def test_an_answer_is_what_the_reference_draws(model: lily.Model, given: dict[str, object]) -> None:
    prompt = model.prefill(PROMPT).tokens
    answer = model.generate(PROMPT, max_tokens=40, seed=12, stop_tokens=(), **given)
    assert len(answer.tokens) == 40
    replay(model, answer, prompt, **given)


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: " ".join(given))
def test_a_seed_gives_one_answer(model: lily.Model, given: dict[str, object]) -> None:
    """Alone, again, after other work, streamed, from a prefix, from one that grew, and from a fork."""
    asked = {"max_tokens": 25, "seed": 3, **given}
    want = model.generate(PROMPT, **asked).tokens
    assert model.generate(PROMPT, **asked).tokens == want
    model.generate("A dog.", max_tokens=5)
    assert model.generate(PROMPT, **asked).tokens == want
    with model.stream(PROMPT, **asked) as stream:
        assert sum((chunk.tokens for chunk in stream), ()) == want
    prefix = model.prefill(PROMPT)
    grown = model.prefill(prefix.tokens[:4]).extend(prefix.tokens[4:])
    for same in (prefix, prefix.fork(), grown, prefix):
        assert same.generate(**asked).tokens == want
    if given.get("temperature") != 0:
        assert model.generate(PROMPT, **(asked | {"seed": 4})).tokens != want


def test_penalties_and_a_shared_prefix(model: lily.Model) -> None:
    """Eight turns that share their beginning: each penalises its own answer only."""
    told = model.prefill("Tell me a story about a fox.")
    for turn in range(8):
        asked = {"max_tokens": 10, "seed": turn, "repetition_penalty": 1.1}
        answer = told.generate(**asked)
        assert answer.tokens == model.generate(told.tokens, **asked).tokens
        told = told.extend(answer.tokens)


def test_a_frequency_penalty_ends_repetition(model: lily.Model) -> None:
    fox = model.tokenizer.encode(" fox")[0]
    asked = {"max_tokens": 60, "temperature": 0, "stop_tokens": (), "logit_bias": {fox: 12}}
    counts = [
        model.generate(PROMPT, frequency_penalty=penalty, **asked).tokens.count(fox)
        for penalty in (0, 0.5, 2)
    ]
    assert counts[0] > 2 * counts[1] > 4 * counts[2] > 0


def test_a_banned_token_is_never_drawn(model: lily.Model) -> None:
    common = Counter(model.generate(PROMPT, max_tokens=100, seed=1).tokens)
    biases = [-math.inf, -100, -100, -100, -100]
    banned = {str(token): bias for (token, _), bias in zip(common.most_common(5), biases, strict=True)}
    answer = model.generate(PROMPT, max_tokens=100, seed=1, logit_bias=banned)
    assert not {str(token) for token in answer.tokens} & set(banned)
    same = {int(token): bias for token, bias in banned.items()}
    assert model.generate(PROMPT, max_tokens=100, seed=1, logit_bias=same).tokens == answer.tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_p": 1.5}, "min_p: wanted a number from 0 to 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: wanted a number from 0.01 to 100, got 0"),
        ({"logit_bias": {10**6: 1}}, "logit_bias: wanted token ids from 0 to [0-9]+, got 1000000"),
        ({"logprobs": 1}, "logprobs: wanted True or False, got 1; top_logprobs is how many"),
        ({"top_logprobs": 3}, "top_logprobs: wanted logprobs=True beside it, got 3 alone"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: wanted an int of at least 0 .*, got -1"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs: wanted an int .*, got 1000000"),
    ],
)
def test_nonsense_is_refused_before_any_work(
    model: lily.Model, given: dict[str, object], message: str
) -> None:
    for ask in (model.stream, lambda _, **given: model.prefill([5]).stream(**given)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            ask(PROMPT, **given)


def test_an_unknown_argument_is_refused(model: lily.Model) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'temprature'"):
        model.generate(PROMPT, temprature=1)


# Logprobs


def test_logprobs_are_the_models_own(model: lily.Model) -> None:
    """Not those of what a token is drawn by."""
    answer = model.generate(
        PROMPT,
        max_tokens=12,
        seed=5,
        temperature=2,
        logit_bias={7: 5},
        presence_penalty=1,
        logprobs=True,
        top_logprobs=4,
    )
    prompt = model.prefill(PROMPT).tokens
    logits = model.logits(prompt + answer.tokens[:-1])[len(prompt) - 1 :].astype(np.float64)
    assert answer.logprobs is not None
    assert [each.token for each in answer.logprobs] == list(answer.tokens)
    for row, each in zip(logits, answer.logprobs, strict=True):
        want = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.argsort(-row, kind="stable")[:4]
        assert abs(each.logprob - want[each.token]) < 1e-9
        assert [other.token for other in each.top] == best.tolist()
        assert np.abs(np.array([other.logprob for other in each.top]) - want[best]).max() < 1e-9
        assert all(other.top == () for other in each.top)


def test_logprobs_spell_the_answer(model: lily.Model) -> None:
    """Characters of several tokens among them, and the same list from a stream."""
    letters = "\N{FOX FACE}ď日"
    tokens = model.tokenizer.encode(letters)
    assert len(tokens) > len(letters)
    answers = []
    for token in tokens:  # one byte each: a bias makes the model write it
        start = model.prefill(model.tokenizer.encode("A ") + tokens[: tokens.index(token)])
        answers.append(start.generate(max_tokens=1, temperature=0, logit_bias={token: 100}, logprobs=True))
    logprobs = [each for answer in answers for each in answer.logprobs or ()]
    assert b"".join(each.utf8 for each in logprobs) == letters.encode()
    assert all(each.text.encode() == each.utf8 or "\ufffd" in each.text for each in logprobs)

    asked = {"max_tokens": 40, "seed": 5, "logprobs": True, "top_logprobs": 2}
    answer = model.generate(PROMPT, **asked)
    assert answer.logprobs is not None
    assert b"".join(each.utf8 for each in answer.logprobs).decode() == answer.text
    chunks = list(model.stream(PROMPT, **asked))
    assert sum((chunk.logprobs or () for chunk in chunks), ()) == answer.logprobs
    assert all(len(chunk.logprobs or ()) == len(chunk.tokens) for chunk in chunks)


def test_a_marker_adds_no_bytes(model: lily.Model) -> None:
    end = model.tokenizer.token_id("<|im_end|>")
    assert end is not None
    asked = {"max_tokens": 2, "temperature": 0, "logit_bias": {end: 100}, "logprobs": True}
    answer = model.generate(PROMPT, stop_tokens=(), **asked)
    assert answer.text == ""
    assert answer.logprobs is not None
    assert [(each.text, each.utf8) for each in answer.logprobs] == [("<|im_end|>", b"")] * 2
    stopped = model.generate(PROMPT, **asked)  # the end token is none of the answer's
    assert (stopped.logprobs, stopped.finish_reason) == ((), "stop")


def test_logprobs_cost_only_who_asks(model: lily.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("logprobs were computed")

    monkeypatch.setattr(_core.Session, "logprobs", unwanted)
    answer = model.generate(PROMPT, max_tokens=5, seed=1)
    assert answer.logprobs is None
    assert [chunk.logprobs for chunk in model.stream(PROMPT, max_tokens=5, seed=1)] == [None] * 5
    with pytest.raises(AssertionError, match="logprobs were computed"):
        model.generate(PROMPT, max_tokens=5, seed=1, logprobs=True)
