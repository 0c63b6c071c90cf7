// sample: draws the token that follows, bit for bit as reference.py states it. Past the scaled logits all
// numbers are integers, and the random ones a function of (seed, position, token), so that neither the order
// in which threads come nor what they leave out shows in the token.
//
// The best key of every 32 logits, which the head or sample_adjust left, says what can be left out: of
// 248,320 logits a threadgroup looks at 7,760 such keys, and then into the few blocks that matter.
#include "fixed.h"
#include "logits.h"
#include "quant.h"

#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

using namespace lily;

namespace {

constant constexpr ushort kThreads = 512, kSimds = kThreads / kSimd;  // of sample: csrc/gpu/sample.cpp
constant constexpr ushort kBins = 256;
constant constexpr uint kAnyId = 0xffffffff;

// (x - top) / temperature in 2^-24, not below -64.
struct Scale {
    float top, factor;

    METAL_FUNC int operator()(uint key) const {
        return int(max((value_of(key) - top) * factor, -1073741824.0f));
    }
};

// Tokens that may be drawn: those no worse than one of them.
struct Limit {
    uint key, id;

    METAL_FUNC bool takes(uint other, uint other_id) const {
        return other > key || (other == key && other_id <= id);
    }
};

// Logits by blocks of 32: a SIMD-group asks the visitor about 32 blocks at a time, a lane each, and shows it
// those that it wants, again a lane each.
struct Logits {
    device const float* x;     // (V)
    device const uint* best;   // (blocks)
    uint vocab, blocks;

    template <class Visit>
    METAL_FUNC void each(thread Visit& visit, ushort simd, ushort lane) const {
        for (uint first = simd * kSimd; first < blocks; first += kThreads) {
            const uint block = first + lane;
            const simd_vote vote = simd_ballot(block < blocks && visit.wants(best[block]));
            for (uint wanted = uint(simd_vote::vote_t(vote)); wanted != 0; wanted &= wanted - 1) {
                const uint id = (first + ctz(wanted)) * args::kLogitBlock + lane;
                if (id < vocab) visit(id, key_of(x[id]));
            }
        }
    }
};

// The best keys themselves.
struct Bests {
    device const uint* best;  // (blocks)
    uint blocks;

    template <class Visit>
    METAL_FUNC void each(thread Visit& visit, ushort simd, ushort lane) const {
        for (uint block = simd * kSimd + lane; block < blocks; block += kThreads) visit(block, best[block]);
    }
};

// What a threadgroup shares while it selects.
struct Shared {
    threadgroup atomic_uint *low, *high;  // (kBins): sums of 64 bits
    threadgroup ulong* sums;              // (3)
    threadgroup uint* digit;              // (1)

    METAL_FUNC void add(uint bin, ulong weight) const {
        const uint least = uint(weight);
        const uint before = atomic_fetch_add_explicit(low + bin, least, memory_order_relaxed);
        const uint rest = uint(weight >> 32) + (before + least < before);
        if (rest != 0) atomic_fetch_add_explicit(high + bin, rest, memory_order_relaxed);
    }
    METAL_FUNC ulong sum(uint bin) const {
        return ulong(atomic_load_explicit(high + bin, memory_order_relaxed)) << 32 |
               atomic_load_explicit(low + bin, memory_order_relaxed);
    }
};

// What an element weighs: one, the mass of its token, or one if it has the limit's key; then ids are sorted
// instead of keys, the lowest first.
enum Kind { kCount, kMass, kIds };

// Adds the weights of elements that begin with a prefix to the bins of their next eight bits.
struct Weigh {
    Kind kind;
    Limit limit;
    Scale scaled;
    Shared shared;
    uint prefix;
    ushort shift;

