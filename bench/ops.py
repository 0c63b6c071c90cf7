"""The ops of a pass, one by one: how long each takes, and its share of what the machine can do at most.

    python -m bench.ops DIRECTORY [--rows 1] [--context 3840] [--option NAME=VALUE ...] [--times 5]
                        [--rounds 5] [--record [FILE]]

An op's time is that of one layer, and a sample the mean of --times passes. On a CPU it is read off the clock
within whole passes, so that weights come from memory unless the caches hold a pass's. A GPU does not say
when an op ends: there an op runs alone, in all layers that have it, one after the other and over and over.

For one row the rate is of the bytes that the op cannot do without; for more it is of its products'
operations. On a CPU the share is of the most that bench/peaks.py measures, by turns with the passes: what
memory gives, or what the cores multiply.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import peaks, record, run
from bench.speed import about, option
from lily import _core, stages

ATTENTION = ("attn_in", "attn_mix", "attn_out")
DELTA = ("gdn_in", "gdn_mix", "gdn_out")
MIXTURE = ("moe_route", "moe_up", "moe_down")
Listed = list[tuple[str, int]]
Samples = dict[str, list[float]]  # seconds by case, and what can be done per second by kind


def of_layer(config: Mapping[str, Any], layer: int) -> Listed:
    """Return the ops of a layer, each with its number."""
    mixer = ATTENTION if config["attention"][layer] else DELTA
    return [(op, layer) for op in (*mixer, *MIXTURE)]


def of_pass(config: Mapping[str, Any]) -> Listed:
    """Return the ops of a pass without its head."""
    return [("embed", 0), *(op for layer in range(config["layers"]) for op in of_layer(config, layer))]


def layers_with(config: Mapping[str, Any], op: str) -> list[int]:
    """Return the layers that have an op."""
    return [layer for layer in range(config["layers"]) if (op, layer) in of_layer(config, layer)]


def products(config: Mapping[str, Any], op: str, seen: float) -> float:
    """Return the multiplications that an op does for a row that sees `seen` positions, itself included.

    Of matrices, the numbers that a row meets; of the delta rule, as it is stated, one token after the other:
    S times its decay, S k, S q, and k d.
    """
    D, keys = config["hidden"], config["kv_heads"] * config["head_dim"]
    queries, values = config["heads"] * config["head_dim"], config["value_heads"] * config["value_dim"]
    channels = 2 * config["key_heads"] * config["key_dim"] + values
    chosen, shared = config["experts_per_token"] * config["expert_width"], config["shared_width"]
    each = {
        "gdn_in": D * (channels + values + 2 * config["value_heads"]),
        "gdn_mix": values * 4 * config["key_dim"] + channels * config["conv_taps"],
        "gdn_out": D * values,
        "attn_in": D * (2 * queries + 2 * keys),
        "attn_mix": 2 * queries * seen,
        "attn_out": D * queries,
        "moe_route": D * (config["experts"] + 1 + 2 * shared),
        "moe_up": 2 * D * chosen,
        "moe_down": D * (chosen + shared),
    }
    return float(each.get(op, 0))


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
            for name in ("x", "h", "y", "z", "router", "shared", "hidden")
        }

    @property
    def on_cpu(self) -> bool:
        """Whether ops are done when they return."""
        return self.session.device.startswith("cpu")

    @property
    def limit(self) -> str:
        """Name what a pass can be held to on a CPU."""
        return peaks.MEMORY if self.rows == 1 else peaks.products(self.session.device)

    def each(self, listed: Listed, times: int) -> list[float]:
        """Time some ops, from inputs like a model's; on a GPU only the sum of their seconds says anything."""
        for name, values in self.inputs.items():
            self.session._set(name, values)
        self.session._run("moe_up", 0, self.parts)  # so that moe_down has experts to add up
        return [seconds / times for seconds in self.session._time(listed, times, self.parts)]

    def seconds(self, listed: Listed, times: int) -> float:
        """Time some ops together."""
        return sum(self.each(listed, times))

    def stages(self, listed: Listed) -> int:
        """Count how often ops call a CPU's threads together."""
        before = self.session._stages
        self.session._time(listed, 1, self.parts)
        return (self.session._stages - before) // 2  # it warms up

    def layers(self, op: str) -> Listed:
        """Return an op in every layer that has it."""
        return [(op, layer) for layer in layers_with(self.config, op)] or [(op, 0)]

    def alone(self, op: str, times: int) -> float:
        """Time an op of one layer in all layers that have it, one after the other."""
        return self.seconds(self.layers(op), times) / len(self.layers(op))

    def whole(self) -> Listed:
        """Return a pass, with the head and the draw if it is a decode step."""
        return [*of_pass(self.config), *([("head", 0), ("sample", 0)] if self.rows == 1 else [])]

    def by_op(self, times: int) -> dict[str, float]:
        """Time each op of one layer."""
        listed = self.whole()
        if not self.on_cpu:
            return {op: self.alone(op, times) for op, _ in listed if op != "sample"}
        found: dict[str, list[float]] = {}
        for (op, _), seconds in zip(listed, self.each(listed, times), strict=True):
            found.setdefault(op, []).append(seconds)
        return {op: statistics.mean(seconds) for op, seconds in found.items()}

    def rate(self, op: str, seconds: float, most: float) -> str:
        """Say how fast an op of one layer was, and its share of the most there is, if that is known.

        most: bytes or operations per second, or 0. Nothing is said of an op that has neither to count.
        """
        if self.rows == 1:
            amount = stages.floors(self.config, self.context).get(op, 0) / len(self.layers(op))
            text = f"{amount / seconds / 1e9:.4g} GB/s of {amount / 1e6:.3f} MB"
        else:
            seen = self.context + (self.rows + 1) / 2  # positions, on average
            amount = 2 * self.rows * products(self.config, op, seen)
            text = f"{amount / seconds / 1e9:.0f} GFLOP/s"
        if amount and most:
            text += f", {100 * amount / seconds / most:.1f} % of the most"
        return text if amount else ""

    def told(
        self, timed: Mapping[str, list[float]], most: float = 0
    ) -> Iterator[tuple[str, str, list[float], str]]:
        """Yield (case, unit, samples, note) of what was timed; a case begins with its op.

        most: as rate() takes it, where it was not measured with the rest.
        """
        if self.limit in timed:
            most = statistics.median(timed[self.limit])
        for case, samples in timed.items():
            if case in peaks.KINDS:
                unit = "GB/s" if case == peaks.MEMORY else "GFLOP/s"
                yield case, unit, [each / 1e9 for each in samples], "the most, by turns with the rest"
            else:
                note = self.rate(case.split(", ")[0], statistics.median(samples), most)
                yield case, "us", [1e6 * seconds for seconds in samples], note


