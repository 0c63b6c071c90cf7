"""Runs kernels that Apple's own compiler made: AIR out of a .metallib, lowered to the simulator's runtime.

An oracle for the front end, rounding and layouts: a kernel's AIR and our lowering of its source must agree.
"""

import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.metal import clang
from tools.metal.compile import library_of_modules
from tools.metal.kernels import Argument, Function, Instance, Kernels

LAYOUT = (
    'target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"\n'
    'target triple = "x86_64-unknown-linux-gnu"\n'
)
# Offsets in runtime/context.h: of msl_group, in the group; of msl_thread, in the thread.
GROUP = {"threadgroup_position_in_grid": 496, "threadgroups_per_grid": 508, "threads_per_grid": 520}
GROUP |= {
    "dispatch_threads_per_threadgroup": 532,
    "threads_per_threadgroup": 544,
    "simdgroups_per_threadgroup": 556,
}
THREAD = {
    "thread_position_in_threadgroup": 16,
    "thread_index_in_threadgroup": 28,
    "thread_index_in_simdgroup": 32,
}
THREAD |= {"simdgroup_index_in_threadgroup": 36}
BYTES = {"float": 4, "half": 2, "bfloat": 2, "i32": 4, "i16": 2, "i8": 1}
RUNTIME = """
@msl_current = external thread_local(initialexec) global ptr
declare void @msl_runtime_barrier(i32, i32)
declare void @msl_runtime_simd_barrier(i32, i32)
declare void @msl_runtime_reduce(ptr, ptr, i32, i32, i32, i32)
declare ptr @msl_runtime_exchange(ptr, i32, i32)
declare void @msl_runtime_apple_multiply(ptr, ptr, i32)
declare float @llvm.sqrt.f32(float)
declare float @llvm.maxnum.f32(float, float)
declare float @llvm.minnum.f32(float, float)
declare float @llvm.exp.f32(float)
declare float @llvm.exp2.f32(float)
declare float @llvm.log.f32(float)
declare float @llvm.tanh.f32(float)
"""


class AirError(Exception):
    """A .metallib lacks a kernel, or a kernel uses something that is not lowered."""


class Metallib:
    """The functions of a .metallib by name, each a module of its own in LLVM's bitcode."""

    def __init__(self, path: Path) -> None:
        """Read the list of functions."""
        self._data = path.read_bytes()
        header = struct.unpack_from("<9Q", self._data, 16)
        listed, self._code = header[1], header[7]
        (count,) = struct.unpack_from("<I", self._data, listed)
        at = listed + 4
        self.functions: dict[str, tuple[int, int]] = {}  # name: where its bitcode lies and how long it is
        for _ in range(count):
            (length,) = struct.unpack_from("<I", self._data, at)
            tags = self._tags(at + 4)
            name = tags[b"NAME"].rstrip(b"\0").decode()
            offset = struct.unpack("<QQQ", tags[b"OFFT"])[2]
            self.functions[name] = (self._code + offset, *struct.unpack("<Q", tags[b"MDSZ"]))
            at += length

    def _tags(self, at: int) -> dict[bytes, bytes]:
        tags = {}
        while self._data[at : at + 4] != b"ENDT":
            (length,) = struct.unpack_from("<H", self._data, at + 4)
            tags[self._data[at : at + 4]] = self._data[at + 6 : at + 6 + length]
            at += 6 + length
        return tags

    def bitcode(self, name: str) -> bytes:
        """Give a function's module."""
        if name not in self.functions:
            raise AirError(f"the metallib has no kernel {name}")
        at, length = self.functions[name]
        return self._data[at : at + length]


def replay(metallib: Metallib, names: Sequence[str], folder: Path) -> Path:
    """Lower kernels of a metallib into one library for the simulator, in a folder, and give its path."""
    modules, kernels = [], Kernels()
    for number, name in enumerate(names):
        bitcode = folder / f"{number}.bc"
        bitcode.write_bytes(metallib.bitcode(name))
        code, function = lower(
            clang.checked(["llvm-dis-22", bitcode, "-o", "-"]), name, f"lily_entry_0_{number}"
        )
        modules.append(folder / f"{number}.ll")
        modules[-1].write_text(code)
        kernels.functions[name] = function
        kernels.instances.append(Instance(name, name, None, function.where))
    return library_of_modules(modules, kernels, folder / "air")


