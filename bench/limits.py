"""Where the limits are: single ops, beside the same kernels without their arithmetic and without their loads.

    python -m bench.limits DIRECTORY [--option device=cuda --option kernels=FILE ...] [--loads FILE]
                           [--arithmetic FILE] [--context 3840] [--rows 2048] [--bandwidth 4.3e12]
                           [--times 20] [--rounds 5] [--record [FILE]]

--loads and --arithmetic name the kernels compiled with metal/twin.h's defines; for an NVIDIA GPU:

    python -m tools.metal.cuda metal/*.metal -D LILY_LOADS_ONLY=1 -o build/loads.ptx
    python -m tools.metal.cuda metal/*.metal -D LILY_ARITHMETIC_ONLY=1 -o build/arithmetic.ptx

An op alone runs in all layers that have it, one after the other and over and over, so that its weights come
from memory and not from a cache. In the model it is what a pass takes longer than the same pass without it.
All of an op's cases go by turns; one sample is the mean of --times passes.

With --bandwidth, of the device's memory in bytes per second, a decode step is accounted for: its bytes at
that rate, its stages at the cost of one with nothing to do, and what neither explains.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import ops, record, run
from bench.speed import option
from bench.synthetic_config import describe
from lily import _core, stages

GEMV = ("gdn_in", "gdn_out", "attn_in", "attn_out", "moe_route", "moe_up", "moe_down", "head")
TILED = ("gdn_in", "gdn_out", "attn_in", "attn_out", "moe_up", "moe_down")
Listed = list[tuple[str, int]]
Samples = dict[str, list[float]]  # seconds by case


@dataclass
class Machine:
    """A session, and one pass of it to time: `rows` tokens after `context`."""

    session: _core.Session
    config: Mapping[str, Any]
    rows: int
    context: int

    def __post_init__(self) -> None:
        """Make the state. Its tokens are never computed: what a pass touches is the same."""
        self.state = self.session.new_state()
        self.session._advance(self.state, self.context)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.config["vocab"], self.rows, dtype=np.int32)
        self.parts = [(self.state, tokens)]
        self.inputs = {
            name: rng.standard_normal((self.rows, self.session._get(name, 1).shape[1])).astype(np.float32)
            for name in ("x", "h", "router", "shared", "hidden")
        }

    def seconds(self, listed: Listed, times: int) -> float:
        """Time some ops, from inputs like a model's."""
        for name, values in self.inputs.items():
            self.session._set(name, values)
        self.session._run("moe_up", 0, self.parts)  # so that moe_down has experts to add up
        return sum(self.session._time(listed, times, self.parts)) / times

    def alone(self, op: str) -> Listed:
        """Return an op in every layer that has it."""
        return [(op, layer) for layer in ops.layers_with(self.config, op)] or [(op, 0)]

    def whole(self) -> Listed:
        """Return a pass, with the head and the draw if it is a decode step."""
        return [*ops.of_pass(self.config), *([("head", 0), ("sample", 0)] if self.rows == 1 else [])]


