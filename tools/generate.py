"""Write what is committed but made: src/lily/_core.pyi, and tables in docs/.

Stub, options and stages come from the built core, records from bench/records, fields from the server.

python tools/generate.py             writes them
python tools/generate.py --check     writes nothing; exit status 1 and the difference if one is out of date
"""

import argparse
import difflib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

START, END = "<!-- generated: {} -->\n", "<!-- end -->"


def stub() -> str:
    """Give the text of _core.pyi as nanobind's stubgen makes it from the installed core."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "_core.pyi"
        command = [
            sys.executable,
            "-m",
            "nanobind.stubgen",
            "--include-private",
            "--quiet",
            "-m",
            "lily._core",
            "-o",
            str(file),
        ]
        subprocess.run(command, check=True)
        return file.read_text()


def with_table(page: str, name: str, head: str, rows: list[str]) -> str:
    """Give a page with the table between its markers replaced; head is the first row."""
    start = START.format(name)
    before, rest = page.split(start)
    table = [head, "|---" * (head.count("|") - 1) + "|", *rows]
    return before + start + "\n" + "\n".join(table) + "\n\n" + END + rest.split(END, 1)[1]


def options_page(page: str) -> str:
    """Give the options page with the core's list."""
    from lily import _core

    rows = [
        f"| `{name}` | {kind} | `{standard}` | {text} | `LILY_{name.upper()}` |"
        for name, kind, standard, text in _core.option_list()
    ]
    head = "| option | type | default | what it does | in the environment |"
    return with_table(page, "options", head, rows)


def newest_of(bench: str, records: Path) -> list[dict[str, Any]]:
    """Give the newest record of each case and options of each machine."""
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for file in sorted(records.glob("*.jsonl")):
        for r in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if r["bench"] == bench and r["kept"]:
                newest[file.stem, r["case"], json.dumps(r["options"])] = r
    return list(newest.values())


def beside_the_article(bench: str, records: Path, known: dict[str, Any]) -> tuple[str, list[str]]:
    """Give head and rows of a table of records, with the article's figure of a case where it is at hand."""
    rows = []
    for r in newest_of(bench, records):
        spread = f"{r['min']:.4g} to {r['max']:.4g}, n {r['n']}"
        cells = [r["case"], r["chip"], f"{r['median']:.4g} {r['unit']}", spread]
        theirs = known.get(r["case"], known.get(r["case"].rpartition(", ")[2], ""))
        rows.append(f"| {' | '.join(cells)} | {theirs} | {r['note']} | {r['id']} |")
    return "| what | on | median | spread | the article's M5 Max | note | record |", rows


def sweep_of_the_article(article: dict[str, Any]) -> tuple[str, list[str]]:
    """Give head and rows of the sweep that the article's engine was measured by, tok/s."""
    rows = [f"| {length} | {' | '.join(map(str, rates))} |" for length, rates in article["sweep"].items()]
    return f"| tokens | {' | '.join(article['sweep_columns'])} |", rows


def performance_page(page: str, records: Path) -> str:
    """Give the performance page with the newest record of each bench, case and options of each machine."""
    article = json.loads((Path(__file__).parent.parent / "bench" / "article.json").read_text("utf-8"))
    for bench in ("ablate", "limits", "ops", "speculate"):
        page = with_table(page, bench, *beside_the_article(bench, records, article.get(bench, {})))
    page = with_table(page, "sweep", *sweep_of_the_article(article))
    for bench in ("agree", "crowd", "layers", "load", "peers", "serve", "speed"):
        rows = []
        for r in newest_of(bench, records):
            options = ", ".join(f"{name} {value}" for name, value in r["options"].items())
            spread = f"{r['min']:.4g} to {r['max']:.4g}, n {r['n']}" if r["n"] > 1 else r["note"]
            rows.append(f"| {r['case']} | {r['median']:.4g} {r['unit']} | {spread} | {options} | {r['id']} |")
        head = "| what | median | spread, or against what | options | record |"
        page = with_table(page, bench, head, rows)
    return page


