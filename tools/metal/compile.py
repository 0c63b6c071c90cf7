"""Compiles .metal files into a library for the simulator: python -m tools.metal.compile FILES -o OUT.so."""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.metal import clang, lines
from tools.metal.clang import CompileError, Translation
from tools.metal.kernels import Constant, Kernels

CACHE = Path(os.environ.get("METAL_CACHE", clang.HERE.parent.parent / "build" / "metal"))
MAX_THREADS = 1024
C_TYPES = {
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned",
    "ulong": "unsigned long",
    "half": "_Float16",
}
# Apple's compiler fuses a * b + c within an expression, so this one does.
OPTIMISE = [
    "-O2",
    "-fPIC",
    "-ffp-contract=on",
    "-fno-math-errno",
    "-Xclang",
    "-ffloat16-excess-precision=none",
]
# clang's thread sanitizer calls a function at every access; ours, in runtime/instruments.cpp. Accesses are
# neither merged into vectors nor taken apart, so that they are those which the source asks for.
INSTRUMENT = [
    *("-fsanitize=thread", "-gline-tables-only"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-atomics=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1", "-mllvm", "-tsan-distinguish-volatile=0"),
]
RUNTIME = ["scheduler", "collectives", "tiles", "matmul", "dispatch", "findings"]
RUNTIME_FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", *clang.TARGET]


def compile(
    files: Sequence[Path],
    output: Path | None = None,
    *,
    instrumented: bool = False,
    include: Iterable[Path] = (),
    define: Iterable[str] = (),
) -> Path:
    """Compile .metal files into one library, and give its path.

    output: where it goes; left out, into a cache, where a library of the same sources is found again.
    instrumented: with a call at every access, for the faults and the traffic that runtime.h lists.
    Raises CompileError with file, line and reason for every fault.
    """
    include, define = list(include), list(define)
    translations = [
        clang.translate(Path(file), include, define, f"lily_entry_{number}_")
        for number, file in enumerate(files)
    ]
    faults = [str(problem) for translation in translations for problem in translation.problems]
    faults += _clashes(translations)
    if faults:
        raise CompileError("\n".join(faults))
    table = _table(translations)
    if output is None:
        output = CACHE / f"{_key(translations, table, instrumented, define)}.so"
        if output.exists():
            return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        apple = [name for name in define if name.startswith("MSL_UNDOCUMENTED")]
        objects = pool.map(lambda t: _kernel_object(t, Path(folder), instrumented, apple), translations)
        runtime = pool.submit(_runtime, Path(folder), instrumented, table)
        made = Path(folder) / "library.so"
        _link([*objects, *runtime.result()], made)
        if instrumented:
            lines.lay_beside(made, Path(f"{output}.lines"))
        made.replace(output)
    return output


def library_of_modules(modules: Sequence[Path], kernels: Kernels, output: Path) -> Path:
    """Make a library of LLVM modules that hold the entry points of kernels already."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        objects = [module.with_suffix(".o") for module in modules]
        for module, made in zip(modules, objects, strict=True):
            flags = [*clang.TARGET, "-O2", "-fPIC", "-Wno-override-module"]
            clang.checked([clang.CLANG, "-x", "ir", *flags, "-c", module, "-o", made])
        table = _table([Translation(modules[0], "", kernels)])
        _link([*objects, *_runtime(Path(folder), False, table)], output)
    return output


def _clashes(translations: Sequence[Translation]) -> list[str]:
    """Two kernels of one name, or one function constant declared in two ways, do not make one library."""
    kernels: dict[str, str] = {}
    constants: dict[str, Constant] = {}
    faults = []
    for translation in translations:
        for instance in translation.kernels.instances:
            here = f"{instance.where[0]}:{instance.where[1]}"
            first = kernels.setdefault(instance.name, here)
            if first != here:
                faults.append(f"{here}: error: there is a kernel {instance.name} in {first} too")
        for constant in translation.kernels.constants:
            other = constants.setdefault(constant.name, constant)
            if other != constant:
                faults.append(
                    f"{translation.file}: error: function constant {constant.name} is declared in two ways"
                )
    return faults


def _key(translations: Sequence[Translation], table: str, instrumented: bool, define: Sequence[str]) -> str:
    tool = sorted(path for path in clang.HERE.rglob("*") if path.suffix in (".py", ".h", ".cpp"))
    parts = [
        *(t.text for t in translations),
        table,
        str(instrumented),
        *define,
        *(path.read_text() for path in tool),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _kernel_object(translation: Translation, folder: Path, instrumented: bool, define: Sequence[str]) -> Path:
    source = folder / f"{translation.file.stem}_{abs(hash(translation.file))}.clcpp"
    source.write_text(translation.text)
    extra = [*INSTRUMENT, "-DMSL_INSTRUMENTED=1"] if instrumented else []
    extra += [f"-D{name}" for name in define]
    made = source.with_suffix(".o")
    clang.checked(
        [
            clang.CLANG,
            *clang.FRONT_END,
            *clang.WARNINGS,
            *clang.TARGET,
            *OPTIMISE,
            *extra,
            "-c",
            source,
            "-o",
            made,
        ]
    )
    return made


def _runtime(folder: Path, instrumented: bool, table: str) -> list[Path]:
    """Compile the runtime, once for all libraries, and the table of this one's kernels."""
    names = [*RUNTIME, "instruments", "shadow", "lines"] if instrumented else RUNTIME
    sources = [clang.HERE / "runtime" / f"{name}.cpp" for name in names]
    headers = [*(clang.HERE / "runtime").glob("*.h"), clang.HERE / "runtime.h"]
    text = "".join(path.read_text() for path in [*sources, *sorted(headers)]) + str(RUNTIME_FLAGS)
    archive = (
        CACHE / f"runtime-{'instrumented-' * instrumented}{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"
    )
    flags = [*RUNTIME_FLAGS, f"-DMSL_INSTRUMENTED={int(instrumented)}"]
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        objects = [folder / f"{name}.runtime.o" for name in names]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [clang.CLANG, *flags, "-c", s, "-o", o] for s, o in zip(sources, objects, strict=True)
            ]
            list(pool.map(clang.checked, commands))
        whole = folder / "runtime.o"
        clang.checked([clang.CLANG, "-nostdlib", "-r", *objects, "-o", whole])
        whole.replace(archive)
    source = folder / "table.cpp"
    source.write_text(table)
    clang.checked([clang.CLANG, *flags, "-I", clang.HERE, "-c", source, "-o", folder / "table.o"])
    return [archive, folder / "table.o"]


