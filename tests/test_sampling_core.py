"""Drawing in the core: what a draw does not depend on, how often it falls where, what is refused; logprobs.

That it draws what reference.py draws is in test_ops.py.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily import _core
from support import CHECKPOINTS

DRAWS = 20_000
CRITICAL = {10: 29.59, 5: 20.52, 3: 16.27}  # chi-square at p = 0.001, by degrees of freedom
PROBABILITIES = np.array([0.3, 0.05, 0.2, 0.15, 0.02, 0.08, 0.1, 0.04, 0.03, 0.02, 0.01])

# Sixteenths: their sums and differences are exact, and so is their scaling by a power of two.
exact_logits = st.lists(st.integers(-300, 300), min_size=2, max_size=60).map(
    lambda sixteenths: np.array(sixteenths, np.float32) / 16
)
kinds = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.sampled_from([0.25, 1, 4]),
        "top_k": st.integers(0, 70),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
    },
)


@pytest.fixture(scope="module")
def session():
    return _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {})


def history_of(tokens):
    history = _core.History()
    for token in tokens:
        history.add(token)
    return history


def bits(allowed):
    """(V) bool as (V / 32) uint32."""
    padded = np.pad(allowed, (0, -len(allowed) % 32)).reshape(-1, 32)
    return (padded.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)


def draw(session, logits, position=0, history=(), allowed=None, **sampling):
    logits = np.ascontiguousarray(logits, np.float32)
    mask = None if allowed is None else bits(allowed)
    return session._sample_from(logits, _core.Sampling(**sampling), position, history_of(history), mask)


# What it does not depend on


@given(exact_logits, kinds, st.integers(-4000, 4000), st.integers(0, 2**62))
def test_a_constant_added_to_all_changes_nothing(session, logits, sampling, sixteenths, position):
    moved = logits + np.float32(sixteenths / 16)
    assert draw(session, moved, position, **sampling) == draw(session, logits, position, **sampling)


@given(exact_logits, kinds, st.sampled_from([0.25, 0.5, 2, 8]))
def test_temperature_divides(session, logits, sampling, factor):
    scaled = sampling | {"temperature": sampling.get("temperature", 1) * factor}
    plain = sampling | {"temperature": sampling.get("temperature", 1)}
    assert draw(session, logits * np.float32(factor), **scaled) == draw(session, logits, **plain)


@given(exact_logits, st.integers(0, 2**64 - 1), st.sets(st.integers(0, 59)))
def test_others_that_are_excluded_are_not_missed(session, logits, seed, excluded):
    """Whether a token wins depends on its own noise and its rivals', not on who the rivals are."""
    token = draw(session, logits, temperature=1, seed=seed)
    excluded = {other for other in excluded if other < len(logits) and other != token}
    allowed = np.array([i not in excluded for i in range(len(logits))])
    assert draw(session, logits, temperature=1, seed=seed, allowed=allowed) == token
    banned = dict.fromkeys(excluded, -math.inf)
    assert draw(session, logits, temperature=1, seed=seed, logit_bias=banned) == token


@given(exact_logits, kinds, st.integers(1, 200))
def test_more_vocabulary_out_of_reach_changes_nothing(session, logits, sampling, more):
    wider = np.concatenate([logits, np.full(more, logits.max() - np.float32(2000))])
    assert draw(session, wider, **sampling) == draw(session, logits, **sampling)


@given(exact_logits, kinds, st.integers(0, 2**62))
def test_one_way_to_be_greedy_is_as_good_as_another(session, logits, sampling, position):
    best = int(np.argmax(logits))
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"temperature": 1e-6}):
        drawn = draw(session, logits, position, **({"temperature": 1} | sampling | greedy))
        assert logits[drawn] == logits[best]
        if "temperature" not in greedy or greedy["temperature"] == 0:
            assert drawn == best


def test_seed_and_position_make_the_noise(session):
    logits = np.zeros(1000, np.float32)

    def drawn(seed, position):
        return draw(session, logits, position, temperature=1, seed=seed)

    assert drawn(3, 5) == drawn(3, 5)
    assert len({drawn(seed, 5) for seed in range(200)}) > 150
    assert len({drawn(3, position) for position in range(200)}) > 150
    assert len({drawn(0, 0), drawn(2**32, 0), drawn(0, 2**32), drawn(2**63, 0), drawn(1, 0)}) > 3


# How often


def chi_square(counts, probabilities):
    expected = probabilities / probabilities.sum() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("temperature", [0.5, 1, 3])
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_softmax(session, temperature, by):
    logits = np.log(PROBABILITIES)
    fixed = {"position": 3, "seed": 11, "temperature": temperature}
    drawn = [draw(session, logits, **(fixed | {by: i})) for i in range(DRAWS)]
    counts = np.bincount(drawn, minlength=len(logits))
    assert chi_square(counts, PROBABILITIES ** (1 / temperature)) < CRITICAL[10]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 4}, [0, 2, 3, 6]),
        ({"top_p": 0.72}, [0, 2, 3, 6]),
        ({"min_p": 0.3}, [0, 2, 3, 6]),
        ({"top_k": 7, "top_p": 0.93, "min_p": 0.15}, [0, 1, 2, 3, 5, 6]),
        ({"logit_bias": dict.fromkeys([0, 1, 2, 3, 6, 7, 10], -math.inf)}, [4, 5, 8, 9]),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(session, sampling, kept):
    logits = np.log(PROBABILITIES)
    drawn = [draw(session, logits, i, temperature=1, **sampling) for i in range(DRAWS)]
    counts = np.bincount(drawn, minlength=len(logits))
    assert np.flatnonzero(counts).tolist() == kept
    assert chi_square(counts[kept], PROBABILITIES[kept]) < CRITICAL[len(kept) - 1]


