"""Saved prefixes: what comes back, and every way in which a file or a disk can be bad."""

import hashlib
import itertools
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import lily
from lily import saved
from support import CHECKPOINTS, backends, code_paths, options_of

LENGTH = 300


@pytest.fixture(scope="module", params=[name for name in backends() if name != "sim rows"])
def model(request):
    options = {"prefill_chunk": 128, "checkpoint_tokens": 64, "threads": 2, **options_of(request.param)}
    with lily.Model.load(CHECKPOINTS["tiny"], **options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain():
    """One backend, for what does not depend on it."""
    with lily.Model.load(CHECKPOINTS["tiny"], checkpoint_tokens=64, threads=2, device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokens(plain):
    return np.random.default_rng(5).integers(0, plain.info.vocab, LENGTH + 40).tolist()


@pytest.fixture(scope="module")
def content(plain, tokens, tmp_path_factory):
    """The bytes of a good file."""
    file = tmp_path_factory.mktemp("saved") / "good.lily"
    plain.prefill(tokens[:LENGTH]).save(file)
    return file.read_bytes()


def test_what_is_loaded_is_what_was_saved(model, tokens, tmp_path):
    prefix = model.prefill(tokens[:LENGTH], checkpoints=[200])
    prefix.save(tmp_path / "a.lily")
    loaded = model.load_prefix(tmp_path / "a.lily")
    assert loaded.tokens == prefix.tokens
    assert loaded.checkpoints == prefix.checkpoints
    assert np.array_equal(loaded.logits(), prefix.logits())
    assert np.array_equal(loaded.extend(tokens[LENGTH:]).logits(), prefix.extend(tokens[LENGTH:]).logits())
    for back in (1, 37, 200):
        assert np.array_equal(loaded.rollback(back).logits(), prefix.rollback(back).logits())
    settings = {"seed": 4, "max_tokens": 12, "stop_tokens": ()}
    assert loaded.generate(**settings).tokens == prefix.generate(**settings).tokens
    loaded.save(tmp_path / "b.lily")
    assert (tmp_path / "b.lily").read_bytes() == (tmp_path / "a.lily").read_bytes()


def test_pages_stay_in_the_file_on_a_cpu(plain, tokens, tmp_path):
    file, session = tmp_path / "a.lily", plain._engine.session
    prefix = plain.prefill(tokens[:LENGTH])
    prefix.save(file)
    before, content = session.state_bytes, file.read_bytes()
    loaded = plain.load_prefix(file)
    assert session.state_bytes == before  # nothing was copied
    assert loaded.nbytes == prefix.nbytes
    longer = loaded.extend(tokens[LENGTH:])
    file.unlink()  # what is mapped outlives its name
    assert np.array_equal(longer.rollback(40).logits(), prefix.logits())
    assert np.array_equal(loaded.logits(), prefix.logits())
    loaded.save(file)
    assert file.read_bytes() == content  # going on has not written to the mapping


def test_a_file_holds_nothing_of_what_shares_its_pages(plain, tokens, tmp_path):
    """The last page of a prefix also holds what a fork took in behind it."""
    prefix = plain.prefill(tokens[:LENGTH])
    prefix.save(tmp_path / "before.lily")
    longer = prefix.extend(tokens[LENGTH:])
    prefix.save(tmp_path / "after.lily")
    assert (tmp_path / "after.lily").read_bytes() == (tmp_path / "before.lily").read_bytes()
    assert np.array_equal(longer.logits(), plain.prefill(tokens).logits())


def test_it_is_a_safetensors_file_for_its_owner_alone(plain, tokens, tmp_path):
    file = tmp_path / "a.lily"
    plain.prefill(tokens[:LENGTH]).save(file)
    tensors = load_file(file)
    assert tensors["tokens"].tolist() == tokens[:LENGTH]
    assert tensors["digest"].tobytes() == hashlib.sha256(file.read_bytes()[:-32]).digest()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert int.from_bytes(file.read_bytes()[:8], "little") % 16384 == 16384 - 8  # pages can be mapped


# Damage


def test_any_flipped_byte_is_found(plain, content, tmp_path):
    rng = np.random.default_rng(0)
    header = int.from_bytes(content[:8], "little")
    places = [*range(8), 8, 20, 60, 8 + header - 1, 8 + header, len(content) - 33, len(content) - 1]
    places += rng.integers(0, len(content), 60).tolist() + rng.integers(8, 600, 60).tolist()
    file = tmp_path / "bad.lily"
    for place in places:
        bad = bytearray(content)
        bad[place] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(bad)
        with pytest.raises(lily.PrefixFileError, match=r"bad\.lily: (damaged|wanted)"):
            plain.load_prefix(file)
        assert file.read_bytes() == bad


def test_any_other_length_is_found(plain, content, tmp_path):
    file = tmp_path / "bad.lily"
    for length in (0, 1, 7, 8, 9, 100, 20_000, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(lily.PrefixFileError, match=r"bad\.lily: "):
            plain.load_prefix(file)
    file.write_bytes(content + b"\0")
    with pytest.raises(lily.PrefixFileError, match="cut short, or damaged"):
        plain.load_prefix(file)


def rewritten(content, change):
    """A file whose header was changed by who also made the digest right."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    begin = len(text).to_bytes(8, "little") + text + content[8 + length : -32]
    return begin + hashlib.sha256(begin).digest()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", "3", r"version: wanted 2, got 3 of the format; update Lily"),
        ("version", "0", r"version: wanted 2, got 0 of the format; save it again"),
        ("weights", "00", r"weights: wanted \w+, got 00 as the weights' fingerprint"),
        ("tokenizer", "00", r"tokenizer: wanted \w+, got 00 as the tokenizer's digest"),
        ("device", "gpu", r"device: wanted cpu, got gpu as the layout of its states"),
        (
            "code_path",
            "cpu none",
            r"code_path: wanted cpu \w+, got cpu none as what computed it, .* prefill again",
        ),
        ("kv", "f32", r"kv: wanted bf16, got f32 as the type of keys and values"),
    ],
)
def test_what_belongs_to_another_model_is_named(plain, content, tmp_path, field, value, message):
    file = tmp_path / "other.lily"
    other = rewritten(content, lambda header: header["__metadata__"].update({field: value}))
    file.write_bytes(other)
    with pytest.raises(lily.PrefixMismatchError, match=message):
        plain.load_prefix(file)
    assert file.read_bytes() == other


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("tokens"),
        lambda header: header.pop("pages"),
        lambda header: header.pop(f"recurrent.{LENGTH}"),
        lambda header: header["pages"].update(shape=[1, 1]),
        lambda header: header["pages"].update(data_offsets=[-16, -16]),
        lambda header: header["pages"].update(data_offsets="ab"),
        lambda header: header["tokens"].update(shape=[1 << 40]),
        lambda header: header["tokens"].update(shape=[-1]),
        lambda header: header["tokens"].update(shape=[]),
        lambda header: header["recurrent.64"].update(dtype="F32"),
        lambda header: header.update({"recurrent.x": header.pop("recurrent.64")}),
        lambda header: header.update({f"recurrent.{10**30}": header.pop("recurrent.64")}),
        lambda header: header["__metadata__"].pop("pinned"),
        lambda header: header["__metadata__"].update(pinned="{"),
        lambda header: header.update(tokens=None),
    ],
)
def test_a_header_that_is_wrong_in_itself(plain, content, tmp_path, change):
    file = tmp_path / "bad.lily"
    file.write_bytes(rewritten(content, change))
    with pytest.raises(lily.PrefixFileError, match=r"bad\.lily: (damaged|wanted)"):
        plain.load_prefix(file)


def test_tokens_that_the_model_does_not_have(plain, content, tmp_path):
    begin = content[: -32 - 4] + (10**6).to_bytes(4, "little")
    file = tmp_path / "bad.lily"
    file.write_bytes(begin + hashlib.sha256(begin).digest())
    with pytest.raises(lily.PrefixFileError, match=r"damaged: tokens\[299\]: wanted a token id from 0 to"):
        plain.load_prefix(file)


def test_other_weights_and_another_tokenizer(plain, content, tmp_path):
    """Of the same shapes: one weight differs, then one byte of tokenizer.json."""
    file = tmp_path / "a.lily"
    file.write_bytes(content)
    for name, error in (("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")):
        folder = tmp_path / name
        shutil.copytree(CHECKPOINTS["tiny"], folder)
        changed = sorted(folder.glob("*.safetensors"))[-1] if error == "weights" else folder / name
        data = bytearray(changed.read_bytes())
        if error == "weights":
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            norm = next(entry for tensor, entry in header.items() if tensor.endswith("layernorm.weight"))
            data[8 + int.from_bytes(data[:8], "little") + norm["data_offsets"][0]] ^= 1
        else:
            data += b"\n"
        changed.write_bytes(data)
        with (
            lily.Model.load(folder, device="cpu", threads=1) as other,
            pytest.raises(lily.PrefixMismatchError, match=f"{error}: wanted"),
        ):
            other.load_prefix(file)


def test_a_prefix_of_another_code_path_is_refused(tokens, tmp_path):
    """As the folder of a cache passes them over: what goes on from it would not be what prefill gives."""
    file = tmp_path / "prefix.lily"
    for saves, loads in itertools.permutations(code_paths(), 2):
        with lily.Model.load(CHECKPOINTS["tiny"], device="cpu", simd=saves) as model:
            model.prefill(tokens).save(file)
            assert model.load_prefix(file).tokens == tuple(tokens)
        with (
            lily.Model.load(CHECKPOINTS["tiny"], device="cpu", simd=loads) as model,
            pytest.raises(lily.PrefixMismatchError, match=f"code_path: wanted cpu {loads}, got cpu {saves} "),
        ):
            model.load_prefix(file)


def test_what_is_no_saved_prefix(plain, tmp_path):
    for path in (tmp_path, tmp_path / "none", "/dev/null", "/dev/zero", "a\0b"):
        with pytest.raises(lily.PrefixFileError):
            plain.load_prefix(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(lily.PrefixFileError, match="got no regular file"):
        plain.load_prefix(tmp_path / "pipe")
    weights = next(iter(CHECKPOINTS["tiny"].glob("*.safetensors")))
    with pytest.raises(lily.PrefixFileError, match=r"wanted a file that Prefix\.save wrote"):
        plain.load_prefix(weights)


# Disks


def unchanged(folder: Path, before: dict[str, bytes]) -> None:
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_full_disk_leaves_the_old_file(plain, tokens, content, tmp_path):
    """The system refuses to let a file grow, as it does when there is no room."""
    file = tmp_path / "a.lily"
    file.write_bytes(content)
    prefix = plain.prefill(tokens[:LENGTH])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100, 20_000, len(content) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(
                lily.PrefixFileError, match=r"a\.lily: cannot be written: File too large; nothing"
            ):
                prefix.save(file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        unchanged(tmp_path, {"a.lily": content})
    assert plain.load_prefix(file).tokens == prefix.tokens


@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
def test_any_refusal_leaves_the_old_file(plain, tokens, content, tmp_path, monkeypatch, call):
    file = tmp_path / "a.lily"
    file.write_bytes(content)
    prefix = plain.prefill(tokens[:LENGTH])
    real = getattr(os, call)

    def refuse(*arguments, **settings):
        if call == "close":
            real(*arguments, **settings)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved.os, call, refuse)
        with pytest.raises(lily.PrefixFileError, match="No space left on device"):
            prefix.save(file)
    unchanged(tmp_path, {"a.lily": content})


def test_a_disk_that_takes_little_at_a_time(plain, tokens, content, tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(saved.os, "write", lambda file, data: real(file, data[:5000]))
    plain.prefill(tokens[:LENGTH]).save(tmp_path / "a.lily")
    monkeypatch.undo()
    assert (tmp_path / "a.lily").read_bytes() == content


def test_where_nothing_can_be_saved(plain, tokens, tmp_path):
    prefix = plain.prefill(tokens[:9])
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for path in (
        tmp_path / "folder",
        tmp_path / "link",
        "/dev/null",
        "/proc/a",
        tmp_path / "no" / "a",
        "a\0b",
    ):
        with pytest.raises(lily.PrefixFileError):
            prefix.save(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "link"]


@pytest.mark.unsanitized  # starts a program
def test_a_process_that_dies_leaves_the_old_file(plain, tokens, content, tmp_path):
    """Killed at the last moment before the new file gets its name."""
    file = tmp_path / "a.lily"
    file.write_bytes(content)
    script = """
import os, signal, sys, lily
from lily import saved
model = lily.Model.load(sys.argv[1], device="cpu", threads=1)
saved.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
model.prefill([1, 2, 3]).save(sys.argv[2])
"""
    died = subprocess.run([sys.executable, "-c", script, str(CHECKPOINTS["tiny"]), str(file)], check=False)
    assert died.returncode == -9
    assert file.read_bytes() == content
    assert plain.load_prefix(file).tokens == tuple(tokens[:LENGTH])
