"""Saved prefixes: a file in safetensors format that holds tokens, pages, recurrent states and logits.

Its tensors, in the order of their bytes, n being the length of a state, the prefix's own or a checkpoint's:
    pages         U8  (P, bytes of a page)  keys and values, 256 positions a page, as the device lays them out
    recurrent.n   U8  (bytes)               conv and delta states of every layer, as the device lays them out
    logits.n      F32 (V)                   of the token that follows
    tokens        I32 (N)
    digest        U8  (32)                  SHA-256 of all bytes before
The pages begin at a multiple of 16 KB, so that they can be mapped. __metadata__ says which weights,
tokenizer, device, code path and type of keys and values they belong to.

The digest finds damage, not malice: whoever can write the file can write a digest.
"""

import errno
import hashlib
import json
import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lily import _core
from lily.engine import Engine
from lily.errors import PrefixFileError, PrefixMismatchError

VERSION = 2
_FORMAT = "lily-prefix"
_ALIGNMENT = 16384  # the largest page of memory among the systems that Lily runs on
_MOST_HEADER = 1 << 20  # bytes
_SIZES = {"U8": 1, "I32": 4, "F32": 4}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a file holds: tokens, the states shortest first, and the lengths of those that are pinned."""

    tokens: tuple[int, ...]
    states: list[_core.State]
    pinned: frozenset[int]


def write(
    path: str | os.PathLike[str],
    engine: Engine,
    tokens: tuple[int, ...],
    states: Iterable[_core.State],
    pinned: frozenset[int],
) -> None:
    """Save states of the beginnings of some tokens; the longest one is of all of them.

    Raises PrefixFileError if that fails, and then leaves what was there as it was.
    """
    name = _path(path)
    session = engine.session
    parts = {state.length: session.parts(state) for state in states}
    pages, longest = parts[len(tokens)][0], len(tokens)
    size = session.state_sizes[0]
    tensors: list[tuple[str, str, list[int], list[Any]]] = [("pages", "U8", [len(pages), size], list(pages))]
    tensors += [(f"recurrent.{n}", "U8", [parts[n][1].size], [parts[n][1]]) for n in sorted(parts)]
    for n in sorted(parts):
        logits = parts[n][2]
        if logits is not None:
            tensors.append((f"logits.{n}", "F32", [engine.vocab], [logits]))
    tensors.append(("tokens", "I32", [longest], [np.array(tokens, "<i4")]))
    metadata = {**_belongs_to(engine), "pinned": json.dumps(sorted(pinned & set(parts)))}
    with _replacing(name) as file:
        _write_tensors(file, metadata, tensors)


def read(path: str | os.PathLike[str], engine: Engine) -> Loaded:
    """Restore what a file holds; its pages stay in the file, where the device can read them there.

    Raises PrefixFileError if it can't be read or is damaged, PrefixMismatchError if it belongs to another
    model or another way to run it.
    """
    name = os.fsdecode(_path(path))
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise PrefixFileError(f"{name}: cannot be read: {_reason(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise PrefixFileError(f"{name}: wanted a file that Prefix.save wrote, got no regular file")
        size = os.fstat(file).st_size
        try:
            with mmap.mmap(file, size, access=mmap.ACCESS_READ) as view:
                metadata, tensors, begin = _header(name, view, size)
                _check_digest(name, view, size)
                _check_metadata(name, metadata, engine)
                return _restore(name, engine, metadata, tensors, begin, file, view)
        except (OSError, ValueError) as error:
            raise PrefixFileError(f"{name}: cannot be read: {_reason(error)}") from error
    finally:
        os.close(file)


def _path(path: object) -> str | bytes:
    """Return a path as the system takes it; a number would be a file that somebody has open."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path: wanted a str or a path, got {type(path).__name__}")
    return os.fspath(path)


def _belongs_to(engine: Engine) -> dict[str, str]:
    """Return what a file says of the model it belongs to."""
    session = engine.session
    return {
        "format": _FORMAT,
        "version": str(VERSION),
        "weights": engine.fingerprint,
        "tokenizer": engine.tokenizer.digest,
        "device": session.state_order,
        "code_path": session.device,
        "kv": session.options["kv"],
    }


# Writing


