"""Where the limits are: single ops, beside the same kernels without their arithmetic and without their loads.

    python -m bench.limits DIRECTORY [--option device=cuda --option kernels=FILE ...] [--loads FILE]
                           [--arithmetic FILE] [--context 3840] [--rows 2048] [--bandwidth 4.3e12]
                           [--times 20] [--rounds 5] [--record [FILE]]

--loads and --arithmetic name the kernels compiled with the defines of metal/twin.h or csrc/cpu/twin.h. For an
NVIDIA GPU, and for a CPU with AVX-512's integer dot products, of a row or few:

    python -m tools.metal.cuda metal/*.metal -D LILY_LOADS_ONLY=1 -o build/loads.ptx
    python -m tools.metal.cuda metal/*.metal -D LILY_ARITHMETIC_ONLY=1 -o build/arithmetic.ptx

    cmake -S . -B build/twins -DLILY_TWINS=ON && cmake --build build/twins --target loads arithmetic

An op alone runs in all layers that have it, one after the other and over and over, so that its weights come
from memory and not from a cache, unless one holds those of all layers. In the model it is, on a CPU, what
the clock says within a pass, on a GPU what a pass takes longer than the same pass without it. All of an op's
cases go by turns; one sample is the mean of --times passes.

A decode step is accounted for: its bytes at the memory's rate, its stages at the cost of one with nothing to
do, and what neither explains. The rate is --bandwidth, in bytes per second; left out on a CPU, it is measured
by turns with the step. A GPU's bytes and stages are those that it declares; a CPU's bytes are those that no
step can do without, and a stage is a barrier of its threads.
"""

import argparse
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import peaks, record, run
from bench.ops import Listed, Machine, Samples, by_turns
from bench.speed import about, option
from lily import _core, stages

GEMV = ("gdn_in", "gdn_out", "attn_in", "attn_out", "moe_route", "moe_up", "moe_down", "head")
TILED = ("gdn_in", "gdn_out", "attn_in", "attn_out", "moe_up", "moe_down")
EMPTY = 100  # stages of a sample of one


class Account(NamedTuple):
    """What a decode step is accounted for by."""

    context: int
    bytes: int
    stages: int
    bandwidth: float  # bytes per second; 0 if it is not known

    def told(self, timed: Mapping[str, list[float]]) -> Iterator[tuple[str, str, list[float], str]]:
        """Yield (case, unit, samples, note) of its stages, and of what is left of steps that were timed."""
        yield "stages of a token", "", [self.stages], f"after {self.context} tokens"
        if not self.bandwidth:
            return
        explained = self.bytes / self.bandwidth
        left = [
            100 * (whole - explained - self.stages * empty) / whole
            for whole, empty in zip(timed["a step"], timed["an empty stage"], strict=True)
        ]
        note = f"{self.bytes / 1e6:.1f} MB at {self.bandwidth / 1e9:.4g} GB/s, {self.stages} stages"
        yield "share of a step that bytes and stages do not explain", "%", left, note


def twin(
    weights: _core.Weights, options: Mapping[str, str], file: str, whole: _core.Session
) -> _core.Session:
    """Make a session like another one, with the kernels of a file."""
    if not whole.device.startswith("cpu"):
        return _core.Session(weights, {**options, "kernels": file})
    session = _core.Session(weights, options)
    session._use_kernels(file)
    return session


def gemv(machines: Mapping[str, Machine], times: int, rounds: int) -> Samples:
    """Time each op of one row: whole and as its twins alone, and the whole in the model."""
    found: Samples = {}
    for op in GEMV:
        cases = {f"{op}, {kind}": partial(machine.alone, op, times) for kind, machine in machines.items()}
        if op != "head":  # a draw without it would begin by looking for the best logit
            cases[f"{op}, in the model"] = partial(share, machines["whole"], op, times)
        found |= by_turns(cases, rounds)
    return found


def share(machine: Machine, op: str, times: int) -> float:
    """Return the seconds of an op of one layer in the model."""
    if machine.on_cpu:
        return machine.by_op(times)[op]
    listed = machine.whole()
    without = [one for one in listed if one[0] != op]
    return (machine.seconds(listed, times) - machine.seconds(without, times)) / len(machine.layers(op))