def by_turns(cases: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Take a sample of each case a round, every other round backwards."""
    found: Samples = {name: [] for name in cases}
    for k in range(rounds):
        for name in list(cases) if k % 2 == 0 else list(cases)[::-1]:
            found[name].append(cases[name]())
    return found


def gemv(machines: Mapping[str, Machine], times: int, rounds: int) -> Samples:
    """Time each op of one row: whole and as its twins alone, and the whole in the model."""
    found: Samples = {}
    one = machines["whole"]
    for op in GEMV:
        count = len(one.alone(op))
        cases = {f"{op}, {kind}": _alone(machine, op, times, count) for kind, machine in machines.items()}
        if op != "head":  # a draw without it would begin by looking for the best logit
            cases[f"{op}, in the model"] = lambda op=op, count=count: _share(one, op, times) / count  # type: ignore[misc]
        found |= by_turns(cases, rounds)
    return found


def _alone(machine: Machine, op: str, times: int, count: int) -> Callable[[], float]:
    return lambda: machine.seconds(machine.alone(op), times) / count


def _share(machine: Machine, op: str, times: int) -> float:
    """Return by how many seconds a pass is longer with an op than without."""
    listed = machine.whole()
    return machine.seconds(listed, times) - machine.seconds([one for one in listed if one[0] != op], times)


def gemm(machine: Machine, times: int, rounds: int) -> Samples:
    """Time each product of a prompt alone and in the model."""
    found: Samples = {}
    for op in TILED:
        count = len(machine.alone(op))
        cases = {
            f"{op}, {machine.rows} rows": _alone(machine, op, times, count),
            f"{op}, {machine.rows} rows, in the model": lambda op=op, count=count: (  # type: ignore[misc]
                _share(machine, op, times) / count
            ),
        }
        found |= by_turns(cases, rounds)
    return found


def steps(one: Machine, times: int, rounds: int) -> Samples:
    """Time a decode step, its head and draw apart and together, and a stage with nothing to do."""
    listed = {
        "a step": one.whole(),
        "head alone": [("head", 0)],
        "sample alone": [("head", 0), ("sample", 0)],  # less the head: a draw needs finite logits
        "head and sample": [("head", 0), ("sample", 0)],
        "an empty stage": [("nothing", 0)] * 100,
    }
    found = by_turns(
        {name: lambda each=each: one.seconds(each, times) for name, each in listed.items()},  # type: ignore[misc]
        rounds,
    )
    found["sample alone"] = [
        both - head for both, head in zip(found["sample alone"], found["head alone"], strict=True)
    ]
    found["an empty stage"] = [seconds / 100 for seconds in found["an empty stage"]]
    return found


def products(config: Mapping[str, Any], op: str) -> int:
    """Return the multiplications that an op does for a row: the numbers of the matrices that it meets."""
    D, keys = config["hidden"], config["kv_heads"] * config["head_dim"]
    queries, values = config["heads"] * config["head_dim"], config["value_heads"] * config["value_dim"]
    channels = 2 * config["key_heads"] * config["key_dim"] + values
    chosen = config["experts_per_token"] * config["expert_width"]
    each = {
        "gdn_in": D * (channels + values + 2 * config["value_heads"]),
        "gdn_out": D * values,
        "attn_in": D * (2 * queries + 2 * keys),
        "attn_out": D * queries,
        "moe_up": 2 * D * chosen,
        "moe_down": D * (chosen + config["shared_width"]),
    }
    return int(each[op])


def derived(
    timed: Mapping[str, list[float]],
    step: stages.Step,
    config: Mapping[str, Any],
    rows: int,
    bandwidth: float,
) -> Iterator[tuple[str, str, list[float], str]]:
    """Yield (case, unit, samples, note) of everything that was timed and what follows from it."""
    read: dict[str, tuple[int, int]] = {}
    for row in step.table:
        total, count = read.get(row.op, (0, 0))
        read[row.op] = (total + row.read + row.written, max(count, row.dispatches))
    for case, seconds in timed.items():
        op, *rest = case.split(", ")
        note = ""
        if op in GEMV and f"{rows} rows" not in rest:
            rate = float(read[op][0] / read[op][1] / np.median(seconds))
            note = f"{rate / 1e9:.0f} GB/s of {read[op][0] / read[op][1] / 1e6:.3f} MB"
        elif op in TILED:
            rate = 2.0 * products(config, op) * rows / float(np.median(seconds))
            note = f"{rate / 1e12:.3g} TFLOP/s"
        yield case, "us", [1e6 * each for each in seconds], note
    yield "dispatches of a token", "", [step.dispatches], f"after {step.context} tokens"
    yield "stages of a token", "", [step.stages], f"after {step.context} tokens"
    if math.isfinite(bandwidth):
        moved = (step.read + step.written) / bandwidth
        left = [
            100 * (whole - moved - step.stages * empty) / whole
            for whole, empty in zip(timed["a step"], timed["an empty stage"], strict=True)
        ]
        note = (
            f"{(step.read + step.written) / 1e6:.1f} MB at {bandwidth / 1e12:.3g} TB/s, {step.stages} stages"
        )
        yield "share of a step that bytes and stages do not explain", "%", left, note


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--loads", metavar="FILE", help="kernels compiled with LILY_LOADS_ONLY")
    parser.add_argument("--arithmetic", metavar="FILE", help="kernels compiled with LILY_ARITHMETIC_ONLY")
    parser.add_argument("--context", type=int, default=3840, help="tokens before the step")
    parser.add_argument("--rows", type=int, default=2048, help="of a prompt's products; 0 leaves them out")
    parser.add_argument("--bandwidth", type=float, default=math.inf, help="of the memory, bytes per second")
    parser.add_argument("--times", type=int, default=20, help="passes of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each case")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.times < 1 or given.rounds < 1:
        parser.error("wanted at least one pass and one round")

    weights, options = _core.Weights(str(given.directory)), dict(given.option)
    config = weights.config
    files = {"whole": options.get("kernels", ""), "loads": given.loads, "arithmetic": given.arithmetic}
    sessions = {
        kind: _core.Session(weights, options if kind == "whole" else {**options, "kernels": file})
        for kind, file in files.items()
        if file is not None
    }
    device = sessions["whole"].device
    rest = {name: value for name, value in options.items() if name not in ("device", "kernels")}
    about = {**describe(given.directory), "device": device, **rest}
    print(f"{given.directory}: {about}")
    machines = {kind: Machine(session, config, 1, given.context) for kind, session in sessions.items()}
    timed = steps(machines["whole"], given.times, given.rounds)
    timed |= gemv(machines, given.times, given.rounds)
    if given.rows:
        prompt = Machine(sessions["whole"], config, given.rows, 0)
        timed |= gemm(prompt, max(1, given.times // 10), given.rounds)
    step = stages.step(given.directory, given.context, rest)
    for case, unit, samples, note in derived(timed, step, config, given.rows, given.bandwidth):
        record.keep(
            given.record,
            bench="limits",
            case=case,
            unit=unit,
            samples=samples,
            options=about,
            note=note,
            device=device,
        )


if __name__ == "__main__":
    run(main)
