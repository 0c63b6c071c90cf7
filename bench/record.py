"""Records of measurements: one schema, one writer.

A record is a line of JSON in bench/records/<machine>.jsonl. Every figure in it is computed here from samples;
nothing accepts a median. Docs and README quote records by id.

A machine without git writes samples into a file of its own, with `--record FILE` of any bench. With the same
code checked out where there is git, they become records:

    python -m bench.record FILE
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import run

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "bench" / "records"

# The schema, in the order of the keys.
FIELDS: dict[str, type] = {
    "id": str,  # "<machine>-0042", counted within a machine's file
    "date": str,  # UTC, "2026-08-30T12:00:00Z"
    "commit": str,  # of the code that was measured
    "dirty": bool,  # the code differed from the commit
    "chip": str,
    "cores": int,  # that the process could use
    "memory_gb": float,
    "os": str,
    "bench": str,  # the module of bench/ that measured
    "case": str,  # what, "decode@8192"
    "options": dict,  # of Lily and of the bench, where they were not the default
    "unit": str,
    "n": int,  # samples
    "min": float,
    "median": float,
    "max": float,
    "note": str,
    "kept": bool,  # False: an experiment whose code was not kept; the note says why
}


def summarise(samples: Sequence[float]) -> dict[str, Any]:
    """Return n, min, median and max of the samples, to six digits.

    Raises ValueError if there are none or one is not finite.
    """
    if not samples or not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"samples: wanted one or more finite numbers, got {list(samples)}")
    figures = {"min": min(samples), "median": statistics.median(samples), "max": max(samples)}
    return {"n": len(samples), **{name: float(f"{value:.6g}") for name, value in figures.items()}}


def machine(device: str = "") -> dict[str, Any]:
    """Return chip, cores, memory_gb and os of the machine that this runs on.

    device: as a session names it; the chip is then the GPU that it names, "cuda (NVIDIA H200)".
    """
    gpu = re.fullmatch(r"\w+ \((.+)\)", device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "chip": gpu[1] if gpu else _chip(),
        "cores": cores,
        "memory_gb": round(memory / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
    }


def _chip() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()  # many ARM kernels name no model


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def commit() -> dict[str, Any]:
    """Return the commit of the working tree, and whether the tree differs from it in anything but records."""
    changes = _output("git", "status", "--porcelain", "--", ".", ":(exclude)bench/records")
    return {"commit": _output("git", "rev-parse", "--short=12", "HEAD"), "dirty": bool(changes)}


def measured(
    *,
    bench: str,
    case: str,
    unit: str,
    samples: Sequence[float],
    options: Mapping[str, Any] | None = None,
    note: str = "",
    kept: bool = True,
    device: str = "",
) -> dict[str, Any]:
    """Return samples that were just measured on this machine, with what a record says of them.

    Raises ValueError for no samples, for ones not finite, and if kept is False and no note says why.
    """
    if not kept and not note:
        raise ValueError("note: wanted the reason why the experiment was not kept, got none")
    summarise(samples)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **machine(device),
        "bench": bench,
        "case": case,
        "options": dict(options or {}),
        "unit": unit,
        "samples": list(samples),
        "note": note,
        "kept": kept,
    }


def append(*, directory: Path = RECORDS, **given: Any) -> dict[str, Any]:
    """Add a record of samples that were just measured on this machine, and return it; see measured()."""
    return add(measured(**given), directory)


def add(samples: Mapping[str, Any], directory: Path = RECORDS) -> dict[str, Any]:
    """Add a record of what measured() returned, by the code that is checked out here."""
    facts = {**samples, **summarise(samples["samples"]), **commit()}
    machine_name = f"{facts['chip']} {facts['cores']}c".lower().replace("(r)", "")
    name = re.sub(r"[^a-z0-9]+", "-", machine_name).strip("-")
    path = directory / f"{name}.jsonl"
    facts["id"] = f"{name}-{len(read(path)) + 1 if path.exists() else 1:04d}"
    record = {field: facts[field] for field in FIELDS}
    check(record)
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return record


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a bench the option --record, whose value keep() takes."""
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FILE",
        help="append the figures to bench/records, or as samples to FILE, see bench/record.py",
    )


def keep(
    to: str | None, case: str, unit: str, samples: Sequence[float], note: str = "", **given: Any
) -> None:
    """Print a case's figures, and do with them what --record asked for: nothing, records, or a file.

    given: the rest of what measured() takes.
    """
    given |= {"case": case, "unit": unit, "samples": samples, "note": note}
    print(line(case, unit, summarise(samples)) + (f"  {note}" if note else ""), flush=True)
    if to == "":
        append(**given)
    elif to is not None:
        with Path(to).open("a", encoding="utf-8") as file:
            file.write(json.dumps(measured(**given), ensure_ascii=False) + "\n")


def check(record: Mapping[str, Any]) -> None:
    """Raise ValueError unless a record has the schema's fields, of their types, and figures in order."""
    if list(record) != list(FIELDS):
        raise ValueError(f"record: wanted the fields {list(FIELDS)}, got {list(record)}")
    for name, wanted in FIELDS.items():
        value = record[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"record {record['id']}: {name}: wanted {wanted}, got {value!r}")
    if record["n"] < 1 or not record["min"] <= record["median"] <= record["max"]:
        raise ValueError(f"record {record['id']}: wanted n >= 1 and min <= median <= max")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, oldest first. Raises ValueError for a line that breaks the schema."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        check(record)
    return records


def line(case: str, unit: str, figures: Mapping[str, Any]) -> str:
    """Return a case and its figures, of a record or fresh from summarise, as a line for a terminal."""
    spread = f"{figures['min']:.4g} ... {figures['max']:.4g}, n {figures['n']}"
    return f"{case:<24} {figures['median']:>9.4g} {unit:<6} ({spread})"


def main(arguments: list[str] | None = None) -> None:
    """Make records of the samples in some files."""
    parser = argparse.ArgumentParser(prog="python -m bench.record", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args(arguments).files:
        for text in file.read_text(encoding="utf-8").splitlines():
            print(add(json.loads(text))["id"])


if __name__ == "__main__":
    run(main)
