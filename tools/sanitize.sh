#!/bin/sh
# Runs the core's tests in an environment whose Lily was built with LILY_SANITIZE.
#   tools/sanitize.sh PYTHON [ARGUMENTS OF PYTEST]
set -eu
python=$1
shift

if [ "$(uname -s)" != Linux ]; then
    echo "sanitizers: left out, since only Linux lets an interpreter preload their runtime as is" >&2
    exit 0
fi
# The interpreter is not built with them, so their runtimes come first. libstdc++ too: the address sanitizer looks for
# __cxa_throw when it starts, long before Python loads the core. The core links the runtimes it was built with.
core=$("$python" -c 'import lily, pathlib; print(next(pathlib.Path(lily.__file__).parent.glob("_core*.so")))')
preload=$(ldd "$core" | sed -n 's/.*\(lib\(asan\|ubsan\|stdc++\)[^ ]*\) => \([^ ]*\) .*/\3/p' | tr '\n' ' ')
case "$preload" in
    *asan*) ;;
    *) echo "$core was not built with LILY_SANITIZE" >&2; exit 1 ;;
esac

# Python keeps memory until it exits, so leaks are looked for in tests/core_story.cpp, which has no Python in it.
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# The tests that lead through the core; the others, Python's and the kernels', would show it nothing more.
tests="tests/test_core.py tests/test_gpu.py tests/test_ops.py tests/test_prefix.py tests/test_sampling_core.py
    tests/test_saved.py tests/test_shapes.py tests/test_turns.py tests/test_amx.py tests/test_panel_file.py"
# shellcheck disable=SC2086 # they are several
LD_PRELOAD="$preload" exec "$python" -m pytest -p no:cacheprovider -m "not long and not unsanitized" \
    $tests tests/test_loading*.py -k "not sim" "$@"
