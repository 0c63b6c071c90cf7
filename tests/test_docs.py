"""Every Python block of the README and of docs/ runs, in order, page by page, with the embedded checkpoint.

Only a block titled "needs the 35B checkpoint" is exempt, and it must at least compile.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

import lily
import rungs

pytestmark = pytest.mark.unsanitized
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXEMPT = 'title="needs the 35B checkpoint"'
FENCE = re.compile(r"^```python *(?P<info>.*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)


def run_blocks(page: Path) -> tuple[dict[str, object], str]:
    """Run a page's blocks as one program; give its names and its output. Tracebacks name the page's lines."""
    text, names, printed = page.read_text(), {"__name__": "__main__"}, io.StringIO()
    for block in FENCE.finditer(text):
        assert block["info"] in ("", EXEMPT), (
            f"{page.name}: a Python block marked {block['info']!r} would not run"
        )
        above = "\n" * text.count("\n", 0, block.start("code"))
        code = compile(above + block["code"], str(page), "exec")
        if not block["info"]:
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    return names, printed.getvalue()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if FENCE.search(page.read_text())], ids=lambda page: page.name
)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "from tools.metal" in page.read_text():
        rungs.climb("metal")
    monkeypatch.chdir(tmp_path)
    names, printed = run_blocks(page)
    if isinstance(model := names.get("model"), lily.Model):
        model.close()
    assert not printed or printed.endswith("\n"), "the last line that is written has no end"
    left = [path.name for path in tmp_path.iterdir() if path.name != "build"]
    assert not left, "files that whoever tries the page out has to remove"
    if page.name in ("README.md", "index.md"):
        assert len(printed.split()) > 50, f"wanted a story, got {printed!r}"


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nraise KeyError('planted')\n```\n", KeyError),
        ("```python\nthis is no Python\n```\n", SyntaxError),
        (f"```python {EXEMPT}\nthis is no Python either\n```\n", SyntaxError),
        ('```python title="an example"\nassert True\n```\n', AssertionError),
    ],
)
def test_a_broken_block_is_found(tmp_path: Path, block: str, error: type[Exception]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n" + block)
    with pytest.raises(error):
        run_blocks(page)


def test_every_block_is_seen() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(FENCE.findall(text)) == len(re.findall(r"^ *(?:```|~~~) *py", text, re.MULTILINE)), (
            page.name
        )


def test_every_public_name_is_in_the_api_page() -> None:
    documented = set(re.findall(r"^::: lily\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert documented == set(lily.__all__) - {"__version__"}


def test_letters_of_the_model_page_are_those_of_the_core() -> None:
    """The table's last column names a field of Config, its third one has the embedded checkpoint's value."""
    rows = re.findall(
        r"^\| (\w+) \|[^|]+\|[^|]+\| ([\d,]+) \| `(\w+)` \|$",
        (ROOT / "docs/model.md").read_text(),
        re.MULTILINE,
    )
    header = (ROOT / "csrc" / "config.h").read_text()
    with lily.Model.load(lily.DEMO) as model:
        config = model.info.config
    assert len(rows) == 16
    for letter, value, field in rows:
        assert re.search(rf"\bint {field} = 0; *// {letter}\b", header), (
            f"{letter}: {field} is not so in config.h"
        )
        assert config[field] == int(value.replace(",", "")), f"{letter}: {field}"
