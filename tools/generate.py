"""Write what is committed but made from the built core: src/lily/_core.pyi and the table in docs/options.md.

python tools/generate.py             writes both
python tools/generate.py --check     writes nothing; exit status 1 and the difference if one is out of date
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

START, END = "<!-- generated: options -->\n", "<!-- end -->"


def stub() -> str:
    """Give the text of _core.pyi as nanobind's stubgen makes it from the installed core."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "_core.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "--quiet", "-m", "lily._core", "-o", str(file)]
        subprocess.run(command, check=True)
        return file.read_text()


def options_page(page: str) -> str:
    """Give the options page with its table replaced by the core's list."""
    from lily import _core

    rows = ["| option | type | default | what it does | in the environment |", "|---|---|---|---|---|"]
    for name, kind, standard, text in _core.option_list():
        rows.append(f"| `{name}` | {kind} | `{standard}` | {text} | `LILY_{name.upper()}` |")
    before, rest = page.split(START)
    return before + START + "\n" + "\n".join(rows) + "\n\n" + END + rest.split(END, 1)[1]


def main() -> int:
    """Write the two files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the checkout")
    arguments = parser.parse_args()
    stub_file, page_file = arguments.root / "src/lily/_core.pyi", arguments.root / "docs/options.md"
    stale = 0
    for file, made in [(stub_file, stub()), (page_file, options_page(page_file.read_text()))]:
        committed = file.read_text()
        if committed == made:
            continue
        stale = 1
        if arguments.check:
            lines = committed.splitlines(keepends=True), made.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(*lines, f"{file} as committed", f"{file} as made now"))
        else:
            file.write_text(made)
            print(f"wrote {file}")
    if arguments.check and stale:
        print("`make stubs` brings the files up to date")
    return stale if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
