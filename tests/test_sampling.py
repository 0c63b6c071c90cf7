"""Which numbers a token is drawn by: arguments over the checkpoint's own, checked."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily.sampling import Sampling

FILE = Sampling(temperature=0.7, top_k=40, top_p=0.9)


def write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@given(
    st.none() | st.floats(0, 1000),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_arguments_come_before_the_file(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> None:
    got = FILE.resolve(temperature, top_k, top_p, seed)
    assert got.temperature == (FILE.temperature if temperature is None else temperature)
    assert got.top_k == (FILE.top_k if top_k is None else top_k)
    assert got.top_p == (FILE.top_p if top_p is None else top_p)
    assert got.seed == seed


def test_an_explicit_zero_is_not_unset() -> None:
    assert FILE.resolve(temperature=0, top_k=0, top_p=0, seed=0) == Sampling(0.0, 0, 0.0, 0)


def test_without_a_seed_each_is_another() -> None:
    seeds = {FILE.resolve().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_other_numbers_become_pythons_own() -> None:
    got = Sampling(np.float32(0.5), np.int64(3), Fraction(1, 4), np.uint64(2**64 - 1))
    assert got == Sampling(0.5, 3, 0.25, 2**64 - 1)
    kinds = [type(value) for value in (got.temperature, got.top_k, got.top_p, got.seed)]
    assert kinds == [float, int, float, int]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("temperature", "a number from 0 to 1000"),
        ("top_k", "an int of at least 0"),
        ("top_p", "a number from 0 to 1"),
        ("seed", "an int of at least 0"),
    ],
)
@pytest.mark.parametrize("bad", [-1, -0.1, math.nan, math.inf, -math.inf, True, "1", [1], 2**64, 10**400])
def test_what_makes_no_sense_is_named(name: str, wanted: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted {wanted}.*got ") as caught:
        Sampling(**{name: bad})
    assert str(caught.value).endswith(repr(bad))


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_fractions_are_no_counts(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted an int.*got 1.0"):
        Sampling(**{name: 1.0})


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    assert Sampling.load(Path(lily.DEMO)) == Sampling(temperature=0.7, top_k=40, top_p=0.95)
    assert Sampling.load(tmp_path) == Sampling(temperature=1.0, top_k=20, top_p=0.95)
    assert Sampling.load(write(tmp_path, top_p=0.5)) == Sampling(temperature=1.0, top_k=20, top_p=0.5)
    assert Sampling.load(write(tmp_path, temperature=None, top_k=0)) == Sampling(1.0, 0, 0.95)
    assert Sampling.load(write(tmp_path, do_sample=False, temperature=0.6)).temperature == 0


def test_a_senseless_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        lily.ModelFilesError, match=r"generation_config\.json: temperature: wanted .* got 'hot'"
    ):
        Sampling.load(write(tmp_path, temperature="hot"))
