"""The layering of docs/architecture.md, read off the include lines and the imports.

A file may include only what its row names. A file without a row fails: its place is decided when it is added.
"""

import ast
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.unsanitized
ROOT = Path(__file__).parent.parent

LEAVES = "config.h error.h tensor.h traffic.h"
MODEL = f"{LEAVES} weights.h state.h ops.h"  # what an implementation of Ops may know
# The first row that matches counts. Folders as seen from csrc/.
MAY_INCLUDE = {
    "error.h": "",
    "tensor.h": "",
    "traffic.h": "",
    "config.h": "",
    "options.h": "",
    "json.h": LEAVES,
    "safetensors.h": f"{LEAVES} json.h",
    "json.cpp": f"{LEAVES} json.h",
    "config.cpp": f"{LEAVES} json.h safetensors.h",
    "options.cpp": f"{LEAVES} options.h",
    "safetensors.cpp": f"{LEAVES} json.h safetensors.h",
    "weights.h": LEAVES,
    "weights.cpp": f"{LEAVES} json.h safetensors.h weights.h",
    "state.h": LEAVES,
    "ops.h": f"{LEAVES} weights.h state.h",
    "state.cpp": MODEL,  # it allocates and copies through Ops
    "forward.*": f"{MODEL} forward.h",
    "logprobs.*": f"{LEAVES} logprobs.h",
    "history.h": MODEL,
    "kept.*": f"{LEAVES} state.h kept.h",
    "turns.*": f"{MODEL} forward.h history.h turns.h",
    "session.*": f"{MODEL} forward.h history.h logprobs.h session.h turns.h kept.h",
    "sample.*": f"{MODEL} metal/fixed.h sample.h",
    "backends.cpp": f"{MODEL} options.h cpu/backend.h gpu/backend.h",  # the factory: all there is
    "bind.cpp": f"{MODEL} forward.h history.h logprobs.h session.h turns.h kept.h options.h gpu/device.h"
    " gpu/dry.h",
    "cpu/*": f"{MODEL} sample.h cpu/*",
    "gpu/device.h": f"{LEAVES} state.h",
    "gpu/recorder.*": "gpu/device.h gpu/recorder.h",
    "gpu/backend.h": f"{MODEL} options.h gpu/recorder.h metal/args.h",
    "gpu/launch.h": f"{LEAVES} weights.h gpu/recorder.h metal/args.h",
    "gpu/ops.cpp": f"{MODEL} safetensors.h options.h gpu/backend.h gpu/launch.h",
    "gpu/sample.cpp": f"{MODEL} sample.h gpu/backend.h gpu/launch.h",
    "gpu/attention.cpp": f"{MODEL} gpu/backend.h gpu/launch.h",
    "gpu/gdn.cpp": f"{MODEL} gpu/backend.h gpu/launch.h",
    "gpu/matmul.cpp": f"{MODEL} gpu/backend.h gpu/launch.h",
    "gpu/moe.cpp": f"{MODEL} gpu/backend.h gpu/launch.h",
    "gpu/dry.*": f"{MODEL} options.h forward.h gpu/backend.h gpu/dry.h",
    "gpu/sim.cpp": f"{LEAVES} gpu/device.h tools/metal/runtime.h",
    "gpu/cuda.cpp": f"{LEAVES} gpu/device.h",
    "gpu/embedded.h": "",
    "gpu/metal.mm": f"{LEAVES} gpu/device.h gpu/embedded.h",
    "gpu/simulated_metal.cpp": f"{LEAVES} gpu/device.h",
}
# What stands in one place only: the pattern, where it may stand, why.
CONFINED = [
    (r"#\s*include\s*[<\"](nanobind/|Python\.h)", ["bind.cpp"], "only bind.cpp knows Python"),
    (r"#\s*(include|import)\s*<Metal/", ["gpu/metal.mm"], "only gpu/metal.mm knows Metal"),
    (r"#\s*include\s*<cuda", ["gpu/cuda.cpp"], "only gpu/cuda.cpp knows CUDA"),
    (r"\bgetenv\b", ["options.cpp"], "only options.cpp reads the environment"),
    (r"\bvirtual\b", ["ops.h", "gpu/device.h"], "ops.h and gpu/device.h are the only seams"),
    (
        r"\b(printf|fprintf|puts|abort|_?exit)\s*\(|std::(cout|cerr)\b",
        [],
        "the core throws: it never prints or exits",
    ),
]


def without_comments(line: str) -> str:
    return re.sub(r'//.*|/\*.*?\*/|"[^"]*"', "", line)


def resolve(csrc: Path, file: Path, included: str) -> str:
    """Give an included file's path as seen from csrc/, whether it was written from there or from the file."""
    beside = (file.parent / included).resolve()
    return beside.relative_to(csrc.resolve()).as_posix() if beside.exists() else included