def lower(code: str, name: str, entry: str) -> tuple[str, Function]:
    """Turn the AIR of a kernel into x86-64 LLVM that calls the runtime; with its argument table."""
    arguments = _arguments(code)
    code = re.sub(r"target datalayout = .*\ntarget triple = .*\n", LAYOUT, code)
    code = re.sub(r" addrspace\(\d\)", "", code).replace("addrspacecast", "bitcast")
    code = re.sub(r"@llvm\.(memcpy|memmove)\.p\d\.p\d\.", r"@llvm.\1.p0.p0.", code)
    code = re.sub(r"@llvm\.memset\.p\d\.", "@llvm.memset.p0.", code)
    code = re.sub(r"^@llvm.global_ctors.*\n", "", code, flags=re.MULTILINE)
    code = re.sub(r"^.*@llvm\.lifetime\..*\n", "", code, flags=re.MULTILINE)
    definitions: list[str] = []
    seen: set[str] = set()
    lines: list[str] = []
    for line in code.split("\n"):
        declared = re.match(r"declare (.+?) @([\w.]+)\((.*?)\)", line)
        if declared and declared[2] in seen:
            continue  # the same function of two address spaces
        if declared:
            seen.add(declared[2])
        if declared and declared[2].startswith("air."):
            definitions.append(_define(declared[1], declared[2], declared[3], len(definitions) + 1))
        else:
            lines.append(line)
    declared_runtime = [
        line for line in RUNTIME.split("\n") if not any(f"@{known}(" in line for known in seen)
    ]
    entry_code, function = _entry(code, name, entry, arguments)
    return "\n".join([*lines, *definitions, *declared_runtime, entry_code]), function


def _arguments(code: str) -> list[str]:
    """Give the metadata of each parameter of the kernel."""
    nodes = dict(re.findall(r"^!(\d+) = (?:distinct )?!\{(.*)\}$", code, re.MULTILINE))
    kernel = re.search(r"^!air\.kernel = !\{!(\d+)\}", code, re.MULTILINE)
    if not kernel:
        raise AirError("the module holds no kernel")
    table = re.findall(r"!(\d+)", nodes[kernel[1]])[1]
    return [nodes[number] for number in re.findall(r"!(\d+)", nodes[table])]


def _function(kind: str, name: str, parameters: str, *body: str) -> str:
    return f"define linkonce_odr {kind} @{name}({parameters}) alwaysinline {{\n" + "\n".join(body) + "\n}"


def _define(kind: str, name: str, parameters: str, site: int) -> str:
    """Write one of AIR's functions in terms of the runtime; `site` tells its calls from others."""
    kind = kind if kind.startswith("<") else kind.split()[-1]
    for pattern, make in LOWERINGS:
        if found := re.fullmatch(pattern, name):
            return make(kind, name, parameters, site, *found.groups())
    raise AirError(f"{name} is not lowered")


def _barrier(kind: str, name: str, parameters: str, site: int, simd: str) -> str:
    target = "msl_runtime_simd_barrier" if simd == "simdgroup" else "msl_runtime_barrier"
    return _function(
        "void", name, "i32 %flags, i32 %scope", f"call void @{target}(i32 %flags, i32 {site})", "ret void"
    )


def _reduce(kind: str, name: str, parameters: str, site: int, operation: str, number: str) -> str:
    code = ["sum", "product", "max", "min", "and", "or", "xor"].index(operation)
    integer = number.startswith(("s.", "u."))
    wide = "i32" if integer else "float"
    widen = {"s": "sext", "u": "zext"}.get(number[0], "fpext")
    narrow = "trunc" if integer else "fptrunc"
    same = kind == wide
    type_code = "fsu".index(number[0])
    return _function(
        kind,
        name,
        f"{kind} %x",
        f"%from = alloca {wide}",
        f"%to = alloca {wide}",
        f"%w = bitcast {kind} %x to {wide}" if same else f"%w = {widen} {kind} %x to {wide}",
        f"store {wide} %w, ptr %from",
        f"call void @msl_runtime_reduce(ptr %from, ptr %to, i32 {type_code}, i32 1, i32 {code}, i32 {site})",
        f"%r = load {wide}, ptr %to",
        f"%n = bitcast {wide} %r to {kind}" if same else f"%n = {narrow} {wide} %r to {kind}",
        f"ret {kind} %n",
    )


