"""Where the core can't be loaded: the import works, and the first use says what is wrong with what."""

import platform
import subprocess
import sys

import pytest

import lily
from lily import platforms

pytestmark = pytest.mark.unsanitized

BROKEN = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "lily._core":
            {how}

sys.meta_path.insert(0, Finder())
import lily
print(lily.DEMO, file=sys.stderr)
try:
    {use}
except lily.UnsupportedPlatformError as error:
    assert isinstance(error.__cause__, ImportError)
    print(error)
"""
WRONG = "dlopen(_core.abi3.so): incompatible architecture (have 'arm64', need 'x86_64')"


@pytest.mark.parametrize("use", ["lily.Model.load(lily.DEMO)", "from lily import Model"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (f"raise ImportError({WRONG!r}, name=name)", WRONG),
        ("raise ModuleNotFoundError('No module named ' + repr(name), name=name)", "No module named"),
    ],
)
def test_a_core_that_cannot_be_loaded_is_named_with_the_platform(use: str, how: str, reason: str) -> None:
    code = BROKEN.format(how=how, use=use)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(
        f"lily._core can't be loaded on {platform.system()} {platform.release()} on "
    )
    assert platform.machine() in run.stdout
    assert reason in run.stdout
    assert "wanted macOS 14 or later on Apple silicon, or Linux" in run.stdout


def test_what_else_is_missing_keeps_its_name() -> None:
    code = "import sys; sys.modules['numpy'] = None\nimport lily; lily.Model"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "UnsupportedPlatformError" not in run.stderr
    assert "numpy" in run.stderr


@pytest.mark.parametrize("translated", [True, False])
def test_rosetta_is_told_from_an_intel_mac(monkeypatch: pytest.MonkeyPatch, translated: bool) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "x86_64"))
    said = subprocess.CompletedProcess([], 0, stdout=f"{translated:d}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    message = str(platforms.explained(ImportError("no core")))
    assert "macOS 15.1 on x86_64" in message
    assert ("under Rosetta" in message) == ("install one for arm64" in message) == translated


def test_a_mac_without_that_question_is_an_intel_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert "Rosetta" not in platforms.here()


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(platform, "release", lambda: "11")
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    error = platforms.explained(ImportError("no core"))
    assert isinstance(error, lily.LilyError)
    assert "Windows 11 on AMD64" in str(error)
    assert str(error).endswith("wanted macOS 14 or later on Apple silicon, or Linux")
