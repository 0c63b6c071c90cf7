"""reference.sample: what may be drawn, how often, and that equal arguments draw equal tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_uniform_takes_the_word_of_a_token_from_its_block():
    seed, position = 0x299F31D0A4093822, 0x0370734413198A2E
    got = reference.uniform(np.array([6, 7, 4, 5, 0]), seed, position)
    for token, u in zip([6, 7, 4, 5, 0], got, strict=True):
        block = reference.philox((token // 4, 0x13198A2E, 0x03707344, 0), (0xA4093822, 0x299F31D0))
        assert u == ((int(block[token % 4][0]) >> 8) + 0.5) / 2**24


def test_uniform_stays_inside_zero_and_one():
    u = reference.uniform(np.arange(100_000), 1, 2)
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * len(u))


def test_temperature_zero_takes_the_best_and_the_lower_of_equals():
    assert reference.sample([0, 2, 1, 2], 0, 0, 1, seed=9, position=9) == 1


def test_top_k_takes_the_lower_of_equals():
    assert reference.keep(np.array([1.0, 3, 2, 2, 2]), 1, 3, 1).tolist() == [1, 2, 3]


def test_top_p_stops_when_its_mass_is_reached():
    logits = np.log([0.125, 0.5, 0.25, 0.125])
    assert reference.keep(logits, 1, 0, 0.5).tolist() == [1]
    assert reference.keep(logits, 1, 0, 0.51).tolist() == [1, 2]
    assert reference.keep(logits, 1, 0, 0.76).tolist() == [1, 2, 0]
    assert reference.keep(logits, 1, 0, 0).tolist() == [1]


def test_top_p_counts_only_what_top_k_left():
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert reference.keep(logits, 1, 2, 0.65).tolist() == [0]  # 0.4 of 0.6 is two thirds
    assert reference.keep(logits, 1, 0, 0.65).tolist() == [0, 1, 2]


def test_temperature_comes_before_top_p():
    logits = np.log([0.6, 0.3, 0.1])
    assert reference.keep(logits, 1, 0, 0.6).tolist() == [0]
    assert reference.keep(logits, 2, 0, 0.6).tolist() == [0, 1]


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    st.floats(0.0625, 4),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
)
def test_a_draw_is_one_of_those_kept(logits, temperature, top_k, top_p, seed, position):
    logits = np.array(logits)
    temperature, top_p = float(np.float32(temperature)), float(np.float32(top_p))
    kept = reference.keep(logits, temperature, top_k, top_p)
    assert 1 <= len(kept) <= (top_k or len(logits))
    left = np.delete(logits, kept)
    assert not left.size or left.max() <= logits[kept].min()
    token = reference.sample(logits, temperature, top_k, top_p, seed, position)
    assert token in kept
    assert token == reference.sample(logits, temperature, top_k, top_p, seed, position)


def chi_square(counts, probabilities):
    expected = probabilities / probabilities.sum() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_softmax(by):
    logits, fixed = np.log(PROBABILITIES), {"seed": 3, "position": 11}
    drawn = [reference.sample(logits, 1, 0, 1, **(fixed | {by: i})) for i in range(DRAWS)]
    counts = np.bincount(drawn, minlength=len(logits))
    assert chi_square(counts, PROBABILITIES) < CRITICAL[len(logits) - 1]


def test_draws_follow_the_tempered_softmax_of_those_kept():
    logits = np.log(PROBABILITIES)
    drawn = [reference.sample(logits, 1.5, 6, 0.8, seed=5, position=i) for i in range(DRAWS)]
    kept = reference.keep(logits, 1.5, 6, float(np.float32(0.8)))
    assert len(kept) == 4
    counts = np.bincount(drawn, minlength=len(logits))
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], PROBABILITIES[kept] ** (1 / 1.5)) < CRITICAL[len(kept) - 1]


def test_neighbouring_positions_are_independent():
    logits = np.zeros(2)
    drawn = np.array([reference.sample(logits, 1, 0, 1, seed=1, position=i) for i in range(DRAWS)])
    counts = np.bincount(2 * drawn[:-1] + drawn[1:], minlength=4)
    assert chi_square(counts, np.ones(4)) < CRITICAL[3]
