"""Runs the kernels of a compiled library on NumPy arrays. The structs are runtime.h's."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

SPACES = ("device", "constant", "threadgroup")
FAULTS = (
    "launch",
    "out of bounds",
    "read-only",
    "misaligned",
    "uninitialised",
    "race",
    "divergence",
    "matrix",
    "memory",
)
COUNTS = (
    *("threadgroup_bytes", "threadgroup_read", "threadgroup_written", "threads", "groups"),
    *("switches", "barriers", "meetings", "seconds"),
)
ORDERS = ("forward", "reverse", "random")
CONSTANT_TYPES = {
    "half": np.float16,
    "float": np.float32,
    "uint": np.uint32,
    "int": np.int32,
    "bool": np.bool_,
} | {
    "ushort": np.uint16,
    "short": np.int16,
    "uchar": np.uint8,
    "char": np.int8,
    "ulong": np.uint64,
    "long": np.int64,
}
u32, u64, text, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p


def _struct(struct: str, /, **fields: Any) -> type[ctypes.Structure]:
    return type(struct, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Argument = _struct("_Argument", name=text, space=u32, index=u32, writable=u32, atomic=u32, optional=u32)
_Kernel = _struct(
    "_Kernel",
    name=text,
    arguments=ctypes.POINTER(_Argument),
    argument_count=u32,
    max_threads=u32,
    entry=pointer,
)
_Constant = _struct("_Constant", name=text, type=text, index=u32, bytes=u32, value=pointer, defined=pointer)
_Binding = _struct("_Binding", index=u32, writes=u32, data=pointer, bytes=u64)
_Value = _struct("_Value", index=u32, value=pointer)
_Launch = _struct(
    "_Launch",
    kernel=u32,
    groups=u32 * 3,
    threads=u32 * 3,
    grid=u32 * 3,
    indirect=ctypes.POINTER(u32),
    bindings=ctypes.POINTER(_Binding),
    binding_count=u32,
    constants=ctypes.POINTER(_Value),
    constant_count=u32,
    threadgroup_bytes=ctypes.POINTER(u32),
    threadgroup_count=u32,
    order=u32,
    seed=u32,
    workers=u32,
)
_Finding = _struct(
    "_Finding",
    fault=u32,
    buffer=ctypes.c_int32,
    offset=u64,
    kernel=text,
    file=text,
    line=u32,
    count=u32,
    message=text,
)
_Traffic = _struct(
    "_Traffic",
    **dict.fromkeys(("buffer", "unused"), u32),
    **dict.fromkeys(
        ("bytes_read", "bytes_written", "reads", "writes", "groups", "sectors", "lines", "unique_lines"), u64
    ),
)
_Range = _struct("_Range", buffer=u32, written=u32, begin=u64, end=u64)
_Result = _struct(
    "_Result",
    findings=ctypes.POINTER(_Finding),
    finding_count=u32,
    traffic_count=u32,
    traffic=ctypes.POINTER(_Traffic),
    ranges=ctypes.POINTER(_Range),
    range_count=u32,
    threadgroup_bytes=u32,
    **dict.fromkeys(
        ("threadgroup_read", "threadgroup_written", "threads", "groups", "switches", "barriers", "meetings"),
        u64,
    ),
    seconds=ctypes.c_double,
)
_Library = _struct(
    "_Library",
    version=u32,
    instrumented=u32,
    kernels=ctypes.POINTER(_Kernel),
    kernel_count=u32,
    constant_count=u32,
    constants=ctypes.POINTER(_Constant),
    dispatch=ctypes.CFUNCTYPE(ctypes.POINTER(_Result), ctypes.POINTER(_Launch)),
    release=ctypes.CFUNCTYPE(None, ctypes.POINTER(_Result)),
    track=ctypes.CFUNCTYPE(None, pointer, u64, u32),
    define=ctypes.CFUNCTYPE(None, pointer, u64),
    forget=ctypes.CFUNCTYPE(None, pointer),
)


@dataclass(frozen=True)
class Finding:
    """A fault of a dispatch; buffer is None for threadgroup memory and for faults that concern no memory."""

    fault: str
    kernel: str
    file: str
    line: int
    buffer: int | None
    offset: int
    count: int
    message: str


@dataclass(frozen=True)
class Traffic:
    """What a dispatch did to one buffer; runtime.h says what each number counts."""

    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    groups: int
    sectors: int
    lines: int
    unique_lines: int


@dataclass
class Run:
    """What came of one dispatch. Without instruments traffic and touched are empty."""

    findings: list[Finding]
    traffic: dict[int, Traffic]
    read: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    written: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelInfo:
    """A kernel and its argument table: (name, space, index, writable) an argument."""

    number: int
    arguments: list[tuple[str, str, int, bool]]
    max_threads: int


class SimulatorError(Exception):
    """A dispatch had findings, one a line."""


class Library:
    """A compiled library; kernels by name."""

    def __init__(self, path: Path) -> None:
        """Load a library that compile() made."""
        self._file = ctypes.CDLL(str(path))
        self._file.lily_metal_library.restype = ctypes.POINTER(_Library)
        self._library: Any = self._file.lily_metal_library().contents
        self.instrumented = bool(self._library.instrumented)
        self.kernels = {}
        for number in range(self._library.kernel_count):
            kernel = self._library.kernels[number]
            arguments = [kernel.arguments[i] for i in range(kernel.argument_count)]
            table = [(a.name.decode(), SPACES[a.space], a.index, bool(a.writable)) for a in arguments]
            self.kernels[kernel.name.decode()] = KernelInfo(number, table, kernel.max_threads)
        constants = [self._library.constants[i] for i in range(self._library.constant_count)]
        self.constants = {c.name.decode(): (c.index, c.type.decode()) for c in constants}

    def track(self, array: np.ndarray, *, defined: bool) -> None:
        """Watch an array for reads of bytes that nothing has written; defined: all are written now."""
        self._library.track(array.ctypes.data, array.nbytes, defined)

    def define(self, array: np.ndarray) -> None:
        """Say that the host has written an array, or a part of one."""
        self._library.define(array.ctypes.data, array.nbytes)

    def forget(self, array: np.ndarray) -> None:
        """Watch an array no longer."""
        self._library.forget(array.ctypes.data)

    def run(
        self,
        kernel: str,
        buffers: Mapping[int, np.ndarray],
        groups: Sequence[int],
        threads: Sequence[int],
        *,
        grid: Sequence[int] = (0, 0, 0),
        indirect: np.ndarray | None = None,
        constants: Mapping[str, Any] | None = None,
        threadgroup: Sequence[int] = (),
        read_only: Sequence[int] = (),
        order: Literal["forward", "reverse", "random"] = "forward",
        seed: int = 1,
        workers: int = 1,
        check: bool = True,
    ) -> Run:
        """Dispatch a kernel and wait for it.

        buffers: by index; contiguous arrays, written in place. groups, threads, grid: up to 3 numbers.
        constants: function constants by name. threadgroup: bytes of [[threadgroup(n)]]. read_only: buffers
        that this dispatch declares not to write. Raises SimulatorError for findings unless check is off.
        """
        launch: Any = _Launch()
        launch.kernel = self.kernels[kernel].number
        for counts, target in ((groups, launch.groups), (threads, launch.threads), (grid, launch.grid)):
            padded = [*counts, *[0 if target is launch.grid else 1] * (3 - len(counts))]
            for i, value in enumerate(padded):
                target[i] = value
        for array in buffers.values():
            assert array.flags.c_contiguous, "the simulator writes in place, so arrays must be contiguous"
        bindings = [_Binding(i, int(i not in read_only), a.ctypes.data, a.nbytes) for i, a in buffers.items()]
        launch.bindings = (_Binding * len(bindings))(*bindings)
        launch.binding_count = len(bindings)
        held = [(*self.constants[name], value) for name, value in (constants or {}).items()]
        kept: list[np.ndarray] = [np.array([value], CONSTANT_TYPES[kind]) for _, kind, value in held]
        given = [_Value(index, value.ctypes.data) for (index, _, _), value in zip(held, kept, strict=True)]
        launch.constants = (_Value * len(given))(*given)
        launch.constant_count = len(given)
        launch.threadgroup_bytes = (u32 * len(threadgroup))(*threadgroup)
        launch.threadgroup_count = len(threadgroup)
        if indirect is not None:
            launch.indirect = indirect.ctypes.data_as(ctypes.POINTER(u32))
        launch.order, launch.seed, launch.workers = ORDERS.index(order), seed, workers
        result = self._library.dispatch(ctypes.byref(launch))
        try:
            run = _read(result.contents)
        finally:
            self._library.release(result)
        if check and run.findings:
            raise SimulatorError("\n".join(finding.message for finding in run.findings))
        return run


def _read(result: Any) -> Run:
    findings = [
        Finding(
            FAULTS[f.fault],
            f.kernel.decode(),
            f.file.decode(),
            f.line,
            None if f.buffer < 0 else f.buffer,
            f.offset,
            f.count,
            f.message.decode(),
        )
        for f in result.findings[: result.finding_count]
    ]
    names = Traffic.__dataclass_fields__
    traffic = {
        t.buffer: Traffic(**{name: getattr(t, name) for name in names})
        for t in result.traffic[: result.traffic_count]
    }
    run = Run(findings, traffic)
    for touched in result.ranges[: result.range_count]:
        side = run.written if touched.written else run.read
        side.setdefault(touched.buffer, []).append((touched.begin, touched.end))
    run.counts = {name: getattr(result, name) for name in COUNTS}
    return run