def gemm(machine: Machine, times: int, rounds: int) -> Samples:
    """Time each product of a prompt alone and in the model."""
    found: Samples = {}
    if machine.on_cpu:
        found = by_turns({machine.limit: partial(peaks.measure, machine.limit)}, rounds)
    for op in TILED:
        cases = {
            f"{op}, {machine.rows} rows": partial(machine.alone, op, times),
            f"{op}, {machine.rows} rows, in the model": partial(share, machine, op, times),
        }
        found |= by_turns(cases, rounds)
    return found


def steps(one: Machine, times: int, rounds: int, *, memory: bool) -> Samples:
    """Time a decode step, its head and draw apart and together, and a stage with nothing to do.

    memory: whether the memory's rate is measured too.
    """
    listed: dict[str, Listed] = {
        "a step": one.whole(),
        "head alone": [("head", 0)],
        "sample alone": [("head", 0), ("sample", 0)],  # less the head: a draw needs finite logits
        "head and sample": [("head", 0), ("sample", 0)],
        "an empty stage": [("nothing", 0)] * EMPTY,
    }
    cases = {name: partial(one.seconds, each, times) for name, each in listed.items()}
    if memory:
        cases[peaks.MEMORY] = partial(peaks.measure, peaks.MEMORY)
    found = by_turns(cases, rounds)
    found["sample alone"] = [
        both - head for both, head in zip(found["sample alone"], found["head alone"], strict=True)
    ]
    found["an empty stage"] = [seconds / EMPTY for seconds in found["an empty stage"]]
    return found


def account(machine: Machine, step: stages.Step, bandwidth: float) -> Account:
    """Return what a machine's decode step is accounted for by. step: as a GPU declares it."""
    if machine.on_cpu:
        return Account(step.context, step.floor, machine.stages(machine.whole()), bandwidth)
    return Account(step.context, step.read + step.written, step.stages, bandwidth)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--loads", metavar="FILE", help="kernels compiled with LILY_LOADS_ONLY")
    parser.add_argument("--arithmetic", metavar="FILE", help="kernels compiled with LILY_ARITHMETIC_ONLY")
    parser.add_argument("--context", type=int, default=3840, help="tokens before the step")
    parser.add_argument("--rows", type=int, default=2048, help="of a prompt's products; 0 leaves them out")
    parser.add_argument("--bandwidth", type=float, default=0, help="of the memory, bytes per second")
    parser.add_argument("--times", type=int, default=20, help="passes of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.times < 1 or given.rounds < 1:
        parser.error("wanted at least one pass and one round")

    weights, options = _core.Weights(str(given.directory)), dict(given.option)
    config = weights.config
    whole = _core.Session(weights, options)
    sessions = {"whole": whole}
    for kind, file in (("loads", given.loads), ("arithmetic", given.arithmetic)):
        if file is not None:
            sessions[kind] = twin(weights, options, file, whole)
    facts = about(given.directory, whole, options)
    print(f"{given.directory}: {facts}")
    keep = partial(record.keep, given.record, bench="limits", options=facts, device=whole.device)
    machines = {kind: Machine(session, config, 1, given.context) for kind, session in sessions.items()}
    one = machines["whole"]
    timed = steps(one, given.times, given.rounds, memory=one.on_cpu and not given.bandwidth)
    bandwidth = statistics.median(timed.get(peaks.MEMORY, [given.bandwidth]))
    rest = {name: value for name, value in options.items() if name not in ("device", "kernels")}
    step = stages.step(given.directory, given.context, rest)
    if not one.on_cpu:
        keep("dispatches of a token", "", [step.dispatches], f"after {step.context} tokens")
    for told in account(one, step, bandwidth).told(timed):
        keep(*told)
    for told in one.told(timed | gemv(machines, given.times, given.rounds), bandwidth):
        keep(*told)
    if given.rows:
        prompt = Machine(whole, config, given.rows, 0)
        for told in prompt.told(gemm(prompt, max(1, given.times // 10), given.rounds)):
            keep(*told)


if __name__ == "__main__":
    run(main)
