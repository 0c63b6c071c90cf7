"""What this process runs on, for an error that says why the core can't be loaded here."""

import platform
import subprocess
import sys

from lily.errors import UnsupportedPlatformError


def here() -> str:
    """Return the system with its version, the processor and the Python."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]}"
        machine = platform.machine() + (" under Rosetta" if _translated() else "")
    else:
        system, machine = f"{platform.system()} {platform.release()}", platform.machine()
    return f"{system} on {machine}, {python}"


def explained(error: ImportError) -> UnsupportedPlatformError:
    """Return the error to raise for a core that can't be imported."""
    if sys.platform == "darwin" and platform.machine() != "arm64":
        todo = "wanted macOS 14 or later on Apple silicon"
        if _translated():
            todo += "; this Python is an Intel one, so install one for arm64, and Lily with it"
    elif sys.platform in ("darwin", "linux"):
        todo = (
            "wanted macOS 14 or later on Apple silicon, or Linux; install it for this Python with `pip "
            "install --force-reinstall lily-llm`, or build it here from its sources"
        )
    else:
        todo = "wanted macOS 14 or later on Apple silicon, or Linux"
    return UnsupportedPlatformError(f"lily._core can't be loaded on {here()}: {error}; {todo}")


def _translated() -> bool:
    """Return whether macOS translates this process from Intel's instructions."""
    if platform.machine() != "x86_64":
        return False
    command = ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"]
    try:
        # A child of a translated process is translated too.
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return said.strip() == "1"
