"""Measures the simulator on kernels of tests/metal, on one core: python -m tools.metal.speed."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tools.metal.compile import compile
from tools.metal.simulator import Library

KERNELS = Path(__file__).parent.parent.parent / "tests" / "metal"
REPEATS = 7


def seconds(
    library: Library, kernel: str, buffers: Mapping[int, np.ndarray], groups: Sequence[int], threads: int
) -> tuple[float, int]:
    """Give the least processor time of a dispatch, and its switches between lanes."""
    times, switches = [], 0.0
    for _ in range(REPEATS):
        begin = time.process_time()
        switches = library.run(kernel, buffers, groups, (threads,)).counts["switches"]
        times.append(time.process_time() - begin)
    return min(times), int(switches)


def meetings(library: Library) -> None:
    """Print what it costs that lanes wait for each other."""
    for kernel, threads, count in (
        ("shuffles", 32, 20000),
        ("sums", 32, 20000),
        ("barriers", 128, 3000),
        ("barriers", 1024, 300),
    ):
        out = np.zeros(threads, np.uint32)
        took, switches = seconds(library, kernel, {0: out, 1: np.array([count], np.uint32)}, (1,), threads)
        rate, each = switches / took / 1e6, took / count * 1e9
        print(f"{kernel:24} {threads:5} threads {rate:8.1f} M switches/s {each:6.0f} ns each")


def matvec(library: Library, rows: int, columns: int, label: str) -> None:
    """Print the time of a matrix of four-bit weights times a vector."""
    given: dict[int, np.ndarray]
    words, groups = np.zeros((rows, columns // 8), np.uint32), np.zeros((rows, columns // 64), np.uint16)
    x, y, shape = (
        np.zeros(columns, np.uint16),
        np.zeros(rows, np.float32),
        np.array([rows, columns], np.uint32),
    )
    given = {0: words, 1: groups, 2: groups, 3: x, 4: y, 5: shape}
    took, _ = seconds(library, "matvec", given, (rows // 8,), 64)
    print(
        f"{label:24} {rows} x {columns} {took * 1e3:8.2f} ms {took / rows / columns * 1e9:6.2f} ns a weight"
    )


def products(library: Library) -> None:
    """Print the speed of matrix products, by the tiles that they use."""
    M, N, K = 256, 256, 512
    for kernel, tile, threads in (
        ("product_half", (64, 64), 128),
        ("product_bfloat", (64, 64), 128),
        ("registers_bfloat", (32, 16), 32),
        ("memory_half_4", (32, 64), 128),
    ):
        given: dict[int, np.ndarray]
        a, b, c = np.zeros((M, K), np.uint16), np.zeros((N, K), np.uint16), np.zeros((M, N), np.float32)
        given = {0: a, 1: b, 2: c, 3: np.array([M, N, K], np.uint32)}
        took, _ = seconds(library, kernel, given, (N // tile[0], M // tile[1]), threads)
        print(f"{kernel:24} {M} x {N} x {K} {2 * M * N * K / took / 1e9:8.1f} GFLOP/s")


def main() -> None:
    """Measure everything."""
    plain, watched = (Library(compile([KERNELS / "speed.metal"], instrumented=i)) for i in (False, True))
    meetings(plain)
    matvec(plain, 512, 2048, "matvec")
    matvec(watched, 512, 2048, "matvec, instrumented")
    products(Library(compile([KERNELS / "tiles.metal"])))


if __name__ == "__main__":
    main()
