"""The measuring programs: what they count, how they take turns, and that they run on a checkpoint."""

import functools
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import agree, load, record, speed, synthetic, traffic
from bench.synthetic_config import describe
from lily.speed import alternate
from support import CHECKPOINTS

pytestmark = pytest.mark.unsanitized
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which Linux has")
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write four layers of 8 experts: 140 MB of weights."""
    directory = tmp_path_factory.mktemp("checkpoint")
    synthetic.write(directory, layers=4, experts=8, vocab=1024, skew=1)
    yield directory
    for file in directory.iterdir():
        file.unlink()


# ---- memory


@linux_only
def test_anonymous_peak_holds_what_was_freed_again() -> None:
    before = load.process_memory()["RssAnon"]
    with load.AnonymousPeak() as peak:
        # Of the system, not of an allocator, which may have as much left over from earlier tests.
        block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(64):
            block.write(b"x" * MIB)
        time.sleep(0.1)
        block.close()
    assert peak.bytes - before > 60 * MIB


@linux_only
def test_mapped_files_are_not_anonymous(checkpoint: Path) -> None:
    (path,) = load.checkpoint_files(checkpoint)
    before = load.process_memory()
    with (
        load.AnonymousPeak() as peak,
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert np.frombuffer(mapped[: 1 << 10], np.uint8).size
        for start in range(0, len(mapped), mmap.PAGESIZE):
            mapped[start]
        after = load.process_memory()
    assert after["VmRSS"] - before["VmRSS"] > 0.9 * path.stat().st_size
    assert peak.bytes - before["RssAnon"] < 8 * MIB


@linux_only
def test_files_leave_the_page_cache(checkpoint: Path) -> None:
    files = load.checkpoint_files(checkpoint)
    assert load.drop_from_page_cache(files)


def test_a_directory_without_a_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load.main([str(tmp_path)])
    assert f"{tmp_path}: wanted a checkpoint, got no .safetensors file" in capsys.readouterr().err


# ---- turns and arguments


def test_rounds_go_there_and_back_and_the_first_is_not_counted() -> None:
    calls: list[str] = []

    def case(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    samples = alternate({name: functools.partial(case, name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abccbaabc"
    assert samples == {"a": [6.0, 7.0], "b": [5.0, 8.0], "c": [4.0, 9.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "128,0"], "wanted lengths of at least 1"),
        (["--decode", "many"], "wanted lengths of at least 1, such as 128,2K, got many"),
        (["--prefill", "", "--decode", ""], "wanted at least one step, one round and one length"),
        (["--rounds", "0"], "wanted at least one step, one round and one length"),
        (["--option", "threads"], "wanted NAME=VALUE, got threads"),
    ],
)
def test_speed_refuses_nonsense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speed.main(["nowhere", *arguments])
    assert message in capsys.readouterr().err


# ---- on a checkpoint


def test_load_measures_and_records(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "commit", lambda: {"commit": "0" * 12, "dirty": False})
    monkeypatch.setattr(record, "append", functools.partial(record.append, directory=tmp_path))
    load.main([str(checkpoint), "--rounds", "2", "--tokens", "4", "--option", "kv=f32", "--record"])
    (path,) = tmp_path.iterdir()
    made = {line["case"]: line for line in record.read(path)}
    assert {"load, warm", "first token, warm", "decode, warm", "peak resident, warm"} <= set(made)
    assert all(line["n"] == 2 and line["bench"] == "load" for line in made.values())
    assert all(line["options"] == {**describe(checkpoint), "kv": "f32"} for line in made.values())
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(made)


@linux_only
def test_loading_makes_no_second_copy(tmp_path: Path) -> None:
    """The embedding and head of a real vocabulary, 286 MB each, are the bulk of one layer of 8 experts."""
    weights = synthetic.write(tmp_path / "checkpoint", layers=1, experts=8)
    bare = load.sample(tmp_path / "checkpoint", 2)
    assert bare["peak anonymous"] * load.GIB < weights / 2


def test_speed_measures_prefill_and_decode(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--prefill",
        "9,33",
        "--decode",
        "5",
        "--steps",
        "3",
        "--rounds",
        "2",
        "--option",
        "threads=1",
    ]
    speed.main([str(checkpoint), *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert "'threads': '1'" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["prefill@9", "prefill@33", "decode@5"]
    assert all(float(line.split()[1]) > 0 for line in lines[1:])


def test_texts_of_its_own_compare_ways_to_run_the_demo() -> None:
    texts = agree.own_texts(2)
    assert [len(text) for text in texts] == [agree.OWN_TOKENS] * 2
    assert not np.array_equal(*texts)
    _, same = agree.own_figures(texts, {"device": "cpu", "kv": "f32"})
    assert [figure for _, figure in same.values()] == [100, 0, 0, pytest.approx(0, abs=1e-12)]
    device, other = agree.own_figures(texts, {"device": "cpu", "kv": "int8"})
    assert device.startswith("cpu")
    agreement, difference, error, kl = (figure for _, figure in other.values())
    assert 97 < agreement < 100
    assert 0 < abs(difference) < 1
    assert 0 < error < 1
    assert 0 < kl < 0.01


@pytest.mark.parametrize(
    "program",
    ["ablate", "layers", "limits", "load", "ops", "record", "sample", "speculate", "speed", "traffic"],
)
def test_what_a_program_is_given_wrong_is_one_line(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{program}", "/nonexistent"],
        capture_output=True,
        text=True,
        cwd=record.ROOT,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "/nonexistent" in done.stderr.splitlines()[-1]


def test_traffic_wants_layers_of_both_kinds(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINTS["tiny"] / "config.json").read_text())
    text = config.get("text_config", config)
    text["layer_types"] = ["full_attention"] * len(text["layer_types"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"wanted layers of both kinds, as bench.synthetic makes them"):
        traffic.main([str(tmp_path)])
