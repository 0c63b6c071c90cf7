// The model, once: prefill and decode are the same function and differ in T.
#pragma once

#include <functional>

#include "ops.h"

namespace lily {

// Called before every layer. An exception thrown from it ends the pass, and leaves behind states that took
// the batch in halfway.
using Interrupt = std::function<void()>;

// Takes the batch's tokens in: every segment's state advances by its length. Afterwards the activation x
// holds the residual stream after the last layer.
void forward(const Weights& weights, Ops& ops, const Batch& batch, const Interrupt& interrupt = nullptr);

}  // namespace lily
