"""What is committed but made, the stub and the tables, is what the core and the records say now."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unsanitized
ROOT = Path(__file__).parent.parent


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "generate.py", "--check", "--root", root]
    return subprocess.run(command, capture_output=True, text=True)


def test_generated_files_are_up_to_date() -> None:
    run = check(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("src/lily/_core.pyi", "def option_list(", "def options("),
        ("docs/options.md", "`LILY_THREADS`", "`THREADS`"),
        ("docs/performance.md", "| demo, same best token |", "| demo, same second token |"),
        ("docs/performance.md", "| 256 | 194.7 |", "| 256 | 195 |"),
        ("docs/kernels.md", "| 4096 | 252 | 252 |", "| 4096 | 252 | 251 |"),
        ("docs/server.md", "`top_logprobs`", "`top_logits`"),
    ],
)
def test_a_stale_file_is_found(tmp_path: Path, file: str, old: str, new: str) -> None:
    pages = [f"docs/{name}.md" for name in ("options", "performance", "kernels", "server")]
    for name in ("src/lily/_core.pyi", *pages):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "bench" / "records", tmp_path / "bench" / "records")
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    run = check(tmp_path)
    assert run.returncode == 1
    assert (
        f"+{text.splitlines()[next(i for i, line in enumerate(text.splitlines()) if old in line)]}"
        in run.stdout
    )
