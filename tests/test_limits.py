"""bench.limits: what it derives from seconds, that the twins leave out what they say, and that it runs."""

import json
from pathlib import Path

import numpy as np
import pytest

import rungs
from bench import limits
from lily import _core, stages
from support import CHECKPOINTS, HERE, ROW_BY_ROW

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]
# The ops of metal/matvec.metal but the head, and their kernels.
GEMVS = {"gdn_in": "gdn_in", "gdn_out": "gdn_out", "attn_in": "attn_in", "attn_out": "matvec"}


def test_cases_go_by_turns() -> None:
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name) or float(len(calls))) for name in "ab"}
    assert limits.by_turns(cases, 2) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert calls == ["a", "b", "b", "a"]


def test_a_step_is_accounted_for() -> None:
    step = stages.step(None, 4096, {})
    bandwidth = 1e12
    bytes_seconds, empty = (step.read + step.written) / bandwidth, 1e-6
    whole = (bytes_seconds + step.stages * empty) / 0.75  # a quarter is left
    timed = {"a step": [whole], "an empty stage": [empty], "gdn_in, whole": [1e-5], "gdn_in, 64 rows": [1e-3]}
    config = {
        "hidden": 2048,
        "key_heads": 16,
        "key_dim": 128,
        "value_heads": 32,
        "value_dim": 128,
        "heads": 16,
    }
    config |= {
        "kv_heads": 2,
        "head_dim": 256,
        "experts_per_token": 8,
        "expert_width": 512,
        "shared_width": 512,
    }
    found = {
        case: (samples, note) for case, _, samples, note in limits.derived(timed, step, config, 64, bandwidth)
    }
    assert found["share of a step that bytes and stages do not explain"][0] == [pytest.approx(25)]
    assert found["stages of a token"][0] == [step.stages]
    read = next(row for row in step.table if row.op == "gdn_in")
    megabytes = (read.read + read.written) / 30 / 1e6
    assert found["gdn_in, whole"] == (
        [pytest.approx(10)],
        f"{megabytes * 100:.0f} GB/s of {megabytes:.3f} MB",
    )
    assert found["gdn_in, 64 rows"][1] == f"{2 * 12352 * 2048 * 64 / 1e-3 / 1e12:.3g} TFLOP/s"


def test_an_op_alone_is_run_in_every_layer_that_has_it() -> None:
    weights = _core.Weights(str(TINY))
    machine = limits.Machine(_core.Session(weights, {}), weights.config, 1, 20)
    attention = [i for i, kind in enumerate(weights.config["attention"]) if kind]
    assert machine.alone("attn_mix") == [("attn_mix", layer) for layer in attention]
    assert machine.alone("head") == [("head", 0)]
    assert machine.whole()[-2:] == [("head", 0), ("sample", 0)]
    assert machine.seconds(machine.whole(), 2) > 0


def test_everything_becomes_samples(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    arguments = ["--context", "20", "--rows", "16", "--times", "1", "--rounds", "2", "--bandwidth", "1e10"]
    limits.main([str(TINY), *arguments, "--record", str(file)])
    lines = {line["case"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {f"{op}, whole" for op in limits.GEMV} <= set(lines)
    assert {f"{op}, 16 rows, in the model" for op in limits.TILED} <= set(lines)
    assert all(len(lines[case]["samples"]) == 2 for case in ("a step", "head alone", "head and sample"))
    assert "TFLOP/s" in lines["moe_down, 16 rows"]["note"]
    assert lines["dispatches of a token"]["samples"] == [stages.step(TINY, 20, {}).dispatches]


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
