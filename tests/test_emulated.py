"""The code paths of arm64 under emulation: the choice. test_ops.py and test_cpu.py run every op on them."""

import platform

import pytest

import emulated
import rungs
from lily import errors
from support import CHECKPOINTS

pytestmark = [
    pytest.mark.long,
    pytest.mark.unsanitized,
    pytest.mark.skipif(
        platform.machine() in {"aarch64", "arm64"}, reason="this machine is an arm64 one, and needs no other"
    ),
]


def device(cpu: str, **options: str) -> str:
    rungs.climb("neon")
    core = emulated.machine(cpu).core
    return core.Session(core.Weights(str(CHECKPOINTS["small"])), options).device


@pytest.mark.parametrize("simd", ["neondot", "neon", "plain"])
def test_every_path_can_be_forced(simd: str) -> None:
    assert device(emulated.CPU, simd=simd) == f"cpu {simd}"


def test_the_best_path_is_chosen() -> None:
    assert device(emulated.CPU) == "cpu neondot"
    assert device(emulated.CPU, prefill_digits="2") == "cpu neondot, 2 digits"
    assert device(emulated.OLD_CPU) == "cpu neon"


def test_a_path_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match="cannot run 'neondot'; it can run neon, plain"):
        device(emulated.OLD_CPU, simd="neondot")
    with pytest.raises(errors.DeviceError, match="cannot run 'avx2'; it can run neondot, neon, plain"):
        device(emulated.CPU, simd="avx2")
