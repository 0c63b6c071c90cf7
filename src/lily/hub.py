"""Models of the Hugging Face hub: what its cache on this machine holds, and how the rest is fetched.

The cache is read here, without the hub's library, which costs most of a second to import and would ask the
network. It is written by that library alone, and only when a download is asked for.
"""

import json
import os
import re
from pathlib import Path

from lily.errors import ModelFilesError
from lily.progress import bar_class, watched

ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.jinja", "*.safetensors"]  # all that Lily reads; what lies in folders it does not


def cached(model: str, revision: str | None = None) -> Path:
    """Return the folder of the cache that holds a model, "org/name", without using the network.

    Raises ModelFilesError, with the command that brings it, if there is none or files are missing.
    """
    snapshot = _snapshot(model, revision)
    lacking = _lacking(snapshot) if snapshot else f"no such folder, and not in the hub's cache, {_cache()}"
    if snapshot is None or lacking:
        wanted = f"{model} --revision {revision}" if revision else model
        raise ModelFilesError(
            f"{model}: {lacking}; fetch it with `lily download {wanted}`, "
            "or by Model.load(..., download=True)"
        )
    return snapshot


def fetch(model: str, revision: str | None = None, progress: bool = True) -> Path:
    """Return the folder of the cache that holds a model, once it does: what is missing is downloaded.

    A complete one is taken as it is, and the network left alone.
    progress: whether to draw bars, if anybody looks.
    Raises ModelFilesError if it can't be had.
    """
    snapshot = _snapshot(model, revision)
    return snapshot if snapshot and not _lacking(snapshot) else update(model, revision, progress)


def update(model: str, revision: str | None = None, progress: bool = True) -> Path:
    """Ask the hub for a model's newest files, download those that the cache lacks, return their folder.

    Raises ModelFilesError if they can't be had or are not all that a checkpoint consists of.
    """
    if not ID.fullmatch(model):
        raise ValueError(f"{model}: wanted a model's id on the hub, org/name")
    from huggingface_hub import snapshot_download

    class Bar(bar_class()):  # type: ignore[misc]  # tqdm has no types
        """Draws only where somebody looks."""

        def __init__(self, *arguments: object, **settings: object) -> None:
            settings["disable"] = not (progress and watched())
            settings.pop("name", None)  # the hub's, by which its users may switch bars off one by one
            super().__init__(*arguments, **settings)

    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=_FILES, ignore_patterns=["*/*"], tqdm_class=Bar
        )
    except Exception as error:  # of a dozen types, from three libraries
        raise ModelFilesError(
            f"{model}: cannot be fetched from the hub: {_reason(error)}; check the id and the network, log "
            "in with `hf auth login` if it is not public, or copy its folder here and pass that"
        ) from error
    if lacking := _lacking(Path(folder)):
        raise ModelFilesError(f"{model}: {lacking}, and the hub has no more of it; is it an MLX checkpoint?")
    return Path(folder)


def _reason(error: Exception) -> str:
    """Return what the hub's library says went wrong, in one line; its first one may only say what it got."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300].rstrip(".;, ") or type(error).__name__


def name_of(folder: Path) -> str:
    """Return what to call a model by its folder: its id if that is one of the cache's."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def _cache() -> Path:
    """Return the hub's cache, where its own library keeps it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(os.path.expandvars(value)).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _snapshot(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model's revision, if there is one: complete or not."""
    repository = _cache() / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision or ""  # which may be a commit itself
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _lacking(snapshot: Path) -> str:
    """Say what a snapshot lacks of a checkpoint, in the words of an error; "" for nothing."""
    for file in sorted(snapshot.iterdir()):
        if any(file.match(pattern) for pattern in _FILES) and file.is_symlink() and not file.exists():
            return f"incomplete, {file} is a dangling link to {os.readlink(file)}"
    wanted = {"config.json", "tokenizer.json"}
    index = snapshot / "model.safetensors.index.json"
    if not (
        snapshot / "model.safetensors"
    ).exists():  # which the loader prefers to an index that names others
        try:
            wanted |= {str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()}
        except FileNotFoundError:
            wanted |= set() if any(snapshot.glob("*.safetensors")) else {"model.safetensors"}
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            pass  # the loader says what is wrong with it
    missing = sorted(name for name in wanted if not (snapshot / name).exists())
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"incomplete, {missing[0]}{more} missing in {snapshot}"
