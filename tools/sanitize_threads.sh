#!/bin/sh
# Builds tests/core_crowd.cpp with the thread sanitizer and runs it: eight threads on one session, for so long; then as
# long on csrc/gpu/metal.mm and the simulated Metal framework, where clang is.
#   tools/sanitize_threads.sh CMAKE SECONDS
set -eu
cmake=$1
seconds=$2
build=build/sanitized-threads

if [ "$(uname -s)" != Linux ]; then
    echo "thread sanitizer: left out, since it is set up for Linux's compilers only" >&2
    exit 0
fi
# crowd FOLDER DEFINE...
crowd() {
    folder=$1
    shift
    "$cmake" -S . -B "$folder" -DLILY_SANITIZE_THREADS=ON -DLILY_TESTS=ON -DCMAKE_BUILD_TYPE=Release "$@" > /dev/null
    "$cmake" --build "$folder" --target core_crowd --parallel 2 > "$folder/log" || { cat "$folder/log" >&2; exit 1; }
    TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 "$folder/core_crowd" tests/checkpoints/tiny "$seconds"
}
# Prompts are compared however they are cut, for which AMX's rounding asks for multiples of 16: without it, as the suite.
if grep -qw amx_tile /proc/cpuinfo; then export LILY_SIMD=avx512vnni; fi
crowd "$build"

if ! command -v clang++-22 > /dev/null; then
    if [ "${LILY_RUNGS:-}" = all ]; then exit 1; fi
    echo "thread sanitizer: the Metal device is left out: no clang++-22" >&2
    exit 0
fi
python=$(dirname "$cmake")/python
kernels=$("$python" -m tools.metal.compile metal/*.metal)
LILY_KERNELS=$("$python" -m tools.metal.apple.build --flag=-fsanitize=thread "$kernels")
# Row by row, so that what is taken in from a fork has the bits that it has in one piece.
export LILY_KERNELS LILY_DEVICE=metal LILY_MATMUL_ROWS=65536 LILY_FLASH_FROM=0 LILY_GDN_SCAN_FROM=0
# The device is a library that finds the sanitizer in the program, with two functions that only Objective-C asks for.
crowd "$build-metal" -DCMAKE_CXX_COMPILER=clang++-22 \
    -DCMAKE_EXE_LINKER_FLAGS="-rdynamic -Wl,-u,__tsan_ignore_thread_begin,-u,__tsan_ignore_thread_end"