def _shuffle(kind: str, name: str, parameters: str, site: int, how: str | None) -> str:
    source = {
        "_xor": ["%source = xor i32 %lane, %d"],
        "_down": [
            "%a = add i32 %lane, %d",
            "%c = icmp ult i32 %a, 32",
            "%source = select i1 %c, i32 %a, i32 %lane",
        ],
        "_up": [
            "%a = sub i32 %lane, %d",
            "%c = icmp uge i32 %lane, %d",
            "%source = select i1 %c, i32 %a, i32 %lane",
        ],
        None: ["%source = and i32 %d, 31"],
    }[how]
    return _function(
        kind,
        name,
        f"{kind} %x, i16 %n",
        f"%from = alloca {kind}",
        f"store {kind} %x, ptr %from",
        f"%slots = call ptr @msl_runtime_exchange(ptr %from, i32 {BYTES[kind]}, i32 {site})",
        "%thread = load ptr, ptr @msl_current",
        f"%at = getelementptr i8, ptr %thread, i64 {THREAD['thread_index_in_simdgroup']}",
        "%lane = load i32, ptr %at",
        "%d = zext i16 %n to i32",
        *source,
        "%wide = zext i32 %source to i64",
        "%offset = mul i64 %wide, 64",
        "%slot = getelementptr i8, ptr %slots, i64 %offset",
        f"%r = load {kind}, ptr %slot",
        f"ret {kind} %r",
    )


def _matrix(kind: str, name: str, parameters: str, site: int) -> str:
    """Multiply; AIR passes 64 elements, of which a lane's own two are the first."""
    vectors = re.findall(r"<64 x \w+>", parameters)
    body = ["%in = alloca [6 x float]", "%out = alloca [2 x float]"]
    for i, vector in enumerate(vectors):
        element = vector[6:-1]
        for j in range(2):
            n = 2 * i + j
            widen = "bitcast" if element == "float" else "fpext"
            body += [
                f"%e{n} = extractelement {vector} %m{i}, i32 {j}",
                f"%f{n} = {widen} {element} %e{n} to float",
                f"%p{n} = getelementptr float, ptr %in, i64 {n}",
                f"store float %f{n}, ptr %p{n}",
            ]
    body += [
        f"call void @msl_runtime_apple_multiply(ptr %out, ptr %in, i32 {site})",
        "%o0 = load float, ptr %out",
        "%q = getelementptr float, ptr %out, i64 1",
        "%o1 = load float, ptr %q",
        "%r0 = insertelement <64 x float> undef, float %o0, i32 0",
        "%r1 = insertelement <64 x float> %r0, float %o1, i32 1",
        "ret <64 x float> %r1",
    ]
    return _function("<64 x float>", name, ", ".join(f"{v} %m{i}" for i, v in enumerate(vectors)), *body)


def _convert(kind: str, name: str, parameters: str, site: int, sign: str, bits: str) -> str:
    convert = "sitofp" if sign == "s" else "uitofp"
    return _function(kind, name, f"i{bits} %x", f"%y = {convert} i{bits} %x to {kind}", f"ret {kind} %y")


def _one(kind: str, name: str, parameters: str, site: int, function: str) -> str:
    return _function(
        "float", name, "float %x", f"%y = call float @llvm.{function}.f32(float %x)", "ret float %y"
    )


def _rsqrt(kind: str, name: str, parameters: str, site: int) -> str:
    root = "%s = call float @llvm.sqrt.f32(float %x)"
    return _function("float", name, "float %x", root, "%y = fdiv float 1.0, %s", "ret float %y")


def _extreme(kind: str, name: str, parameters: str, site: int, which: str) -> str:
    call = f"%z = call float @llvm.{which}num.f32(float %x, float %y)"
    return _function("float", name, "float %x, float %y", call, "ret float %z")


