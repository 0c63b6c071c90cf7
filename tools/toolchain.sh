#!/bin/sh
# Installs what the Linux rungs need beyond a plain build: a second compiler, and an emulator that runs the arm64 build.
# Metal's rungs compile their kernels with the same clang. Needs apt and root; anywhere else it says what to do.
set -eu

# The build itself, so that this one command is enough on a bare machine.
build="make g++ python3 python3-venv python3-dev"
# git: the commit that a record of the bench names. clang, lld, llvm: the core under a second compiler, Metal kernels.
# lld: the Mac's bundle. qemu and the cross compiler: the arm64 builds, one for an arm64 Python that a test fetches.
# Tests of `make test-long` fetch with pip what they need beyond it, into build/: ziglang 0.17 and wheel for the Mac's
# wheel, mlx-metal 0.32.4 and pyobjc-framework-Metal 12.2.2 for Apple's names and code.
rungs="git clang-22 lld-22 llvm-22 libclang-rt-22-dev qemu-user g++-aarch64-linux-gnu"

case "$(uname -s)" in
    Darwin)
        echo "macOS needs no toolchain beyond Xcode's command line tools (xcode-select --install): the rungs stand in for a Mac on Linux."
        exit 0 ;;
    Linux) ;;
    *) echo "The rungs run on Linux only; nothing was installed." >&2; exit 1 ;;
esac
if ! command -v apt-get >/dev/null 2>&1; then
    echo "There is no apt here, so nothing was installed. The rungs need clang 22 with its runtime, lld, llvm, qemu-user" >&2
    echo "(qemu-aarch64) and an aarch64-linux-gnu g++; on Fedora:" >&2
    echo "  sudo dnf install clang lld llvm compiler-rt qemu-user gcc-c++-aarch64-linux-gnu" >&2
    echo "tests/rungs.py tells which of them this machine has." >&2
    exit 1
fi

all_there() {
    states=$(dpkg-query -W -f '${db:Status-Status}\n' "$@" 2>/dev/null) && ! echo "$states" | grep -qvx installed
}
# shellcheck disable=SC2086  # one word a package
if all_there $build $rungs; then
    echo "toolchain: all there: $build $rungs"
    exit 0
fi

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
        echo "apt installs for root only, and there is no sudo; run this as root. Nothing was installed." >&2
        exit 1
    fi
    as_root="sudo"
fi

apt() { $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@"; }

apt update
for package in $build $rungs; do
    # A real candidate, not a name that other packages merely mention.
    if ! apt-cache policy "$package" | grep -q 'Candidate: [^(]'; then
        echo "apt's sources here do not offer $package; nothing was installed." >&2
        case "$package" in
            *-22*) echo "LLVM's own apt repository (https://apt.llvm.org) has release 22: add it, then run this again." >&2 ;;
            *) echo "Enable the distribution's main (Debian) or universe (Ubuntu) section, then run this again." >&2 ;;
        esac
        exit 1
    fi
done
# shellcheck disable=SC2086  # one word a package
apt install -y --no-install-recommends $build $rungs
echo "toolchain: $build $rungs are installed"
