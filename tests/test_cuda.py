"""The GPU kernels as PTX for NVIDIA GPUs, and what device="cuda" says where it can't run.

Nothing here needs a GPU. On one, LILY_PTX=build/kernels.ptx lets every op case run there: support.backends.
"""

import re
from pathlib import Path

import pytest

import lily
import rungs
from lily import _core, errors
from support import CHECKPOINTS, HERE

METAL = sorted((HERE.parent / "metal").glob("*.metal"))
TENSORS = HERE.parent / "metal" / "tensors.metal"  # of Metal alone


@pytest.fixture(scope="module")
def ptx() -> str:
    """Return what the package brings along where the compiler was there when it was built."""
    rungs.climb("metal")
    return (Path(lily.__file__).parent / "kernels.ptx").read_text()


def test_every_kernel_is_an_entry(ptx: str) -> None:
    from tools.metal import clang

    wanted = {
        instance.name
        for file in METAL
        if file != TENSORS
        for instance in clang.translate(file).kernels.instances
    }
    assert set(re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)) == wanted


def test_kernels_call_nothing_and_lack_nothing(ptx: str) -> None:
    """A call would cost a kernel its registers; a name without a body would keep all from being loaded."""
    assert not re.search(r"^\s*call", ptx, re.MULTILINE)
    assert not re.search(r"^\.func", ptx, re.MULTILINE)
    assert re.findall(r"^\.extern .*", ptx, re.MULTILINE) == [".extern .shared .align 16 .b8 msl_dynamic[];"]


@pytest.mark.parametrize(
    ("kernel", "loads"),
    [
        ("matmul_bf16_128", ()),  # its operands lie in registers' order: tools/metal/language/cuda_multiply.h
        ("attn_mix_flash_256", ("x4", "x4.trans")),
    ],
)
def test_products_use_the_matrix_units(ptx: str, kernel: str, loads: tuple[str, ...]) -> None:
    entry = re.search(rf"^\.visible \.entry {kernel}\(.*?^\}}", ptx, re.MULTILINE | re.DOTALL)
    assert entry
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in entry[0]
    assert "cp.async.cg.shared.global" in entry[0]
    for load in loads:
        assert f"ldmatrix.sync.aligned.m8n8.{load}.shared.b16" in entry[0]


def test_a_row_times_a_matrix_uses_them_too(ptx: str) -> None:
    """Fields of a word are halves as they lie: tools/metal/language/cuda_products.h."""
    entry = re.search(r"^\.visible \.entry gdn_in\(.*?^\}", ptx, re.MULTILINE | re.DOTALL)
    assert entry
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in entry[0]
    assert "cp.async.cg.shared.global" in entry[0]


def test_a_function_constant_is_refused(tmp_path: Path) -> None:
    rungs.climb("metal")
    from tools.metal import cuda
    from tools.metal.clang import CompileError

    source = tmp_path / "flag.metal"
    source.write_text(
        "#include <metal_stdlib>\nconstant bool flag [[function_constant(0)]];\n"
        "kernel void f(device float* x [[buffer(1)]]) { if (flag) x[0] = 1; }\n"
    )
    with pytest.raises(CompileError, match="function constants are fixed at a launch, PTX is not"):
        cuda.compile([source], tmp_path / "flag.ptx")


def test_a_machine_without_a_gpu_says_so() -> None:
    weights = _core.Weights(str(CHECKPOINTS["tiny"]))
    with pytest.raises(errors.DeviceError, match="option device: cuda cannot be used"):
        _core.Session(weights, {"device": "cuda", "kernels": str(HERE / "none.ptx")})
    assert _core.Session(weights, {}).device.startswith("cpu")
