#include "forward.h"

namespace lily {

void forward(const Weights& weights, Ops& ops, const Batch& batch, const Interrupt& interrupt) {
    ops.begin(batch);
    ops.embed(weights.embedding, batch);
    for (const LayerWeights& layer : weights.layers) {
        if (interrupt) interrupt();
        if (layer.attention) {
            ops.attn_in(layer, batch);
            ops.attn_mix(layer, batch);
            ops.attn_out(layer, batch);
        } else {
            ops.gdn_in(layer, batch);
            ops.gdn_mix(layer, batch);
            ops.gdn_out(layer, batch);
        }
        ops.moe_route(layer, batch);
        ops.moe_up(layer, batch);
        ops.moe_down(layer, batch);
    }
    for (const Segment& segment : batch.segments) segment.state->advance(segment.length);
}

}  // namespace lily
