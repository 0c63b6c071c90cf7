"""The code paths of arm64 under emulation: the choice. test_ops.py and test_cpu.py run every op on them."""

import platform

import numpy as np
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


@pytest.mark.parametrize("simd", ["neoni8mm", "neondot", "neon", "plain"])
def test_every_path_can_be_forced(simd: str) -> None:
    assert device(emulated.CPU, simd=simd) == f"cpu {simd}"


def test_the_best_path_is_chosen() -> None:
    assert device(emulated.CPU) == "cpu neoni8mm"
    assert device(emulated.CPU, prefill_digits="2") == "cpu neoni8mm, 2 digits"
    assert device(emulated.DOTS_CPU) == "cpu neondot"
    assert device(emulated.DOTS_CPU, prefill_digits="2") == "cpu neondot, 2 digits"
    assert device(emulated.OLD_CPU) == "cpu neon"


def test_a_path_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match="cannot run 'neoni8mm'; it can run neondot, neon, plain"):
        device(emulated.DOTS_CPU, simd="neoni8mm")
    with pytest.raises(errors.DeviceError, match="cannot run 'neondot'; it can run neon, plain"):
        device(emulated.OLD_CPU, simd="neondot")
    with pytest.raises(
        errors.DeviceError, match="cannot run 'avx2'; it can run neoni8mm, neondot, neon, plain"
    ):
        device(emulated.CPU, simd="avx2")


@pytest.mark.parametrize("digits", ["3", "2"])
@pytest.mark.parametrize("repack", ["on", "off"])
def test_products_of_matrices_have_the_bits_of_dot_products(repack: str, digits: str) -> None:
    rungs.climb("neon")
    core = emulated.machine().core
    weights = core.Weights(str(CHECKPOINTS["small"]))
    tokens = np.random.default_rng(1).integers(0, 500, 67).astype(np.int32)  # 64 in one product, and three
    one, other = (
        core.Session(weights, {"simd": simd, "repack": repack, "prefill_digits": digits})
        for simd in ("neoni8mm", "neondot")
    )
    assert one.device != other.device
    assert np.array_equal(one.logits(one.new_state(), tokens), other.logits(other.new_state(), tokens))
