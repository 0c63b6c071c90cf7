"""Builds csrc/gpu/metal.mm on a simulated Metal: python -m tools.metal.apple.build [KERNELS.so] -o OUT.so.

KERNELS is a library of tools/metal/compile.py; it stands for the metallib of a build with Apple's compiler.
Without one the kernels are compiled from the embedded sources, as on a Mac without it.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.metal import clang
from tools.metal.compile import CACHE
from tools.metal.embed import embed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
KERNELS = sorted((ROOT / "metal").glob("*.metal"))
# Apple's binary interface of Objective-C, on ELF.
OBJECTIVE = [
    *("-x", "objective-c++", "-fblocks", "-fobjc-runtime=macosx-12.0", "-I", str(HERE)),
    *("-Wno-objc-root-class", "-Wno-incomplete-implementation", "-Wno-unguarded-availability"),
]
ARC = ["-fobjc-arc"]
FLAGS = [
    *(
        "-std=c++20",
        "-O1",
        "-g1",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
    ),
    *("-I", str(ROOT), "-I", str(ROOT / "csrc"), "--target=x86_64-linux-gnu"),
]
SOURCES = {
    HERE / "objc.cpp": [],
    HERE / "foundation.mm": OBJECTIVE,
    HERE / "device.mm": [*OBJECTIVE, *ARC],
    HERE / "commands.mm": [*OBJECTIVE, *ARC],
    HERE / "plugin.cpp": [],
    ROOT / "csrc" / "gpu" / "metal.mm": [*OBJECTIVE, *ARC],
}


def build(kernels: Path | None = None, output: Path | None = None, flags: Sequence[str] = ()) -> Path:
    """Build the library, or find what was built of the same sources before; give its path."""
    metallib = b"" if kernels is None else f"simulated metallib {kernels.resolve()}".encode()
    embedded = embed(KERNELS, metallib)
    headers = [*HERE.rglob("*.h"), *(ROOT / "csrc").rglob("*.h"), HERE.parent / "runtime.h", Path(__file__)]
    text = "\0".join(path.read_text() for path in [*SOURCES, *sorted(headers)])
    key = hashlib.sha256("\0".join([text, embedded, *flags]).encode()).hexdigest()[:16]
    output = output or CACHE / f"metal-{key}.so"
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    defines = [
        f'-DLILY_SIMULATED_{name}="{value}"'
        for name, value in (("FOLDER", CACHE.resolve()), ("ROOT", ROOT.resolve()), ("PYTHON", sys.executable))
    ]
    with tempfile.TemporaryDirectory(dir=output.parent) as folder, ThreadPoolExecutor() as pool:
        written = Path(folder) / "embedded.cpp"
        written.write_text(embedded)
        jobs = []
        for number, (source, more) in enumerate({**SOURCES, written: []}.items()):
            made = Path(folder) / f"{number}.o"
            command: list[str | Path] = [
                clang.CLANG,
                *FLAGS,
                *defines,
                *flags,
                *more,
                "-c",
                source,
                "-o",
                made,
            ]
            jobs.append((made, pool.submit(clang.checked, command)))
        for _, job in jobs:
            job.result()
        part = Path(folder) / "metal.so"
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete", "-pthread", "-ldl", *flags]
        link += [] if flags else ["-Wl,-z,defs"]  # a sanitizer's functions are in the program
        clang.checked([clang.CLANG, *(made for made, _ in jobs), *link, "-o", part])
        part.replace(output)
    return output


def main() -> None:
    """Build what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tools.metal.apple.build", description=__doc__)
    parser.add_argument("kernels", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="for every compilation and the link")
    a = parser.parse_args()
    print(build(a.kernels, a.output, a.flag))


if __name__ == "__main__":
    main()
