"""Writes the C++ that holds the kernels: python tools/metal/embed.py FILES -o OUT.cpp [--metallib FILE].

Needs nothing but Python, since every build on a Mac runs it.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

PART = 8192  # bytes of a string literal; compilers promise 65,536


def flat(file: Path, seen: set[Path] | None = None) -> str:
    """Give a source with what it includes of ours in place, each header once."""
    seen = set() if seen is None else seen
    written = [f'#line 1 "{file.name}"']
    for number, line in enumerate(file.read_text().splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if line == "#pragma once":
            written.append("")
        elif included is None:
            written.append(line)
        elif (header := file.parent / included[1]) not in seen:
            seen.add(header)
            written += [flat(header, seen), f'#line {number + 1} "{file.name}"']
        else:
            written.append("")
    return "\n".join(written)


def literal(text: str) -> str:
    """Write a text as string literals that a compiler joins, and its length, which it need not count."""
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    joined = "\n".join(f'R"metal({part})metal"' for part in parts)
    return f"{{{joined}, {len(text.encode())}}}"


def embed(files: Sequence[Path], metallib: bytes = b"") -> str:
    """Write the file that csrc/gpu/embedded.h declares."""
    data = ",".join(map(str, metallib))
    sources = ",\n".join(f'    {{"{file.stem}", {literal(flat(file))}}}' for file in files)
    return (
        '// Written by tools/metal/embed.py.\n#include "gpu/embedded.h"\n\nnamespace lily {\n\n'
        f"static constexpr KernelSource kSources[] = {{\n{sources}}};\n"
        f"static constexpr unsigned char kBytes[] = {{{data or '0'}}};\n\n"
        "extern const std::span<const KernelSource> kKernelSources;\n"
        "extern const std::string_view kMetallib;\n"
        "const std::span<const KernelSource> kKernelSources(kSources);\n"
        f"const std::string_view kMetallib(reinterpret_cast<const char*>(kBytes), {len(metallib)});\n\n"
        "}  // namespace lily\n"
    )


def main() -> None:
    """Embed the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--metallib", type=Path)
    a = parser.parse_args()
    a.output.write_text(embed(a.files, a.metallib.read_bytes() if a.metallib else b""))


if __name__ == "__main__":
    main()