@contextmanager
def _replacing(path: str | bytes) -> Iterator[int]:
    """Give a new file's descriptor; the file gets its name once it is complete, and goes if it never is."""
    name = os.fsdecode(path)
    folder, _ = os.path.split(name)
    unfinished = os.path.join(folder, f".lily-{secrets.token_hex(8)}.tmp")
    try:
        if os.path.lexists(name) and not stat.S_ISREG(os.lstat(name).st_mode):
            raise PrefixFileError(
                f"{name}: wanted a regular file to replace, or none; there is something else"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(unfinished, flags, 0o600)
        try:
            try:
                yield file
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(unfinished, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        _sync_folder(folder or ".")
    except (OSError, ValueError) as error:
        raise PrefixFileError(f"{name}: cannot be written: {_reason(error)}; nothing was changed") from error


def _sync_folder(folder: str) -> None:
    """Have the new name survive a power cut, where the system can promise that."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # a folder that may be written, but not read
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _write_tensors(
    file: int, metadata: dict[str, str], tensors: list[tuple[str, str, list[int], list[Any]]]
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, kind, shape, _ in [*tensors, ("digest", "U8", [hashlib.sha256().digest_size], [])]:
        size = _SIZES[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    digest = hashlib.sha256()
    for part in (len(text).to_bytes(8, "little"), text, *(part for *_, parts in tensors for part in parts)):
        rest = memoryview(part).cast("B")
        digest.update(rest)
        _write_all(file, rest)
    _write_all(file, memoryview(digest.digest()))


def _write_all(file: int, rest: memoryview) -> None:
    while len(rest):
        rest = rest[os.write(file, rest[: 1 << 30]) :]


# Reading


def _header(name: str, view: mmap.mmap, size: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """Return a file's metadata, the entries of its tensors, and where their bytes begin.

    Raises PrefixFileError unless it is a prefix of some version, and as long as it says.
    """
    length = int.from_bytes(view[:8], "little")
    if not 2 <= length <= min(_MOST_HEADER, size - 8):
        raise PrefixFileError(f"{name}: wanted a file that Prefix.save wrote; it has no such header")
    try:
        header = json.loads(view[8 : 8 + length])
        metadata = header.pop("__metadata__")
        if metadata["format"] != _FORMAT:
            raise ValueError
        end = max(int(entry["data_offsets"][1]) for entry in header.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise PrefixFileError(
            f"{name}: wanted a file that Prefix.save wrote; its header is damaged, or it is of another kind"
        ) from None
    if 8 + length + end != size:
        raise PrefixFileError(
            f"{name}: wanted {8 + length + end} bytes as its header says, got {size}: cut short, or damaged; "
            "prefill again, and save"
        )
    return metadata, header, 8 + length


def _check_digest(name: str, view: mmap.mmap, size: int) -> None:
    kept = hashlib.sha256().digest_size
    with memoryview(view) as whole, whole[: size - kept] as held:
        found = hashlib.sha256(held).digest()
    if found != view[size - kept :]:
        raise PrefixFileError(f"{name}: damaged: its bytes do not give its digest; prefill again, and save")


def _check_metadata(name: str, metadata: dict[str, str], engine: Engine) -> None:
    """Raise PrefixMismatchError for the first thing that a file and a model differ in."""
    wanted = _belongs_to(engine)
    what = {
        "version": "of the format; "
        + ("update Lily" if _newer(metadata.get("version")) else "save it again"),
        "weights": "as the weights' fingerprint; it was saved by another checkpoint",
        "tokenizer": "as the tokenizer's digest; it was saved with another tokenizer.json",
        "device": 'as the layout of its states; load the model with device="cpu" or a GPU as it was',
        "code_path": "as what computed it, whose last bits differ; prefill again, or load the model as it "
        'was, on a CPU by simd="avx2" and the like',
        "kv": "as the type of keys and values; load the model with the option kv as it was",
    }
    for field, meaning in what.items():
        if metadata.get(field) != wanted[field]:
            raise PrefixMismatchError(
                f"{name}: {field}: wanted {wanted[field]}, got {metadata.get(field)} {meaning}"
            )


def _newer(version: object) -> bool:
    return isinstance(version, str) and version.isdecimal() and int(version[:9]) > VERSION


def _restore(
    name: str,
    engine: Engine,
    metadata: dict[str, str],
    tensors: dict[str, Any],
    begin: int,
    file: int,
    view: mmap.mmap,
) -> Loaded:
    """Make the states of a file whose digest and metadata are right."""
    page, recurrent, logits = engine.session.state_sizes

    def at(tensor: str, kind: str, shape: list[int]) -> int:
        entry = tensors[tensor]
        first, last = (int(offset) for offset in entry["data_offsets"])
        if entry["dtype"] != kind or entry["shape"] != shape or first < 0:
            raise ValueError(f"{tensor}: wanted {kind} {shape}, got {entry['dtype']} {entry['shape']}")
        if last - first != _SIZES[kind] * int(np.prod(shape)) or begin + last > len(view):
            raise ValueError(f"{tensor}: wanted the bytes of {shape}, got {last - first} bytes")
        return begin + first

    try:
        count = int(tensors["tokens"]["shape"][0])
        tokens = np.frombuffer(view, "<i4", count, at("tokens", "I32", [count])).copy()
        if engine.tokens("tokens", tokens).size > engine.context:
            raise ValueError(f"tokens: wanted at most {engine.context}, got {count}")
        lengths = sorted(
            int(tensor.removeprefix("recurrent.")) for tensor in tensors if "recurrent." in tensor
        )
        if not lengths or lengths[-1] != count or lengths[0] < 1:
            raise ValueError(f"recurrent: wanted states up to {count} tokens, got {lengths}")
        pages = at("pages", "U8", [-(-count // 256) if page else 0, page])
        states = [
            (
                n,
                at(f"recurrent.{n}", "U8", [recurrent]),
                at(f"logits.{n}", "F32", [logits // 4]) if f"logits.{n}" in tensors else -1,
            )
            for n in lengths
        ]
        pinned = frozenset(int(n) for n in json.loads(metadata["pinned"]))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise PrefixFileError(f"{name}: damaged: {error}; prefill again, and save") from None
    restored = engine.session.restore(file, len(view), pages, states)
    return Loaded(tuple(tokens.tolist()), restored, pinned)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
