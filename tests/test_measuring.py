"""`lily bench` and `lily agree`, with an engine that stands in for mlx-lm, which few machines have."""

import json
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import lily
from lily import agreement, peers, plot, speed
from lily.__main__ import main
from support import CHECKPOINTS, backends, options_of

pytestmark = pytest.mark.unsanitized
TINY = str(CHECKPOINTS["tiny"])
TEXT = "".join(chr(97 + i * i % 23) + " " * (i % 5 == 0) for i in range(400))


class Stand:
    """An engine whose rates are known."""

    def __init__(self, folder: Path) -> None:
        self.name = "stand 1.0"
        self.calls: list[int] = []

    def trial(self, tokens: np.ndarray, steps: int) -> tuple[float, float]:
        self.calls.append(len(tokens))
        return 10.0 * len(self.calls), 5.0


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "stand", Stand)


def test_engines_and_lengths_take_turns_on_the_same_ids() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Engine(Stand):
        def trial(self, tokens: np.ndarray, steps: int) -> tuple[float, float]:
            seen.append((self.name, tuple(tokens.tolist())))
            return super().trial(tokens, steps)

    first, second = Engine(Path()), Engine(Path())
    second.name = "second"
    rows = speed.sweep([first, second], [2, 4], vocab=100, steps=1, trials=2)
    order = [(name, len(ids)) for name, ids in seen]
    there = [("stand 1.0", 2), ("second", 2), ("stand 1.0", 4), ("second", 4)]
    assert order == there + there[::-1] + there
    assert len({ids[:2] for _, ids in seen}) == 1
    assert [(row.engine, row.length) for row in rows] == there
    assert rows[0].prefill == (40.0, 50.0)  # the fourth and fifth of its calls; the first is not counted
    assert rows[0].decode == (5.0, 5.0)


def test_bench_prints_writes_and_draws(
    stand: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["-p", "9", "33", "-g", "2", "-n", "2", "--peer", "stand", "--threads", "1"]
    arguments += ["--json", str(file), "--plot", str(picture)]
    assert main(["bench", "--model", TINY, *arguments]) == 0
    told = capsys.readouterr()
    assert "2 trials" in told.err
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["9", "9", "33", "33"]
    assert lines[2].rstrip().endswith("x")  # the ratio of the two engines
    held = json.loads(file.read_text())
    assert held["options"] == {"threads": "1"}
    assert [row["prompt_tokens"] for row in held["rows"]] == [9, 9, 33, 33]
    assert all(
        len(row["prompt_tps_samples"]) == len(row["generation_tps_samples"]) == 2 for row in held["rows"]
    )
    assert all(row["prompt_tps"] > 0 < row["generation_tps"] for row in held["rows"])
    root = ElementTree.fromstring(picture.read_text())
    assert len(root.findall(".//{*}polyline")) == 4  # two engines, prefill and decoding
    assert len(root.findall(".//{*}circle")) == 8


def test_a_picture_puts_more_higher_and_escapes_names() -> None:
    rows = [speed.Row("a<b", n, (r,), (r,)) for n, r in ((256, 1.0), (512, 3.0))]
    root = ElementTree.fromstring(plot.svg(rows, "x & y"))
    line = root.find(".//{*}polyline")
    assert line is not None
    (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
    assert x1 < x2
    assert y2 < y1
    assert "a<b" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "0"], "--prompt-tokens: wanted lengths from 1 to"),
        (["-p", "1000K"], "--prompt-tokens: wanted lengths from 1 to"),
        (["-p", "many"], "wanted a number of tokens"),
        (["-n", "0"], "wanted at least one token to write and one trial"),
        (["-p", "8", "--peer", "nobody"], "peer: wanted one of mlx-lm, got 'nobody'"),
    ],
)
def test_bench_refuses_nonsense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlx", types.ModuleType("mlx"))  # without a core
    assert main(["bench", "--model", TINY, "-p", "8", "--peer", "mlx-lm"]) == 1
    assert "mlx-lm cannot be used: " in capsys.readouterr().err


class Fixed:
    """A side with logits that are given."""

    def __init__(self, name: str, logits: np.ndarray) -> None:
        self.name = name
        self.logits = logits

    def blocks(self, tokens: np.ndarray):
        for begin in range(0, len(tokens), agreement.ROWS):
            yield self.logits[begin : begin + agreement.ROWS]


def test_figures_are_those_of_all_positions_at_once() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, 600, dtype=np.int32)
    truth = rng.standard_normal((600, 50)).astype(np.float32)
    other = truth + 0.3 * rng.standard_normal((600, 50)).astype(np.float32)
    found = agreement.compare(Fixed("ours", other), Fixed("theirs", truth), tokens)
    assert found.positions == 600
    assert found.same_best == agreement.top1_agreement(truth, other) < 1
    assert found.mean_kl == pytest.approx(agreement.kl_divergence(truth, other).mean())
    given = agreement.target_log_probabilities(other, tokens)
    assert found.our_perplexity == pytest.approx(agreement.perplexity(given))
    given = agreement.target_log_probabilities(truth, tokens)
    assert found.their_perplexity == pytest.approx(agreement.perplexity(given))
    assert "same best token" in str(found)


def test_a_short_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("too short")
    assert main(["agree", "--model", TINY, str(tmp_path / "text"), "--against", "simd=plain"]) == 2
    assert "text: wanted at least 192 tokens, got" in capsys.readouterr().err


@pytest.mark.parametrize("backend", [name for name in backends() if name != "sim rows"])  # which is slow
def test_agree_compares_two_ways_to_run_it(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    options = [
        part for name, value in options_of(backend).items() for part in ("--option", f"{name}={value}")
    ]
    arguments = ["--against", "simd=plain,kv=f32", "--positions", "192", "--json", *options]
    assert main(["agree", "--model", TINY, str(tmp_path / "text"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["positions"] == 192
    assert found["same_best"] >= 0.9  # random weights: many tokens are nearly as good as the best
    bound = 1 if backend.endswith("tiles") else 0.1  # whose operands are bfloat16
    assert abs(found["perplexity_difference_percent"]) < bound
    assert 0 <= found["mean_kl"] < bound / 100
    assert found["theirs"].endswith("simd=plain kv=f32")


def test_a_model_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    assert main(["agree", "--model", lily.DEMO, str(tmp_path / "text"), "--against", "threads=1"]) == 0
    out = capsys.readouterr().out
    assert "same best token   100.000 %" in out
    assert "mean KL           0 nat" in out
