"""Apple's names, from two wheels that others ship: metal-cpp inside mlx-metal, and pyobjc's metadata.

Downloaded when a test asks, into build/, and never a part of Lily.
"""

import io
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import rungs

FOLDER = Path(__file__).parent.parent / "build" / "apple"
WHEELS = {
    "mlx-metal==0.32.4": "macosx_26_0_arm64",
    "pyobjc-framework-Metal==12.2.2": "macosx_10_9_universal2",
}


def wheel(requirement: str) -> zipfile.ZipFile:
    """Open a wheel, downloaded if it is not there; without a network the test is left out."""
    pattern = re.split("==", requirement)[0].replace("-", "_").lower() + "-*.whl"
    if not list(FOLDER.glob(pattern)):
        where = ["--platform", WHEELS[requirement], "--python-version", "3.11", "--only-binary=:all:"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
        done = subprocess.run([*pip, *where, requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"{requirement} cannot be downloaded: {done.stderr[-300:]}"
            (pytest.fail if rungs.must_all_run() else pytest.skip)(reason)
    (found,) = FOLDER.glob(pattern)
    return zipfile.ZipFile(io.BytesIO(found.read_bytes()))


def number(text: str) -> int | None:
    """Evaluate an enumerator's value where it is arithmetic on numbers."""
    text = re.sub(r"(?<=\d)(UL|ULL|L|U)\b", "", text.strip())
    return eval(text) if re.fullmatch(r"[\d\sxa-fA-F()<|+-]+", text) else None


@dataclass
class Names:
    """What a source says: selectors, classes, functions, and enumerators with their values."""

    selectors: set[str]
    classes: set[str]
    values: dict[str, int]
    text: str


@cache
def metal_cpp() -> Names:
    with wheel("mlx-metal==0.32.4") as archive:
        names = [n for n in archive.namelist() if "/metal_cpp/" in n and n.endswith(".hpp")]
        text = "\n".join(archive.read(n).decode() for n in names)
    values = {}
    for body in re.findall(r"_(?:MTL|NS)_(?:ENUM|OPTIONS)\([^)]*\)\s*\{(.*?)\};", text, re.DOTALL):
        for name, value in re.findall(r"(\w+) = ([^,\n}]+)", body):
            if (known := number(value)) is not None:
                values["MTL" + name] = known
    return Names(
        set(re.findall(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\(\s*\w+,\s*"([^"]+)"', text)),
        set(re.findall(r"_(?:MTL|NS)_PRIVATE_DEF_CLS\((\w+)\)", text)),
        values,
        text,
    )


def plain(kind: str) -> str:
    """Write a type as both languages have it: objects by their class, without const and names."""
    kind = re.sub(r"\bconst\b|\b__kindof\b", "", kind).strip()
    if "(^" in kind:
        return "block"
    kind = re.sub(r"id<(MTL\w+)>", r"\1*", kind)
    kind = re.sub(r"MTL::(\w+)", r"MTL\1", kind)
    kind = re.sub(r"NS::(\w+)", r"NS\1", kind)
    kind = re.sub(r"<[^<>]*>", "", kind)  # of collections
    if kind == "MTLComputePipelineReflection**":
        kind = "MTLAutoreleasedComputePipelineReflection*"
    kind = kind.replace(" ", "")
    return {"bool": "BOOL", "CFTimeInterval": "double", "MTLGPUAddress": "uint64_t"}.get(kind, kind)


@cache
def signatures() -> dict[str, set[tuple[str, ...]]]:
    """Collect metal-cpp's signatures of each selector: what it returns and takes, as plain() has it."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", metal_cpp().text, flags=re.DOTALL)
    names = dict(re.findall(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\(\s*(\w+),\s*"([^"]+)"', text))
    function = r"^_MTL_INLINE ([\w:*&<> ]+?)\s*MTL::\w+::\w+\(([^{;]*?)\)(?: const)?\s*\{(.*?)^\}"
    found: dict[str, set[tuple[str, ...]]] = {}
    for returned, arguments, body in re.findall(function, text, re.DOTALL | re.MULTILINE):
        if selector := re.search(r"_MTL_PRIVATE_SEL\((\w+)\)", body):
            parts = [part for part in re.split(r",(?![^(]*\))", arguments) if part.strip()]
            taken = [part if "(^" in part else re.sub(r"\w+\s*$", "", part.strip()) for part in parts]
            found.setdefault(names[selector[1]], set()).add((plain(returned), *map(plain, taken)))
    return found


@cache
def pyobjc() -> Names:
    with wheel("pyobjc-framework-Metal==12.2.2") as archive:
        text = archive.read("Metal/_metadata.py").decode()
        binary = next(n for n in archive.namelist() if n.endswith(".so"))
        strings = archive.read(binary).decode("latin1")
    values = {name: int(value) for name, value in re.findall(r"\$(MTL\w+)@(-?\d+)", text)}
    found = set(re.findall(r"[A-Za-z_][\w:]*", strings)) | set(re.findall(r'b"([\w:]+)"', text))
    return Names(found, set(re.findall(r'b"(MTL\w+)"', text)), values, text + os.linesep + strings)
