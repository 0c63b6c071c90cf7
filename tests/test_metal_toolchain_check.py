"""The checker: what Metal does not take is reported at its line, in the words that rejected.metal gives."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rungs
from tools.metal.check import check

pytestmark = pytest.mark.unsanitized
ROOT = Path(__file__).parent.parent
REJECTED = ROOT / "tests" / "metal" / "rejected.metal"


@pytest.fixture(autouse=True)
def metal():
    rungs.climb("metal")


def cases():
    """Read rejected.metal: by number of the case, its message and its lines."""
    found, number = {}, 0
    for at, line in enumerate(REJECTED.read_text().splitlines(), 1):
        if case := re.fullmatch(r"#(?:el)?if CASE == (\d+)  // (.+)", line):
            number = int(case[1])
            found[number] = (case[2], set())
        elif number and line.endswith("// !"):
            found[number][1].add(at)
    return found


def test_cases_are_numbered_and_marked():
    assert list(cases()) == list(range(1, len(cases()) + 1))
    assert all(lines for _, lines in cases().values())
    assert len(cases()) >= 35


@pytest.mark.parametrize("case", cases())
def test_rejected(case):
    message, lines = cases()[case]
    found = check(REJECTED, define=[f"CASE={case}"])
    assert {(p.file, p.line, p.message, p.is_error) for p in found} == {
        (str(REJECTED), line, message, True) for line in lines
    }


@pytest.mark.parametrize("name", ["library", "simd", "tiles", "faults"])
def test_accepted(name):
    assert check(REJECTED.with_name(f"{name}.metal")) == []


OURS = sorted((ROOT / "metal").glob("*.metal"))


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_our_kernels_are_accepted(file):
    assert check(file) == []


# How loops are compiled, and that a draw's arithmetic is as written: none of them silences anything.
PRAGMAS = (
    "once",
    "unroll",
    "unroll 1",
    "unroll 4",
    "unroll 8",
    "METAL fp math_mode(safe)",
    "METAL fp contract(off)",
)


def test_nothing_of_ours_is_waived():
    """No compiler's warnings switched off, no name of the checker's, and lines as long as everywhere."""
    for file in (ROOT / "metal").iterdir():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            pragma = re.match(r"\s*#\s*pragma\s+(.*)", line)
            assert pragma is None or pragma[1] in PRAGMAS, f"{file.name}:{number}"
            assert not re.search(r"\bMSL_|\bmsl_|__clang|_Pragma", line), f"{file.name}:{number}"
            assert len(line) <= 110, f"{file.name}:{number}"


def test_the_command_names_file_and_line(tmp_path):
    wrong = tmp_path / "wrong.metal"
    wrong.write_text("#include <metal_stdlib>\n\n\nkernel void k(device float* x [[buffer(99)]]) {}\n")
    command = [sys.executable, "-m", "tools.metal.check", wrong]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"{wrong}:4: error: k: buffer index 99 of x is over 30\n"


def test_lines_of_an_included_header_are_its_own(tmp_path):
    (tmp_path / "part.h").write_text(
        "#pragma once\ninline float f(device float* x) {\n    float* y = x;\n    return *y;\n}\n"
    )
    whole = tmp_path / "whole.metal"
    whole.write_text('#include "part.h"\nkernel void k(device float* x [[buffer(0)]]) { x[0] = f(x); }\n')
    (problem,) = check(whole)
    assert (Path(problem.file).name, problem.line) == ("part.h", 3)
