"""Finds, for every watched access in an instrumented library, the line of Metal that it comes from."""

import json
import re
from pathlib import Path

from tools.metal import clang

INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)(.*)$")


def lay_beside(library: Path, output: Path) -> None:
    """Write `address line file` for every call of the sanitizer, by return address, for runtime/lines.cpp."""
    listing = clang.checked(["llvm-objdump-22", "-d", "--no-show-raw-insn", library])
    returns, called = [], False
    for line in listing.splitlines():
        found = INSTRUCTION.match(line)
        if found:
            if called:
                returns.append(int(found[1], 16))
            called = found[2].startswith("call") and "__tsan_" in found[3]
    # A return address belongs to the instruction after the call; the byte before it is the call's own.
    asked = "".join(f"{address - 1:#x}\n" for address in returns)
    symbolizer = ["llvm-symbolizer-22", f"--obj={library}", "--output-style=JSON"]
    answers = clang.checked(symbolizer, asked).splitlines()
    rows = []
    for address, answer in zip(returns, answers, strict=True):
        for frame in json.loads(answer).get("Symbol", []):
            file = frame.get("FileName", "")
            if frame.get("Line") and file and not clang.LANGUAGE.search(file):
                rows.append(f"{address:x} {frame['Line']} {file}\n")
                break
    output.write_text("".join(rows))
