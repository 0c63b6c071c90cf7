"""The simulator's Metal: every function of tests/metal/library.metal and simd.metal against NumPy."""

import numpy as np
import pytest

import simulated
from simulated import from_bfloat, to_bfloat
from tools.metal.simulator import ORDERS

pytestmark = pytest.mark.unsanitized
random = np.random.default_rng(11)
WIDE = np.concatenate([random.uniform(-30, 30, 250), [0.0, -0.0, 0.5, -0.5, 1.5, 2.5]])
POSITIVE, UNIT = np.abs(WIDE) + 0.01, WIDE / 31
# By function: arguments where it is defined and, in half, finite, and the same in float64.
UNARY = {
    "exp": (WIDE / 4, np.exp),
    "exp2": (WIDE / 4, np.exp2),
    "exp10": (WIDE / 8, lambda x: 10**x),
    "log": (POSITIVE, np.log),
    "log2": (POSITIVE, np.log2),
    "log10": (POSITIVE, np.log10),
    "sin": (WIDE, np.sin),
    "cos": (WIDE, np.cos),
    "tan": (UNIT, np.tan),
    "asin": (UNIT, np.arcsin),
    "acos": (UNIT, np.arccos),
    "atan": (WIDE, np.arctan),
    "sinh": (WIDE / 4, np.sinh),
    "cosh": (WIDE / 4, np.cosh),
    "tanh": (WIDE / 4, np.tanh),
    "asinh": (WIDE, np.arcsinh),
    "acosh": (POSITIVE + 1, np.arccosh),
    "atanh": (UNIT, np.arctanh),
    "sqrt": (POSITIVE, np.sqrt),
    "rsqrt": (POSITIVE, lambda x: 1 / np.sqrt(x)),
    "floor": (WIDE, np.floor),
    "ceil": (WIDE, np.ceil),
    "trunc": (WIDE, np.trunc),
    "rint": (WIDE, np.rint),
    "round": (WIDE, lambda x: np.trunc(x + np.copysign(0.5, x))),
    "fract": (WIDE, lambda x: x - np.floor(x)),
    "fabs": (WIDE, np.abs),
    "sinpi": (UNIT, lambda x: np.sin(np.pi * x)),
    "cospi": (UNIT, lambda x: np.cos(np.pi * x)),
    "tanpi": (UNIT / 4, lambda x: np.tan(np.pi * x)),
    "saturate": (WIDE / 16, lambda x: np.clip(x, 0, 1)),
}
OTHER = np.roll(WIDE, 5) / 8
BINARY = {
    "pow": (POSITIVE, OTHER / 2, np.power),
    "powr": (POSITIVE, OTHER / 2, np.power),
    "atan2": (WIDE, OTHER, np.arctan2),
    "fmod": (WIDE, OTHER + np.copysign(0.3, OTHER), np.fmod),
    "copysign": (WIDE, OTHER, np.copysign),
    "fmin": (WIDE, OTHER, np.fmin),
    "fmax": (WIDE, OTHER, np.fmax),
    "fdim": (WIDE, OTHER, lambda x, y: np.maximum(x - y, 0)),
    "divide": (WIDE, OTHER + np.copysign(0.3, OTHER), np.divide),
    "step": (WIDE, OTHER, lambda edge, x: (x >= edge) * 1.0),
}


def run(name, out, *inputs, library="library", **more):
    """Run an elementwise kernel in every order of lanes, and give its result, the same in all."""
    count = more.pop("threads", inputs[0].shape[0])
    results = []
    for order in ORDERS:
        result = np.empty_like(out)
        result.view(np.uint8)[...] = 0xFF
        padded = [*inputs, inputs[-1]][:2]
        given = {0: result, **{i + 1: np.ascontiguousarray(x) for i, x in enumerate(padded)}}
        simulated.compiled(library).run(
            name, given, ((count + 63) // 64,), (min(64, count),), order=order, **more
        )
        results.append(result.tobytes())
    assert len(set(results)) == 1, f"{name} depends on the order of the lanes"
    return result


def close(got, want, bits):
    """Allow errors of a few units of the last of `bits` bits, relative, and of that size near zero."""
    unit = 2.0**-bits
    error = np.abs(got.astype(np.float64) - want) / np.maximum(np.abs(want), 2.0 ** (-bits / 2))
    assert error.max() <= 4 * unit, f"off by {error.max() / unit:.1f} units at {error.argmax()}"


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name):
    x, reference = UNARY[name]
    for kind in ("float", "fast", "precise"):
        single = x.astype(np.float32)
        close(run(f"{name}_{kind}", single, single), reference(single.astype(np.float64)), 22)
    four = x.astype(np.float32).reshape(-1, 4)
    assert np.array_equal(
        run(f"{name}_float4", four, four).ravel(),
        run(f"{name}_float", x.astype(np.float32), x.astype(np.float32)),
    )
    half = x.astype(np.float16)
    close(run(f"{name}_half", half, half), reference(half.astype(np.float64)), 11)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name):
    x, y, reference = BINARY[name]
    single = [v.astype(np.float32) for v in (x, y)]
    flat = run(f"{name}_float", single[0], *single)
    close(flat, reference(*(v.astype(np.float64) for v in single)), 22)
    fours = [v.reshape(-1, 4) for v in single]
    assert np.array_equal(run(f"{name}_float4", fours[0], *fours).ravel(), flat)
    half = [v.astype(np.float16) for v in (x, y)]
    wanted = reference(*(v.astype(np.float64) for v in half))
    keep = np.abs(wanted) < 60000
    close(run(f"{name}_half", half[0], *half)[keep], wanted[keep], 11)


