"""Guessing ahead: what is looked up, and that no answer changes by it, on any backend."""

import numpy as np
import pytest

import lily
from lily import _core
from lily.guess import Guesser
from support import CHECKPOINTS, backends, options_of

GREEDY = _core.Sampling()
WARM = _core.Sampling(temperature=0.8, seed=5, repetition_penalty=1.1)


def test_what_followed_the_same_words_is_guessed() -> None:
    guesser = Guesser([1, 2, 3, 4, 5, 9, 2, 3])
    assert list(guesser.guess(3)) == [4, 5, 9]
    guesser.add(7)
    assert list(guesser.guess(3)) == []


def test_the_latest_and_the_longest_decide() -> None:
    assert list(Guesser([1, 2, 5, 1, 2, 6, 1, 2]).guess(1)) == [6]
    assert list(Guesser([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).guess(1)) == [7]


def test_a_run_is_guessed_as_far_as_it_is_known() -> None:
    assert list(Guesser([4, 4, 4]).guess(5)) == [4]
    assert list(Guesser().guess(5)) == []


# What is slow on a backend goes through fewer cases there: `sim tiles` has the same states and pages.
STEPS = [(name, past) for name in backends() for past in ((2,) if name == "sim rows" else (2, 254))]


@pytest.fixture(scope="module", params=backends())
def session(request) -> _core.Session:
    options = {"prefill_chunk": "64", "threads": "2", **options_of(request.param)}
    return _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), options)


def one_by_one(session, state, sampling, count):
    """Return so many tokens, the state's logits after each, and how often each token was counted."""
    history, grown = _core.History(), session.fork(state)
    tokens, logits = [session.sample(grown, sampling)], [session.last_logits(grown)]
    while len(tokens) < count:
        tokens.append(session.step(grown, tokens[-1], sampling, history))
        logits.append(session.last_logits(grown))
    return tokens, logits, history.counts


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("session", "past"), STEPS, indirect=["session"])  # one near a page's end
def test_a_guess_gives_the_tokens_and_the_state_of_single_steps(session, sampling, past) -> None:
    state = session.new_state()
    session.extend(state, np.random.default_rng(past).integers(0, 600, past).astype(np.int32))
    tokens, logits, counts = one_by_one(session, state, sampling, 8)
    for right in (0, 2, 4):  # of four guessed
        grown, history = session.fork(state), _core.History()
        wrong = [(token + 1) % 600 for token in tokens[1 + right : 5]]
        guess = np.array(tokens[1 : 1 + right] + wrong, np.int32)
        assert session.step_with(grown, tokens[0], guess, sampling, history) == tokens[1 : 2 + right]
        assert grown.length == past + 1 + right
        assert np.array_equal(session.last_logits(grown), logits[1 + right])
        token = tokens[1 + right]
        while len(history.counts) and sum(history.counts.values()) < 7:
            token = session.step(grown, token, sampling, history)
        assert token == tokens[7]
        assert history.counts == counts
        assert np.array_equal(session.last_logits(grown), logits[7])


def test_a_guess_too_long_or_out_of_the_vocabulary_is_refused(session) -> None:
    state = session.new_state()
    session.extend(state, np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="guess: wanted at most 31 tokens, got 32"):
        session.step_with(state, 1, np.zeros(32, np.int32), GREEDY, _core.History())
    with pytest.raises(ValueError, match=r"tokens\[1\]: wanted an id from 0"):
        session.step_with(state, 1, np.array([-1], np.int32), GREEDY, _core.History())
    assert state.length == 3


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 4, "repetition_penalty": 1.05}])
def test_answers_are_the_same_and_some_guesses_right(settings) -> None:
    """The demo's greedy story repeats itself, as does the prompt."""
    prompt = "The fox ran to the sea. The fox ran to the hill. The fox ran to"
    with lily.Model.load(lily.DEMO) as plain, lily.Model.load(lily.DEMO, speculate=4) as ahead:
        for model_prompt in (prompt, plain.tokenizer.encode(prompt)):
            wanted = plain.generate(model_prompt, max_tokens=60, **settings)
            got = ahead.generate(model_prompt, max_tokens=60, **settings)
            assert got.tokens == wanted.tokens
            assert got.text == wanted.text
            assert 0 < got.timings.accepted_tokens < got.timings.guessed_tokens
            assert got.timings.decode_tokens == len(got.tokens) - (got.finish_reason != "stop")
            assert wanted.timings.guessed_tokens == 0
        prefix = ahead.prefill(prompt)
        assert (
            prefix.generate(max_tokens=60, **settings).tokens
            == plain.prefill(prompt).generate(max_tokens=60, **settings).tokens
        )


def test_an_answer_that_ends_inside_a_guess_ends_there() -> None:
    prompt = "The fox ran to the sea. The fox ran to the hill. The fox ran to"
    with lily.Model.load(lily.DEMO) as plain, lily.Model.load(lily.DEMO, speculate=7) as ahead:
        whole = plain.generate(prompt, max_tokens=60, temperature=0).text
        for stop in (whole[20:26], whole[50:55]):
            wanted = plain.generate(prompt, max_tokens=60, temperature=0, stop=[stop])
            got = ahead.generate(prompt, max_tokens=60, temperature=0, stop=[stop])
            assert (got.text, got.tokens, got.stop) == (wanted.text, wanted.tokens, stop)
            again = ahead.generate(prompt, max_tokens=60, temperature=0)  # through the cache
            assert again.text == whole
        wanted = plain.generate(prompt, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2)
        got = ahead.generate(prompt, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2)
        assert got.logprobs == wanted.logprobs
        assert got.timings.guessed_tokens == 0