def by_turns(cases: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Take a sample of each case a round, every other round backwards."""
    found: Samples = {name: [] for name in cases}
    for k in range(rounds):
        for name in list(cases) if k % 2 == 0 else list(cases)[::-1]:
            found[name].append(cases[name]())
    return found


def timed(machine: Machine, times: int, rounds: int) -> Samples:
    """Time each op of a pass, and on a CPU by turns what it can do at most."""
    found: Samples = {}
    for _ in range(rounds):
        sample = {machine.limit: peaks.measure(machine.limit)} if machine.on_cpu else {}
        for op, seconds in machine.by_op(times).items():
            sample[op if machine.rows == 1 else f"{op}, {machine.rows} rows"] = seconds
        for case, figure in sample.items():
            found.setdefault(case, []).append(figure)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="tokens of the pass")
    parser.add_argument("--context", type=int, help="tokens before it; 3840 before one row, else none")
    parser.add_argument("--times", type=int, default=5, help="passes of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each op")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.rows < 1 or given.times < 1 or given.rounds < 1:
        parser.error("wanted at least one row, one pass and one round")
    context = given.context if given.context is not None else 3840 if given.rows == 1 else 0

    weights, options = _core.Weights(str(given.directory)), dict(given.option)
    session = _core.Session(weights, options)
    machine = Machine(session, weights.config, given.rows, context)
    facts = {**about(given.directory, session, options), "context": context}
    print(f"{given.directory}: {facts}")
    keep = partial(record.keep, given.record, bench="ops", options=facts, device=session.device)
    for told in machine.told(timed(machine, given.times, given.rounds)):
        keep(*told)


if __name__ == "__main__":
    run(main)
