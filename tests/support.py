"""What test modules share: where checkpoints are, which code paths this CPU has, how arrays compare."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import emulated
import rungs
from bench.agree import ROW_BY_ROW
from lily import _core, errors, reference

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CHECKPOINTS = {
    "tiny": HERE / "checkpoints" / "tiny",
    "small": HERE / "checkpoints" / "small",
    "demo": Path(reference.__file__).parent / "demo" / "lily-tales-22m-4bit",
}


# The code paths of another machine, which are run under emulation where this one has none of them.
EMULATED = ("neoni8mm", "neoni8mm packed", "neondot", "neon")


@cache
def runs(simd: str) -> bool:
    """Tell whether this CPU can run a code path."""
    try:
        _core.Session(_core.Weights(str(CHECKPOINTS["tiny"])), {"simd": simd})
    except errors.DeviceError:
        return False
    return True


@cache
def code_paths() -> list[str]:
    """Return the code paths in float32 that this CPU can run; the plain one always can."""
    paths = ("avx512vnni", "avx512", "avx2", "neoni8mm", "neondot", "neon", "plain")
    found = [simd for simd in paths if runs(simd)]
    assert "plain" in found
    return found


@cache
def kernels(instrumented: bool = False) -> str:
    """Return the path of the GPU kernels compiled for the simulator, made when it is not there yet."""
    from tools.metal import compile as compiler

    sources = sorted((HERE.parent / "metal").glob("*.metal"))
    return str(compiler.compile(sources, instrumented=instrumented))


@cache
def metal(instrumented: bool = False, source: bool = False) -> str:
    """Return the path of the Metal device on the simulated framework, with the same kernels.

    source: which compiles the kernels that it carries as text, as on a Mac.
    """
    from tools.metal.apple.build import build

    return str(build(None if source else Path(kernels(instrumented))))


def backends() -> list[str]:
    """Return every way to run a model here: the CPU's code paths, and the GPU kernels in the simulator.

    Of the code paths that keep matrices in an order of their own only the best does; see packed_paths().

    Where LILY_PTX names the kernels compiled for NVIDIA GPUs (`make ptx`), also those, on the GPU that must
    then be there.
    """
    gpus = [] if rungs.why_left_out("metal") else ["sim"]
    gpus += ["cuda"] if "LILY_PTX" in os.environ else []
    cpus = [*code_paths(), *packed_paths()[:1]]
    cpus += ["amx tiles"] if runs("amx") else []
    return [*cpus, *(f"{gpu} {kind}" for gpu in gpus for kind in ("rows", "tiles"))]


def packed_paths() -> list[str]:
    """Return the code paths here that keep matrices in an order of their own, doing so; the best first."""
    return [f"{simd} packed" for simd in code_paths() if can_pack(simd)]


def emulated_paths() -> list[str]:
    """Return the ways of EMULATED, if this machine has to emulate them and can."""
    here = EMULATED[0] in code_paths() or EMULATED[-1] in code_paths()
    return [] if here or rungs.why_left_out("neon") else list(EMULATED)


def core_of(backend: str) -> Any:
    """Return lily._core, or what stands for it in the emulator, for sessions of a backend."""
    emulate = backend in EMULATED and backend.partition(" ")[0] not in code_paths()
    return emulated.machine().core if emulate else _core


def can_pack(simd: str) -> bool:
    """Tell whether a code path keeps matrices in an order of its own."""
    weights = _core.Weights(str(CHECKPOINTS["small"]))
    return _core.Session(weights, {"simd": simd, "repack": "on"}).packed_bytes > 0


def options_of(backend: str) -> dict[str, str]:
    """Return the options that choose a backend."""
    device, _, kind = backend.partition(" ")
    if device in ("amx", *code_paths()) or backend in EMULATED:
        return {"device": "cpu", "simd": device, "repack": "on" if "packed" in kind else "off"}
    file = os.environ["LILY_PTX"] if device == "cuda" else metal() if device == "metal" else kernels()
    return {"device": device, "kernels": file} | (ROW_BY_ROW if kind == "rows" else {})


def compare(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Fail with the worst place unless |got - want| <= tolerance * max |want| everywhere."""
    assert got.shape == want.shape, f"{name}: wanted {want.shape}, got {got.shape}"
    if got.size == 0:
        return
    error = np.abs(got.astype(np.float64) - want)
    error[np.isnan(error)] = np.inf
    worst = np.unravel_index(error.argmax(), error.shape)
    bound = tolerance * max(1e-30, float(np.abs(want).max()))
    assert error[worst] <= bound, (
        f"{name}{list(map(int, worst))}: wanted {want[worst]}, got {got[worst]}, "
        f"off by {error[worst]:.3g} > {bound:.3g}"
    )
