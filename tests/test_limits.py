"""bench.ops and bench.limits: what they make of seconds, what the twins leave out, and that they run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rungs
from bench import limits, ops, peaks
from lily import _core, stages
from support import CHECKPOINTS, HERE, ROW_BY_ROW, runs

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]
# The ops of metal/matvec.metal but the head, and their kernels.
GEMVS = {"gdn_in": "gdn_in", "gdn_out": "gdn_out", "attn_in": "attn_in", "attn_out": "matvec"}


def test_cases_go_by_turns() -> None:
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name) or float(len(calls))) for name in "ab"}
    assert ops.by_turns(cases, 2) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert calls == ["a", "b", "b", "a"]


def test_a_step_is_accounted_for() -> None:
    account = limits.Account(context=20, bytes=3_000_000, stages=252, bandwidth=1e12)
    whole = (3e-6 + 252 * 1e-6) / 0.75  # a quarter is left
    timed = {"a step": [whole], "an empty stage": [1e-6]}
    (stages_of_it, left) = account.told(timed)
    assert stages_of_it == ("stages of a token", "", [252], "after 20 tokens")
    assert left[1:3] == ("%", [pytest.approx(25)])
    assert left[3] == "3.0 MB at 1000 GB/s, 252 stages"
    assert len(list(account._replace(bandwidth=0).told(timed))) == 1


def machine_of(rows: int, context: int, **options: str) -> ops.Machine:
    weights = _core.Weights(str(TINY))
    return ops.Machine(_core.Session(weights, {"device": "cpu", **options}), weights.config, rows, context)


def test_an_op_is_run_in_every_layer_that_has_it() -> None:
    machine = machine_of(1, 20)
    attention = [i for i, kind in enumerate(machine.config["attention"]) if kind]
    assert machine.layers("attn_mix") == [("attn_mix", layer) for layer in attention]
    assert machine.layers("head") == [("head", 0)]
    assert machine.whole()[-2:] == [("head", 0), ("sample", 0)]
    assert set(machine.by_op(2)) == {op for op, _ in machine.whole()}
    assert all(seconds > 0 for seconds in machine.each(machine.whole(), 2))


def test_the_stages_of_a_cpu_are_barriers_of_its_threads() -> None:
    nothing = [("nothing", 0)] * 7
    assert machine_of(1, 20, threads="2").stages(nothing) == 7
    assert machine_of(1, 20, threads="1").stages(nothing) == 0


def test_rates_are_of_what_an_op_must_move_or_multiply() -> None:
    one, prompt = machine_of(1, 20), machine_of(16, 0)
    read = stages.floors(one.config, 20)["gdn_in"] / one.config["attention"].count(False)
    assert one.rate("gdn_in", read / 2e9, 8e9) == f"2 GB/s of {read / 1e6:.3f} MB, 25.0 % of the most"
    assert one.rate("embed", 1e-6, 8e9) == ""
    products = ops.products(one.config, "gdn_in", 1)
    assert prompt.rate("gdn_in", 32 * products / 3e9, 0) == "3 GFLOP/s"
    timed = {"gdn_in": [read / 2e9], peaks.MEMORY: [3e9, 8e9, 9e9]}
    assert [told[1:] for told in one.told(timed)] == [
        ("us", [pytest.approx(read / 2e3)], one.rate("gdn_in", read / 2e9, 8e9)),
        ("GB/s", [3.0, 8.0, 9.0], "the most, by turns with the rest"),
    ]


@pytest.mark.parametrize(
    "op", ["gdn_in", "gdn_out", "attn_in", "attn_out", "moe_route", "moe_up", "moe_down"]
)
def test_products_are_the_numbers_of_the_matrices_that_are_read(op: str) -> None:
    """Of 16 bits each; norms, which are read too, are as wide as the model at most."""
    config = {**_core.read_config(TINY), "quantisation": None, "override": {}}
    layers = [
        kind for kind in config["attention"] if not op.startswith(("gdn", "attn")) or kind == (op[0] == "a")
    ]
    norms = stages.floors(config, 20)[op] / len(layers) - 2 * ops.products(config, op, 21)
    assert norms in (0, 2 * config["hidden"], 2 * config["value_dim"])


def test_the_machine_does_what_peaks_says() -> None:
    """However busy it is."""
    memory, products = (peaks.measure(kind) for kind in (peaks.MEMORY, peaks.VECTORS))
    assert 1e8 < memory < 1e13
    assert 1e8 < products < 1e15
    if runs("amx"):
        assert products < peaks.measure(peaks.TILES) < 1e15
    else:
        with pytest.raises(ValueError, match=r"peaks.cpp: tiles: wanted a processor with AMX"):
            peaks.measure(peaks.TILES)


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks._program.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"wanted a C\+\+ compiler, got no no-such-compiler"):
        peaks.measure(peaks.MEMORY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "measure", lambda kind: 1e12 if kind == peaks.MEMORY else 1e15)


def told(file: Path) -> dict[str, dict[str, Any]]:
    return {line["case"]: line for line in map(json.loads, file.read_text().splitlines())}


@pytest.mark.usefixtures("quick")
def test_limits_become_samples(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    arguments = ["--context", "20", "--rows", "16", "--times", "1", "--rounds", "2", "--record", str(file)]
    limits.main([str(TINY), *arguments, "--option", "device=cpu"])
    lines = told(file)
    assert {f"{op}, whole" for op in limits.GEMV} <= set(lines)
    assert {f"{op}, 16 rows, in the model" for op in limits.TILED} <= set(lines)
    assert all(len(lines[case]["samples"]) == 2 for case in ("a step", "head alone", "head and sample"))
    assert lines[peaks.MEMORY]["samples"] == [1000.0, 1000.0]
    assert "GFLOP/s" in lines["moe_down, 16 rows"]["note"]
    floor = stages.step(TINY, 20, {}).floor
    assert (
        f"{floor / 1e6:.1f} MB at 1000 GB/s"
        in lines["share of a step that bytes and stages do not explain"]["note"]
    )
    limits.main(
        [
            str(TINY),
            *arguments[:2],
            "--rows",
            "0",
            *arguments[4:-1],
            str(tmp_path / "given"),
            "--bandwidth",
            "2e9",
        ]
    )
    lines = told(tmp_path / "given")
    assert peaks.MEMORY not in lines
    assert " MB at 2 GB/s" in lines["share of a step that bytes and stages do not explain"]["note"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rows", [1, 16])
def test_ops_become_samples(tmp_path: Path, rows: int) -> None:
    file = tmp_path / "samples.jsonl"
    arguments = ["--rows", str(rows), "--context", "20", "--times", "1", "--rounds", "2"]
    ops.main([str(TINY), *arguments, "--option", "device=cpu", "--record", str(file)])
    lines = told(file)
    machine = machine_of(rows, 20)
    rest = "" if rows == 1 else f", {rows} rows"
    assert set(lines) == {machine.limit, *(op + rest for op, _ in machine.whole())}
    assert all(len(line["samples"]) == 2 and line["bench"] == "ops" for line in lines.values())
    rate = "GB/s of" if rows == 1 else "GFLOP/s"
    assert all(rate in lines[op + rest]["note"] for op in (*ops.DELTA, *ops.ATTENTION, *ops.MIXTURE))
    assert all("% of the most" in line["note"] for line in lines.values() if rate in line["note"])
    assert lines["gdn_mix" + rest]["options"]["context"] == 20


@pytest.mark.long
def test_twins_leave_out_half_of_the_work_and_no_more() -> None:
    """In the simulator: the loads are the same without the arithmetic, and none of weights without loads."""
    rungs.climb("metal")
    from tools.metal.compile import compile

    seen = {}
    for define in ("", "LILY_LOADS_ONLY=1", "LILY_ARITHMETIC_ONLY=1"):
        library = compile(
            [HERE.parent / "metal" / "matvec.metal"], instrumented=True, define=[define] if define else []
        )
        options = {"device": "sim", "kernels": str(library), "kv": "f32", **ROW_BY_ROW}
        session = _core.Session(_core.Weights(str(TINY)), options)
        state = session.new_state()
        session._recorded()
        for op in GEMVS:
            session._run(op, 3 if op.startswith("attn") else 0, [(state, np.zeros(1, np.int32))])
        session._finish()
        seen[define] = {
            dispatch.kernel: [(t.reads, t.read_lines) for t in dispatch.memory]
            for dispatch in session._recorded()
        }
    whole, loads, arithmetic = seen.values()
    assert set(whole) == set(GEMVS.values())
    for kernel, memory in whole.items():
        pairs = list(zip(memory, loads[kernel], strict=True))
        assert all(abs(was[1] - now[1]) <= 1 for was, now in pairs), (
            kernel
        )  # a buffer may begin within a line
        pairs = list(zip(memory, arithmetic[kernel], strict=True))
        assert any(was[1] > 0 and now[1] == 0 for was, now in pairs), kernel  # the matrices
        assert any(was[1] > 1 and abs(now[1] - was[1]) <= 1 for was, now in pairs), kernel  # the input
