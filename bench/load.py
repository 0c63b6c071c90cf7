"""Loads a checkpoint, answers once, and reports time and memory.

    python -m bench.load DIRECTORY [--rounds 5] [--tokens 32] [--option repack_cache=beside] [--record]

Every sample is a process of its own, since peak memory belongs to a process. Before a cold sample the files'
pages are dropped from the page cache, which only Linux can be asked for; a warm sample follows it. Weights
are mapped from files, so memory that no file backs, called anonymous, tells whether a second copy was made.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import record, run
from bench.speed import option
from bench.synthetic_config import describe

PROMPT = "Tell me a story about a fox."
GIB = 2**30
UNITS = {  # what is measured
    "load": "s",
    "first token": "s",  # prompt taken in and one token drawn
    "decode": "tok/s",
    "peak resident": "GiB",  # with the pages of mapped files
    "peak anonymous": "GiB",  # without them
}


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint that are large. Raises FileNotFoundError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory}: wanted a checkpoint, got no .safetensors file")
    return [*files, *sorted(directory.glob("*.panels"))]  # packed, by repack_cache


def drop_from_page_cache(files: list[Path]) -> bool:
    """Ask the system to forget the contents of files; return whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages not yet written cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def process_memory() -> dict[str, int]:
    """Return this process's memory in bytes by the names of /proc/self/status, such as VmHWM; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    entries = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in entries}


class AnonymousPeak:
    """Looks at this process's anonymous memory every 2 ms in a with block: the system keeps no maximum."""

    def __init__(self) -> None:
        """Take the first look."""
        self.bytes = process_memory()["RssAnon"]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, process_memory()["RssAnon"])

    def __enter__(self) -> "AnonymousPeak":
        """Start watching."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the last look."""
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, process_memory()["RssAnon"])


def answer(directory: Path, tokens: int, options: Mapping[str, Any]) -> dict[str, float]:
    """Load the checkpoint and write an answer of `tokens` tokens; return the times by the names of UNITS."""
    import lily

    started = time.perf_counter()
    with lily.Model.load(str(directory), **options) as model:
        loaded = time.perf_counter()
        timings = model.generate(PROMPT, max_tokens=tokens, temperature=0.0).timings
    figures = {"load": loaded - started, "first token": timings.prefill_seconds}
    if timings.decode_tokens:  # random weights may draw an end token at once
        figures["decode"] = timings.decode_tokens_per_second
    return figures


def measure(directory: Path, tokens: int, options: Mapping[str, Any]) -> dict[str, float]:
    """Take one sample in this process."""
    if sys.platform != "linux":
        figures = answer(directory, tokens, options)
        return {**figures, "peak resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB}
    with AnonymousPeak() as anonymous:
        figures = answer(directory, tokens, options)
    return {
        **figures,
        "peak resident": process_memory()["VmHWM"] / GIB,
        "peak anonymous": anonymous.bytes / GIB,
    }


def sample(directory: Path, tokens: int, options: Mapping[str, Any] = {}) -> dict[str, float]:
    """Take one sample in a process of its own. Raises RuntimeError with what it wrote if it fails."""
    command = [sys.executable, "-m", "bench.load", str(directory), "--tokens", str(tokens), "--sample"]
    command += [f"--option={name}={value}" for name, value in options.items()]
    root = Path(__file__).parent.parent
    run = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {run.returncode}\n{run.stderr}")
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Measure loading and memory.")
    parser.add_argument("directory", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5, help="samples of each kind")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to write")
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    parser.add_argument("--record", action="store_true", help="append the figures to bench/records")
    parser.add_argument("--sample", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.tokens < 2:
        parser.error("--rounds, --tokens: wanted at least 1 and 2")
    if options.sample:
        print(json.dumps(measure(options.directory, options.tokens, dict(options.option))))
        return
    given = dict(options.option)
    try:
        checkpoint_files(options.directory)
    except OSError as error:
        parser.error(str(error))

    samples: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for kind in ("cold", "warm"):
            if kind == "cold" and not drop_from_page_cache(checkpoint_files(options.directory)):
                continue
            for name, figure in sample(options.directory, options.tokens, given).items():
                samples.setdefault(f"{name}, {kind}", []).append(figure)
    about = {**describe(options.directory), **given}
    print(f"{options.directory}: {about}")
    report(samples, about, options.record)


def report(samples: dict[str, list[float]], checkpoint: dict[str, Any], keep: bool) -> None:
    """Print the figures, and record them if `keep`."""
    for case, figures in samples.items():
        unit = UNITS[case.split(", ")[0]]
        print(record.line(case, unit, record.summarise(figures)))
        if keep:
            record.append(bench="load", case=case, unit=unit, samples=figures, options=checkpoint)


if __name__ == "__main__":
    run(main)
