"""The CPU backend's own promises: rows that do not see each other, inputs of any size, packed matrices."""

import sys
from pathlib import Path

import numpy as np
import pytest

import checkpoint_maker as maker
from bench import load, synthetic
from cases import OPS, Case, inputs
from lily import _core, reference
from support import (
    CHECKPOINTS,
    can_pack,
    code_paths,
    compare,
    core_of,
    emulated_paths,
    options_of,
    packed_paths,
)

EMULATED = [pytest.param(path, marks=pytest.mark.long) for path in emulated_paths()]
LONG = [*EMULATED, *(pytest.param(path, marks=pytest.mark.long) for path in packed_paths()[1:])]
PATHS = [*code_paths(), *packed_paths()[:1], *LONG]
PACKED = [simd for simd in code_paths() if can_pack(simd)]
PACKED += [path for path in EMULATED if f"{path.values[0]} packed" in emulated_paths()]
PRODUCTS = [name for name, (_, reads, _) in OPS.items() if "state" not in reads]
ROWS = 70  # more than the kernels take at a time


def session_of(path: str, checkpoint: Path = CHECKPOINTS["small"]) -> _core.Session:
    options = options_of(path) | {"kv": "f32", "prefill_chunk": "128", "threads": "2"}
    core = core_of(path)
    return core.Session(core.Weights(str(checkpoint)), options)


def outputs(session: _core.Session, op: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a product op on some rows; return what it writes."""
    rows = len(next(iter(given.values())))
    for name, array in given.items():
        wide = session._get(name, 1).shape[1]
        session._set(name, np.pad(array, ((0, 0), (0, wide - array.shape[1]))))
    layer = 3 if op.startswith("attn") else 0
    session._run(op, layer, [(session.new_state(), np.zeros(rows, np.int32))])
    return {name: session._get(name, rows).copy() for name in OPS[op][2]}


def given_for(session: _core.Session, op: str, rows: int = ROWS) -> dict[str, np.ndarray]:
    config = reference.Model(CHECKPOINTS["small"]).config
    widths = {
        name: session._get(name, 1).shape[1]
        for _, reads, _ in OPS.values()
        for name in reads
        if name != "state"
    }
    return inputs(Case(op, "small", rows), config, widths, seed=5)


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("path", PATHS)
def test_a_row_does_not_see_how_many_there_are(path: str, op: str) -> None:
    session = session_of(path)
    given = given_for(session, op)
    together = outputs(session, op, given)
    for first, count in [(0, 1), (69, 1), (3, 2), (7, 3), (20, 8), (31, 33)]:
        rows = slice(first, first + count)
        alone = outputs(session, op, {name: array[rows] for name, array in given.items()})
        for name, array in alone.items():
            assert np.array_equal(array, together[name][rows]), (name, first, count)


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("simd", PACKED)
def test_packing_changes_no_bit(simd: str, op: str) -> None:
    in_place, packed = session_of(simd), session_of(f"{simd} packed")
    assert in_place.packed_bytes == 0 < packed.packed_bytes
    given = given_for(in_place, op)
    for rows in (1, 2, ROWS):
        some = {name: array[:rows] for name, array in given.items()}
        one, other = outputs(in_place, op, some), outputs(packed, op, some)
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, "one in a group"], ids=str)
def test_inputs_of_any_size(path: str, size: float | str) -> None:
    """An error is small beside the products that are summed, whether inputs are alike or not."""
    session = session_of(path)
    model = reference.Model(CHECKPOINTS["small"])
    y = np.random.default_rng(1).standard_normal((3, session._get("y", 1).shape[1])).astype(np.float32)
    if isinstance(size, str):
        y[:, 5::64] *= 1e5
    else:
        y *= np.float32(size)
    width = model.config.heads * model.config.head_dim
    y, x = y[:, :width], np.zeros((3, model.config.hidden), np.float32)
    got = outputs(session, "attn_out", {"x": x, "y": y})["x"]
    want = reference.attn_out(model.layers[3], x.astype(np.float64), y.astype(np.float64))
    norms = np.linalg.norm(y.astype(np.float64), axis=1, keepdims=True)
    scale = np.abs(want).max() / norms.max()  # of a row of the matrix, about
    assert (np.abs(got - want) <= 1e-6 * scale * norms).all()


@pytest.mark.parametrize("digits", [(126, -128, -128), (-126, -128, -128), (126, 127, 127)], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_sums_fit(path: str, digits: tuple[int, int, int], tmp_path: Path) -> None:
    """Every weight is 15, and every input's digits are as far from zero as they get."""
    checkpoint = maker.made().copy()
    name = f"{maker.PREFIX}layers.3.self_attn.o_proj.weight"
    stored = checkpoint.tensors[name]
    checkpoint.tensors[name] = stored._replace(array=np.full_like(stored.array, 0xFFFFFFFF))
    folder = maker.write(tmp_path / "model", checkpoint)
    model = reference.Model(folder)
    value = (digits[0] * 2**16 + digits[1] * 2**8 + digits[2]) / 2**22
    y = np.full((3, model.config.heads * model.config.head_dim), value, np.float32)
    x = np.zeros((3, model.config.hidden), np.float32)
    got = outputs(session_of(path, folder), "attn_out", {"x": x, "y": y})["x"]
    compare("x", got, reference.attn_out(model.layers[3], x.astype(np.float64), y.astype(np.float64)), 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_finite_shows(path: str, value: float) -> None:
    session = session_of(path)
    given = given_for(session, "attn_out", 2)
    given["y"][1, 3] = value
    got = outputs(session, "attn_out", given)["x"]
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1]).any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which Linux has")
@pytest.mark.unsanitized
@pytest.mark.skipif(
    not any(map(can_pack, code_paths())), reason="packing is for AVX2 or integer dot products"
)
def test_packed_matrices_take_the_place_of_the_files_pages(tmp_path: Path) -> None:
    written = synthetic.write(tmp_path / "checkpoint", layers=2, experts=64, vocab=1024)
    before = load.process_memory()["VmRSS"]
    weights = _core.Weights(str(tmp_path / "checkpoint"))
    session = _core.Session(weights, {"repack": "on", "prefill_chunk": "8"})
    assert session.packed_bytes > 0.9 * written
    after = load.process_memory()
    assert after["VmRSS"] - before - session.scratch_bytes < 1.1 * written
    shared = _core.Session(weights, {"repack": "on", "prefill_chunk": "8"})
    assert shared.packed_bytes == session.packed_bytes
    assert load.process_memory()["VmRSS"] < after["VmRSS"] + 0.1 * written


