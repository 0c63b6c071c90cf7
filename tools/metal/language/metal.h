// The whole of Metal's language and library, in the order in which the parts need each other.
#pragma once
// clang-format off
#include "types.h"
#include "../runtime/context.h"
#include "runtime.h"
#include "math.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "tensor.h"
#include "atomic.h"
#include "launch.h"
#if MSL_UNDOCUMENTED
#include "undocumented.h"
#endif