def _link(objects: Sequence[Path], made: Path) -> None:
    flags = ["-Wl,-Bsymbolic", "-Wl,-z,nodelete", "-Wl,-z,defs", "-pthread"]
    clang.checked([clang.CLANG, "-shared", *objects, *flags, "-lm", "-o", made])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _table(translations: Sequence[Translation]) -> str:
    """Write the C++ that lists the library's kernels and holds its function constants."""
    written = ['#include "runtime.h"', "using namespace lily::metal;"]
    entries, constants = [], {c.name: c for t in translations for c in t.kernels.constants}
    for number, translation in enumerate(translations):
        for position, instance in enumerate(translation.kernels.instances):
            function = translation.kernels.functions[instance.function]
            name = f"lily_entry_{number}_{position}"
            arguments = ", ".join(
                f"{{{_quoted(a.name)}, Space::k{a.space.capitalize()}, {a.index}, "
                f"{int(a.writable)}, {int(a.atomic)}, {int(a.optional)}}}"
                for a in function.arguments
            )
            written.append(f'extern "C" void {name}(const void*);')
            written.append(f"static const Argument {name}_arguments[] = {{{arguments or '{}'}}};")
            most = function.attributes.get("max_total_threads_per_threadgroup", str(MAX_THREADS))
            count = len(function.arguments)
            entries.append(f"{{{_quoted(instance.name)}, {name}_arguments, {count}, {most}, {name}}}")
    values = []
    for constant in constants.values():
        kind = C_TYPES.get(constant.type, constant.type)
        written.append(f"{kind} {constant.name} = 0; bool {constant.name}_is_defined = false;")
        values.append(
            f'{{"{constant.name}", "{constant.type}", {constant.index}, sizeof({kind}), &{constant.name}, '
            f"&{constant.name}_is_defined}}"
        )
    written += [
        'extern "C" {',
        f"extern const uint32_t lily_metal_kernel_count = {len(entries)};",
        f"extern const uint32_t lily_metal_constant_count = {len(values)};",
        f"extern const Kernel lily_metal_kernels[] = {{{', '.join(entries) or '{}'}}};",
        f"extern const FunctionConstant lily_metal_constants[] = {{{', '.join(values) or '{}'}}};",
        "}",
    ]
    return "\n".join(written) + "\n"


def main() -> int:
    """Compile the files of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.metal.compile", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "-o", "--output", type=Path, help="the library; left out, its path in the cache is printed"
    )
    parser.add_argument("-I", "--include", action="append", default=[], type=Path)
    parser.add_argument("-D", "--define", action="append", default=[])
    parser.add_argument("--instrumented", action="store_true", help="watch every access")
    a = parser.parse_args()
    try:
        made = compile(a.files, a.output, instrumented=a.instrumented, include=a.include, define=a.define)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    if a.output is None:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
