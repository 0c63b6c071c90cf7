// The model, once: prefill and decode are the same function and differ in T.
#pragma once

#include "ops.h"

namespace lily {

// Takes the batch's tokens in: every segment's state advances by its length. Afterwards the activation x
// holds the residual stream after the last layer.
void forward(const Weights& weights, Ops& ops, const Batch& batch);

}  // namespace lily
