"""States that outlive the process: a folder of saved ones, found again by their tokens.

The tier behind cache.py: what that gives up for want of room, and what it holds when the model is closed,
goes here if it is worth a file. saved.py writes and reads the files; the name says which tokens one is for.
"""

import hashlib
import logging
import os
import re
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lily import _core
from lily.cache import Tokens
from lily.errors import PrefixFileError

if TYPE_CHECKING:
    from lily.engine import Engine

_log = logging.getLogger("lily")

LEAST = 256  # tokens that are worth a file
_NAME = re.compile(r"(\d+)-([0-9a-f]{40})\.lily")


@dataclass(slots=True)
class _File:
    path: Path
    bytes: int
    used: float  # seconds since 1970


class DiskTier:
    """A folder of states. Safe to call from any thread, and for several processes to share.

    budget: int, bytes that its files may take; those used longest ago go first.
    """

    def __init__(self, folder: Path, budget: int, fingerprint: str) -> None:
        """Make the folder if it is not there, and see what it holds.

        fingerprint: of the weights, and of the code that works on them, since others' bits differ; others'
            files are left alone.
        Raises OSError if the folder can't be made or read.
        """
        self.budget = budget
        self._folder = folder / hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._files: dict[tuple[int, str], _File] = {}
        for path in self._folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                with suppress(OSError):  # another process has just removed it
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):  # a link leads anywhere
                        self._files[int(match[1]), match[2]] = _File(path, status.st_size, status.st_mtime)

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        with self._lock:
            return sum(file.bytes for file in self._files.values())

    def longest(self, tokens: Tokens) -> int:
        """Return how many of a prompt's tokens the longest state has that it begins with; 0 for none."""
        found = self._find(tokens)
        return found[0] if found else 0

    def load(self, tokens: Tokens, engine: "Engine") -> "_core.State | None":
        """Return the longest state that a prompt begins with; None if there is none, or it can't be read.

        A file that is damaged, or was written for another way to run the model, is logged and left out.
        """
        from lily import saved

        found = self._find(tokens)
        if found is None:
            return None
        try:
            loaded = saved.read(self._files[found].path, engine)
        except (PrefixFileError, KeyError) as error:
            _log.warning("cache_dir: a saved state is passed over: %s", error)
            with self._lock:
                self._files.pop(found, None)
            return None
        if loaded.tokens != tuple(tokens[: found[0]].tolist()):  # a name says what anybody likes
            _log.warning("cache_dir: %s holds other tokens than its name says", found)
            return None
        with self._lock, suppress(KeyError, OSError):
            file = self._files[found]
            os.utime(file.path)
            file.used = file.path.stat().st_mtime
        return loaded.states[-1]

    def save(self, tokens: Tokens, state: "_core.State", engine: "Engine") -> bool:
        """Save a state of so many tokens, unless it is there; return whether it is now."""
        from lily import saved

        key = len(tokens), _digest(tokens)
        if len(tokens) < LEAST or state.nbytes > self.budget:
            return False
        with self._lock:
            if key in self._files:
                return True
        path = self._folder / f"{key[0]}-{key[1]}.lily"
        try:
            self._make_room(state.nbytes)
            saved.write(path, engine, tuple(tokens.tolist()), [state], frozenset())
            status = path.stat()
        except (PrefixFileError, OSError) as error:
            _log.warning("cache_dir: a state is not saved: %s", error)
            return False
        with self._lock:
            self._files[key] = _File(path, status.st_size, status.st_mtime)
        self._make_room(0)
        return True

    def _make_room(self, needed: int) -> None:
        with self._lock:
            while sum(file.bytes for file in self._files.values()) + needed > self.budget and self._files:
                oldest = min(self._files, key=lambda key: self._files[key].used)
                with suppress(OSError):
                    self._files[oldest].path.unlink()
                del self._files[oldest]

    def _find(self, tokens: Tokens) -> tuple[int, str] | None:
        with self._lock:
            known = set(self._files)
        for length in sorted({length for length, _ in known if length <= len(tokens)}, reverse=True):
            if (key := (length, _digest(tokens[:length]))) in known:
                return key
        return None


def _digest(tokens: Tokens) -> str:
    return hashlib.blake2b(tokens.tobytes(), digest_size=20).hexdigest()
