"""bench.ablate: no technique of the core is left out, and what is compared is the same work."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import ablate
from lily import _core
from support import CHECKPOINTS

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]
# What says where and for whom a model runs, or what it keeps, and is no way to compute the same thing faster.
NO_TECHNIQUE = {
    *(
        "device",
        "threads",
        "simd",
        "repack",
        "repack_cache",
        "kernels",
        "kv",
        "decode_batch",
        "checkpoint_tokens",
    ),
    "resident_seconds",  # for how long memory stays wired
    "speculate",  # bench/speculate.py: its gain depends on the text
}


def test_every_option_but_those_of_place_is_flipped() -> None:
    options = {name: (kind, default) for name, kind, default, _ in _core.option_list()}
    assert {flip.name for flip in ablate.flips()} == set(options) - NO_TECHNIQUE
    for flip in ablate.flips():
        kind, default = options[flip.name]
        assert flip.value != default
        assert kind != "bool" or {flip.value, default} == {"true", "false"}
        _core.record_decode(TINY, 0, {flip.name: flip.value})  # would refuse a value out of range


def test_an_option_of_one_phase_is_measured_in_that_phase() -> None:
    phases = {flip.name: flip.phases for flip in ablate.flips()}
    assert phases["gqa_packing"] == ("decode",)
    assert phases["gdn_scan"] == phases["prefill_chunk"] == ("prefill",)
    assert phases["concurrent"] == ("prefill", "decode")


def test_an_option_without_alternatives_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"threads: wanted an option with alternatives: .*gqa_packing"):
        list(ablate.flips(["threads"]))


@pytest.mark.parametrize("kv", ["bf16", "f32"])  # of another layout, so taken in anew
def test_both_sides_decode_after_the_same_tokens(kv: str) -> None:
    weights = _core.Weights(TINY)
    tokens = np.random.default_rng(0).integers(0, 600, 300, dtype=np.int32)
    default = ablate.Side(weights, {"kv": "bf16"})
    default.take_in([270, 20], tokens)
    other = ablate.Side(weights, {"kv": kv, "prefill_chunk": "512"})
    other.take_over(default, tokens)
    assert sorted(other.states) == [20, 270]
    for context, state in other.states.items():
        assert state.length == context
        want, got = default.session.last_logits(default.states[context]), other.session.last_logits(state)
        assert np.array_equal(want, got) if kv == "bf16" else np.allclose(want, got, atol=0.1)
    default.close()


def test_the_order_alternates_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def rate(side: str, case: str, *_: object) -> float:
        calls.append((side, case))
        return {"default": 3.0, "other": 2.0}[side] + len(calls) // 5

    monkeypatch.setattr(ablate, "rate", rate)
    shape = ablate.Shape([8], [4], steps=1, rounds=1)
    flip = ablate.Flip("concurrent", "false", ("prefill", "decode"))
    found = ablate.compare("default", "other", flip, shape, np.zeros(8, np.int32))  # type: ignore[arg-type]
    assert found == {"prefill@8": [(4.0, 3.0)], "decode@4": [(4.0, 3.0)]}
    first = [(side, case) for case in ("prefill@8", "decode@4") for side in ("default", "other")]
    assert calls == first + first[::-1]


def test_gains_become_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    arguments = ["--prefill", "9", "--decode", "5", "--steps", "2", "--rounds", "2"]
    arguments += ["--only", "prefill_chunk,concurrent", "--option", "threads=1", "--record", str(file)]
    ablate.main([str(TINY), *arguments])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["case"] for line in lines} == {
        *(f"prefill_chunk={size}, prefill@9" for size in (512, 1024, 4096, 8192)),
        *("concurrent=false, prefill@9", "concurrent=false, decode@5"),
    }
    assert all(line["unit"] == "%" and len(line["samples"]) == 2 for line in lines)
    assert all(line["options"]["threads"] == "1" for line in lines)
    assert "tok/s by default" in lines[0]["note"]
    assert "concurrent=false" in capsys.readouterr().out
