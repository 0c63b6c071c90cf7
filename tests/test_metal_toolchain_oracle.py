"""Apple's own compiler as an oracle, and the checker on public kernels; public_kernels.py fetches both."""

from functools import cache

import numpy as np
import pytest

import public_kernels
import simulated
from simulated import from_bfloat, to_bfloat
from tools.metal import air
from tools.metal.check import check
from tools.metal.compile import compile
from tools.metal.simulator import Library

pytestmark = [pytest.mark.long, pytest.mark.unsanitized]
random = np.random.default_rng(14)
UNDOCUMENTED = ("MSL_UNDOCUMENTED=1",)
RMS = "rmsbfloat16"
QMV = "affine_qmv_fast_bfloat16_t_gs_64_b_4_batch_0_pr_0_hgs_0_r_4"
QMM = "affine_qmm_t_bfloat16_t_gs_64_b_4_alN_true_batch_0"
# Families of which the checker refuses kernels that Apple takes: how many, and for want of what.
REFUSED = {"steel_attention": (8, "a pointer plus an integral_constant; vectors of bool")}


@pytest.fixture(scope="module")
def apples(tmp_path_factory):
    """Load the kernels that Apple's compiler made."""
    metallib = air.Metallib(public_kernels.folder() / "lib" / "mlx.metallib")
    return Library(air.replay(metallib, [RMS, QMV, QMM], tmp_path_factory.mktemp("air")))


@cache
def ours():
    """Compile the sources of the same kernels ourselves: kernel_0 is QMV, kernel_1 is QMM."""
    headers, _ = public_kernels.FAMILIES["quantized"]
    instances = [
        ("affine_qmv_fast", "bfloat16_t, 64, 4, false"),
        ("affine_qmm_t", "bfloat16_t, 64, 4, true, false"),
    ]
    root = public_kernels.folder()
    file = root / "oracle.metal"
    file.write_text(public_kernels.source(headers, instances))
    return Library(compile([file], include=[root / "include"], define=UNDOCUMENTED))


def quantised(rows, columns):
    """Make a matrix in MLX's affine form, four bits, groups of 64: as stored, and in float64."""
    q = random.integers(0, 16, (rows, columns), np.uint32)
    words = sum(q[:, i::8] << np.uint32(4 * i) for i in range(8)).astype(np.uint32)
    scales, biases = (
        to_bfloat(random.normal(0, 0.02, (rows, columns // 64))),
        to_bfloat(random.normal(0, 0.1, (rows, columns // 64))),
    )
    whole = q * np.repeat(from_bfloat(scales), 64, 1).astype(np.float64) + np.repeat(
        from_bfloat(biases), 64, 1
    )
    return words, scales, biases, whole


def numbers(*values):
    return [np.array([value], np.int32) for value in values]


def same(got, wanted, truth):
    """Compare the bits of two results, and both with the truth, to the rounding of a bfloat."""
    assert np.abs(from_bfloat(got) - truth).max() <= 2**-8 * np.abs(truth).max()
    assert np.array_equal(got, wanted), f"{(got != wanted).sum()} of {got.size} numbers differ"


def test_rms_norm(apples):
    rows, columns = 5, 2048
    x, weight = to_bfloat(random.normal(0, 1, (rows, columns))), to_bfloat(random.normal(1, 0.1, columns))
    results = []
    for library, kernel in ((apples, RMS), (simulated.compiled("oracle"), "rms_norm")):
        out = np.zeros((rows, columns), np.uint16)
        epsilon, (size, stride) = np.array([1e-6], np.float32), numbers(columns, 1)
        given = {0: x, 1: weight, 2: out, 3: epsilon, 4: size, 5: stride}
        library.run(kernel, given, (rows,), (columns // 4,))
        results.append(out)
    wide = from_bfloat(x).astype(np.float64)
    same(*results, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * from_bfloat(weight))


def test_matrix_times_vector(apples):
    rows, columns = 256, 2048
    words, scales, biases, whole = quantised(rows, columns)
    x, nothing, results = to_bfloat(random.normal(0, 1, columns)), np.zeros(4, np.int64), []
    for library, kernel in ((apples, QMV), (ours(), "kernel_0")):
        y = np.zeros(rows, np.uint16)
        K, N, one = numbers(columns, rows, 1)
        given = {0: words, 1: scales, 2: biases, 3: x, 4: y, 5: K, 6: N, 7: one, 10: one}
        given |= dict.fromkeys((8, 9, 11, 12, 13, 14), nothing)
        library.run(kernel, given, (1, rows // 8), (32, 2))
        results.append(y)
    same(*results, whole @ from_bfloat(x))


def test_matrix_times_matrix(apples):
    M, N, K = 40, 64, 256
    words, scales, biases, whole = quantised(N, K)
    x, nothing, results = to_bfloat(random.normal(0, 1, (M, K))), np.zeros(4, np.int64), []
    for library, kernel in ((apples, QMM), (ours(), "kernel_1")):
        y = np.zeros((M, N), np.uint16)
        sizes = numbers(K, N, M, 1)
        given = {
            0: words,
            1: scales,
            2: biases,
            3: x,
            4: y,
            11: sizes[3],
            **{5 + i: size for i, size in enumerate(sizes)},
        }
        given |= dict.fromkeys((9, 10, 12, 13, 14, 15), nothing)
        library.run(kernel, given, (N // 32, (M + 31) // 32), (32, 2, 2))
        results.append(y)
    same(*results, from_bfloat(x) @ whole.T)


def test_a_kernel_that_the_metallib_lacks(tmp_path):
    metallib = air.Metallib(public_kernels.folder() / "lib" / "mlx.metallib")
    with pytest.raises(air.AirError, match="the metallib has no kernel rms_of_nobody"):
        air.replay(metallib, ["rms_of_nobody"], tmp_path)


@pytest.mark.parametrize("family", public_kernels.FAMILIES)
def test_public_kernels_are_accepted(family, tmp_path):
    headers, instances = public_kernels.FAMILIES[family]
    file = tmp_path / f"{family}.metal"
    file.write_text(public_kernels.source(headers, instances))
    errors = [p for p in check(file, [public_kernels.folder() / "include"], UNDOCUMENTED) if p.is_error]
    refused, want = REFUSED.get(family, (0, ""))
    assert bool(errors) == bool(refused), [
        str(error) for error in errors[:5]
    ] or f"accepted after all: {want}"
    assert refused in (0, len(instances))


def test_the_share_of_public_kernels_in_the_docs_is_measured():
    total = sum(len(instances) for _, instances in public_kernels.FAMILIES.values())
    refused = sum(count for count, _ in REFUSED.values())
    text = (simulated.HERE.parent.parent / "docs" / "metal-toolchain.md").read_text()
    assert f"{total - refused} of {total} instances" in text
