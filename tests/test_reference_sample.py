"""reference.sample: what may be drawn, how often, and that equal arguments draw equal tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import Chebyshev, Polynomial

from lily import reference

# Counter, key and output of the known-answer file that Philox's authors publish with Random123.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PROBABILITIES = np.array([0.3, 0.05, 0.2, 0.15, 0.02, 0.08, 0.1, 0.04, 0.03, 0.02, 0.01])
DRAWS = 8000
CRITICAL = {10: 29.59, 3: 16.27}  # chi-square at p = 0.001, by degrees of freedom


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, output):
    assert [int(word[0]) for word in reference.philox(words(counter), words(key))] == words(output)


def test_the_word_of_a_token_is_from_its_block():
    seed, position = 0x299F31D0A4093822, 0x0370734413198A2E
    got = reference.random_words(np.array([6, 7, 4, 5, 0]), seed, position)
    for token, word in zip([6, 7, 4, 5, 0], got, strict=True):
        block = reference.philox((token // 4, 0x13198A2E, 0x03707344, 0), (0xA4093822, 0x299F31D0))
        assert word == block[token % 4][0]


# Fixed point


@pytest.mark.parametrize(
    ("ratio", "ends", "coefficients"),
    [
        (lambda r: np.log1p(r) / r, (0.5**0.5 - 1, 2**0.5 - 1), reference.LN_RATIO),
        (lambda f: np.expm1(-f * np.log(2)) / f, (0, 1), reference.EXP2_RATIO),
    ],
)
def test_coefficients_interpolate_at_the_chebyshev_nodes(ratio, ends, coefficients):
    fit = Chebyshev.interpolate(ratio, len(coefficients) - 1, domain=ends)
    exact = fit.convert(kind=Polynomial, domain=[-1, 1], window=[-1, 1]).coef
    assert np.abs(exact * 2**30 - coefficients).max() < 0.51


def test_constants_are_the_nearest():
    assert abs(reference.LN_2 - np.log(2) * 2**56) <= 8  # a float64 of that size is a multiple of 8
    assert round(2**30 / np.log(2)) == reference.LOG2_E
    assert round(2**0.5 * 2**32) == reference.SQRT_2


def words_to_try():
    some = np.random.default_rng(0).integers(0, 2**32, 200_000)
    powers = 2 ** np.arange(32)
    near = np.concatenate([powers - 1, powers, powers + 1, np.arange(1000)])
    return np.unique(np.concatenate([some, near, 2**32 - 1 - near]))


def test_gumbel_noise_is_that_of_its_word():
    words = words_to_try()
    u, rest = (2 * words + 1) / 2**33, (2 * (2**32 - 1 - words) + 1) / 2**33
    exponential = np.where(u < 0.5, -np.log(u), -np.log1p(-rest))
    error = reference.gumbel(words.astype(np.uint32)) + np.log(exponential) * 2**24
    assert -4 < error.min() < error.max() < 1  # of 2^-24, rounded down


def test_mass_is_the_exponential():
    z = -np.unique(np.random.default_rng(1).integers(0, 2**30 + 1, 200_000))
    want = np.exp(z / 2**24)
    error = np.abs(reference.mass(z) / 2**40 - want)
    assert (error <= 3e-8 * want + 2**-40).all()
    assert reference.mass(np.array([0, -(2**30)])).tolist() == [2**40, 0]


# What is kept


def keep(logits, **sampling):
    return reference.keep(np.asarray(logits, np.float32), reference.Sampling(**sampling)).tolist()


def sample(logits, position=0, **sampling):
    return reference.sample(logits, reference.Sampling(**sampling), position)


def test_temperature_zero_takes_the_best_and_the_lower_of_equals():
    assert sample([0, 2, 1, 2], temperature=0) == 1
    assert sample([-1, -0.0, 0.0], temperature=0) == 1


def test_top_k_takes_the_lower_of_equals():
    assert keep([1.0, 3, 2, 2, 2], top_k=3) == [1, 2, 3]


def test_top_p_stops_when_its_mass_is_reached():
    logits = np.log([0.125, 0.5, 0.25, 0.125])
    assert keep(logits, top_p=0.5) == [1]
    assert keep(logits, top_p=0.51) == [1, 2]
    assert keep(logits, top_p=0.76) == [1, 2, 0]
    assert keep(logits, top_p=0) == [1]


def test_top_p_counts_only_what_top_k_left():
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert keep(logits, top_k=2, top_p=0.65) == [0]  # 0.4 of 0.6 is two thirds
    assert keep(logits, top_p=0.65) == [0, 1, 2]


def test_temperature_comes_before_top_p_and_min_p():
    logits = np.log([0.6, 0.3, 0.1])
    assert keep(logits, top_p=0.59) == [0]
    assert keep(logits, temperature=2, top_p=0.59) == [0, 1]
    assert keep(logits, min_p=0.51) == [0]
    assert keep(logits, temperature=2, min_p=0.51) == [0, 1]


def test_min_p_is_a_part_of_the_best():
    logits = np.log([0.3, 0.4, 0.1, 0.2])
    assert keep(logits, min_p=0.49) == [1, 0, 3]
    assert keep(logits, min_p=0.51) == [1, 0]
    assert keep([1, 2, 2, 0], min_p=1) == [1, 2]
    assert keep(logits, top_p=0.6, min_p=0.1) == [1, 0]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0.0625, 4),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
)
def test_a_draw_is_one_of_those_kept(logits, temperature, top_k, top_p, min_p, seed, position):
    logits = np.array(logits, np.float32)
    s = reference.Sampling(temperature, top_k, top_p, min_p, seed=seed)
    kept = reference.keep(logits, s)
    assert 1 <= len(kept) <= (top_k or len(logits))
    left = np.delete(logits, kept)
    assert not left.size or left.max() <= logits[kept].min()
    token = reference.sample(logits, s, position)
    assert token in kept
    assert token == reference.sample(logits, s, position)


def test_fixed_point_draws_what_float64_draws():
    rng = np.random.default_rng(4)
    tokens = np.arange(500)
    different = 0
    for position in range(1000):
        logits = (3 * rng.standard_normal(500)).astype(np.float32)
        u = (2.0 * reference.random_words(tokens, 6, position) + 1) / 2**33
        score = logits.astype(np.float64) / 0.8 - np.log(-np.log(u))
        different += sample(logits, position, temperature=0.8, seed=6) != np.argmax(score)
    assert different <= 1  # scores closer than a millionth are about as rare


# What comes before


def test_penalties_are_for_what_was_generated():
    logits = [4.0, -4.0, 1.0, 0.5]
    s = reference.Sampling(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    assert reference.adjust(logits, s, {0: 1, 1: 3}).tolist() == [2 - 0.75, -8 - 1.25, 1, 0.5]
    assert reference.adjust(logits, s).tolist() == logits


def test_the_order_is_mask_bias_penalties():
    s = reference.Sampling(repetition_penalty=2, presence_penalty=1, logit_bias={0: -3, 1: 3, 2: -np.inf})
    allowed = np.array([0b01111], np.uint32)
    got = reference.adjust([1, -1, 9, 2, 7], s, {0: 1, 1: 1}, allowed)
    assert got.tolist() == [-2 * 2 - 1, 2 / 2 - 1, -np.inf, 2, -np.inf]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(bad):
    with pytest.raises(FloatingPointError, match="finite"):
        sample([1, bad, 2], temperature=0)


def test_nothing_left_is_refused():
    with pytest.raises(ValueError, match="no token is left"):
        sample([1, 2], logit_bias={0: -np.inf, 1: -np.inf})


# How often


def chi_square(counts, probabilities):
    expected = probabilities / probabilities.sum() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_softmax(by):
    logits, fixed = np.log(PROBABILITIES), {"seed": 3, "position": 11}
    drawn = [sample(logits, **(fixed | {by: i})) for i in range(DRAWS)]
    counts = np.bincount(drawn, minlength=len(logits))
    assert chi_square(counts, PROBABILITIES) < CRITICAL[len(logits) - 1]


def test_draws_follow_the_tempered_softmax_of_those_kept():
    logits = np.log(PROBABILITIES)
    by = {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.4}
    drawn = [sample(logits, i, **by, seed=5) for i in range(DRAWS)]
    kept = keep(logits, **by)
    assert kept == [0, 2, 3, 6]
    counts = np.bincount(drawn, minlength=len(logits))
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], PROBABILITIES[kept] ** (1 / 1.5)) < CRITICAL[len(kept) - 1]


def test_neighbouring_positions_are_independent():
    logits = np.zeros(2)
    drawn = np.array([sample(logits, i, seed=1) for i in range(DRAWS)])
    counts = np.bincount(2 * drawn[:-1] + drawn[1:], minlength=4)
    assert chi_square(counts, np.ones(4)) < CRITICAL[3]
