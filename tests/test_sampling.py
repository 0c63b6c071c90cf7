"""Which numbers a token is drawn by: arguments over the checkpoint's own, checked."""

import dataclasses
import inspect
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lily
from lily.sampling import Sampling

FILE = Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
NUMBERS = {
    "temperature": "a number from 0 to 1000",
    "top_p": "a number from 0 to 1",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number from 0.01 to 100",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
}


def write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.none() | st.floats(0, 1000),
            "top_k": st.none() | st.integers(0, 2**31 - 1),
            "top_p": st.none() | st.floats(0, 1),
            "min_p": st.none() | st.floats(0, 1),
            "repetition_penalty": st.none() | st.floats(0.01, 100),
            "presence_penalty": st.none() | st.floats(-2, 2),
            "frequency_penalty": st.none() | st.floats(-2, 2),
            "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100)),
            "seed": st.none() | st.integers(0, 2**64 - 1),
        },
    )
)
def test_arguments_come_before_the_file(given: Any) -> None:
    got = FILE.resolve(given)
    for field in dataclasses.fields(Sampling):
        if given.get(field.name) is not None:
            assert getattr(got, field.name) == given[field.name]
        elif field.name != "seed":
            assert getattr(got, field.name) == getattr(FILE, field.name)


def test_an_explicit_zero_is_not_unset() -> None:
    zeros = {"temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "seed": 0}
    got = FILE.resolve(zeros)
    assert got == dataclasses.replace(FILE, **zeros)
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0, 0, 0, 0, 0)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(
        TypeError, match="unexpected argument 'temprature'; of sampling there are temperature, "
    ):
        FILE.resolve({"temprature": 1})


def test_without_a_seed_each_is_another() -> None:
    seeds = {FILE.resolve({}).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_other_numbers_become_pythons_own() -> None:
    given = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(3),
        "top_p": Fraction(1, 4),
        "logit_bias": {np.int32(5): np.float64(1.5), "6": -1, 7: -math.inf},
        "seed": np.uint64(2**64 - 1),
    }
    got = Sampling(**given)
    want = Sampling(
        temperature=0.5, top_k=3, top_p=0.25, logit_bias={5: 1.5, 6: -1, 7: -math.inf}, seed=2**64 - 1
    )
    assert got == want
    assert hash(got) == hash(want)
    kinds = [type(value) for value in (got.temperature, got.top_k, got.top_p, got.seed)]
    assert kinds == [float, int, float, int]
    assert {type(key) for key in got.logit_bias} == {int}
    assert {type(bias) for bias in got.logit_bias.values()} == {float}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [*NUMBERS.items(), ("top_k", "an int of at least 0"), ("seed", "an int of at least 0")],
)
@pytest.mark.parametrize(
    "bad", [-3, -2.1, math.nan, math.inf, -math.inf, True, "1", [1], 2**64, 10**400], ids=repr
)
def test_what_makes_no_sense_is_named(name: str, wanted: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted {wanted}.*got ") as caught:
        Sampling(**{name: bad})
    assert str(caught.value).endswith(repr(bad))


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_fractions_are_no_counts(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted an int.*got 1.0"):
        Sampling(**{name: 1.0})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([5], r"logit_bias: wanted a dict of token ids and numbers, got \[5\]"),
        ({-1: 0}, "logit_bias: a token id: wanted an int of at least 0 .*, got -1"),
        ({"the": 0}, "logit_bias: a token id: .*, got 'the'"),
        ({"-1": 0}, "logit_bias: a token id: .*, got '-1'"),
        ({"²": 0}, "logit_bias: a token id: .*, got '²'"),
        ({5.0: 0}, "logit_bias: a token id: .*, got 5.0"),
        ({5: 0, "5": 1}, "logit_bias: wanted each token once, got 5 twice"),
        ({5: 100.1}, r"logit_bias\[5\]: wanted a number from -100 to 100, got 100.1"),
        ({5: math.inf}, r"logit_bias\[5\]: wanted a number from -100 to 100, got inf"),
        ({"5": math.nan}, r"logit_bias\['5'\]: wanted a number from -100 to 100, got nan"),
        ({5: "1"}, r"logit_bias\[5\]: wanted a number from -100 to 100, got '1'"),
    ],
)
def test_a_senseless_bias_is_named(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Sampling(logit_bias=bad)


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    assert Sampling.load(Path(lily.DEMO)) == Sampling(temperature=0.7, top_k=40, top_p=0.95)
    assert Sampling.load(tmp_path) == Sampling(temperature=1.0, top_k=20, top_p=0.95)
    assert Sampling.load(write(tmp_path, top_p=0.5)) == Sampling(top_p=0.5)
    assert Sampling.load(write(tmp_path, temperature=None, top_k=0)) == Sampling(top_k=0)
    assert Sampling.load(write(tmp_path, do_sample=False, temperature=0.6)).temperature == 0
    for name in NUMBERS:
        assert getattr(Sampling.load(write(tmp_path, **{name: 0.25})), name) == 0.25


def test_a_senseless_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        lily.ModelFilesError, match=r"generation_config\.json: temperature: wanted .* got 'hot'"
    ):
        Sampling.load(write(tmp_path, temperature="hot"))


@pytest.mark.parametrize("owner", [lily.Model, lily.Prefix])
@pytest.mark.parametrize("name", ["generate", "stream"])
def test_help_shows_each_argument(owner: type, name: str) -> None:
    shown = inspect.signature(getattr(owner, name)).parameters
    assert {field.name for field in dataclasses.fields(Sampling)} <= set(shown)
    assert shown["seed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
