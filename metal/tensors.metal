// Every kernel that multiplies in tiles once more, by Metal 4's tensor operations: for GPUs with a matrix
// unit. CUDA's tiles are of one kind, so there it is empty.
#ifndef LILY_TILES
#define LILY_TENSOR

#include "flash.metal"
#include "grouped.metal"
#include "matmul.metal"
#endif
