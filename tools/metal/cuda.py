"""Compiles .metal files for NVIDIA GPUs: python -m tools.metal.cuda FILES -o OUT.ptx.

The front end and the rewriting are the simulator's; language/cuda.h stands in for its runtime, and clang's
NVPTX back end makes PTX, which the driver compiles for the GPU that it finds.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.metal import clang
from tools.metal.clang import CompileError

LINK = os.environ.get("METAL_LLVM_LINK", "llvm-link-22")
TILES = clang.HERE / "language" / "cuda_tile.h"
PRODUCTS = clang.HERE / "language" / "cuda_products.h"
ATTENTION = clang.HERE / "language" / "cuda_attention.h"
MULTIPLY = clang.HERE / "language" / "cuda_multiply.h"
# bfloat arithmetic and ldmatrix need sm_80 (Ampere); PTX of an architecture runs on all later ones.
ARCHITECTURE = "sm_80"
TARGET = ["--target=nvptx64-nvidia-cuda", f"-march={ARCHITECTURE}"]
OPTIMISE = ["-O3", "-ffp-contract=on", "-fno-math-errno"]
# Arrays that loops index have to become registers: loops of known length are unrolled, whatever their size.
UNROLL = ["-mllvm", "-unroll-threshold=2000"]
_ALLOCATION = re.compile(
    r"call [^@\n]*@msl_threadgroup_memory\(i64 noundef (\d+), i32 noundef (\d+), i32 noundef (\d+)\)[^\n]*"
)
THREADS = 512  # that an SM is to hold at least: 128 registers each
ROOMY = re.compile(r"(matmul|moe_\w+_tiles)_")  # half as many: 128 sums a lane, language/cuda_multiply.h
# What was inlined everywhere and is still written out: nothing calls it.
_FUNCTION = re.compile(r"^\.func [^{;]*(?:;\n|\{.*?^\}\n)", re.DOTALL | re.MULTILINE)
_DYNAMIC = re.compile(r"call [^@\n]*@msl_dynamic_memory\(\)[^\n]*")


def compile(
    files: Sequence[Path],
    output: Path,
    *,
    include: Iterable[Path] = (),
    define: Iterable[str] = (),
) -> Path:
    """Compile .metal files into one file of PTX whose entries have the host's names, and give its path.

    Raises CompileError with file, line and reason for every fault.
    """
    include, define = (
        list(include),
        [
            *define,
            f'LILY_TILES="{TILES}"',
            f'LILY_PRODUCTS="{PRODUCTS}"',
            f'LILY_ATTENTION="{ATTENTION}"',
            f'LILY_MULTIPLY="{MULTIPLY}"',
            "MSL_CUDA=1",
        ],
    )
    translations = [clang.translate(Path(file), include, define, None) for file in files]
    faults = [str(problem) for t in translations for problem in t.problems]
    faults += [
        f"{t.file}: error: function constants are fixed at a launch, PTX is not"
        for t in translations
        if t.kernels.constants
    ]
    if faults:
        raise CompileError("\n".join(faults))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        modules = list(pool.map(lambda t: _module(t, Path(folder)), translations))
        whole, made = Path(folder) / "whole.bc", Path(folder) / "made.ptx"
        clang.checked([shutil.which(LINK) or "llvm-link", *modules, "-o", whole])
        clang.checked(
            [
                clang.CLANG,
                "-x",
                "ir",
                *TARGET,
                *OPTIMISE,
                *UNROLL,
                "-Wno-override-module",
                "-S",
                whole,
                "-o",
                made,
            ]
        )
        made.write_text(_bounded(_FUNCTION.sub("", made.read_text()), translations))
        made.replace(output)
    return output


def _bounded(ptx: str, translations: Iterable[clang.Translation]) -> str:
    """Say how large a kernel's threadgroups get, and that so many are to fit an SM as make 512 threads.

    Without it the compiler takes any number of registers, and then one threadgroup fits.
    """
    for translation in translations:
        for instance in translation.kernels.instances:
            function = translation.kernels.functions[instance.function]
            if most := function.attributes.get("max_total_threads_per_threadgroup"):
                threads = THREADS // 2 if ROOMY.match(instance.name) else THREADS
                bounds = f".maxntid {most}, 1, 1\n.minnctapersm {max(1, threads // int(most))}\n"
                ptx = re.sub(rf"(\.entry {instance.name}\([^)]*\)[^\n]*\n)", rf"\g<1>{bounds}", ptx)
    return ptx


def _module(translation: clang.Translation, folder: Path) -> Path:
    source = folder / f"{translation.file.stem}.clcpp"
    source.write_text(translation.text)
    made = source.with_suffix(".ll")
    clang.checked(
        [
            clang.CLANG,
            *clang.FRONT_END,
            *clang.WARNINGS,
            *TARGET,
            *OPTIMISE,
            "-DMSL_CUDA=1",
            "-Xclang",
            "-disable-llvm-passes",
            "-S",
            "-emit-llvm",
            source,
            "-o",
            made,
        ]
    )
    made.write_text(lowered(made.read_text()))
    return made


def lowered(module: str) -> str:
    """Say in LLVM's language what OpenCL's cannot: shared variables, and constants that lie anywhere.

    A dispatch's argument struct is a kernel parameter and other constant buffers are plain memory, so
    `constant` pointers become generic ones; NVPTX's constant space is for tables that a module brings along.
    """
    module = module.replace("addrspace(4)", "addrspace(0)").replace(" noinline ", " alwaysinline ")
    lines, variables, function = [], {}, ""
    for line in module.split("\n"):
        if line.startswith("define "):
            if "ptx_kernel" not in line:  # a call costs a GPU its registers, and its arguments their place
                line = re.sub(r"^define (?:internal |linkonce_odr |dso_local )*", "define internal ", line)
                line = re.sub(r" (#\d+)", r" alwaysinline \1", line, count=1)
                line = re.sub(r"\bcomdat\b(?:\([^)]*\))? ?", "", line)
            function = re.sub(r"\W", "_", line[line.index("@") + 1 : line.index("(", line.index("@"))])
        if found := _ALLOCATION.search(line):
            name = f"@msl_{function}_{found[3]}"
            variables[name] = (
                f"{name} = internal addrspace(3) global [{found[1]} x i8] undef, align {found[2]}"
            )
            line = line[: found.start()] + f"getelementptr i8, ptr addrspace(3) {name}, i64 0"
        elif found := _DYNAMIC.search(line):
            variables["@msl_dynamic"] = "@msl_dynamic = external addrspace(3) global [0 x i8], align 16"
            line = line[: found.start()] + "getelementptr i8, ptr addrspace(3) @msl_dynamic, i64 0"
        lines.append(line)
    first = next((i for i, line in enumerate(lines) if line.startswith("define ")), len(lines))
    return "\n".join([*lines[:first], *variables.values(), "", *lines[first:]])


def main() -> int:
    """Compile the files of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.metal.cuda", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("-I", "--include", action="append", default=[], type=Path)
    parser.add_argument("-D", "--define", action="append", default=[])
    a = parser.parse_args()
    try:
        compile(a.files, a.output, include=a.include, define=a.define)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
