// 8 x 8 fragments of matrices, which a SIMD-group holds together. Metal does not say which lane holds
// which element, so fragments are loaded, multiplied and stored whole; a diagonal one scales the rows of
// another.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

namespace lily {

using namespace metal;

constant constexpr ushort kTile = 8;                // rows and columns of a fragment
constant constexpr ushort kSquare = kTile * kTile;  // its elements

template <typename T>
using Fragment = simdgroup_matrix<T, kTile, kTile>;

METAL_FUNC Fragment<float> zeros() { return make_filled_simdgroup_matrix<float, kTile, kTile>(0.0f); }

}  // namespace lily
