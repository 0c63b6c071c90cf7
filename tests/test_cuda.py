"""The GPU kernels as PTX for NVIDIA GPUs, and what device="cuda" says where it can't run.

Nothing here needs a GPU. On one, LILY_PTX=build/kernels.ptx lets every op case run there: support.backends.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
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


# Against tests/fake_cuda.cpp, which stands in for NVIDIA's driver.

STEPS = """
import json, sys
import numpy as np
from lily import _core, errors

checkpoint, options = sys.argv[1:]
session = _core.Session(_core.Weights(checkpoint), json.loads(options))
state = session.new_state()
for step in range(8):
    try:
        session.extend(state, np.zeros(1, np.int32))
    except errors.DeviceError as error:
        print("error", error)
    with open(LOG, "a") as log:
        print("step", file=log)
del state, session
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared"]
    source = HERE / "fake_cuda.cpp"
    subprocess.run([*compiler, str(source), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


@pytest.fixture
def steps(driver: Path, tmp_path: Path) -> Callable[..., tuple[str, list[list[str]]]]:
    """Return what takes eight steps while a call fails, and gives what is printed and each step's calls."""

    def take(fails: str, kernels: str | None = "any.ptx") -> tuple[str, list[list[str]]]:
        log = tmp_path / "log"
        log.write_text("")
        options = {"device": "cuda"}
        if kernels:
            (tmp_path / kernels).write_text("kernels that nobody compiles")
            options["kernels"] = str(tmp_path / kernels)
        environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log)}
        given = [str(CHECKPOINTS["tiny"]), json.dumps(options)]
        done = subprocess.run(
            [sys.executable, "-c", STEPS.replace("LOG", repr(str(log))), *given],
            env=environment | {"FAKE_CUDA_FAIL": fails},
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr, [
            part.split() for part in re.split("^step$", log.read_text(), flags=re.M)
        ]

    return take


@pytest.mark.unsanitized
@pytest.mark.parametrize(
    "fails",
    [
        "cuModuleGetFunction 5",
        "cuLaunchKernel 5",
        "cuGraphAddKernelNode_v2 5",
        "cuGraphInstantiateWithFlags 1",
        "cuGraphExecKernelNodeSetParams_v2 3",
        "cuGraphLaunch 1",
        "cuGraphLaunch 4",
    ],
)
def test_a_pass_that_fails_is_let_go_of(
    steps: Callable[..., tuple[str, list[list[str]]]], fails: str
) -> None:
    """The steps after it launch what they launch otherwise, and every graph goes."""
    printed, whole = steps("")
    assert printed == ""
    kernels = [[name for name in step if name not in NOT_KERNELS] for step in whole]
    assert kernels[0][0] == "embed"
    assert kernels[:8] == [kernels[0]] * 8
    assert sum(step.count("executable") for step in whole) >= 2  # made and gone: graphs were used

    printed, calls = steps(fails)
    assert printed.count("error") == 1
    assert "CUDA_ERROR_LAUNCH_FAILED" in printed
    after = next(i for i, step in enumerate(calls) if "fails" in step)
    for i, step in enumerate(calls[:8]):
        if i != after:
            assert [name for name in step if name not in NOT_KERNELS] == kernels[0], i
    every = " ".join(word for step in calls for word in step)
    for what in ("graph", "executable"):
        assert every.count(f"{what} made") == every.count(f"{what} gone") > 0


NOT_KERNELS = ("graph", "executable", "made", "gone", "fails")


@pytest.mark.unsanitized
@pytest.mark.parametrize("kernels", ["mine.ptx", None])
def test_kernels_that_do_not_compile_are_named(
    steps: Callable[..., tuple[str, list[list[str]]]], kernels: str | None
) -> None:
    if not kernels:
        rungs.climb("metal")  # the package brings them where the compiler was there
    printed, _ = steps("cuModuleLoadDataEx 1", kernels)
    name = kernels or re.escape(str(Path(lily.__file__).parent / "kernels.ptx"))
    assert re.search(rf"CUDA: the kernels \S*{name} do not compile: CUDA_ERROR_LAUNCH_FAILED", printed)
