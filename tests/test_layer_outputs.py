"""bench.layers: every layer's output on every backend, and that a wrong one is found."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import layers
from bench.torch_layer import Torch
from lily import _core
from support import CHECKPOINTS, backends, options_of

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]
# The bench chooses rows or tiles itself, so that each GPU comes once; of a CPU's prompts in tiles it knows
# nothing.
DEVICES = [name for name in backends() if not name.endswith("rows") and not name.startswith("amx")]


@pytest.mark.parametrize("backend", DEVICES)
def test_every_layer_is_the_reference_s(backend: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    given = [part for name, value in options_of(backend).items() for part in ("--option", f"{name}={value}")]
    rows = "12" if backend.startswith("sim") else "33"  # of which products are tiled from 9 on
    layers.main([str(TINY), "--truth", "reference", "--rows", rows, "--record", str(file), *given])
    found = {line["case"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert len(found) == 6
    assert max(found["row by row, relative error of a layer's output"]["samples"]) <= 1e-4
    assert max(found["tiles, relative error of a layer's output"]["samples"]) <= 1e-2
    assert all(len(line["samples"]) == 4 for line in found.values())


def test_an_error_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.Reference.layer

    def wrong(self: layers.Reference, index: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, expert = right(self, index, x)
        return out * (1 + 2e-4 * (index == 2)), expert

    monkeypatch.setattr(layers.Reference, "layer", wrong)
    with pytest.raises(SystemExit, match=r"^row by row, layer 2: wanted an error of 0\.0001 at most"):
        layers.main([str(TINY), "--truth", "reference", "--rows", "5"])


def test_rows_with_other_experts_are_counted_and_left_out() -> None:
    before, wanted = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    after = wanted.copy()
    after[1] = 9
    ours, theirs = np.array([[0, 1], [0, 2], [3, 1], [0, 1]]), np.array([[1, 0], [0, 1], [3, 1], [0, 1]])
    assert layers.compare(before, after, ours, (wanted, theirs), 7) == layers.Layer(7, 0, 0, 0.25)


@pytest.mark.parametrize("checkpoint", ["tiny", "small"])
def test_torch_is_the_reference(checkpoint: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed; bench.layers takes reference.py instead")
    directory = CHECKPOINTS[checkpoint]
    for dtype, truth, bound in (("float32", "f64", 1e-5), ("bfloat16", "bf16", 1.5e-2)):
        ours, theirs = Torch(directory, dtype, "cpu"), layers.Reference(directory, truth)
        x = np.random.default_rng(0).standard_normal((7, 1)).astype(np.float32)
        x = np.repeat(x, _core.read_config(directory)["hidden"], 1)
        x += np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
        for index in range(_core.read_config(directory)["layers"]):
            out, expert = ours.layer(index, x)
            found = layers.compare(x, out, expert, theirs.layer(index, x), index)
            assert found.error <= bound, (dtype, found)
            assert found.others <= 0.3, (dtype, found)
            x = out
