"""The rungs of the default suite that need more than a plain build: what each shows, and what it needs.

Run as a program it says which run here; `make test` does that first. With LILY_RUNGS=all a missing one fails.
"""

import os
import platform
import shutil
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Rung:
    """One rung, the commands it needs on PATH, and whether it stands on Linux only."""

    shows: str
    needs: tuple[str, ...]
    linux: bool = True

    @property
    def missing(self) -> list[str]:
        return [command for command in self.needs if shutil.which(command) is None]


RUNGS = {
    "git": Rung("records of the bench, which name a commit", ("git",), linux=False),
    "clang": Rung("the core built by clang, warnings as errors", ("clang++-22",)),
    "metal": Rung(
        "the GPU kernels, held to Metal's rules and run in a simulator",
        ("clang++-22", "llvm-objdump-22", "llvm-symbolizer-22"),
    ),
    "arm64": Rung("the core built for arm64, under emulation", ("aarch64-linux-gnu-g++", "qemu-aarch64")),
    "neon": Rung(
        "every op on the code paths of arm64, under emulation (long)",
        ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg-deb"),
    ),
}


def must_all_run() -> bool:
    return os.environ.get("LILY_RUNGS") == "all"


def why_left_out(name: str) -> str:
    """Say why a rung cannot run here, and what brings it; empty if it can."""
    rung = RUNGS[name]
    if rung.linux and platform.system() != "Linux":
        return f"rung {name} ({rung.shows}) runs on Linux only"
    if rung.missing:
        missing = ", no ".join(rung.missing)
        return f"rung {name} ({rung.shows}) left out: no {missing}; `make toolchain` brings it"
    return ""


def climb(name: str) -> None:
    """Skip the test that calls this, with the reason, if a rung cannot run here; fail it if all must."""
    if reason := why_left_out(name):
        (pytest.fail if must_all_run() else pytest.skip)(reason)


if __name__ == "__main__":
    for name in RUNGS:
        print(why_left_out(name) or f"rung {name} ({RUNGS[name].shows}) runs")
