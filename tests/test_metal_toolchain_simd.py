"""The simulator's SIMD-groups and barriers: every function of tests/metal/simd.metal against NumPy."""

import numpy as np
import pytest

import simulated
from test_metal_toolchain_library import close, run
from tools.metal.simulator import ORDERS

pytestmark = pytest.mark.unsanitized
random = np.random.default_rng(12)
LANE = np.arange(32)
DTYPES = {
    "float": np.float32,
    "half": np.float16,
    "int": np.int32,
    "uint": np.uint32,
    "ushort": np.uint16,
    "float4": np.float32,
}


def all_lanes(function):
    return lambda x: np.broadcast_to(function(x), x.shape)


def of_quads(function):
    """Apply a function to each four lanes, the result for all of them."""
    return lambda x: np.repeat(function(x.reshape(x.shape[0], 8, 4, *x.shape[2:])), 4, axis=1).reshape(
        x.shape
    )


def filled(up):
    def apply(x):
        moved = np.roll(x, 3 if up else -3, axis=1)
        outside = (LANE < 3) if up else (LANE >= 29)
        moved[:, outside] *= 2
        return moved

    return apply


def exclusive(accumulate, first):
    return lambda x: np.concatenate([np.full_like(x[:, :1], first), accumulate(x, axis=1)[:, :-1]], axis=1)


def votes(x, test):
    return (test(x).astype(np.uint64) << LANE.astype(np.uint64)).sum(1, keepdims=True).astype(np.uint32)


# By name: the reference on (SIMD-groups, 32 lanes, ...), exact but for the rounding of sums and products.
FUNCTIONS = {
    "sum": all_lanes(lambda x: x.sum(1, keepdims=True)),
    "max": all_lanes(lambda x: x.max(1, keepdims=True)),
    "min": all_lanes(lambda x: x.min(1, keepdims=True)),
    "product": all_lanes(lambda x: x.prod(1, keepdims=True)),
    "and": all_lanes(lambda x: np.bitwise_and.reduce(x, 1, keepdims=True)),
    "or": all_lanes(lambda x: np.bitwise_or.reduce(x, 1, keepdims=True)),
    "xor": all_lanes(lambda x: np.bitwise_xor.reduce(x, 1, keepdims=True)),
    "inclusive_sum": lambda x: np.cumsum(x, axis=1),
    "exclusive_sum": exclusive(np.cumsum, 0),
    "inclusive_product": lambda x: np.cumprod(x, axis=1),
    "exclusive_product": exclusive(np.cumprod, 1),
    "shuffle": lambda x: x[:, (LANE * 7 + 3) % 32],
    "broadcast": all_lanes(lambda x: x[:, 13:14]),
    "broadcast_first": all_lanes(lambda x: x[:, :1]),
    "shuffle_xor": lambda x: x[:, LANE ^ 5],
    "rotate_down": lambda x: np.roll(x, -3, axis=1),
    "rotate_up": lambda x: np.roll(x, 3, axis=1),
    "fill_down": filled(up=False),
    "fill_up": filled(up=True),
    "shuffle_down": lambda x: np.roll(x, -3, axis=1) * (LANE < 29),
    "shuffle_up": lambda x: np.roll(x, 3, axis=1) * (LANE >= 3),
    "ballot": all_lanes(lambda x: votes(x, lambda v: v % 3 == 0)),
    "any": all_lanes(lambda x: (x % 31 == 0).any(1, keepdims=True)),
    "all": all_lanes(lambda x: (x != 77).all(1, keepdims=True)),
    "active": lambda x: np.full_like(x, 2**32 - 1),
    "is_first": lambda x: np.broadcast_to(LANE == 0, x.shape),
    "quad_sum": of_quads(lambda x: x.sum(2)),
    "quad_max": of_quads(lambda x: x.max(2)),
    "quad_min": of_quads(lambda x: x.min(2)),
    "quad_product": of_quads(lambda x: x.prod(2)),
    "quad_broadcast": of_quads(lambda x: x[:, :, 2]),
    "quad_shuffle": lambda x: x[:, LANE // 4 * 4 + (LANE + 1) % 4],
    "quad_shuffle_xor": lambda x: x[:, LANE ^ 1],
}


def values(kind, name, simds):
    shape = (simds, 32, 4) if kind == "float4" else (simds, 32)
    if kind in ("int", "uint", "ushort"):
        low = -50 if kind == "int" else 0
        return random.integers(low, 2**16 if name in ("and", "or", "xor") else 100, shape).astype(
            DTYPES[kind]
        )
    low, high = (0.9, 1.1) if "product" in name else (-8, 8)
    return random.uniform(low, high, shape).astype(DTYPES[kind])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    kernels = [k for k in simulated.compiled("simd").kernels if k.rpartition("_")[0] == name]
    assert kernels
    for kernel in kernels:
        kind = kernel.rpartition("_")[2]
        x = values(kind, name, 8)
        got = run(kernel, x, x.reshape(256, *x.shape[2:]), library="simd").reshape(x.shape)
        if x.dtype.kind == "f" and ("sum" in name or "product" in name):
            bits = 18 if x.dtype == np.float32 else 8
            close(got / 256, FUNCTIONS[name](x.astype(np.float64)) / 256, bits)
        else:
            with np.errstate(over="ignore"):
                assert np.array_equal(got, FUNCTIONS[name](x).astype(x.dtype)), kernel


def test_nan_loses_against_a_number():
    x = values("float", "max", 2)
    x[0, 3], x[1, :] = np.nan, np.nan
    for name, reference in (("max_float", np.fmax), ("min_float", np.fmin)):
        got = run(name, x, x.ravel(), library="simd").reshape(2, 32)
        assert (got[0] == reference.reduce(x[0])).all()
        assert not np.isfinite(got[1]).any()


@pytest.mark.parametrize("threads", [32, 64, 96, 256, 1024])
def test_a_group_sums_its_numbers(threads):
    x = random.normal(0, 1, (3, threads)).astype(np.float32)
    for order in ORDERS:
        got = np.full(3, np.nan, np.float32)
        given = {0: got, 1: x}
        simulated.compiled("simd").run("group_sum", given, (3,), (threads,), threadgroup=(128,), order=order)
        close(got, x.astype(np.float64).sum(1), 18)


def test_lanes_that_have_returned_take_no_part():
    x = values("float", "sum", 1).ravel()
    got = np.zeros(32, np.float32)
    simulated.compiled("simd").run("sum_of_those_left", {0: got, 1: x}, (1,), (32,))
    close(got, np.where(LANE < 20, x[:20].astype(np.float64).sum(), 0), 18)


@pytest.mark.parametrize("threads", [1, 7, 32, 33, 100, 1024])
def test_barriers(threads):
    for order in ORDERS:
        got = np.full(threads, 2**32 - 1, np.uint32)
        given = {0: got, 1: np.array([5], np.uint32)}
        done = simulated.compiled("simd").run("ring", given, (1,), (threads,), order=order)
        assert np.array_equal(got, (np.arange(threads) + 5) % threads)
        assert done.counts["barriers"] == 10
