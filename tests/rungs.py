"""The rungs of the default suite that need more than a plain build: what each shows, and what it needs.

Run as a program it says which run here; `make test` does that first. With LILY_RUNGS=all a missing one fails.
"""

import os
import platform
import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One rung and the commands it needs on PATH."""

    shows: str
    needs: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return [command for command in self.needs if shutil.which(command) is None]


RUNGS = {
    "clang": Rung("the core built by clang, warnings as errors", ("clang++-22",)),
    "arm64": Rung("the core built for arm64, under emulation", ("aarch64-linux-gnu-g++", "qemu-aarch64")),
}


def must_all_run() -> bool:
    return os.environ.get("LILY_RUNGS") == "all"


def why_left_out(name: str) -> str:
    """Say why a rung cannot run here, and what brings it; empty if it can."""
    rung = RUNGS[name]
    if platform.system() != "Linux":
        return f"rung {name} ({rung.shows}) runs on Linux only"
    if rung.missing:
        missing = ", no ".join(rung.missing)
        return f"rung {name} ({rung.shows}) left out: no {missing}; `make toolchain` brings it"
    return ""


if __name__ == "__main__":
    for name in RUNGS:
        print(why_left_out(name) or f"rung {name} ({RUNGS[name].shows}) runs")
