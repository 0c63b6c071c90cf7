"""Checks .metal files against Metal's rules: python -m tools.metal.check FILES."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tools.metal import clang, lint
from tools.metal.clang import CompileError, Translation
from tools.metal.tokens import Problem

DIAGNOSTIC = re.compile(
    r"(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?P<kind>fatal error|error|warning|note): (?P<message>.*)"
)
ASSERTION = re.compile(r"static assertion failed(?: due to requirement '.*?')?: (?P<message>.*)")


def check(file: Path, include: Iterable[Path] = (), define: Iterable[str] = ()) -> list[Problem]:
    """Find what Metal would not take in a source; empty if nothing."""
    try:
        translation = clang.translate(Path(file), include, define)
    except CompileError as error:
        return diagnostics(str(error), file)
    apple = [f"-D{name}" for name in define if name.startswith("MSL_UNDOCUMENTED")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.clcpp"
        source.write_text(translation.text)
        return _compiled(translation, source, apple)


def _compiled(translation: Translation, source: Path, define: list[str]) -> list[Problem]:
    command = [clang.CLANG, *clang.FRONT_END, *clang.TARGET, *define]
    judged = [
        *command,
        *clang.WARNINGS,
        "-fsyntax-only",
        "-ferror-limit=0",
        "-Xclang",
        "-ast-dump",
        "-fno-color-diagnostics",
    ]
    coded = [*command, "-w", "-O0", "-S", "-emit-llvm", "-o", "-"]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen([*judged, source], stdout=subprocess.PIPE, stderr=said, text=True) as tree,
    ):
        assert tree.stdout
        linted = lint.Tree().read(tree.stdout)
        tree.wait()
        said.seek(0)
        problems = translation.problems + diagnostics(said.read(), translation.file)
    if not any(problem.is_error for problem in problems):
        problems += linted
        if "msl_threadgroup_memory(" in translation.text:
            code = clang.run([*coded, source]).stdout
            problems += lint.threadgroup_memory(code, translation.kernels, str(translation.file))
    return sorted(problems, key=lambda p: (p.file, p.line))


def diagnostics(said: str, file: Path) -> list[Problem]:
    """Read clang's messages; one inside our headers is laid at the line of the source that led there."""
    problems: list[Problem] = []
    inside: Problem | None = None  # of our headers, not laid anywhere yet
    for line in clang.in_metal_words(said).splitlines():
        found = DIAGNOSTIC.match(line)
        if not found:
            continue
        where, at, kind, message = found["file"], int(found["line"]), found["kind"], found["message"]
        users = not clang.LANGUAGE.search(where) and not where.startswith("<")
        if kind == "note":
            if inside and users:
                inside.file, inside.line = where, at
                inside = None
            continue
        assertion = ASSERTION.match(message)
        text = re.sub(r" \[-W.*\]$", "", assertion["message"] if assertion else message)
        problem = Problem(where if users else str(file), at if users else 1, text, kind != "warning")
        problems.append(problem)
        inside = None if users else problem
    return problems


def main() -> int:
    """Check the files of the command line; 1 if Metal would not take one."""
    parser = argparse.ArgumentParser(prog="python -m tools.metal.check", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-I", "--include", action="append", default=[], type=Path)
    parser.add_argument("-D", "--define", action="append", default=[])
    a = parser.parse_args()
    bad = False
    for file in a.files:
        for problem in check(file, a.include, a.define):
            print(problem, file=sys.stderr)
            bad = bad or problem.is_error
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
