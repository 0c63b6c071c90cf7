"""Every name and number of Apple's that metal.mm uses, held to two lists that are not ours."""

import re
import subprocess
from functools import cache

import pytest

import apple_names
import rungs
from support import HERE

pytestmark = [pytest.mark.long, pytest.mark.unsanitized]
METAL_MM = HERE.parent / "csrc" / "gpu" / "metal.mm"
HEADER = HERE.parent / "tools" / "metal" / "apple" / "Metal" / "Metal.h"

# Foundation's, which metal-cpp reaches by other names.
FOUNDATION = {"new", "stringWithUTF8String:"}
# pyobjc keeps these with Foundation, which is another wheel.
OTHER_WHEEL = {
    "arrayWithObjects:count:",
    "fileURLWithPath:",
    "objectAtIndexedSubscript:",
    "stringWithUTF8String:",
}


@cache
def intermediate() -> str:
    """Compile metal.mm as far as LLVM's language, where each selector and class is a name."""
    rungs.climb("metal")
    from tools.metal import clang
    from tools.metal.apple import build

    command = [clang.CLANG, *build.FLAGS, *build.OBJECTIVE, *build.ARC, "-O0", "-g0", "-S", "-emit-llvm"]
    return subprocess.run([*command, METAL_MM, "-o", "-"], capture_output=True, text=True, check=True).stdout


def selectors() -> set[str]:
    names = re.findall(r'@OBJC_METH_VAR_NAME_\S* = .*? c"([\w:.]+)\\00"', intermediate())
    return {name for name in names if not name.startswith(".")}


def classes() -> set[str]:
    return set(re.findall(r'@"OBJC_CLASS_\$_(\w+)" = external', intermediate()))


def enumerators() -> dict[str, int]:
    """List the enumerators of our header with their values, as a compiler counts them."""
    values = {}
    text = re.sub(r"//.*", "", HEADER.read_text())
    for body in re.findall(r"NS_(?:ENUM|OPTIONS)\(\w+, \w+\) \{(.*?)\}", text, re.DOTALL):
        last = -1
        for entry in filter(None, (part.strip() for part in body.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            last = values[name] = apple_names.number(value) if value else last + 1
    return values


def test_selectors_are_apples():
    used = selectors()
    assert len(used) > 70
    assert used - apple_names.metal_cpp().selectors == FOUNDATION


def test_the_other_list_knows_them_too():
    """Of those with arguments, since a bare word could stand anywhere. It has no need to list setters."""
    known = apple_names.pyobjc().selectors
    used = {name for name in selectors() if ":" in name} - OTHER_WHEEL
    assert len(used) > 40
    assert {name for name in used - known if not re.fullmatch(r"set\w+:", name)} == set()


def declared() -> list[tuple[str, tuple[str, ...]]]:
    """List the methods and properties of our header: selector, what it returns, what it takes."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    found = []
    for returned, rest in re.findall(r"^- \(([^;]*?)\)\s*(\w[^;]*);", text, re.MULTILINE | re.DOTALL):
        name = "".join(re.findall(r"(\w+:)\s*\(", rest)) or rest.strip()
        taken = re.findall(r":\s*\(((?:[^()]|\([^()]*\))*)\)", rest)
        found.append((name, tuple(map(apple_names.plain, (returned, *taken)))))
    for kind, name in re.findall(r"^@property(?:\([^)]*\))? (.+?[\s*])(\w+);", text, re.MULTILINE):
        found.append((name, (apple_names.plain(kind),)))
    return found


def test_methods_take_and_return_what_apples_do():
    theirs = apple_names.signatures()
    ours = declared()
    assert len(ours) > 70
    assert {name: types for name, types in ours if types not in theirs.get(name, ())} == {}


def test_classes_are_apples():
    used = classes()
    assert len(used) > 8
    assert used <= apple_names.metal_cpp().classes
    functions = set(re.findall(r"\b(MTLCreate\w+)\(", METAL_MM.read_text()))
    assert functions == {"MTLCreateSystemDefaultDevice"}
    for names in (apple_names.metal_cpp(), apple_names.pyobjc()):
        assert "MTLCreateSystemDefaultDevice" in names.text


def test_numbers_are_apples():
    ours = enumerators()
    assert len(ours) > 30
    for names in (apple_names.metal_cpp(), apple_names.pyobjc()):
        assert {name: names.values.get(name) for name in ours} == ours


def test_every_constant_used_is_in_the_header():
    types = set(
        re.findall(r"(?:@protocol|@interface|using|struct|NS_\w+\(\w+,) (MTL\w+)", HEADER.read_text())
    )
    used = set(re.findall(r"\bMTL[A-Z]\w+", METAL_MM.read_text()))
    constants = {name for name in used if name in enumerators()}
    assert len(constants) > 20
    assert {
        name for name in used - constants - types if re.search(r"[a-z]\d|Mode|Option|Error\w", name)
    } == set()