def _integer_extreme(
    kind: str, name: str, parameters: str, site: int, which: str, sign: str, bits: str
) -> str:
    compare = {"max": "gt", "min": "lt"}[which]
    chosen = f"%z = select i1 %c, i{bits} %x, i{bits} %y"
    order = f"%c = icmp {sign}{compare} i{bits} %x, %y"
    return _function(f"i{bits}", name, f"i{bits} %x, i{bits} %y", order, chosen, f"ret i{bits} %z")


LOWERINGS: list[tuple[str, Callable[..., str]]] = [
    (r"air\.(wg|simdgroup)\.barrier", _barrier),
    (r"air\.simd_(sum|product|max|min|and|or|xor)\.((?:[su]\.i|f)\d+)", _reduce),
    (r"air\.simd_shuffle(_xor|_down|_up)?\.(?:[su]\.)?\w+", _shuffle),
    (r"air\.simdgroup_matrix_8x8_multiply_accumulate\..*", _matrix),
    (r"air\.convert\.f\.f(?:32|16)\.([su])\.i(\d+)", _convert),
    (r"air\.(?:fast_)?(exp2?|log|tanh|sqrt)\.f32", _one),
    (r"air\.(?:fast_)?rsqrt\.f32", _rsqrt),
    (r"air\.(?:fast_)?f(max|min)\.f32", _extreme),
    (r"air\.(max|min)\.([su])\.i(\d+)", _integer_extreme),
]


def _entry(code: str, name: str, entry: str, arguments: Sequence[str]) -> tuple[str, Function]:
    """Write the function that a launch calls, which reads the kernel's arguments out of the context."""
    function = Function(name, None, [], {}, (f"{name}.air", 1))
    signature = re.search(r"^define [^\n]*@" + re.escape(name) + r"\((.*)\) local", code, re.MULTILINE)
    if not signature:
        raise AirError(f"{name} is not defined where its name says")
    body, call = ["%group = load ptr, ptr %thread"], []
    for i, (argument, kind) in enumerate(zip(arguments, _types(signature[1]), strict=True)):
        found = re.search(r'!"air\.(\w+)"', argument)
        what = found[1] if found else ""
        if what == "buffer":
            index = _number(r'!"air\.location_index", i32 (\d+)', argument)
            label = re.search(r'!"air\.arg_name", !"(\w+)"', argument)
            writable = "air.read_write" in argument or '"air.write"' in argument
            function.arguments.append(
                Argument("device", index, label[1] if label else f"buffer{index}", writable)
            )
            body += [f"%p{i} = getelementptr i8, ptr %group, i64 {8 * index}", f"%v{i} = load ptr, ptr %p{i}"]
            call.append(f"ptr %v{i}")
            continue
        base, offset = ("%group", GROUP[what]) if what in GROUP else ("%thread", THREAD.get(what, -1))
        if offset < 0:
            raise AirError(f"{name}: built-in {what} is not lowered")
        wide = kind.replace("i16", "i32")
        body += [
            f"%p{i} = getelementptr i8, ptr {base}, i64 {offset}",
            f"%w{i} = load {wide}, ptr %p{i}, align 4",
        ]
        body.append(
            f"%v{i} = trunc {wide} %w{i} to {kind}"
            if wide != kind
            else f"%v{i} = bitcast {kind} %w{i} to {kind}"
        )
        call.append(f"{kind} %v{i}")
    lines = [*body, f"call void @{name}({', '.join(call)})", "ret void"]
    return f"define void @{entry}(ptr %thread) {{\n" + "\n".join(lines) + "\n}\n", function


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise AirError(f"metadata without {pattern}")
    return int(found[1])


def _types(signature: str) -> list[str]:
    """Give the types of a parameter list."""
    parts, depth, part = [], 0, ""
    for letter in signature + ",":
        depth += (letter in "(<[") - (letter in ")>]")
        if letter == "," and depth == 0:
            found = re.match(r"\s*(<[^>]*>|\S+)", part)
            parts.append(found[1] if found else "")
            part = ""
        else:
            part += letter
    return parts