def test_a_large_vocabulary_draws_rare_tokens_as_often_as_they_are(session):
    """A quarter of the probability each: two tokens, and two halves of a hundred thousand."""
    logits = np.full(100_002, -math.log(200_000), np.float32)
    logits[[0, 50_001]] = math.log(0.25)
    drawn = np.array([draw(session, logits, i, temperature=1) for i in range(3000)])
    counts = [(drawn == 0).sum(), (drawn == 50_001).sum(), ((drawn > 0) & (drawn < 50_001)).sum()]
    assert chi_square(np.array([*counts, 3000 - sum(counts)]), np.ones(4)) < CRITICAL[3]


# What comes before


def test_penalties_do_what_openai_and_mlx_say(session):
    """Against the formulas in float64, on logits that are not close to each other."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        logits = rng.permutation(np.arange(-10, 10)) + 0.3
        history = rng.integers(0, 20, 12)
        given = {
            "repetition_penalty": rng.uniform(0.5, 2),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
        }
        counts = np.bincount(history, minlength=20)
        repeated = np.where(
            logits < 0, logits * given["repetition_penalty"], logits / given["repetition_penalty"]
        )
        want = np.where(counts > 0, repeated - given["presence_penalty"], logits)
        want = want - given["frequency_penalty"] * counts
        token = draw(session, logits, history=history.tolist(), **given)
        assert want[token] > want.max() - 1e-4


def test_a_bias_moves_a_token_and_a_mask_wins(session):
    logits = np.array([3.0, 2, 1, 0])
    assert draw(session, logits) == 0
    assert draw(session, logits, logit_bias={2: 2.5}) == 2
    assert draw(session, logits, logit_bias={2: 2}) == 0  # a tie
    assert draw(session, logits, logit_bias={0: -100, 1: -math.inf}) == 2
    assert draw(session, logits, logit_bias={2: 100}, allowed=np.array([0, 1, 0, 1], bool)) == 1


# What is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1}, {"temperature": 1, "top_k": 2, "top_p": 0.5}])
@pytest.mark.parametrize("place", [0, 3, 16])
def test_logits_that_are_no_numbers_are_refused(session, bad, sampling, place):
    logits = np.ones(17, np.float32)
    logits[place] = bad
    message = f"sample: wanted finite logits, got {bad} for token {place} of 17; the weights are damaged"
    with pytest.raises(lily.DeviceError, match=message):
        draw(session, logits, **sampling)
    with pytest.raises(lily.DeviceError, match=message):  # even where it can't be drawn
        draw(session, logits, allowed=np.arange(17) != place, **sampling)


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_left_is_refused(session, temperature):
    message = "no token is left to draw; the mask and logit_bias exclude all 33"
    logits = np.zeros(33)
    for excluded in ({"allowed": np.zeros(33, bool)}, {"logit_bias": dict.fromkeys(range(33), -math.inf)}):
        with pytest.raises(ValueError, match=message):
            draw(session, logits, temperature=temperature, **excluded)
    beyond = np.array([0, 2**32 - 2], np.uint32)  # all bits but token 32's
    with pytest.raises(ValueError, match=message):
        session._sample_from(np.zeros(33, np.float32), _core.Sampling(), 0, None, beyond)


def test_ids_outside_the_vocabulary_are_refused(session):
    for token in (-1, 8):
        with pytest.raises(ValueError, match=f"logit_bias: wanted token ids from 0 to 7, got {token}"):
            draw(session, np.zeros(8), logit_bias={3: 1, token: 1})
        with pytest.raises(ValueError, match=f"history: wanted token ids from 0 to 7, got {token}"):
            draw(session, np.zeros(8), history=[3, token], presence_penalty=1)
    with pytest.raises(ValueError, match="allowed: wanted 1 words, a bit for each of 8 tokens, got 2"):
        draw(session, np.zeros(8), allowed=np.ones(33, bool))


# Logprobs


def test_logprobs_are_the_log_softmax(session):
    state = session.new_state()
    session.extend(state, np.array([5, 6, 7], np.int32))
    logits = session.last_logits(state).astype(np.float64)
    want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best_first = np.argsort(-logits, kind="stable")
    for token, top in ((3, 0), (int(best_first[0]), 1), (639, 20), (0, len(logits)), (0, 2 * len(logits))):
        own, *likeliest = session.logprobs(state, token, top)
        assert [each for each, _ in likeliest] == best_first[:top].tolist()
        for each, logprob in (own, *likeliest):
            assert abs(logprob - want[each]) < 1e-12
        assert own[0] == token
    with pytest.raises(ValueError, match="token: wanted an id from 0 to 639, got 640"):
        session.logprobs(state, 640, 0)
    with pytest.raises(ValueError, match="top: wanted at least 0, got -1"):
        session.logprobs(state, 0, -1)