def core_violations(root: Path) -> list[str]:
    csrc, found = root / "csrc", []
    for file in sorted(csrc.rglob("*")):
        name = file.relative_to(csrc).as_posix()
        if not file.is_file():
            continue
        allowed = next((allow.split() for row, allow in MAY_INCLUDE.items() if fnmatch(name, row)), None)
        if allowed is None:
            found.append(f"csrc/{name}:1: has no row in MAY_INCLUDE: decide what it may include")
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            where = f"csrc/{name}:{number}: {line.strip()}"
            if include := re.match(r'\s*#\s*include\s*"([^"]+)"', line):
                target = resolve(csrc, file, include[1])
                if not any(fnmatch(target, pattern) for pattern in allowed):
                    found.append(f"{where}  ({name} may include: {', '.join(allowed) or 'nothing'})")
            code = line if line.lstrip().startswith("#") else without_comments(line)
            found += [
                f"{where}  ({why})"
                for pattern, places, why in CONFINED
                if name not in places and re.search(pattern, code)
            ]
    return found


def imported(node: ast.AST) -> list[str]:
    """List the modules an import statement may load; ours without the package's name in front."""
    if isinstance(node, ast.Import):
        return [re.sub(r"^lily\.", "", alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = re.sub(r"^lily(\.|$)", "", node.module or "")
        ours = node.level > 0 or module != (node.module or "")
        return [module] if module or not ours else [alias.name for alias in node.names]
    return []


def python_violations(root: Path) -> list[str]:
    found = []
    package = root / "src" / "lily"
    for file in sorted(package.rglob("*.py")):
        lines = file.read_text().splitlines()
        for node in ast.walk(ast.parse(file.read_text(), file)):
            for module in imported(node):
                first = module.split(".")[0]
                if file.name == "reference.py":
                    relative = isinstance(node, ast.ImportFrom) and node.level > 0
                    bad = relative or first not in {"numpy", *sys.stdlib_module_names}
                    why = "reference.py imports NumPy and the standard library only"
                else:
                    bad, why = (
                        first == "reference",
                        "nothing builds on what the tests compare with",
                    )
                if bad:
                    name = file.relative_to(root).as_posix()
                    found.append(f"{name}:{node.lineno}: {lines[node.lineno - 1].strip()}  ({why})")
    return found


def build_violations(root: Path) -> list[str]:
    """Compare the sources that CMakeLists.txt names, one by one, with those in csrc/."""
    text = (root / "CMakeLists.txt").read_text()
    listed = set(re.findall(r"csrc/[\w/]+\.(?:cpp|mm)|metal/\w+\.(?:metal|h)", text))
    files = [f for f in (root / "csrc").rglob("*") if f.suffix in {".cpp", ".mm"}]
    files += (root / "metal").glob("*.*")  # which the Mac's build embeds
    present = {f.relative_to(root).as_posix() for f in files}
    found = [f"{name}:1: is not in the source list of CMakeLists.txt" for name in sorted(present - listed)]
    found += [f"CMakeLists.txt: {name}  (there is no such file)" for name in sorted(listed - present)]
    return found + [
        f"CMakeLists.txt:{number}: {line.strip()}  (name the sources one by one)"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"\bGLOB(_RECURSE)?\b|aux_source_directory", line)
    ]


def violations(root: Path) -> list[str]:
    return core_violations(root) + python_violations(root) + build_violations(root)


def test_layers() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("csrc/session.cpp", '#include "cpu/threads.h"'),
        ("csrc/forward.cpp", '#include "options.h"'),
        ("csrc/cpu/ops.cpp", '#include "session.h"'),
        ("csrc/cpu/ops.cpp", '#include "../session.h"'),
        ("csrc/weights.h", '#include "ops.h"'),
        ("csrc/session.cpp", "#include <nanobind/nanobind.h>"),
        ("csrc/state.h", "struct Pages { virtual ~Pages() = default; };"),
        ("csrc/cpu/ops.cpp", 'const char* threads = std::getenv("LILY_THREADS");'),
        ("csrc/weights.cpp", 'void say() { printf("loading"); }'),
        ("csrc/helpers.cpp", "int answer();"),
        ("src/lily/model.py", "from lily import reference"),
        ("src/lily/model.py", "from .reference import gdn_mix"),
        ("src/lily/model.py", "import lily.reference"),
        ("src/lily/reference.py", "from . import _core"),
        ("src/lily/reference.py", "import tokenizers"),
        ("CMakeLists.txt", "file(GLOB sources csrc/*.cpp)"),
        ("CMakeLists.txt", "target_sources(lily_core PRIVATE csrc/gone.cpp)"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    for folder in ("csrc", "metal"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    package = ROOT / "src" / "lily"
    shutil.copytree(package, tmp_path / "src" / "lily", ignore=shutil.ignore_patterns("demo", "*.so"))
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    planted = tmp_path / file
    planted.parent.mkdir(exist_ok=True)
    text = planted.read_text() if planted.exists() else ""
    planted.write_text(f"{text}\n{line}\n")
    found = set(violations(tmp_path)) - set(violations(ROOT))
    assert found, f"{line!r} in {file} went unnoticed"
    assert all(file in message for message in found)


@pytest.mark.parametrize(
    "line", ["// virtual, getenv and printf( in a comment", 'f("virtual");', "#include <span>"]
)
def test_innocent_line_passes(tmp_path: Path, line: str) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "tensor.h").write_text(line + "\n")
    assert core_violations(tmp_path) == []
