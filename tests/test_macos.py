"""The wheel for a Mac, built on Linux: what it says, links and needs. It runs nowhere here."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import apple_names
import rungs
from support import HERE

pytestmark = [pytest.mark.long, pytest.mark.unsanitized]
ROOT = HERE.parent
BUILD = ROOT / "build" / "macos"
ZIG = "ziglang==0.17.*"
FRAMEWORKS = {
    name: f"/System/Library/Frameworks/{name}.framework" for name in ("Foundation", "IOKit", "Metal")
}
# In place of Apple's compiler for Metal: says that it is there, notes what it is asked, and writes words.
METALLIB = "MTLB, by a compiler that is none"
XCRUN = f"""#!/bin/sh
case "$*" in
    *" metal --version") exit 0 ;;
    *" metal "*) ;;
    *) exit 1 ;;
esac
echo "$@" >> "$(dirname "$0")/asked"
while [ "$1" != -o ]; do shift; done
printf '{METALLIB}' > "$2"
"""


def checked(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def zig() -> Path:
    rungs.climb("metal")
    if shutil.which("ld64.lld-22") is None:
        (pytest.fail if rungs.must_all_run() else pytest.skip)("no ld64.lld-22; `make toolchain` brings it")
    folder = ROOT / "build" / "zig"
    if not (folder / "ziglang" / "zig").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), ZIG]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"{ZIG} cannot be installed: {done.stderr[-300:]}"
            (pytest.fail if rungs.must_all_run() else pytest.skip)(reason)
    return folder / "ziglang" / "zig"


@pytest.fixture(scope="module")
def wheel(zig: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the build that a Mac runs, but for the compilers, and tag the wheel as a Mac would."""
    folder = tmp_path_factory.mktemp("macos")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "xcrun").write_text(XCRUN)
    (tools / "xcrun").chmod(0o755)
    shutil.rmtree(BUILD, ignore_errors=True)  # so that it is asked for everything
    suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
    settings = {
        "cmake.define.CMAKE_TOOLCHAIN_FILE": ROOT / "tools/metal/apple/macos/toolchain.cmake",
        "build-dir": BUILD,
    }
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    cache = {
        "ZIG_GLOBAL_CACHE_DIR": f"{zig.parents[1]}/cache",
        "ZIG_LOCAL_CACHE_DIR": f"{zig.parents[1]}/local",
    }
    config = [f"--config-settings={name}={value}" for name, value in settings.items()]
    path = f"{tools}:{os.environ['PATH']}"
    checked(*pip, *config, ZIG=str(zig), SETUPTOOLS_EXT_SUFFIX=suffix, PATH=path, **cache)
    (built,) = folder.glob("*.whl")
    tag = "macosx_14_0_arm64"
    checked(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "tool", "wheel")
    checked(
        *(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, built),
        PYTHONPATH=str(folder / "tool"),
    )
    (tagged,) = folder.glob("*.whl")
    return tagged


@pytest.fixture(scope="module")
def extension(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.search(r"lily/_core\.\S+\.so$", name))
        return Path(archive.extract(name, wheel.parent))


def test_the_wheel_is_for_macos_14_on_arm64(wheel: Path, extension: Path) -> None:
    assert wheel.name.endswith("-macosx_14_0_arm64.whl")
    assert extension.name.endswith("-darwin.so")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (tags,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
    assert "macosx_14_0_arm64" in tags
    assert "Root-Is-Purelib: false" in tags
    assert {"lily/__init__.py", "lily/_core.pyi", "lily/py.typed"} <= names
    assert not [name for name in names if name.endswith((".metal", ".mm", ".h"))]  # all in the extension


def test_the_extension_is_arm64_and_asks_for_macos_14(extension: Path) -> None:
    header = checked("llvm-objdump-22", "--macho", "--private-headers", extension)
    assert re.search(r"MH_MAGIC_64\s+ARM64\s.*\sBUNDLE\s", header)
    version = re.search(r"LC_BUILD_VERSION.*?platform (\w+).*?minos ([\d.]+)", header, re.DOTALL)
    assert version
    assert version.groups() == ("macos", "14.0")
    assert "LC_CODE_SIGNATURE" in header  # which arm64 insists on


def test_it_links_the_system_and_nothing_else(extension: Path) -> None:
    lines = checked("llvm-objdump-22", "--macho", "--dylibs-used", extension).splitlines()[1:]
    used = {line.split()[0] for line in lines}
    assert all(name.startswith(("/usr/lib/", "/System/Library/Frameworks/")) for name in used)
    for folder in FRAMEWORKS.values():
        assert any(name.startswith(folder + "/") for name in used)


def test_what_it_lacks_is_pythons_or_the_systems(extension: Path) -> None:
    """A symbol that no library of the link has would be found at the first call only."""
    table = checked("llvm-nm-22", "--undefined-only", "-m", extension)
    lacking = re.findall(
        r"\(undefined\) .*?external (\S+)(?: \(dynamically looked up\))?$", table, re.MULTILINE
    )
    assert lacking
    assert [name for name in lacking if not re.match(r"__?Py", name)] == []
    assert "_PyInit__core" in checked("llvm-nm-22", "--defined-only", extension)


def test_its_selectors_and_classes_are_apples(extension: Path) -> None:
    headers = checked("llvm-objdump-22", "--macho", "--section-headers", extension)
    found = re.search(r"__objc_methname\s+([0-9a-f]+) ([0-9a-f]+)", headers)
    assert found
    size, begin = (int(field, 16) for field in found.groups())  # in __TEXT, whose addresses are the file's
    used = set(extension.read_bytes()[begin : begin + size].decode().split("\0")) - {""}
    assert len(used) > 60
    assert used - apple_names.metal_cpp().selectors <= {"new", "stringWithUTF8String:"}


def test_it_carries_every_kernel(extension: Path) -> None:
    data = extension.read_bytes()
    for file in (ROOT / "metal").glob("*.metal"):
        assert f'#line 1 "{file.name}"'.encode() in data, file.name


def test_apples_compiler_is_asked_for_every_kernel_but_those_of_tensors(wheel: Path, extension: Path) -> None:
    (asked,) = (wheel.parent / "bin" / "asked").read_text().splitlines()
    words = asked.split()
    assert words[:3] == ["-sdk", "macosx", "metal"]
    assert {"-std=metal3.1", "-fno-fast-math", "-mmacosx-version-min=14.0"} <= set(words)
    given = {Path(word).name for word in words if word.endswith(".metal")}
    assert given == {file.name for file in (ROOT / "metal").glob("*.metal")} - {"tensors.metal"}
    assert METALLIB.encode() in extension.read_bytes()
