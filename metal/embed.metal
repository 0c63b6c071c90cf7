// embed: looks up the rows of the embedding.
#include "quant.h"

using namespace lily;

// x[t] = E[tokens[t]]. A threadgroup takes one token, a thread every 256th column. A draw that failed left a
// negative token, which somebody reports once the pass that took it is done.
[[kernel]] void embed(constant args::Embed& a          [[buffer(0)]],
                      device const int* tokens         [[buffer(1)]],  // (T)
                      device const uchar* weight       [[buffer(2)]],  // (V, D) as stored
                      device const uchar* scales       [[buffer(3)]],
                      device const uchar* biases       [[buffer(4)]],
                      device float* x                  [[buffer(5)]],  // (T, D)
                      uint t                           [[threadgroup_position_in_grid]],
                      uint thread_index                [[thread_index_in_threadgroup]],
                      uint threads                     [[threads_per_threadgroup]]) {
    const Weights w = {weight, scales, biases};
    const uint columns = a.embedding.columns, row = uint(max(tokens[t], 0));
    for (uint k = thread_index; k < columns; k += threads)
        x[t * columns + k] = element(w, a.embedding, row, k);
}
