"""The core without Python (core_story.cpp): from another compiler, on another machine, and checked for leaks.

Each build must continue a prompt with the same tokens as the installed package. Rungs that cannot run here
are skipped by name; with LILY_RUNGS=all they fail.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import lily
import rungs

pytestmark = pytest.mark.unsanitized
ROOT = Path(__file__).parent.parent
PROMPT = "Once upon a time there was a"
COUNT = 12


def checked(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command and give its output; fail with all that it said if it fails."""
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, f"{' '.join(map(str, command))}\n{run.stdout[-4000:]}{run.stderr[-4000:]}"
    return run.stdout


def build(folder: Path, **settings: str) -> Path:
    """Build core_story in a folder with CMake's settings, and give its path."""
    cmake = Path(sys.executable).parent / "cmake"
    settings |= {"LILY_TESTS": "ON", "CMAKE_COMPILE_WARNING_AS_ERROR": "ON"}
    checked(cmake, "-S", ROOT, "-B", folder, *(f"-D{name}={value}" for name, value in settings.items()))
    checked(cmake, "--build", folder, "--target", "core_story", "--parallel", str(os.cpu_count()))
    return folder / "core_story"


@pytest.fixture(scope="module")
def story() -> tuple[list[str], list[str]]:
    """Give the arguments of core_story, and the lines that it must print."""
    with lily.Model.load(lily.DEMO, simd="plain", kv="f32") as model:
        prompt = model.tokenizer.encode(PROMPT)
        told = model.generate(prompt, max_tokens=COUNT, temperature=0)
    assert len(told.tokens) == COUNT
    return [str(lily.DEMO), str(COUNT), *map(str, prompt)], [str(token) for token in told.tokens]


@pytest.mark.long  # a build of the whole core
def test_clang(tmp_path: Path, story: tuple[list[str], list[str]]) -> None:
    rungs.climb("clang")
    program = build(tmp_path, CMAKE_CXX_COMPILER="clang++-22")
    assert checked(program, *story[0]).split() == story[1]


@pytest.mark.long
def test_arm64(tmp_path: Path, story: tuple[list[str], list[str]]) -> None:
    if platform.machine() in {"aarch64", "arm64"}:
        pytest.skip("this machine is an arm64 one, so every other test is this rung")
    rungs.climb("arm64")
    program = build(
        tmp_path,
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        CMAKE_CXX_COMPILER="aarch64-linux-gnu-g++",
        CMAKE_EXE_LINKER_FLAGS="-static",
    )
    assert checked("qemu-aarch64", program, *story[0]).split() == story[1]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the leak sanitizer runs on Linux only")
def test_no_leaks(tmp_path: Path, story: tuple[list[str], list[str]]) -> None:
    program = build(tmp_path, LILY_SANITIZE="ON")
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=1"}
    assert checked(program, *story[0], env=environment).split() == story[1]
