"""Packed matrices kept in a file (repack_cache): used when they fit, made anew when not, never an error."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lily import _core
from support import CHECKPOINTS, can_pack, code_paths

PACKING = [simd for simd in code_paths() if can_pack(simd)]
pytestmark = pytest.mark.skipif(not PACKING, reason="packing is for AVX2 or integer dot products")
HEADER = 4096
TOKENS = np.arange(40, dtype=np.int32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS["small"], tmp_path / "checkpoint"))


def load(checkpoint: Path, **options: str) -> tuple[np.ndarray, list[str]]:
    """Return the logits after some tokens, and what was said while loading."""
    said: list[str] = []
    given = {"device": "cpu", "repack": "on", "threads": "2"} | options
    session = _core.Session(_core.Weights(str(checkpoint)), given, said.append)
    assert session.packed_bytes > 0
    state = session.new_state()
    session.extend(state, TOKENS)
    return session.last_logits(state), said


def expect(checkpoint: Path, *said: str, **options: str) -> None:
    """Load; results must be those of a load without a file, and each notice must hold its text."""
    wanted, _ = load(checkpoint)
    got, notices = load(checkpoint, **options)
    assert np.array_equal(got, wanted)
    assert len(notices) == len(said), notices
    for notice, part in zip(notices, said, strict=True):
        assert part in notice


def kept(folder: Path) -> Path:
    (file,) = folder.glob("*.panels")
    assert not list(folder.glob("*.new"))
    return file


def test_nothing_is_kept_unasked(checkpoint: Path) -> None:
    before = sorted(checkpoint.iterdir())
    expect(checkpoint)
    _core.Session(_core.Weights(str(checkpoint)), {"repack": "off", "repack_cache": "beside"})
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.parametrize("where", ["beside", "folder", "new/folder"])
def test_the_second_load_finds_what_the_first_kept(checkpoint: Path, where: str) -> None:
    folder = checkpoint if where == "beside" else checkpoint.parent / where
    cache = where if where == "beside" else str(folder)
    expect(checkpoint, "is written", repack_cache=cache)
    file = kept(folder)
    written = file.stat()
    expect(checkpoint, repack_cache=cache)
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    assert file.stat().st_ino == written.st_ino


def test_the_file_is_what_is_multiplied_with(checkpoint: Path) -> None:
    wanted, _ = load(checkpoint, repack_cache="beside")
    file = kept(checkpoint)
    content = bytearray(file.read_bytes())
    content[HEADER:] = bytes(len(content) - HEADER)
    file.write_bytes(content)
    got, said = load(checkpoint, repack_cache="beside")
    assert not said
    assert not np.array_equal(got, wanted)


def damage(content: bytes, how: str) -> bytes:
    head, panels = content[:HEADER], content[HEADER:]
    if how == "another checkpoint":
        at = head.index(b"fingerprint ") + len("fingerprint ")
        return head[:at] + (b"0" if head[at] != ord("0") else b"1") + head[at + 1 :] + panels
    if how == "another layout":
        return head.replace(b"layout ", b"layout X", 1)[:HEADER] + panels
    if how == "a byte of the header":
        return head[:-1] + b"\1" + panels
    return {"short": content[:-1], "long": content + b"\0", "empty": b"", "header only": head}[how]


@pytest.mark.parametrize(
    "how",
    ["another checkpoint", "another layout", "a byte of the header", "short", "long", "empty", "header only"],
)
def test_a_file_that_does_not_fit_is_made_anew(checkpoint: Path, how: str) -> None:
    load(checkpoint, repack_cache="beside")
    file = kept(checkpoint)
    good = file.read_bytes()
    file.write_bytes(damage(good, how))
    assert file.read_bytes() != good
    expect(checkpoint, "it is made anew", "is written", repack_cache="beside")
    assert kept(checkpoint).read_bytes() == good


def test_other_weights_of_that_name_are_told(checkpoint: Path) -> None:
    load(checkpoint, repack_cache="beside")
    shutil.copytree(CHECKPOINTS["tiny"], checkpoint, dirs_exist_ok=True)
    for file in checkpoint.glob("*.safetensors*"):
        if not (CHECKPOINTS["tiny"] / file.name).exists():
            file.unlink()
    expect(checkpoint, "it is made anew", "is written", repack_cache="beside")


def test_a_folder_that_cannot_be_made(checkpoint: Path) -> None:
    where = checkpoint / "config.json" / "folder"
    expect(checkpoint, "cannot be read", "cannot be written", repack_cache=str(where))


def test_a_folder_in_the_place_of_the_file(checkpoint: Path) -> None:
    load(checkpoint, repack_cache="beside")
    file = kept(checkpoint)
    file.unlink()
    (file / "inside").mkdir(parents=True)
    expect(checkpoint, "it is made anew", "cannot be written", repack_cache="beside")
    assert not list(checkpoint.glob("*.new"))


def test_what_a_killed_process_left_is_written_over(checkpoint: Path) -> None:
    load(checkpoint, repack_cache="beside")
    file = kept(checkpoint)
    good = file.read_bytes()
    file.rename(f"{file}.new").write_bytes(b"\1" * (len(good) + 9))
    expect(checkpoint, "is written", repack_cache="beside")
    assert kept(checkpoint).read_bytes() == good


def test_one_process_writes(checkpoint: Path) -> None:
    load(checkpoint, repack_cache="beside")
    file = kept(checkpoint)
    file.unlink()
    with Path(f"{file}.new").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        expect(checkpoint, "is being written by another process", repack_cache="beside")
    assert not file.exists()
    expect(checkpoint, "is written", repack_cache="beside")


IN_A_PROCESS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_panel_file import load
if limit := int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
logits, said = load(Path(sys.argv[2]), repack_cache="beside")
print(logits.tobytes().hex()[:4000], *said, sep="\\n")
"""


def start(checkpoint: Path, most_bytes: int = 0) -> subprocess.Popen[str]:
    arguments = [str(Path(__file__).parent), str(checkpoint), str(most_bytes)]
    return subprocess.Popen(
        [sys.executable, "-c", IN_A_PROCESS, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_a_disk_without_room(checkpoint: Path) -> None:
    wanted, _ = load(checkpoint)
    process = start(checkpoint, most_bytes=100_000)
    logits, *said = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert logits == wanted.tobytes().hex()[:4000]
    assert len(said) == 1
    assert "cannot be written: File too large" in said[0]
    assert not list(checkpoint.glob("*.panels*"))


def test_two_processes_at_once(checkpoint: Path) -> None:
    wanted, _ = load(checkpoint)
    processes = [start(checkpoint) for _ in range(4)]
    for process in processes:
        logits = process.communicate()[0].splitlines()[0]
        assert process.returncode == 0
        assert logits == wanted.tobytes().hex()[:4000]
    expect(checkpoint, repack_cache="beside")
    kept(checkpoint)
