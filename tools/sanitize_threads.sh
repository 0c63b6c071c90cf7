#!/bin/sh
# Builds tests/core_crowd.cpp with the thread sanitizer and runs it: eight threads on one session, for so long.
#   tools/sanitize_threads.sh CMAKE SECONDS
set -eu
cmake=$1
seconds=$2
build=build/sanitized-threads

if [ "$(uname -s)" != Linux ]; then
    echo "thread sanitizer: left out, since it is set up for Linux's compilers only" >&2
    exit 0
fi
"$cmake" -S . -B "$build" -DLILY_SANITIZE_THREADS=ON -DLILY_TESTS=ON -DCMAKE_BUILD_TYPE=Release > /dev/null
"$cmake" --build "$build" --target core_crowd --parallel 2 > "$build/log" || { cat "$build/log" >&2; exit 1; }
TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 "$build/core_crowd" tests/checkpoints/tiny "$seconds"
