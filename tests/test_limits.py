"""bench.ops and bench.limits: what they make of seconds, what the twins leave out, and that they run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rungs
from bench import limits, ops, peaks, synthetic
from lily import _core, errors, stages
from support import CHECKPOINTS, HERE, ROW_BY_ROW, runs

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]
HALVES = ("loads", "arithmetic")
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


# ---- Twins of the CPU's kernels


@pytest.fixture(scope="module")
def twins() -> dict[str, Path]:
    """Build the halves of the kernels, with the flags of the core's own."""
    if not runs("avx512vnni"):
        pytest.skip("this CPU has no integer dot products of AVX-512, whose kernels the twins are of")
    root, build = HERE.parent, HERE.parent / "build" / "twins"
    for command in (["-S", root, "-B", build, "-DLILY_TWINS=ON"], ["--build", build, "--target", *HALVES]):
        subprocess.run([Path(sys.executable).parent / "cmake", *command], check=True, capture_output=True)
    return {half: build / f"{half}.so" for half in HALVES}


def flipped(folder: Path) -> Path:
    """Copy a checkpoint; of each row of its matrices, one word of weights is another."""
    shutil.copytree(TINY, folder)
    for file in folder.glob("*.safetensors"):
        held = bytearray(file.read_bytes())
        size = int.from_bytes(held[:8], "little")
        for name, tensor in json.loads(held[8 : 8 + size]).items():
            if tensor.get("dtype") != "U32" or "embed_tokens" in name:
                continue
            first, last = (8 + size + at for at in tensor["data_offsets"])
            words = np.frombuffer(held, np.uint32, (last - first) // 4, first)
            rows = words.reshape(-1, tensor["shape"][-1])
            rows[np.arange(len(rows)), 37 * np.arange(len(rows)) % rows.shape[1]] ^= 0x0F0F0F0F
        file.write_bytes(held)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("repack", ["on", "off"])
def test_twins_of_the_cpu_leave_out_one_half_each(
    repack: str, twins: dict[str, Path], tmp_path: Path
) -> None:
    """A weight counts without the arithmetic, wherever it stands, and none counts without loads."""
    options = {"device": "cpu", "simd": "avx512vnni", "repack": repack, "threads": "1"}
    found: dict[tuple[str, str], list[np.ndarray[Any, Any]]] = {}
    x = np.random.default_rng(0).standard_normal((1, 640)).astype(np.float32)
    for which, folder in (("as it is", TINY), ("flipped", flipped(tmp_path / "flipped"))):
        weights = _core.Weights(str(folder))
        whole = _core.Session(weights, options)
        sessions = {"whole": whole}
        sessions |= {half: limits.twin(weights, options, str(file), whole) for half, file in twins.items()}
        assert (whole.packed_bytes > 0) == (repack == "on")
        for kind, session in sessions.items():
            parts = [(session.new_state(), np.zeros(1, np.int32))]
            for op, written in (("gdn_in", "qkv"), ("moe_route", "router"), ("moe_route", "shared")):
                session._set("x", x[:, : session._get("x", 1).shape[1]])
                session._run(op, 0, parts)
                found.setdefault((which, kind), []).append(session._get(written, 1).copy())
    for before, after in zip(found["as it is", "loads"], found["flipped", "loads"], strict=True):
        assert np.all(before != after)
    for before, after in zip(found["as it is", "arithmetic"], found["flipped", "arithmetic"], strict=True):
        assert np.array_equal(before, after)
    for kind in HALVES:
        for whole_output, half in zip(found["as it is", "whole"], found["as it is", kind], strict=True):
            assert np.mean(whole_output != half) > 0.9


@pytest.mark.long
def test_a_matrix_is_loaded_as_fast_as_memory_gives_it(twins: dict[str, Path], tmp_path: Path) -> None:
    """The head of the real vocabulary, 286 MB: within a factor of five, on a machine of any size and load."""
    synthetic.write(tmp_path, layers=1, experts=8)
    weights, options = _core.Weights(str(tmp_path)), {"simd": "avx512vnni", "device": "cpu", "repack": "on"}
    whole = _core.Session(weights, options)
    machine = ops.Machine(limits.twin(weights, options, str(twins["loads"]), whole), weights.config, 1, 0)
    seconds = min(machine.alone("head", 3) for _ in range(3))
    rate = stages.floors(weights.config, 0)["head"] / seconds
    assert 1 / 5 < rate / peaks.measure(peaks.MEMORY) < 5


def test_a_file_without_kernels_is_refused() -> None:
    session = machine_of(1, 0).session
    with pytest.raises(
        errors.DeviceError, match=r"nowhere\.so: wanted kernels of .*, got nowhere\.so: cannot open"
    ):
        session._use_kernels("nowhere.so")
    with pytest.raises(errors.DeviceError, match="compiled from the sources of this core, got others"):
        session._use_kernels(_core.__file__)
