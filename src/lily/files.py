"""From the path a user gave to the small JSON files of a checkpoint. The weights are the core's to read."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from lily import hub
from lily.errors import ModelFilesError


def checkpoint_folder(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download: bool = False,
    progress: bool = True,
) -> Path:
    """Return the folder that a path names, or that a hub id has in the cache.

    path: a checkpoint's folder; "~" stands for the home directory. Or the hub's "org/name".
    revision, download, progress: as for Model.load.
    Raises ModelFilesError if it is missing or not a folder, TypeError if it is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: wanted a str or a path of a checkpoint's folder, got {type(path).__name__}")
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise ModelFilesError("path: wanted a checkpoint's folder, got an empty path; '.' is the current one")
    try:
        folder = Path(text).expanduser()
        kind = "folder" if folder.is_dir() else "file" if folder.exists() else ""
    except RuntimeError:  # "~somebody", of whom the system does not know
        raise ModelFilesError(f"{text}: no such user's home directory; write the path out") from None
    except OSError as error:  # too long a name, a folder above it that is closed to this user
        raise ModelFilesError(f"{text}: cannot be read: {error.strerror}") from error
    if kind == "folder":
        return folder
    if kind == "file":
        raise ModelFilesError(f"{text}: wanted a checkpoint's folder, got a file; pass the folder it is in")
    if isinstance(path, str) and hub.ID.fullmatch(text):
        return hub.fetch(text, revision, progress) if download else hub.cached(text, revision)
    raise ModelFilesError(f"{text}: no such folder; wanted one that holds config.json and *.safetensors")


def read_bytes(file: Path) -> bytes | None:
    """Read a file; None if there is no such file.

    Raises ModelFilesError if it can't be read or is none: a pipe would keep its reader waiting for ever.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ModelFilesError(f"{file}: wanted a file, got a folder, a pipe or a device; fetch it again")
        return file.read_bytes()
    except FileNotFoundError:
        if file.is_symlink():
            raise ModelFilesError(
                f"{file}: dangling link to {os.readlink(file)}; fetch the file again"
            ) from None
        return None
    except OSError as error:
        raise ModelFilesError(f"{file}: cannot be read: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file.

    Raises ModelFilesError if the file can't be read or holds anything else.
    """
    text = read_bytes(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFilesError(f"{file}: wanted JSON, got {error}; fetch the file again") from error
    except RecursionError:
        raise ModelFilesError(
            f"{file}: wanted a checkpoint's JSON, got one nested too deep to read"
        ) from None
    if not isinstance(value, dict):
        raise ModelFilesError(
            f"{file}: wanted a JSON object, got {type(value).__name__}; fetch the file again"
        )
    return value
