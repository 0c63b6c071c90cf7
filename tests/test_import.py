"""`import lily` is cheap: little time, nothing heavy loaded, no thread started."""

import json
import os
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unsanitized
HEAVY = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "transformers", "lily._core", "llguidance")
HEAVY += ("starlette", "uvicorn", "msgspec", "asyncio")


def cpu_seconds(code: str) -> float:
    """Run a fresh interpreter; give its processor time, which a busy machine does not stretch."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_utime + usage.ru_stime


def test_import_takes_less_than_150_ms() -> None:
    bare, ours = [], []
    for _ in range(7):  # taken in turn, so that a slow spell of the machine meets both
        bare.append(cpu_seconds("pass"))
        ours.append(cpu_seconds("import lily"))
    assert statistics.median(ours) - statistics.median(bare) < 0.150


def test_import_loads_nothing_heavy() -> None:
    code = "import lily, json, sys, threading as t; print(json.dumps([[*sys.modules], t.active_count()]))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules, threads = json.loads(run.stdout)
    assert "lily" in modules
    assert [name for name in HEAVY if name in modules] == []
    assert threads == 1
    assert run.stderr == ""
