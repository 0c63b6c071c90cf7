#!/bin/sh
# What a build needs from the machine. Reports all that is missing at once, with the command that brings it; installs nothing.
#   tools/check.sh python                the first Python >= 3.11 on PATH, or python3
#   tools/check.sh venv PYTHON FOLDER    makes the virtual environment anew if it is another interpreter's
set -eu

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    echo python3
}

compiles_cxx20() {
    scratch=$(mktemp -d)
    printf '%s\n' '#include <span>' '#include <thread>' 'struct Size { int rows, columns; };' \
        'template <class T> requires(sizeof(T) > 1) T area(std::span<T> s) { return s[0] * s[1]; }' \
        'int main() { int n[] = {0, 1}; Size z{.rows = 1, .columns = 1}; return area<int>(n) * z.rows; }' > "$scratch/cxx20.cpp"
    status=1
    for compiler in ${CXX:-c++ g++ clang++}; do
        if "$compiler" -std=c++20 "$scratch/cxx20.cpp" -o "$scratch/cxx20" 2>/dev/null; then status=0; break; fi
    done
    rm -r "$scratch"
    return $status
}

# Adds a line to what is missing, and its packages for each package manager.
missing() {
    what="$what  - $1
"
    apt="$apt $2" dnf="$dnf $3" brew="$brew $4"
}

check() {
    python=$1 what="" apt="" dnf="" brew=""
    if ! command -v "$python" >/dev/null 2>&1; then
        missing "Python 3.11 or later: there is no $python" "python3 python3-venv python3-dev" "python3 python3-devel" python@3.12
    elif ! new_enough "$python"; then
        found=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo 'something else')
        missing "Python 3.11 or later: $python is $found (PYTHON=... chooses another)" \
            "python3.11 python3.11-venv python3.11-dev" "python3.12 python3.12-devel" python@3.12
    else
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            missing "$python's venv module, which makes the virtual environment" "python$version-venv" python3 "python@$version"
        "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()' 2>/dev/null ||
            missing "Python.h of $python, which extension modules include" "python$version-dev" python3-devel "python@$version"
    fi
    compiles_cxx20 || missing "a C++20 compiler (g++ 11, clang 14 or Xcode 14, or later): ${CXX:-c++, g++ and clang++} cannot build one" \
        g++ gcc-c++ ""
    [ -z "$what" ] && return
    printf 'Lily cannot be built here yet. Missing:\n%s' "$what" >&2
    case "$(uname -s)" in
        Darwin)
            echo "On macOS these bring it:" >&2
            echo "  xcode-select --install" >&2
            [ -z "$(echo $brew)" ] || echo "  brew install $(echo $brew)" >&2 ;;
        *)
            if command -v apt-get >/dev/null 2>&1; then echo "On Debian and Ubuntu this brings it:
  sudo apt-get install$apt" >&2
            elif command -v dnf >/dev/null 2>&1; then echo "On Fedora this brings it:
  sudo dnf install$dnf" >&2
            else echo "Install it with this system's package manager, then run the command again." >&2
            fi ;;
    esac
    exit 1
}

make_venv() {
    python=$1 folder=$2
    # The interpreter behind them, by whatever link: one of another environment that is active is the same.
    identity=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable), sys.version)' 2>/dev/null || true)
    known=$(cat "$folder/interpreter" 2>/dev/null || true)
    [ -n "$identity" ] && [ "$(readlink -f "${known%% *}") ${known#* }" = "$identity" ] && return
    check "$python"
    if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
        echo "$folder is there and is not a virtual environment; move it away or choose another with VENV=..." >&2
        exit 1
    fi
    echo "$python -m venv --clear $folder"
    "$python" -m venv --clear "$folder"
    echo "$identity" > "$folder/interpreter"
}

case "${1:-}" in
    python) find_python ;;
    venv) make_venv "$2" "$3" ;;
    *) echo "usage: tools/check.sh python | venv PYTHON FOLDER" >&2; exit 2 ;;
esac
