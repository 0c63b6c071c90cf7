"""What this machine's cores can do at most, measured: bytes read from memory, and products, per second.

bench.ops and bench.limits take these by turns with what they measure: a machine's memory is not as fast in
every minute. peaks.cpp does the work, in a process of its own, compiled for the machine by its C++ compiler.
"""

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from bench import record

MEMORY = "memory, read"
VECTORS = "products, float32 in vectors"
TILES = "products, random bfloat16 in tiles"
KINDS = {MEMORY: "memory", VECTORS: "vectors", TILES: "tiles"}  # what peaks.cpp calls them


def products(device: str) -> str:
    """Name the kind of products that prompts are made of on a CPU, as a session names it."""
    return TILES if device == "cpu amx" else VECTORS


def measure(kind: str) -> float:
    """Measure one kind: bytes per second, or floating-point operations.

    Raises ValueError if this machine has nothing of the kind, or no compiler.
    """
    done = subprocess.run([_program(), KINDS[kind]], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"bench/peaks.cpp: {done.stderr.strip()}")
    return float(done.stdout)


@cache
def _program() -> Path:
    """Compile peaks.cpp once a process."""
    made = record.ROOT / "build" / "peaks"
    made.parent.mkdir(exist_ok=True)
    native = "-mcpu=native" if os.uname().machine in ("arm64", "aarch64") else "-march=native"
    sources = [record.ROOT / "bench" / "peaks.cpp", record.ROOT / "csrc" / "cpu" / "threads.cpp"]
    flags = ["-std=c++20", "-O3", native, "-pthread", f"-I{record.ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        new = Path(folder) / "peaks"
        try:
            subprocess.run(
                [compiler, *flags, *sources, "-o", new], check=True, capture_output=True, text=True
            )
        except FileNotFoundError as error:
            raise ValueError(
                f"bench/peaks.cpp: wanted a C++ compiler, got no {compiler}; install one or set CXX"
            ) from error
        except subprocess.CalledProcessError as error:
            raise ValueError(f"bench/peaks.cpp: {compiler}: {error.stderr.strip()}") from error
        return new.replace(made)
