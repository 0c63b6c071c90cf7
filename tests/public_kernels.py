"""Metal kernels that are public and not ours: out of PyPI's mlx-metal, fetched when a test runs, never kept.

The wheel holds the kernels' headers, and a .metallib of what Apple's compiler made of them.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rungs
from tools.metal.compile import CACHE

VERSION, PLATFORM = "0.32.4", "macosx_26_0_arm64"
KERNELS = "mlx/backend/metal/kernels/"
STEEL = ("utils.h", "steel/gemm/gemm.h")
# By family: the headers, in the order in which MLX includes them, and instances of their kernels.
FAMILIES: dict[str, tuple[tuple[str, ...], list[tuple[str, str]]]] = {
    "quantized": (
        (*STEEL, "quantized_utils.h", "quantized.h"),
        [
            (kernel, f"{T}, {group}, {bits}, {rest}".rstrip(", "))
            for T in ("bfloat16_t", "half", "float")
            for group, bits in ((64, 4), (32, 8), (128, 3))
            for kernel, rest in (
                ("affine_qmv_fast", "false"),
                ("affine_qmv", "true"),
                ("affine_qmv_wide", "4, 8, false"),
                ("affine_qvm", "false"),
                ("affine_qmm_t", "true, false"),
                ("affine_qmm_n", "false"),
                ("affine_gather_qmv_fast", ""),
                ("affine_gather_qmm_t", "true"),
                ("affine_gather_qmm_rhs", "16, 32, 32, 1, 2, true"),
                ("affine_quantize", ""),
                ("affine_dequantize", ""),
            )
        ],
    ),
    "steel_gemm": (
        (*STEEL, "steel/gemm/kernels/steel_gemm_fused.h"),
        [
            ("gemm", f"{T}, 64, 64, 16, 2, 2, {a}, {b}")
            for T in ("bfloat16_t", "half", "float")
            for a in ("false", "true")
            for b in ("false", "true")
        ],
    ),
    "steel_gemm_gather": (
        (*STEEL, "steel/gemm/kernels/steel_gemm_gather.h"),
        [("gather_mm", f"{T}, 64, 64, 16, 2, 2, false, true") for T in ("bfloat16_t", "float")]
        + [("gather_mm_rhs", f"{T}, 16, 64, 16, 1, 2, false, true") for T in ("bfloat16_t", "float")],
    ),
    "steel_gemm_splitk": (
        (*STEEL, "steel/gemm/kernels/steel_gemm_splitk.h"),
        [
            ("gemm_splitk", f"{T}, float, 32, 32, 16, 2, 2, false, true, true, true")
            for T in ("bfloat16_t", "float")
        ],
    ),
    "steel_attention": (
        ("utils.h", "steel/attn/kernels/steel_attention.h"),
        [
            ("attention", f"{T}, 32, 16, {D}, {D}, 4, 1, {mask}, float")
            for T in ("bfloat16_t", "half")
            for D in (64, 128)
            for mask in (T, "bool")
        ],
    ),
    "sdpa_vector": (
        ("utils.h", "sdpa_vector.h"),
        [
            (kernel, f"{T}, {D}")
            for T in ("bfloat16_t", "half", "float")
            for D in (64, 128, 256)
            for kernel in ("sdpa_vector", "sdpa_vector_2pass_1", "sdpa_vector_2pass_2")
        ],
    ),
    "gated_delta": (
        ("utils.h", "gated_delta_update.h"),
        [("gated_delta_seq", f"{T}, 128, 128, 16, 32, 0") for T in ("bfloat16_t", "half", "float")],
    ),
    "softmax": (
        ("utils.h", "softmax.h"),
        [
            (kernel, f"{T}, float")
            for T in ("bfloat16_t", "half", "float")
            for kernel in ("softmax_single_row", "softmax_looped")
        ],
    ),
    "logsumexp": (
        ("utils.h", "logsumexp.h"),
        [(k, T) for T in ("bfloat16_t", "float") for k in ("logsumexp", "logsumexp_looped")],
    ),
    "gemv": (("utils.h", "gemv.h"), [("gemv_wide", f"{T}, 4, 8") for T in ("bfloat16_t", "half", "float")]),
    "sort": (
        ("utils.h", "sort.h"),
        [
            (kernel, f"{T}, uint32_t, true, 128, 8")
            for T in ("bfloat16_t", "float", "int32_t")
            for kernel in ("block_sort", "mb_block_sort", "mb_block_merge")
        ],
    ),
    "scan": (
        ("defines.h", "utils.h", "binary_ops.h", "scan.h"),
        [
            ("contiguous_scan", f"float, float, {op}<float>, 4, {inclusive}, false")
            for op in ("CumSum", "CumMax")
            for inclusive in ("true", "false")
        ],
    ),
    "binary": (
        ("utils.h", "binary_ops.h", "binary.h"),
        [
            (kernel, f"{T}, {T}, {op}")
            for T in ("bfloat16_t", "half", "float", "int32_t")
            for op in ("Add", "Multiply", "Maximum")
            for kernel in ("binary_vv", "binary_sv", "binary_g_nd2")
        ],
    ),
    "unary": (
        ("utils.h", "unary_ops.h", "unary.h"),
        [
            ("unary_v", f"{T}, {T}, {op}")
            for T in ("bfloat16_t", "half", "float")
            for op in ("Exp", "Sigmoid", "Rsqrt", "Tanh", "Log")
        ],
    ),
    "copy": (
        ("utils.h", "copy.h"),
        [
            (kernel, f"{T}, {U}")
            for T in ("float", "bfloat16_t", "int32_t")
            for U in ("float", "half")
            for kernel in ("copy_v", "copy_s", "copy_g_nd2")
        ],
    ),
    "hadamard": (
        ("utils.h", "hadamard.h"),
        [("hadamard_n", f"{T}, 1024, 16, 4") for T in ("bfloat16_t", "float")],
    ),
    "quantized_nax": (
        (*STEEL, "steel/gemm/gemm_nax.h", "quantized_utils.h", "quantized_nax.h"),
        [("affine_qmm_t_nax", f"{T}, 64, 4, true, false") for T in ("bfloat16_t", "half")],
    ),
}


def folder() -> Path:
    """Fetch the wheel and give the folder of what is needed of it; skips the test if that fails."""
    rungs.climb("metal")
    kept = CACHE / f"mlx_metal-{VERSION}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        wanted = ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM, f"mlx-metal=={VERSION}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", kept.parent, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = f"pip cannot fetch mlx-metal: {done.stderr[-300:]}"
            reason = f"rung metal, Apple's compiler as an oracle: left out, as {why}"
            (pytest.fail if rungs.must_all_run() else pytest.skip)(reason)
        wheel = kept.parent / f"mlx_metal-{VERSION}-py3-none-{PLATFORM}.whl"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if KERNELS in name or name.endswith(".metallib")]
            archive.extractall(kept.with_suffix(".partial"), names)
        wheel.unlink()
        kept.with_suffix(".partial").rename(kept)
    return kept / "mlx"


def source(headers: tuple[str, ...], instances: list[tuple[str, str]]) -> str:
    """Write a source that includes headers and instantiates kernels, `kernel_0`, `kernel_1` and so on."""
    lines = [f'#include "{KERNELS}{header}"' for header in headers]
    for number, (kernel, arguments) in enumerate(instances):
        call = f"{kernel}<{arguments}>"
        lines.append(f'template [[host_name("kernel_{number}")]] [[kernel]] decltype({call}) {call};')
    return "\n".join(lines) + "\n"
