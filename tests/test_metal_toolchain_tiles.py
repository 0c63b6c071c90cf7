"""The simulator's matrix tiles against NumPy: simdgroup_matrix and Metal 4's matmul2d."""

import numpy as np
import pytest

import simulated
from simulated import from_bfloat, to_bfloat
from tools.metal.simulator import ORDERS

pytestmark = pytest.mark.unsanitized
random = np.random.default_rng(13)
STORED = {
    "float": (np.float32, np.float64),
    "half": (np.float16, lambda x: x.astype(np.float64)),
    "bfloat": (to_bfloat, lambda x: from_bfloat(x).astype(np.float64)),
}


def stored(kind, shape):
    """Make random numbers as they lie in memory, and what they are."""
    write, read = STORED[kind]
    numbers = random.normal(0, 1, shape).astype(np.float32)
    held = numbers.astype(write) if isinstance(write, type) else write(numbers)
    return held, held.astype(np.float64) if kind == "float" else read(held)


def same_in_all_orders(kernel, buffers, out, groups, threads, **more):
    """Run a kernel in every order, plain and instrumented, and give what it writes: always the same bits."""
    results = []
    for instrumented in (False, True):
        for order in ORDERS:
            out.view(np.uint8)[...] = 0xFF
            library = simulated.compiled("tiles", instrumented=instrumented)
            library.run(kernel, buffers, groups, threads, order=order, **more)
            results.append(out.copy())
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("transposed", ["", "_left", "_right"])
def test_tile(kind, transposed):
    a, left = stored(kind, (12, 20))
    b, right = stored(kind, (8, 8))
    c, d = random.normal(0, 1, (8, 8)).astype(np.float32), np.empty((8, 8), np.float32)
    got = same_in_all_orders(f"tile_{kind}{transposed}", {0: a, 1: b, 2: c, 3: d}, d, (1,), (32,))
    left = left[1:9, 3:11]
    want = (left.T if transposed == "_left" else left) @ (right.T if transposed == "_right" else right) + c
    assert np.abs(got - want).max() < 1e-5


def test_tile_values():
    a, d = random.normal(0, 1, (8, 8)).astype(np.float16), np.empty((4, 8, 8), np.float16)
    ones, twice, turned, squares = same_in_all_orders("tile_values", {0: a, 1: d}, d, (1,), (32,))
    assert (ones == 1).all()
    assert np.array_equal(twice, a * np.float16(2))
    assert np.array_equal(turned, twice.T)
    wide = a.astype(np.float64)
    assert np.abs(squares - (wide @ wide + twice)).max() < 0.01


@pytest.mark.parametrize("kind", STORED)
def test_product(kind):
    M, N, K = 128, 192, 96
    (a, left), (b, right) = stored(kind, (M, K)), stored(kind, (N, K))
    c = np.empty((M, N), np.float32)
    buffers = {0: a, 1: b, 2: c, 3: np.array([M, N, K], np.uint32)}
    got = same_in_all_orders(f"product_{kind}", buffers, c, (N // 64, M // 64), (128,))
    assert np.abs(got - left @ right.T).max() < 1e-4


@pytest.mark.parametrize(
    ("kernel", "left", "right"),
    [
        ("registers_half", False, True),
        ("registers_bfloat", False, True),
        ("registers_bfloat_plain", False, False),
        ("registers_float_left", True, False),
        ("registers_half_both", True, True),
        ("registers_half_in_half", False, True),
    ],
)
def test_operands_in_registers(kernel, left, right):
    M, N, K = 32, 64, 48
    kind = kernel.split("_")[1]
    (a, x), (b, y) = stored(kind, (K, M) if left else (M, K)), stored(kind, (N, K) if right else (K, N))
    c = np.empty((M, N), np.float16 if kernel.endswith("in_half") else np.float32)
    buffers = {0: a, 1: b, 2: c, 3: np.array([M, N, K], np.uint32)}
    got = same_in_all_orders(kernel, buffers, c, (N // 32, M // 16), (32,))
    want = (x.T if left else x) @ (y.T if right else y)
    assert np.abs(got - want).max() < (0.05 if c.dtype == np.float16 else 1e-4)


@pytest.mark.parametrize(
    "kernel", ["memory_half", "memory_half_4", "memory_bfloat_4", "memory_int8", "memory_uint8_4"]
)
def test_operands_in_memory(kernel):
    M, N, K = 128, 96, 40
    kind, threads = kernel.split("_")[1], 128 if kernel.endswith("_4") else 32
    if "int8" in kind:
        dtype = np.int8 if kind == "int8" else np.uint8
        limits = np.iinfo(dtype)
        a, b = (random.integers(limits.min, limits.max, (n, K), dtype, endpoint=True) for n in (M, N))
        x, y, c = a.astype(np.int64), b.astype(np.int64), np.empty((M, N), np.int32)
    else:
        (a, x), (b, y), c = stored(kind, (M, K)), stored(kind, (N, K)), np.empty((M, N), np.float32)
    buffers = {0: a, 1: b, 2: c, 3: np.array([M, N, K], np.uint32)}
    got = same_in_all_orders(kernel, buffers, c, (N // 32, M // 64), (threads,))
    assert np.abs(got - x @ y.T).max() < (1 if c.dtype == np.int32 else 1e-4)


def test_the_layout_is_nobodys_but_complete():
    contents, places, valid = (
        np.zeros((32, 9), np.float32),
        np.zeros((32, 9, 2), np.int32),
        np.zeros((32, 9), np.uint32),
    )
    simulated.compiled("tiles").run("layout", {0: contents, 1: places, 2: valid}, (1,), (32,))
    assert np.isnan(contents).all()
    assert (valid.sum(1) == 8).all()
    held = places[valid == 1]
    assert sorted(map(tuple, held.tolist())) == [(x, y) for x in range(16) for y in range(16)]
    # On an M5 a lane holds four neighbours of a row twice; code that counts on it must fail here.
    first = places[:, :4]
    assert not ((np.diff(first[..., 0], axis=1) == 1) & (np.diff(first[..., 1], axis=1) == 0)).any()


def test_matmul2d_of_the_wrong_number_of_simdgroups():
    a, b, c = np.zeros((64, 16), np.float16), np.zeros((32, 16), np.float16), np.zeros((64, 32), np.float32)
    buffers = {0: a, 1: b, 2: c, 3: np.array([64, 32, 16], np.uint32)}
    run = simulated.compiled("tiles").run("memory_half_4", buffers, (1,), (64,), check=False)
    assert {f.message.split(": ")[1] for f in run.findings} == {
        "matmul2d of 4 SIMD-groups runs in a threadgroup of 2"
    }
