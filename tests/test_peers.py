"""bench.peers: what it makes of two engines' rates, and that transformers runs where it is installed."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import peers
from lily.speed import Row
from support import CHECKPOINTS

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]


def test_ratios_are_of_the_same_round() -> None:
    rows = [Row("ours", 8, (4.0, 9.0), (2.0, 2.0)), Row("theirs", 8, (2.0, 3.0), (1.0, 4.0))]
    assert list(peers.cases(rows)) == [
        ("ours, prefill@8", "tok/s", [4.0, 9.0]),
        ("ours, decode@8", "tok/s", [2.0, 2.0]),
        ("theirs, prefill@8", "tok/s", [2.0, 3.0]),
        ("ours over theirs, prefill@8", "x", [2.0, 3.0]),
        ("theirs, decode@8", "tok/s", [1.0, 4.0]),
        ("ours over theirs, decode@8", "x", [2.0, 0.5]),
    ]


def test_both_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stand:
        name, note = "stand 1.0", "of known rates"

        def __init__(self, directory: Path, device: str) -> None:
            assert (directory, device) == (TINY, "cpu")

        def trial(self, tokens: np.ndarray, steps: int) -> tuple[float, float]:
            return 1e-3, 1e-3

    monkeypatch.setattr(peers, "Transformers", Stand)
    file = tmp_path / "samples.jsonl"
    arguments = ["--lengths", "9,20", "--steps", "2", "--rounds", "2", "--record", str(file)]
    peers.main([str(TINY), *arguments])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 12
    assert all(
        line["note"] == ("" if line["case"].startswith("lily 0.1.0, ") else Stand.note) for line in lines
    )
    assert all(min(line["samples"]) > 1 for line in lines if line["unit"] == "x")
    assert "times as fast" in capsys.readouterr().out


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="transformers cannot be used: "):
        peers.main([str(TINY)])


@pytest.mark.filterwarnings("ignore")  # its own, of which every version has others
def test_transformers_takes_the_shape() -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed; only bench.peers needs it")
    engine = peers.Transformers(TINY, "cpu")
    assert (
        engine._model.config.num_experts
        == json.loads((TINY / "config.json").read_text())["text_config"]["num_experts"]
    )
    assert min(engine.trial(np.arange(9, dtype=np.int32), 3)) > 0
