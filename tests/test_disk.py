"""States that outlive the process, in a folder of a bounded size."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lily
from support import CHECKPOINTS, code_paths

PROMPT = [1 + i % 150 for i in range(400)]
ASK = {"max_tokens": 20, "seed": 1, "stop_tokens": ()}


def load(folder: Path, **settings: object) -> lily.Model:
    return lily.Model.load(str(CHECKPOINTS["tiny"]), cache_dir=folder, **settings)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.lily"))


@pytest.fixture
def cold() -> Iterator[lily.Completion]:
    with lily.Model.load(str(CHECKPOINTS["tiny"]), cache_bytes=0) as model:
        yield model.generate(PROMPT, **ASK)


def test_what_is_held_at_the_end_is_there_again(tmp_path: Path, cold: lily.Completion) -> None:
    with load(tmp_path) as model:
        assert model.generate(PROMPT, **ASK).tokens == cold.tokens
        assert model.cache_stats().disk_bytes == 0
    assert files(tmp_path)
    with load(tmp_path) as model:
        again = model.generate([*PROMPT, *cold.tokens, 5, 6, 7], **ASK)
        assert again.usage.cached_tokens == 419  # the last token of an answer is not taken in
        assert model.cache_stats().disk_hits == 1
        assert model.cache_stats().disk_bytes == sum(file.stat().st_size for file in files(tmp_path))
        later = model.generate([*PROMPT, *cold.tokens, 5, 6, 7], **ASK, reuse="off")
        assert later.tokens == again.tokens


def test_what_there_is_no_room_for_is_saved(tmp_path: Path, cold: lily.Completion) -> None:
    with load(tmp_path, cache_bytes=1 << 20) as model:
        session = model._engine.session
        model.generate(PROMPT, **ASK)
        for number in range(6):
            model.generate([7 + number] * 400, max_tokens=1)
            assert session.kept_bytes <= 1 << 20
        assert model.cache_stats().disk_bytes > 0
        again = model.generate(PROMPT, **ASK)
        assert again.usage.cached_tokens == 400
        assert model.cache_stats().disk_hits == 1
        assert again.tokens == cold.tokens


def test_the_folder_is_held_to_its_size(tmp_path: Path) -> None:
    with load(tmp_path, cache_bytes=1 << 20, cache_dir_bytes=2 << 20) as model:
        for number in range(12):
            model.generate([7 + number] * 400, max_tokens=1)
            assert sum(file.stat().st_size for file in files(tmp_path)) <= 2 << 20
        assert files(tmp_path)
    with load(tmp_path, cache_dir_bytes=0) as model:
        model.generate(PROMPT, max_tokens=1)


def test_damage_is_passed_over(
    tmp_path: Path, cold: lily.Completion, caplog: pytest.LogCaptureFixture
) -> None:
    with load(tmp_path) as model:
        model.generate(PROMPT, **ASK)
    for file in files(tmp_path):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with load(tmp_path) as model:
        done = model.generate(PROMPT, **ASK)
        assert (done.tokens, done.usage.cached_tokens) == (cold.tokens, 0)
        assert "a saved state is passed over" in caplog.text


def test_a_file_under_a_wrong_name_is_passed_over(tmp_path: Path, cold: lily.Completion) -> None:
    with load(tmp_path) as model:
        model.generate([9] * 400, max_tokens=1)
        model.generate(PROMPT, max_tokens=1)
    first, second = files(tmp_path)
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    with load(tmp_path) as model:
        done = model.generate(PROMPT, **ASK)
        assert (done.tokens, done.usage.cached_tokens) == (cold.tokens, 0)


def test_what_is_no_file_of_its_own_is_passed_over(tmp_path: Path, cold: lily.Completion) -> None:
    """Links, also to a good file elsewhere, pipes, folders and names that lead out of the folder."""
    with load(tmp_path / "a") as model:
        model.generate(PROMPT, **ASK)
    (good,) = (file for file in files(tmp_path / "a") if file.name.startswith("400-"))
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files(tmp_path / "a"))
    folder = tmp_path / "b" / good.parent.name
    folder.mkdir(parents=True)
    (folder / good.name).symlink_to(good)
    (folder / f"300-{'0' * 40}.lily").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / f"301-{'0' * 40}.lily")
    (folder / f"302-{'0' * 40}.lily").mkdir()
    (folder / f"303-{'0' * 40}.lily").symlink_to("/dev/zero")
    (folder / "..-passwd.lily").write_bytes(b"")
    with load(tmp_path / "b", cache_dir_bytes=0) as model:
        done = model.generate(PROMPT, **ASK)
        assert (done.tokens, done.usage.cached_tokens) == (cold.tokens, 0)
        assert model.cache_stats().disk_bytes == 0
    assert good.exists()
    assert len(list(folder.iterdir())) == 6


def test_other_weights_have_a_folder_of_their_own(tmp_path: Path) -> None:
    with load(tmp_path) as model:
        model.generate(PROMPT, max_tokens=1)
    with lily.Model.load(str(CHECKPOINTS["small"]), cache_dir=tmp_path) as model:
        assert model.generate(PROMPT, max_tokens=1).usage.cached_tokens == 0
        assert model.cache_stats().disk_bytes == 0


def test_other_code_paths_have_a_folder_of_their_own(tmp_path: Path) -> None:
    """Their sums differ in the last bits, and reuse promises the bits of a prompt taken in at once."""
    for simd in {"plain", code_paths()[0]}:
        with load(tmp_path, simd=simd) as model:
            assert model.generate(PROMPT, max_tokens=1).usage.cached_tokens == 0
            assert model.generate(PROMPT, max_tokens=1).usage.cached_tokens > 0


@pytest.mark.unsanitized
def test_a_process_that_is_gone_has_left_it(tmp_path: Path) -> None:
    program = f"""
import lily
with lily.Model.load({str(CHECKPOINTS["tiny"])!r}, cache_dir={str(tmp_path)!r}) as model:
    model.generate({PROMPT}, max_tokens=1)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with load(tmp_path) as model:
        assert model.generate([*PROMPT, 1], max_tokens=1).usage.cached_tokens == 400


def test_a_folder_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        load(tmp_path / "file")
