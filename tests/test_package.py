"""The package as users get it: an sdist, a wheel built from it in isolation, an environment of its own."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.unsanitized]
ROOT = Path(__file__).parent.parent


def checked(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder, outside any Python environment, and give its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LILY_"))
    }
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert run.returncode == 0, f"{' '.join(map(str, command))}\n{run.stdout[-4000:]}{run.stderr[-4000:]}"
    return run.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a fresh virtual environment and give its bin folder."""
    folder = tmp_path_factory.mktemp("environment")
    checked(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    return folder / "venv" / "bin"


@pytest.fixture(scope="module")
def sdist(environment: Path) -> Path:
    folder = environment.parent.parent
    checked(environment / "python", "-m", "pip", "install", "--quiet", "build", folder=folder)
    checked(environment / "python", "-m", "build", "--sdist", "--outdir", folder, ROOT, folder=folder)
    return next(folder.glob("lily_llm-*.tar.gz"))


def test_sdist_holds_what_a_build_needs_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    wanted |= {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "src/lily/py.typed", "PKG-INFO"}
    assert wanted <= names
    assert {
        name for name in names if name.split("/")[0] in {"tests", "docs", "bench", "build", ".venv"}
    } == set()


def test_wheel_from_sdist_runs_on_its_own(sdist: Path, environment: Path) -> None:
    folder = sdist.parent
    checked(environment / "pip", "wheel", "--no-deps", "--wheel-dir", folder / "wheel", sdist, folder=folder)
    (wheel,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {"lily/py.typed", "lily/_core.pyi"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"lily", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    if sys.version_info >= (3, 12):
        assert "-cp312-abi3-" in wheel.name
    checked(environment / "pip", "install", "--quiet", wheel, folder=folder)
    story = checked(
        environment / "lily", "generate", "Tell me a story about a fox.", "--seed", "7", folder=folder
    )
    assert len(story.split()) > 20