def test_other_functions_of_floats():
    x, y = (random.uniform(-3, 3, 256).astype(np.float32) for _ in range(2))
    wide = [v.astype(np.float64) for v in (x, y)]
    smooth = np.clip((wide[0] - 0.5) / 1.5, 0, 1)
    wanted = {
        "fma": wide[0] * wide[1] + wide[0],
        "mix": wide[0] + (wide[1] - wide[0]) * 0.25,
        "smoothstep": smooth * smooth * (3 - 2 * smooth),
        "sign": np.sign(wide[0]),
        "clamp": np.clip(wide[0], -1, 1),
        "fmax3": np.maximum(np.maximum(*wide), 0.5),
        "fmin3": np.minimum(np.minimum(*wide), 0.5),
        "fmedian3": np.median([*wide, np.full(256, 0.5)], axis=0),
        "select": np.where(wide[0] > 1, wide[1], wide[0]),
        "nextafter": np.nextafter(x, y).astype(np.float64),
    }
    for name, want in wanted.items():
        close(run(f"{name}_float", x, x, y), want, 22)
    powers = random.integers(-20, 20, 256).astype(np.int32)
    assert np.array_equal(run("ldexp_float", x, x, powers), np.ldexp(x, powers))
    pairs = np.empty((256, 2), np.float32)
    close(run("sincos_float", pairs, x), np.stack([np.sin(wide[0]), np.cos(wide[0])], 1), 22)
    assert np.array_equal(run("frexp_float", pairs, x), np.stack(np.frexp(x), 1))
    assert np.array_equal(run("modf_float", pairs, x), np.stack(np.modf(x), 1))
    a, b = (v.reshape(-1, 4).astype(np.float64) for v in (x, y))
    fours = [v.reshape(-1, 4) for v in (x, y)]
    close(run("dot_float4", x[:64], *fours), (a * b).sum(1), 19)
    close(run("length_float4", x[:64], *fours), np.sqrt((a * a).sum(1)), 22)
    close(run("distance_float4", x[:64], *fours), np.sqrt(((a - b) ** 2).sum(1)), 22)
    close(run("normalize_float4", fours[0], *fours), a / np.sqrt((a * a).sum(1, keepdims=True)), 22)


def test_kinds_of_numbers():
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 65504, -2e-7], np.float32)
    for name, values in (
        ("isnan_float", special),
        ("isnan_half", special.astype(np.float16)),
        (
            "isnan_bfloat",
            to_bfloat(np.where(np.isnan(special), 1, special))
            | (np.isnan(special) * 0x7FC0).astype(np.uint16),
        ),
    ):
        real = from_bfloat(values) if "bfloat" in name else values
        want = np.isnan(real) + 2 * np.isinf(real) + 4 * np.isfinite(real) + 8 * np.signbit(real)
        assert np.array_equal(run(name, np.empty(len(real), np.uint32), values), want)


def by_bits(function):
    """Apply a function of strings of bits to an array of integers."""

    def apply(x, *_):
        width = x.dtype.itemsize * 8
        bits = [format(int(v) & (2**width - 1), f"0{width}b") for v in x]
        return np.array([function(b) % 2**width for b in bits], np.uint64).astype(x.dtype)

    return apply


def rotated(x, y):
    width = x.dtype.itemsize * 8
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    turned = [
        ((v % 2**width) << (k % width) | (v % 2**width) >> (width - k % width)) % 2**width for v, k in pairs
    ]
    return np.array(turned, np.uint64).astype(x.dtype)


def saturated(wide, like):
    limits = np.iinfo(like.dtype)
    return np.clip(wide, limits.min, limits.max).astype(like.dtype)


def wide(x):
    return x.astype(np.int64)


