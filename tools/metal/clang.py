"""Calls clang: how Metal is preprocessed, checked and compiled. Nothing else here starts a compiler."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.metal import kernels, rewrite
from tools.metal.kernels import Kernels
from tools.metal.tokens import Problem, Source

HERE = Path(__file__).parent
CLANG = os.environ.get("METAL_CLANG", "clang++-22")
METAL_VERSION = 400  # 4.0
TARGET = ["--target=x86_64-linux-gnu", "-march=x86-64-v3"]
# OpenCL's extensions are off, so that what they would allow is an error.
FRONT_END = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
    *("-include", str(HERE / "language" / "metal.h")),
]
DEFINES = [
    *("-undef", "-nostdinc", "-D__METAL__=1", f"-D__METAL_VERSION__={METAL_VERSION}", "-D__METAL_MACOS__=1"),
    *(
        "-D__cplusplus=201703L",
        "-D__LITTLE_ENDIAN__=1",
        "-DNDEBUG",
        "-Wno-builtin-macro-redefined",
        "-Wno-macro-redefined",
    ),
]
WARNINGS = [
    "-Wall",
    "-Wno-unused",
    "-Wno-missing-braces",
    "-Wno-gcc-compat",
    "-Wno-pass-failed",
    "-Wno-return-type-c-linkage",
    "-Wno-unknown-pragmas",
]
WARNINGS += ["-Wno-defaulted-function-deleted"]  # of the copies that rewrite.py declares
LANGUAGE = re.compile(
    r"/tools/metal/(language|runtime)/\w+\.h$"
)  # our own headers, which no message should name
# What clang calls Metal's words.
WORDS = {
    "__global": "device",
    "__local": "threadgroup",
    "__private": "thread",
    "__constant": "constant",
    "__bf16": "bfloat",
}


class CompileError(Exception):
    """A source that Metal would not take; the text has a line for every fault."""


@dataclass
class Translation:
    """One source, rewritten, with the kernels in it."""

    file: Path
    text: str
    kernels: Kernels
    problems: list[Problem] = field(default_factory=list)


def run(command: Sequence[str | Path], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler and keep what it says."""
    return subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True, check=False)


def checked(command: Sequence[str | Path], text: str | None = None) -> str:
    """Run a compiler and give what it writes. Raises CompileError with its words if it fails."""
    done = run(command, text)
    if done.returncode:
        raise CompileError(in_metal_words(done.stderr))
    return done.stdout


def in_metal_words(diagnostics: str) -> str:
    """Put Metal's words for OpenCL's into clang's messages."""
    return re.sub("|".join(WORDS), lambda found: WORDS[found.group()], diagnostics)


def preprocess(file: Path, include: Iterable[Path] = (), define: Iterable[str] = ()) -> str:
    """Expand a source's includes and macros. Raises CompileError with clang's words."""
    folders = [file.resolve().parent, *include]
    command: list[str | Path] = [
        CLANG,
        *FRONT_END[:4],
        "-E",
        *DEFINES,
        "-isystem",
        HERE / "include",
        *TARGET,
        file,
    ]
    done = run(command + [f"-I{folder}" for folder in folders] + [f"-D{name}" for name in define])
    if done.returncode:
        raise CompileError(in_metal_words(done.stderr))
    return done.stdout


def translate(
    file: Path, include: Iterable[Path] = (), define: Iterable[str] = (), prefix: str | None = "lily_entry_"
) -> Translation:
    """Preprocess and rewrite a source, and add the entry points of its kernels: CUDA's without a prefix."""
    source = Source(preprocess(file, include, define))
    found = kernels.find(source)
    rewrite.rewrite(source)
    text = f"{source}\n{kernels.entry_points(source, found, prefix)}"
    problems = [
        Problem(problem.file or str(file), problem.line, problem.message) for problem in source.problems
    ]
    return Translation(file, text, found, problems)
