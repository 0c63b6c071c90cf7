"""Every layer's output on a device against torch's, or reference.py's, of the same weights and input.

    python -m bench.layers DIRECTORY [--option device=cuda --option kernels=FILE ...] [--rows 64]
                           [--truth torch|reference] [--torch-device cuda] [--record [FILE]]

A layer's input is what the device made of the layer before, so that errors do not add up and one layer's
weights are in memory at a time. Two ways to run it are looked at: with its defaults, in matrix tiles, against
bfloat16, and row by row, in float32 throughout, against float32. Rows for which the two sides choose other
experts, which a near tie can do, are counted and left out of the error. The exit status is 1 if an error is
above its bound.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bench import ops, record, run
from bench.speed import option
from bench.synthetic_config import describe
from bench.torch_layer import Array, Torch
from lily import _core, reference

# The kernels that go row by row for any number of rows, and keys and values that are not rounded.
ROW_BY_ROW = {"matmul_rows": "65537", "flash_from": "0", "gdn_scan_from": "0", "kv": "f32"}


class Truth(Protocol):
    """What a device is held to. name: str."""

    name: str

    def layer(self, index: int, x: Array) -> tuple[Array, Array]:
        """Run a layer on x (T, D). Returns x (T, D) and the experts (T, K) of each row."""
        ...


class Reference:
    """reference.py, in float64 or as a bfloat16 pipeline."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """Map a checkpoint. dtype: reference.Model's."""
        self._model = reference.Model(directory, dtype=dtype, keep_bytes=0)
        self.name = f"reference.py {dtype}"

    def layer(self, index: int, x: Array) -> tuple[Array, Array]:
        """Run a layer on x (T, D). Returns x (T, D) and the experts (T, K) of each row."""
        model, layer = self._model, self._model.layers[index]
        dtype = model.weights.numerics.dtype
        x, _ = model.mix(index, x.astype(dtype), model.new_states()[index])
        h, router, _, _ = reference.moe_route(layer, x)
        expert, _, _ = reference.moe_up(layer, h, router)
        return model.moe(index, x), expert


class Way(NamedTuple):
    """A way to run the device, what it is compared with, and the relative error that it may have.

    others: the share of the rows that may have other experts. Between the 8th and the 9th of 256 there often
    is less than what bfloat16 rounds away.
    """

    name: str
    options: Mapping[str, str]
    truth: Truth
    bound: float
    others: float


class Layer(NamedTuple):
    """What came of one layer."""

    number: int
    error: float  # |ours - theirs| / |theirs| of the output, over the rows with the same experts
    update: float  # the same of what the layer added
    others: float  # share of the rows with other experts


def outputs(
    session: _core.Session, config: Mapping[str, Any], tokens: Array
) -> Iterator[tuple[int, Array, Array, Array]]:
    """Yield (layer, x before, x after, experts) of a pass over tokens."""
    parts, rows = [(session.new_state(), tokens)], len(tokens)
    session._run("embed", 0, parts)
    for index in range(config["layers"]):
        before = session._get("x", rows)
        for op, layer in ops.of_layer(config, index):
            session._run(op, layer, parts)
        yield index, before, session._get("x", rows), session._get("expert", rows)


def compare(before: Array, after: Array, expert: Array, truth: tuple[Array, Array], index: int) -> Layer:
    """Compare a layer's output with the truth's for the same input."""
    wanted, theirs = truth
    same = np.array([set(a) == set(b) for a, b in zip(expert, theirs, strict=True)])
    off = after[same].astype(np.float64) - wanted[same]
    added = wanted[same].astype(np.float64) - before[same]

    def share(of: Array) -> float:
        return float(np.linalg.norm(off) / np.linalg.norm(of)) if same.any() else float("inf")

    return Layer(index, share(wanted[same]), share(added), 1 - float(same.mean()))


def ways(kind: str, directory: Path, torch_device: str) -> list[Way]:
    """Return what is compared. kind: "torch" or "reference"."""
    bf16: Truth
    f32: Truth
    if kind == "torch":
        bf16, f32 = (Torch(directory, dtype, torch_device) for dtype in ("bfloat16", "float32"))
    else:
        bf16, f32 = (Reference(directory, dtype) for dtype in ("bf16", "f64"))
    return [Way("tiles", {}, bf16, 1e-2, 0.5), Way("row by row", ROW_BY_ROW, f32, 1e-4, 0.02)]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.layers", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="tokens of the pass")
    parser.add_argument("--truth", choices=("torch", "reference"), default="torch")
    parser.add_argument("--torch-device", default="cpu", help="where torch runs: cpu, cuda")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.rows < 1:
        parser.error("--rows: wanted at least 1")

    weights, config = _core.Weights(str(given.directory)), _core.read_config(given.directory)
    tokens = np.random.default_rng(0).integers(0, config["vocab"], given.rows, dtype=np.int32)
    failed = []
    for way in ways(given.truth, given.directory, given.torch_device):
        session = _core.Session(weights, {**dict(given.option), **way.options})
        found = []
        for index, before, after, expert in outputs(session, config, tokens):
            layer = compare(before, after, expert, way.truth.layer(index, before), index)
            found.append(layer)
            print(
                f"{way.name}, layer {index}: output {layer.error:.3g}, what it adds {layer.update:.3g}, "
                f"other experts {100 * layer.others:.3g} %",
                flush=True,
            )
        note = f"{way.truth.name}; bound {way.bound:g}; {given.rows} rows; a sample is a layer"
        for case, unit, samples in (
            (f"{way.name}, relative error of a layer's output", "", [one.error for one in found]),
            (f"{way.name}, relative error of what it adds", "", [one.update for one in found]),
            (f"{way.name}, rows with other experts", "%", [100 * one.others for one in found]),
        ):
            record.keep(
                given.record,
                bench="layers",
                case=case,
                unit=unit,
                samples=samples,
                options={**describe(given.directory), "device": session.device},
                note=note,
                device=session.device,
            )
        failed += [
            f"{way.name}, layer {one.number}: wanted an error of {way.bound:g} at most and {way.others:.0%} "
            f"of other experts, got {one.error:.3g} and {one.others:.1%}"
            for one in found
            if not (one.error <= way.bound and one.others <= way.others)
        ]
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    run(main)