INTEGERS = {
    "min": np.minimum,
    "max": np.maximum,
    "abs": lambda x, y: np.abs(x) if x.dtype.kind == "i" else x,
    "popcount": by_bits(lambda b: b.count("1")),
    "clz": by_bits(lambda b: len(b) - len(b.lstrip("0"))),
    "ctz": by_bits(lambda b: len(b) - len(b.rstrip("0"))),
    "rotate": rotated,
    "reverse_bits": by_bits(lambda b: int(b[::-1], 2)),
    "addsat": lambda x, y: saturated(wide(x) + wide(y), x),
    "subsat": lambda x, y: saturated(wide(x) - wide(y), x),
    "median3": lambda x, y: np.median([x, y, np.full_like(x, 7)], axis=0).astype(x.dtype),
    "max3": lambda x, y: np.maximum(np.maximum(x, y), 7),
    "min3": lambda x, y: np.minimum(np.minimum(x, y), 7),
    "mulhi": lambda x, y: np.array([int(a) * int(b) >> 32 for a, b in zip(x, y, strict=True)]).astype(
        x.dtype
    ),
    "absdiff": lambda x, y: np.abs(wide(x) - wide(y)).astype(x.dtype),
    "hadd": lambda x, y: ((wide(x) + wide(y)) >> 1).astype(x.dtype),
    "rhadd": lambda x, y: ((wide(x) + wide(y) + 1) >> 1).astype(x.dtype),
    "mad24": lambda x, y: ((wide(x) & 0xFFFFFF) * (wide(y) & 0xFFFFFF) + 5).astype(x.dtype),
    "mul24": lambda x, y: ((wide(x) & 0xFFFFFF) * (wide(y) & 0xFFFFFF)).astype(x.dtype),
    "extract_bits": lambda x, y: np.left_shift(x, 22) >> 25,
    "insert_bits": lambda x, y: ((wide(x) & ~0x3F8) | ((wide(y) << 3) & 0x3F8)).astype(x.dtype),
}
DTYPES = {
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_functions_of_integers(name):
    kernels = [
        k
        for k in simulated.compiled("library").kernels
        if k.rpartition("_")[0] == name and k.rpartition("_")[2] in DTYPES
    ]
    assert kernels
    for kernel in kernels:
        dtype = DTYPES[kernel.rpartition("_")[2]]
        limits = np.iinfo(dtype)
        x, y = (random.integers(limits.min, limits.max, 256, dtype, endpoint=True) for _ in range(2))
        x[:4] = [0, 1, limits.max, limits.min + (name == "abs")]
        with np.errstate(over="ignore"):
            want = INTEGERS[name](x, y)
        assert np.array_equal(run(kernel, x, x, y), want), kernel


def test_types_that_change():
    x, y = (random.normal(0, 8, 256).astype(np.float32) for _ in range(2))
    x[:6] = [np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38, 1e-39]  # two ties, an overflow, a subnormal
    assert np.array_equal(
        run("float_to_bfloat", to_bfloat(x), x), np.where(np.isinf(x), to_bfloat(x), to_bfloat(x))
    )
    nan = run("float_to_bfloat", to_bfloat(x), np.full(256, np.nan, np.float32))
    assert np.isnan(from_bfloat(nan)).all()
    assert np.array_equal(run("bfloat_to_float", x, to_bfloat(x)), from_bfloat(to_bfloat(x)))
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    assert np.array_equal(run("float_to_half", half, x), half)
    assert np.array_equal(run("half_to_bfloat", to_bfloat(x), half), to_bfloat(half.astype(np.float32)))
    sums = to_bfloat(from_bfloat(to_bfloat(y)) + from_bfloat(to_bfloat(y[::-1])))
    assert np.array_equal(run("bfloat_sum", sums, to_bfloat(y), to_bfloat(y[::-1])), sums)
    a, b = y.astype(np.float16), y[::-1].astype(np.float16)
    assert np.array_equal(run("half_products", a, a, b), a * b + a)
    assert np.array_equal(run("bits_of_float", x.view(np.uint32), x), x.view(np.uint32))
    words = random.integers(0, 2**32, 256, np.uint32)
    halves = run("halves_of_uint", np.empty((256, 2), np.float32), words)
    assert np.array_equal(halves, words.view(np.float16).reshape(-1, 2).astype(np.float32), equal_nan=True)
    shifted = (words[:, None] >> np.arange(0, 16, 4, np.uint32)) & 15
    assert np.array_equal(run("nibbles", np.empty((256, 4), np.float32), words), shifted.astype(np.float32))
    small = random.integers(0, 256, (64, 4)).astype(np.uint8)
    assert np.array_equal(run("uchar4_to_float4", small.astype(np.float32), small), small)
    assert np.array_equal(run("float4_to_uchar4", small, small.astype(np.float32)), small)
    p, q = y.reshape(-1, 4), y[::-1].reshape(-1, 4).copy()
    assert np.array_equal(run("swizzles", p, p, q), np.stack([p[:, 3], p[:, 2], q[:, 0], q[:, 1]], 1))
    made = run("vector_constructors", np.empty((256, 4), np.float32), y, y[::-1])
    assert np.array_equal(made, np.stack([y, y, y[::-1], np.ones_like(y)], 1))


def test_packed_types_and_matrices():
    items = np.zeros(64, np.dtype({"names": ["place", "kind"], "formats": ["3f4", "u1"], "itemsize": 16}))
    items["place"], items["kind"] = random.normal(0, 1, (64, 3)), random.integers(0, 256, 64)
    got, halves = np.empty((64, 4), np.float32), np.empty((64, 4), np.float16)
    given = {0: got, 1: items, 2: halves}
    simulated.compiled("library").run("packed_types", given, (1,), (64,))
    assert np.array_equal(got, np.column_stack([items["place"], items["kind"]]))
    assert np.array_equal(halves, got.astype(np.float16))
    m = random.normal(0, 1, (64, 4, 4)).astype(np.float32)
    wide = m.astype(np.float64)
    close(
        run("matrices", np.empty((64, 4), np.float32), m), wide[:, 0] + wide[:, 3] * wide[:, 1, 2, None], 20
    )


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_function_constants(doubles, scale):
    more, got = np.arange(64, dtype=np.float32), np.empty(64, np.float32)
    constants = {"kDoubles": doubles, "kCount": 40} | ({} if scale is None else {"kScale": scale})
    given = {0: got, 1: more} if doubles else {0: got}
    simulated.compiled("library").run("constants", given, (1,), (64,), constants=constants)
    want = (np.arange(64) < 40) + (more if doubles else 0)
    assert np.array_equal(got, want * (1 if scale is None else scale))


@pytest.mark.parametrize("grid", [(12, 6, 2), (11, 5, 1)])
def test_a_thread_is_told_its_place(grid):
    threads = (4, 3, 2)
    groups = tuple(-(-n // t) for n, t in zip(grid, threads, strict=True))
    got = np.full((grid[2], grid[1], grid[0], 24), 2**32 - 1, np.uint32)
    simulated.compiled("library").run("places", {0: got}, groups, threads, grid=grid)
    z, y, x = np.meshgrid(*map(np.arange, grid[::-1]), indexing="ij")
    position = np.stack([x, y, z], -1)
    group = position // threads
    here = np.minimum(threads, np.array(grid) - group * threads)
    inside = position % threads
    index = (inside[..., 2] * here[..., 1] + inside[..., 1]) * here[..., 0] + inside[..., 0]
    fixed = [np.broadcast_to(v, position.shape) for v in (grid, groups, threads)]
    parts = [
        position,
        fixed[0],
        group,
        fixed[1],
        inside,
        here,
        fixed[2],
        index[..., None],
        index[..., None] % 32,
        index[..., None] // 32,
    ]
    assert np.array_equal(got, np.concatenate(parts, -1))


def test_indirect_dispatch():
    got = np.zeros(64, np.float32)
    counts = np.array([2, 1, 1], np.uint32)
    run_ = simulated.compiled("library").run(
        "constants", {0: got}, (99,), (16,), indirect=counts, constants={"kCount": 99}
    )
    assert run_.counts["threads"] == 32
    assert got.sum() == 32


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_atomics(order, workers):
    count = 16 * 64
    number = np.array([0, 0, 0, 2**32 - 1, 0, 5000, 0, 0], np.uint32)
    least, sums, places = np.zeros(1, np.int32), np.zeros(2, np.float32), np.full(count, 2**32 - 1, np.uint32)
    given = {0: number, 1: least, 2: sums, 3: places}
    simulated.compiled("library").run("atomics", given, (16,), (64,), order=order, workers=workers)
    i = np.arange(count)
    total = int((i % 64).sum())
    assert number.tolist() == [
        total,
        count - 1,
        2**32 - 1,
        2**32 - 256,
        int(np.bitwise_xor.reduce(i)),
        (5000 - 2 * count) % 2**32,
        count,
        int(i.sum()),
    ]
    assert least[0] == 1 - count
    assert sums.tolist() == [count / 2, -count / 4]
    assert sorted(places.tolist()) == i.tolist()
    pair = np.array([0, 2**64 - 1], np.uint64)
    simulated.compiled("library").run("wide_atomics", {0: pair}, (4,), (32,), order=order)
    assert pair.tolist() == [127 << 33, 5 << 33]