def test_small_weights_are_used_in_place() -> None:
    assert _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), {"device": "cpu"}).packed_bytes == 0


# ---- prompts in two digits


def prompt_session(checkpoint: str, digits: int, **options: str) -> _core.Session:
    weights = _core.Weights(str(CHECKPOINTS[checkpoint]))
    given = {"device": "cpu", "prefill_digits": str(digits), "kv": "f32", "prefill_chunk": "128"}
    return _core.Session(weights, given | options)


two_digits = pytest.mark.skipif(
    not any(map(can_pack, code_paths())), reason="is for AVX2 or integer dot products"
)


@two_digits
@pytest.mark.parametrize("repack", ["on", "off"])
@pytest.mark.parametrize("op", PRODUCTS)
def test_two_digits_are_within_their_bound(op: str, repack: str) -> None:
    exact, session = prompt_session("small", 3), prompt_session("small", 2, repack=repack)
    given = given_for(exact, op)
    wanted, got = outputs(exact, op, given), outputs(session, op, given)
    for name, want in wanted.items():
        assert np.abs(got[name] - want).max() <= 1e-4 * np.abs(want).max(), name
    assert any(not np.array_equal(got[name], want) for name, want in wanted.items())
    few = {name: array[:9] for name, array in given.items()}
    wanted, got = outputs(exact, op, few), outputs(session, op, few)
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


@two_digits
@pytest.mark.parametrize("cuts", [[16], [48, 64], [128, 144], [16, 32, 240]], ids=str)
def test_a_prompt_in_two_digits_is_cut_on_its_grid(cuts: list[int]) -> None:
    session = prompt_session("tiny", 2)
    assert (session.grid, prompt_session("tiny", 3).grid) == (16, 1)
    tokens = np.random.default_rng(2).integers(0, 600, 251).astype(np.int32)
    whole, pieces = session.new_state(), session.new_state()
    session.extend(whole, tokens)
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        session.extend(pieces, tokens[begin:end], end=len(tokens))
    assert np.array_equal(session.last_logits(whole), session.last_logits(pieces))