    METAL_FUNC bool wants(uint best) const {
        return best >= limit.key && (kind != kMass || scaled(best) >= kNoMass);
    }
    METAL_FUNC void operator()(uint id, uint key) const {
        if (!limit.takes(key, id) || (kind == kIds && key != limit.key)) return;
        const uint sorted = kind == kIds ? ~id : key;
        if (shift < 24 && (sorted ^ prefix) >> (shift + 8) != 0) return;
        shared.add((sorted >> shift) % kBins, kind == kMass ? mass(scaled(key)) : 1);
    }
};

// Sums over a SIMD-group of numbers that stay below 2^64 together, in parts of 22 bits: Metal's own take 32.
METAL_FUNC ulong sum_before(ulong x) {
    constexpr uint kPart = (1u << 22) - 1;
    return ulong(simd_prefix_exclusive_sum(uint(x) & kPart)) +
           (ulong(simd_prefix_exclusive_sum(uint(x >> 22) & kPart)) << 22) +
           (ulong(simd_prefix_exclusive_sum(uint(x >> 44))) << 44);
}
METAL_FUNC ulong sum_of_all(ulong x) {
    constexpr uint kPart = (1u << 22) - 1;
    return ulong(simd_sum(uint(x) & kPart)) + (ulong(simd_sum(uint(x >> 22) & kPart)) << 22) +
           (ulong(simd_sum(uint(x >> 44))) << 44);
}

// How much the selected element and those before it weigh: a weight, or a part of all weights.
struct Wanted {
    ulong weight;
    uint part;  // in 2^-32; used where weight is 0
};

struct Selected {
    uint key;
    ulong before, equal;  // the weights of larger keys, and of those that have this one
    ulong wanted;
};

// Goes from the largest key down to where the weights reach what is wanted: four rounds of eight bits, each
// of which sums the weights by digit and picks one. By a whole threadgroup.
template <class From>
METAL_FUNC Selected selected(From from, Weigh weigh, Wanted wanted, ushort simd, ushort lane) {
    const Shared shared = weigh.shared;
    constexpr ushort kBinsOfLane = kBins / kSimd;
    Selected found = {0, 0, 0, wanted.weight};
    for (short shift = 24; shift >= 0; shift -= 8) {
        for (ushort bin = simd * kSimd + lane; bin < kBins; bin += kThreads) {
            atomic_store_explicit(shared.low + bin, 0, memory_order_relaxed);
            atomic_store_explicit(shared.high + bin, 0, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        weigh.prefix = found.key;
        weigh.shift = shift;
        from.each(weigh, simd, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == 0) {  // a lane takes eight bins, lane 0 the largest digits
            ushort bin = kBins - 1 - kBinsOfLane * lane;
            ulong mine = 0;
            for (ushort i = 0; i < kBinsOfLane; ++i) mine += shared.sum(bin - i);
            if (found.wanted == 0) found.wanted = max(part_of(sum_of_all(mine), wanted.part), 1ul);
            ulong before = found.before + sum_before(mine);
            if (before < found.wanted && found.wanted <= before + mine) {
                ulong equal = shared.sum(bin);
                while (before + equal < found.wanted) {
                    before += equal;
                    equal = shared.sum(--bin);
                }
                shared.digit[0] = bin;
                shared.sums[0] = before;
                shared.sums[1] = equal;
                shared.sums[2] = found.wanted;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        found.key |= shared.digit[0] << shift;
        found.before = shared.sums[0];
        found.equal = shared.sums[1];
        found.wanted = shared.sums[2];
    }
    return found;
}

// The last of the best tokens within a limit that together weigh what is wanted. Of equal ones the lower ids
// come first.
METAL_FUNC Limit last_of(Logits logits, Weigh weigh, Wanted wanted, ushort simd, ushort lane) {
    const Selected found = selected(logits, weigh, wanted, simd, lane);
    const ulong each = weigh.kind == kMass ? mass(weigh.scaled(found.key)) : 1;
    const Wanted needed = {(found.wanted - found.before + each - 1) / each, 0};
    Limit limit = {found.key, found.key == weigh.limit.key ? weigh.limit.id : kAnyId};
    if (needed.weight * each < found.equal) {
        weigh.kind = kIds;
        weigh.limit = limit;
        limit.id = ~selected(logits, weigh, needed, simd, lane).key;
    }
    return limit;
}

// The random number of a token. Four neighbours share a block of Philox.
struct Noise {
    ulong position, seed;

    METAL_FUNC int operator()(uint id) const {
        return int(gumbel(philox(id / 4, position, seed).word[id % 4]));
    }
};

// Draws: the highest of scaled logit plus noise wins, of equals the lower id.
struct Contest {
    Limit limit;
    Scale scaled;
    Noise noise;
    ulong least_mass;
    int beaten;  // a score that somebody has
    int score;
    uint id;

    METAL_FUNC bool may_win(int z) const { return z + int(kLargestGumbel) >= beaten; }
    METAL_FUNC bool wants(uint best) const { return best >= limit.key && may_win(scaled(best)); }
    METAL_FUNC void operator()(uint other, uint key) {
        const int z = scaled(key);
        if (!limit.takes(key, other) || !may_win(z) || (least_mass > 0 && mass(z) < least_mass)) return;
        const int drawn = z + noise(other);
        if (drawn > score || (drawn == score && other < id)) {
            score = drawn;
            id = other;
        }
    }
};

struct Best {
    uint key, id;
};

// The largest key of a threadgroup's, and the lowest id that has it.
METAL_FUNC Best best_of(Best mine, threadgroup uint* keys, threadgroup uint* ids, ushort simd, ushort lane) {
    const uint key = simd_max(mine.key), id = simd_min(mine.key == key ? mine.id : kAnyId);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what was there has been read
    if (lane == 0) {
        keys[simd] = key;
        ids[simd] = id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Best best = {keys[0], ids[0]};
    for (ushort i = 1; i < kSimds; ++i)
        if (keys[i] > best.key || (keys[i] == best.key && ids[i] < best.id)) {
            best.key = keys[i];
            best.id = ids[i];
        }
    return best;
}

// Where the token goes, and its row of the embedding.
struct Output {
    device int* token;
    Weights embedding;
    device float* row;
    ushort thread_index;

    METAL_FUNC void write(constant args::Sample& p, uint drawn) const {
        if (thread_index == 0) token[0] = int(drawn);
        if (!p.embeds) return;
        for (uint k = thread_index; k < p.embedding.columns; k += kThreads)
            row[k] = element(embedding, p.embedding, drawn, k);
    }
};

}  // namespace

// x = logits after mask, bias and penalties, in that order, -infinity for what is excluded; and the best of
// each block of 32. A SIMD-group takes a block, a lane a logit, which looks for its edit in the sorted list.
// Without edits and mask it leaves the best keys only.
[[kernel]] void sample_adjust(constant args::Adjust& p         [[buffer(0)]],
                              device const float* logits       [[buffer(1)]],  // (V)
                              device const args::Edit* edits   [[buffer(2)]],  // (p.edits), by token
                              device const uint* allowed       [[buffer(3)]],  // (V / 32), a bit a token
                              device float* x                  [[buffer(4)]],  // (V)
                              device uint* best                [[buffer(5)]],  // (blocks)
                              uint group                       [[threadgroup_position_in_grid]],
                              ushort simd                      [[simdgroup_index_in_threadgroup]],
                              ushort simds                     [[simdgroups_per_threadgroup]],
                              ushort lane                      [[thread_index_in_simdgroup]]) {
    const uint block = group * simds + simd, id = block * args::kLogitBlock + lane;
    if (block * args::kLogitBlock >= p.vocab) return;
    uint key = 0;
    if (id < p.vocab) {
        float value = logits[id];
        key = key_of_finite(value);
        if (p.masked && (allowed[block] >> lane & 1) == 0) value = -INFINITY;
        uint first = 0, end = p.edits;
        while (first < end) {
            const uint middle = (first + end) / 2;
            if (edits[middle].token < id) {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        if (first < p.edits && edits[first].token == id) {
            const args::Edit edit = edits[first];
            value += edit.bias;
            if (edit.penalised) {
                value *= value < 0 ? p.repetition : p.inverse;
                value -= edit.penalty;
            }
            value = min(value, FLT_MAX);
        }
        if (p.masked || p.edits > 0) {
            x[id] = value;
            if (key != kNotFinite) key = key_of(value);
        }
    }
    key = simd_max(key);
    if (lane == 0) best[block] = key;
}

// token = the one drawn, kNotFiniteToken if a logit is not finite, kNoToken if none is left. And
// row = E[token], for the next step. One threadgroup.
[[kernel, max_total_threads_per_threadgroup(512)]] void sample(
    constant args::Sample& p    [[buffer(0)]],
    device const float* x       [[buffer(1)]],  // (V), adjusted
    device const uint* best     [[buffer(2)]],  // (blocks)
    device int* token           [[buffer(3)]],  // (1)
    device const uchar* weight  [[buffer(4)]],  // the embedding (V, D) as stored
    device const uchar* scales  [[buffer(5)]],
    device const uchar* biases  [[buffer(6)]],
    device float* row           [[buffer(7)]],  // (D)
    ushort thread_index         [[thread_index_in_threadgroup]],
    ushort simd                 [[simdgroup_index_in_threadgroup]],
    ushort lane                 [[thread_index_in_simdgroup]]) {
    threadgroup atomic_uint low[kBins], high[kBins];
    threadgroup ulong sums[3];
    threadgroup uint digit[1], keys[kSimds], ids[kSimds];

    const Weights embedding = {weight, scales, biases};
    const Output out = {token, embedding, row, thread_index};
    Best block = {0, kAnyId};
    for (uint i = thread_index; i < p.blocks; i += kThreads)
        if (best[i] > block.key) {
            block.key = best[i];
            block.id = i;
        }
    block = best_of(block, keys, ids, simd, lane);
    if (block.key == kNotFinite || block.key == kExcluded) {
        if (thread_index == 0) token[0] = block.key == kNotFinite ? args::kNotFiniteToken : args::kNoToken;
        return;
    }
    const uint id = block.id * args::kLogitBlock + lane;
    const bool is_top = id < p.vocab && key_of(x[id]) == block.key;
    const uint top = simd_min(is_top ? id : kAnyId);
    if (p.factor == 0) return out.write(p, top);  // greedy

    const Logits logits = {x, best, p.vocab, p.blocks};
    const Shared shared = {low, high, sums, digit};
    const Scale scaled = {value_of(block.key), p.factor};
    Weigh weigh = {kCount, {0, kAnyId}, scaled, shared, 0, 0};
    if (p.top_k > 0) {
        // The k-th best block's best is at least k tokens' bar, so what is below it is no candidate.
        const Wanted wanted = {p.top_k, 0};
        const Bests bests = {best, p.blocks};
        if (p.top_k <= p.blocks) weigh.limit.key = selected(bests, weigh, wanted, simd, lane).key;
        weigh.limit = last_of(logits, weigh, wanted, simd, lane);
    }
    if (p.has_part) {
        const Wanted wanted = {0, p.part};
        weigh.kind = kMass;
        weigh.limit = last_of(logits, weigh, wanted, simd, lane);
    }
    const Noise noise = {ulong(p.position[1]) << 32 | p.position[0], ulong(p.seed[1]) << 32 | p.seed[0]};
    Contest contest = {weigh.limit, scaled, noise, ulong(p.least_mass[1]) << 32 | p.least_mass[0],
                       noise(top), noise(top), top};
    logits.each(contest, simd, lane);
    const Best mine = {uint(contest.score) ^ 0x80000000, contest.id};
    out.write(p, best_of(mine, keys, ids, simd, lane).id);
}
