// The whole of Metal's language and library, in the order in which the parts need each other.
#pragma once
// clang-format off
#include "types.h"
#if MSL_CUDA
#include "cuda.h"
#else
#include "../runtime/context.h"
#include "runtime.h"
#endif
#include "math.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#if !MSL_CUDA
#include "tensor.h"
#endif
#include "atomic.h"
#include "launch.h"
#if MSL_UNDOCUMENTED
#include "undocumented.h"
#endif
