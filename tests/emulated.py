"""The core of another machine: lily._core, built for arm64 and run under qemu, its objects used from here.

What it needs lies in build/arm64 and is made when it is not there: an interpreter for arm64 with the
libraries it asks for (from apt, unpacked, not installed), NumPy for it (from pip), and the core. The core's
process is this file, run by that interpreter; objects that only it has travel as numbers, everything else as
pickles.
"""

import fcntl
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "arm64"
SYSROOT, SITE, PACKAGE = BUILD / "root", BUILD / "site", BUILD / "package"
DEBS = ("python3-minimal", "libpython3-stdlib", "libpython3-dev", "libstdc++6")
NUMPY = "numpy>=1.26"
CPU = "max"  # with everything that qemu knows
DOTS_CPU = "neoverse-n1"  # Armv8.2: integer dot products, no products of matrices of bytes
OLD_CPU = "cortex-a72"  # Armv8.0: no integer dot products


# ---- What both sides do


class Sender(pickle.Pickler):
    def persistent_id(self, thing: Any) -> int | None:
        if isinstance(thing, Remote):
            return thing._number
        if type(thing).__module__.startswith("lily._core") and not isinstance(thing, BaseException):
            KEPT[id(thing)] = thing
            return id(thing)
        return None


class Receiver(pickle.Unpickler):
    def __init__(self, file: BinaryIO, machine: "Machine | None" = None) -> None:
        super().__init__(file)
        self.machine = machine

    def persistent_load(self, number: int) -> Any:
        return Remote(self.machine, number) if self.machine else KEPT[number]


KEPT: dict[int, Any] = {}  # what the other side has a number of


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there is no more to answer: what an object's attribute is, or returns for arguments."""
    from lily import _core

    KEPT[0] = _core
    while True:
        try:
            thing, name, arguments = Receiver(requests).load()
        except EOFError:
            return
        try:
            value = getattr(thing, name)
            answer: tuple[str, Any] = ("method", None) if callable(value) else ("value", value)
            if arguments is not None:
                answer = ("value", value(*arguments[0], **arguments[1]))
        except Exception as error:
            answer = ("error", error)
        Sender(answers, pickle.HIGHEST_PROTOCOL).dump(answer)
        answers.flush()


# ---- This side


class Remote:
    """An object of the emulated core. Calls and properties go there; it is kept there to the end."""

    def __init__(self, machine: "Machine", number: int) -> None:
        self._machine, self._number = machine, number

    def __getattr__(self, name: str) -> Any:
        kind, value = self._machine.ask(self, name, None)
        if kind == "value":
            return value
        return lambda *given, **named: self._machine.ask(self, name, (given, named))[1]


class Machine:
    """A process of the emulated core."""

    def __init__(self, cpu: str) -> None:
        interpreter = [*emulator(cpu), str(Path(__file__))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(interpreter, stdin=pipe, stdout=pipe, env=environment())
        self.core = Remote(self, 0)

    def ask(self, thing: Remote, name: str, arguments: Any) -> tuple[str, Any]:
        Sender(self.process.stdin, pickle.HIGHEST_PROTOCOL).dump((thing, name, arguments))
        self.process.stdin.flush()
        kind, value = Receiver(self.process.stdout, self).load()
        if kind == "error":
            raise value
        return kind, value


def emulator(cpu: str) -> list[str]:
    (python,) = (SYSROOT / "usr" / "bin").glob("python3.*[0-9]")
    return ["qemu-aarch64", "-cpu", cpu, "-L", str(SYSROOT), str(python)]


def environment() -> dict[str, str]:
    paths = {"PYTHONPATH": f"{PACKAGE}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("LILY_")} | paths


def checked(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def fetch_interpreter() -> None:
    """Unpack an arm64 interpreter of this distribution. apt's own state is left as it is."""
    apt, status = BUILD / "apt", BUILD / "apt" / "status"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    status.touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": apt / "state",
        "Dir::State::status": status,
        "Dir::Cache": apt / "cache",
    }
    get = ["apt-get", "-qq", *(word for name in settings for word in ("-o", f"{name}={settings[name]}"))]
    checked(*get, "update")
    checked(*get, "--yes", "--no-install-recommends", "--download-only", "install", *DEBS)
    unpacked = BUILD / "unpacked"
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        checked("dpkg-deb", "--extract", package, unpacked)
    unpacked.rename(SYSROOT)


def fetch_numpy(version: str) -> None:
    platforms = (f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    where = [f"--platform={name}" for name in (*platforms, "manylinux2014_aarch64")]
    fetched = BUILD / "fetched"
    checked(*pip, *where, f"--python-version={version}", "--target", fetched, NUMPY)
    fetched.rename(SITE)


def build_core(version: str) -> None:
    import nanobind

    from lily import reference

    cmake = Path(sys.executable).parent / "cmake"
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
        "LILY_NANOBIND": Path(nanobind.source_dir()).parent,
        "LILY_PYTHON_HEADERS": f"{SYSROOT}/usr/include/python{version};{SYSROOT}/usr/include",
    }
    folder = BUILD / "core"
    checked(cmake, "-S", ROOT, "-B", folder, *(f"-D{name}={value}" for name, value in settings.items()))
    checked(cmake, "--build", folder, "--target", "_core", "--parallel", str(os.cpu_count()))
    package = PACKAGE / "lily"
    package.mkdir(parents=True, exist_ok=True)
    for source in (*Path(reference.__file__).parent.glob("*.py"), folder / "_core.so"):
        new = package / f"{source.name}.new"
        new.write_bytes(source.read_bytes())
        new.rename(package / source.name)  # not written over: a process may have it mapped


@cache
def machine(cpu: str = CPU) -> Machine:
    """Return a process of the emulated core, with all that it needs fetched and built."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of pytest's processes may come at once
        if not SYSROOT.exists():
            fetch_interpreter()
        version = checked(*emulator(cpu), "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        if not SITE.exists():
            fetch_numpy(version)
        build_core(version)
        return Machine(cpu)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # nothing printed by mistake is an answer
    serve(sys.stdin.buffer, answers)
