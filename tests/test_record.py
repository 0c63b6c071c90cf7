"""Records: figures come from samples, every line follows the schema, and the ones committed do too."""

import json
import math
import subprocess
from pathlib import Path

import pytest

import rungs
from bench import record

pytestmark = pytest.mark.unsanitized


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def repository(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository of one commit for records to name: the tree under test may be an export."""
    rungs.climb("git")
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "--quiet")
    (root / "code.py").write_text("first")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(record, "ROOT", root)
    return root


def add(directory: Path, **changes: object) -> dict[str, object]:
    given = {"bench": "speed", "case": "decode@512", "unit": "tok/s", "samples": [3.0, 1.0, 2.0, 10.0]}
    return record.append(directory=directory, **{**given, **changes})  # type: ignore[arg-type]


def test_figures_are_computed_from_samples(tmp_path: Path) -> None:
    made = add(tmp_path)
    assert {name: made[name] for name in ("n", "min", "median", "max")} == {
        "n": 4,
        "min": 1,
        "median": 2.5,
        "max": 10,
    }
    assert record.summarise([1 / 3]) == {"n": 1, "min": 0.333333, "median": 0.333333, "max": 0.333333}


def test_a_figure_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="median"):
        add(tmp_path, median=3.0)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_samples_without_figures_are_refused(tmp_path: Path, samples: list[float]) -> None:
    with pytest.raises(ValueError, match="wanted one or more finite numbers"):
        add(tmp_path, samples=samples)
    assert not list(tmp_path.iterdir())


def test_records_are_appended_and_counted(tmp_path: Path) -> None:
    first = add(tmp_path, options={"threads": 2}, note="first")
    second = add(tmp_path, kept=False, note="slower than plain")
    (path,) = tmp_path.iterdir()
    assert record.read(path) == [first, second]
    assert (first["id"], second["id"]) == (f"{path.stem}-0001", f"{path.stem}-0002")
    assert list(first) == list(record.FIELDS)


def test_samples_of_a_machine_without_git_become_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, records = tmp_path / "samples.jsonl", tmp_path / "records"
    given = {"bench": "ablate", "case": "decode@512", "unit": "%", "samples": [3.0, 1.0, 2.0]}
    with monkeypatch.context() as patch:
        patch.setattr(record, "_output", None)  # no command can be run
        record.keep(str(file), **given, options={"gqa_packing": "false"}, device="cuda (NVIDIA H200)")
        record.keep(None, **given)
    monkeypatch.setattr(record.add, "__defaults__", (records,))
    record.main([str(file)])
    (path,) = records.iterdir()
    (made,) = record.read(path)
    assert made["id"] == f"nvidia-h200-{made['cores']}c-0001"
    assert made["chip"] == "NVIDIA H200"
    assert (made["n"], made["min"], made["median"], made["max"]) == (3, 1, 2, 3)
    assert made["options"] == {"gqa_packing": "false"}
    assert capsys.readouterr().out.splitlines()[-1] == made["id"]


def test_an_experiment_not_kept_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wanted the reason"):
        add(tmp_path, kept=False)


def test_machine_is_this_one(tmp_path: Path) -> None:
    here = record.machine()
    assert here["chip"]
    assert here["cores"] >= 1
    assert 0.1 < here["memory_gb"] < 100_000
    made = add(tmp_path)
    assert {name: made[name] for name in here} == here


def test_commit_and_what_makes_it_dirty(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD").strip()
    clean = {"commit": head[:12], "dirty": False}
    assert record.commit() == clean
    stray = repository / "bench" / "records" / "stray.jsonl"
    stray.parent.mkdir(parents=True)
    stray.touch()
    assert record.commit() == clean
    (repository / "code.py").write_text("changed")
    assert record.commit() == {"commit": head[:12], "dirty": True}
    git(repository, "checkout", "code.py")
    (repository / "new.py").touch()
    assert record.commit()["dirty"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median": "2"}, "median: wanted"),
        ({"n": True}, "n: wanted"),
        ({"max": 0.5}, "min <= median <= max"),
        ({"extra": 1}, "wanted the fields"),
    ],
)
def test_a_line_that_breaks_the_schema_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    made = add(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**made, **change}) + "\n")
    with pytest.raises(ValueError, match=message):
        record.read(path)


def test_committed_records_follow_the_schema() -> None:
    for path in record.RECORDS.glob("*.jsonl"):
        ids = [line["id"] for line in record.read(path)]
        assert ids == [f"{path.stem}-{k + 1:04d}" for k in range(len(ids))]