def stages_of_the_35b() -> tuple[str, list[str]]:
    """Give head and rows of the table of decode steps, recorded dry by the core."""
    from lily import stages

    rows = []
    for context in stages.CONTEXTS:
        one = stages.step(None, context, {})
        megabytes = [f"{count / 1e6:.2f}" for count in (one.read, one.written, one.floor)]
        cells = [str(context), str(one.dispatches), str(one.stages), *megabytes, f"{one.ratio:.4f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "| context | dispatches | stages | MB read | MB written | floor, MB | of the floor |", rows


def fusions_of_the_35b() -> tuple[str, list[str]]:
    """Give head and rows of the table of what a decode step is without each fusion, at 4K."""
    from lily import stages

    fused, rows = stages.step(None, 4096, {}), []
    for name, one in stages.apart(None, 4096, {}).items():
        more = [one.dispatches - fused.dispatches, one.stages - fused.stages]
        kilobytes = [(one.read - fused.read) / 1e3, (one.written - fused.written) / 1e3]
        rows.append(
            "| " + " | ".join([f"`{name}`", *map(str, more), *(f"{k:.1f}" for k in kilobytes)]) + " |"
        )
    return "| without | more dispatches | more stages | more kB read | more kB written |", rows


def kernels_page(page: str, records: Path) -> str:
    """Give the page of the kernels with the newest counts of bench.traffic, and the 35B's steps."""
    newest: dict[str, dict[str, dict[str, Any]]] = {}
    for file in sorted(records.glob("*.jsonl")):
        for r in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if r["bench"] == "traffic" and r["kept"]:
                case, figure = r["case"].split(" ")
                newest.setdefault(case, {})[figure] = r
    from lily import stages

    steps = [stages.step(None, context, {"token_handoff": "false"}) for context in stages.CONTEXTS]
    present = {row.kernel for step in steps for row in step.table} | {"step"}
    rows = []
    for case, found in newest.items():
        kernel, context = case.split("@")
        if kernel not in present:
            continue  # renamed, or gone
        megabytes = [f"{found[name]['median']:.4g}" for name in ("lines", "asked", "sectors")]
        ids = f"{found['lines']['id']} to {found['sectors']['id'].rpartition('-')[2]}"
        rows.append("| " + " | ".join([f"`{kernel}`", context, *megabytes, ids]) + " |")
    page = with_table(page, "stages", *stages_of_the_35b())
    page = with_table(page, "fusions", *fusions_of_the_35b())
    head = "| kernel, or step of the 35B | context | MB in lines | MB asked for | MB in sectors | records |"
    return with_table(page, "traffic", head, rows)


def server_page(page: str) -> str:
    """Give the server's page with the fields that each endpoint reads, refuses and passes over."""
    import msgspec

    from lily.server.app import DIALECTS

    rows = []
    for dialect in DIALECTS:
        fields = sorted(msgspec.structs.fields(dialect.request), key=lambda field: not field.required)
        read = ", ".join(f"`{field.name}`" + ("*" if field.required else "") for field in fields)
        refused = ", ".join(
            f"`{name}`" + "".join(f" (`{json.dumps(value)}`)" for value in harmless)
            for name, harmless in dialect.refused.items()
        )
        ignored = ", ".join(f"`{name}`" for name in dialect.ignored)
        rows.append(f"| `{dialect.path}` | {read} | {refused} | {ignored} |")
    head = "| endpoint | read (* needed) | refused | without effect |"
    return with_table(page, "fields", head, rows)


def main() -> int:
    """Write the files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is out of date")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the checkout")
    arguments = parser.parse_args()
    stub_file = arguments.root / "src/lily/_core.pyi"
    pages = ("options", "performance", "kernels", "server")
    options, performance, kernels, server = (arguments.root / "docs" / f"{name}.md" for name in pages)
    records = arguments.root / "bench" / "records"
    stale = 0
    for file, made in [
        (stub_file, stub()),
        (options, options_page(options.read_text())),
        (performance, performance_page(performance.read_text(), records)),
        (kernels, kernels_page(kernels.read_text(), records)),
        (server, server_page(server.read_text())),
    ]:
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
