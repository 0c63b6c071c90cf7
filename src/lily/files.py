"""From the path a user gave to the small JSON files of a checkpoint. The weights are the core's to read."""

import json
import os
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
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelFilesError(f"{text}: wanted a checkpoint's folder, got a file; pass the folder it is in")
    if isinstance(path, str) and hub.ID.fullmatch(text):
        return hub.fetch(text, revision, progress) if download else hub.cached(text, revision)
    raise ModelFilesError(f"{text}: no such folder; wanted one that holds config.json and *.safetensors")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file.

    Raises ModelFilesError if the file can't be read or holds anything else.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        if file.is_symlink():
            raise ModelFilesError(
                f"{file}: dangling link to {os.readlink(file)}; fetch the file again"
            ) from None
        return {}
    except OSError as error:
        raise ModelFilesError(f"{file}: cannot be read: {error.strerror}") from error
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
