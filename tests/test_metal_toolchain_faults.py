"""The instruments: planted faults are found, with words, line, buffer and offset, and traffic is counted."""

import re

import numpy as np
import pytest

import simulated
from simulated import aligned
from tools.metal.simulator import FAULTS, SimulatorError

pytestmark = pytest.mark.unsanitized
SOURCE = simulated.HERE / "faults.metal"


def planted():
    """Read faults.metal: by kernel, the fault, its words and the line it is found at."""
    found, lines = {}, SOURCE.read_text().splitlines()
    for at, line in enumerate(lines):
        kernel = re.match(r"kernel void (\w+)", line)
        expected = re.fullmatch(r"// ([a-z -]+): (.+)", lines[at - 1])
        if kernel and expected:
            end = lines.index("}", at)
            marks = {
                mark: [n + 1 for n in range(at, end) if lines[n].endswith(mark)] for mark in ("// !", "// <")
            }
            own, other = (marks[mark][0] if marks[mark] else 0 for mark in marks)
            found[kernel[1]] = (expected[1], expected[2].format(own=own, other=other), own)
    return found


def buffers():
    return {0: aligned(np.zeros(128, np.uint32)), 1: aligned(np.zeros(128, np.uint32))}


def test_every_kind_of_fault_is_planted():
    kinds = {fault for fault, _, _ in planted().values()}
    assert kinds | {"launch", "read-only"} == set(FAULTS)
    assert len(planted()) >= 12


@pytest.mark.parametrize("kernel", planted())
def test_planted_fault(kernel):
    fault, words, line = planted()[kernel]
    library = simulated.compiled("faults", instrumented=True)
    memory = (
        (32800,)
        if any(space == "threadgroup" for _, space, _, _ in library.kernels[kernel].arguments)
        else ()
    )
    run = library.run(kernel, buffers(), (2,), (64,), threadgroup=memory, check=False)
    message = f"{kernel}:{line}: {words}" if line else f"{kernel}: {words}"
    assert (fault, line, message) in [(f.fault, f.line, f.message) for f in run.findings]
    if fault in ("race", "out of bounds", "misaligned", "uninitialised") and "matmul2d" not in words:
        (found,) = [f for f in run.findings if f.message == message]
        assert found.file == str(SOURCE) or "tile" in kernel  # a tile's line comes without its file
        index = re.search(r"\[\[buffer\((\d+)\)\]\]", words)
        assert found.buffer == (int(index[1]) if index else None)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_races_are_found_in_every_order(order):
    library = simulated.compiled("faults", instrumented=True)
    for kernel, (fault, _, _) in planted().items():
        if fault == "race":
            run = library.run(kernel, buffers(), (2,), (64,), order=order, check=False)
            assert "race" in {f.fault for f in run.findings}, kernel


def test_launches_that_are_refused():
    library = simulated.compiled("faults", instrumented=True)

    def refused(kernel, given, threads, **more):
        (found,) = library.run(kernel, given, (1,), threads, check=False, **more).findings
        assert found.fault == "launch"
        return found.message

    assert refused("odd_address", {0: buffers()[0]}, (64,)) == "odd_address: in [[buffer(1)]] is not bound"
    assert (
        refused("odd_address", buffers(), (1025,)) == "odd_address: a group has 1025 threads; 1 to 1024 run"
    )
    assert (
        refused("too_much_memory", buffers(), (64,)) == "too_much_memory: s [[threadgroup(0)]] has no length"
    )
    wrong_grid = refused("odd_address", buffers(), (64,), grid=(65, 1, 1))
    assert wrong_grid == "odd_address: a grid of 65 threads needs 2 groups, not 1"


def test_a_finding_is_an_error_unless_asked_for():
    with pytest.raises(SimulatorError, match=r"read_past_the_end:.*which has 512"):
        simulated.compiled("faults", instrumented=True).run("read_past_the_end", buffers(), (2,), (64,))


def test_writes_that_a_dispatch_did_not_declare():
    library = simulated.compiled("traffic", instrumented=True)
    given = {0: aligned(np.zeros(64, np.float32)), 1: aligned(np.zeros(64, np.float32))}
    run = library.run("copy", given, (2,), (32,), read_only=[0], check=False)
    (found,) = run.findings
    assert (found.fault, found.buffer, found.count) == ("read-only", 0, 64)
    assert "writes 4 bytes at offset 0 of to [[buffer(0)]], which it may only read" in found.message


def test_memory_that_nothing_has_written():
    library = simulated.compiled("traffic", instrumented=True)
    source, target = aligned(np.zeros(64, np.float32)), aligned(np.zeros(64, np.float32))
    library.track(source, defined=False)
    library.track(target, defined=False)
    library.define(source[:40])
    try:
        run = library.run("copy", {0: target, 1: source}, (2,), (32,), check=False)
        (found,) = run.findings
        assert (found.fault, found.buffer, found.offset, found.count) == ("uninitialised", 1, 160, 24)
        # What a kernel writes is defined from then on, also for another kernel.
        assert library.run("copy", {0: source, 1: target}, (2,), (32,)).findings == []
        assert library.run("copy", {0: target, 1: source}, (2,), (32,)).findings == []
    finally:
        library.forget(source)
        library.forget(target)


def traffic(kernel, count=1024, **more):
    library = simulated.compiled("traffic", instrumented=True)
    given = {0: aligned(np.zeros(count, np.float32)), 1: aligned(np.arange(count, dtype=np.float32))}
    return library.run(kernel, given, (count // 128,), (128,), **more)


def test_traffic_of_a_copy():
    run = traffic("copy")
    read, written = run.traffic[1], run.traffic[0]
    assert (read.bytes_read, read.reads, read.bytes_written) == (4096, 1024, 0)
    assert (written.bytes_written, written.writes, written.bytes_read) == (4096, 1024, 0)
    # 32 lanes of 4 bytes: 128 bytes, four sectors, one line.
    assert (read.groups, read.sectors, read.lines, read.unique_lines) == (32, 128, 32, 64)
    assert run.read == {1: [(0, 4096)]}
    assert run.written == {0: [(0, 4096)]}


def test_traffic_of_a_copy_that_does_not_coalesce():
    run = traffic("copy_by_columns")  # a lane's neighbour is 128 bytes away
    assert (run.traffic[1].groups, run.traffic[1].sectors, run.traffic[1].lines) == (32, 1024, 1024)
    assert run.traffic[1].unique_lines == 64


def test_traffic_of_vectors_and_of_one_place():
    wide = traffic("copy_vectors").traffic[1]
    assert (wide.reads, wide.bytes_read, wide.groups, wide.sectors, wide.lines) == (256, 4096, 8, 128, 32)
    same = traffic("broadcast").traffic[1]
    assert (same.reads, same.bytes_read, same.groups, same.sectors, same.unique_lines) == (
        1024,
        4096,
        32,
        32,
        1,
    )


def test_lines_are_counted_once_a_dispatch_and_ranges_are_exact():
    run = traffic("every_third")
    assert run.traffic[1].bytes_read == 4 * len(range(0, 1024, 3))
    assert run.read[1] == [(4 * i, 4 * i + 4) for i in range(0, 1024, 3)]
    assert run.written[0] == run.read[1]
    assert run.traffic[1].unique_lines == 64


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_traffic_does_not_depend_on_the_order(order):
    for kernel in simulated.compiled("traffic", instrumented=True).kernels:
        assert traffic(kernel, order=order).traffic == traffic(kernel).traffic
