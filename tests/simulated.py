"""What the tests of the Metal toolchain share: kernels of tests/metal, compiled, and arrays for them."""

from functools import cache
from pathlib import Path

import numpy as np

import rungs
from tools.metal.compile import compile
from tools.metal.simulator import Library

HERE = Path(__file__).parent / "metal"


@cache
def compiled(name: str, *, instrumented: bool = False, define: tuple[str, ...] = ()) -> Library:
    """Compile tests/metal/name.metal and load it; skips the test where that cannot be done."""
    rungs.climb("metal")
    return Library(compile([HERE / f"{name}.metal"], instrumented=instrumented, define=define))


def aligned(array: np.ndarray) -> np.ndarray:
    """Copy an array to an address that is a multiple of 128, as a GPU's buffers start at one."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def to_bfloat(array: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat, to nearest even, as the bits of uint16; for finite numbers."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
