"""What this machine has, what a model takes, which device serves it and why: what `lily doctor` says."""

import os
import platform
from pathlib import Path

import lily
from lily import _core
from lily.errors import LilyError

Facts = list[tuple[str, str]]


def machine(kernels: str = "") -> Facts:
    """Name the system, the processor and its memory, and the GPU as Metal sees it."""
    facts = [
        ("lily", lily.__version__),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
        ("processor", f"{platform.machine()}, {os.cpu_count()} cores"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"),
    ]
    metal = [line.split(": ", 1) for line in _core.metal_facts(kernels).splitlines()]
    return facts + ([(name, value) for name, value in metal] or [("Metal", "none here")])


def files(folder: Path) -> Facts:
    """Read a checkpoint's headers and say what it is; a fault is a fact too."""
    try:
        weights = _core.Weights(str(folder))
    except LilyError as error:
        return [("model", str(folder)), ("fault", str(error))]
    facts = [
        ("model", str(folder)),
        ("weights", f"{weights.nbytes / 1e9:.2f} GB in {weights.tensors} tensors"),
        ("context", f"{weights.config['max_positions']} tokens"),
    ]
    return facts + [("warning", warning) for warning in weights.warnings]


def choice(folder: Path, options: dict[str, str]) -> Facts:
    """Load the model as the options have it, and say what it runs on, or why it can't."""
    try:
        session = _core.Session(_core.Weights(str(folder)), options)
    except (LilyError, ValueError, MemoryError) as error:
        return [("device", f"none: {error}")]
    asked = options.get("device", "auto")
    reason = f"asked for {asked}"
    if asked == "auto":
        found = session.device.startswith("metal")
        reason = "Metal has a GPU that serves" if found else "Metal has no GPU that serves"
    page, recurrent, _ = session.state_sizes
    return [
        ("device", f"{session.device}: {reason}"),
        ("scratch", f"{session.scratch_bytes / 1e9:.2f} GB"),
        ("a prefix takes", f"{recurrent / 1e6:.1f} MB and {page / 256 / 1e3:.1f} kB a token"),
    ]
