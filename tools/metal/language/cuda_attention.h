// What attn_mix_split multiplies on an NVIDIA GPU, for keys and values in bfloat and heads of 256: the matrix
// unit takes a block's scores, and the sums of its values, of eight query heads at once. mma has 16 rows:
// queries, and shares, are sums of two bfloats, to 16 bits, the high ones in the first eight rows and the low
// ones in the others. The order of what is summed is free, so a lane multiplies what a load of 16 or 8 bytes
// gave it. A block is loaded while the one before it is worked on. Included inside namespace lily.

// Two numbers' high parts in one word, and what is left of them in another.
METAL_FUNC uint2 two_bfloats(float low, float high) {
    const uint top = msl_bfloats(low, high);
    return {top, msl_bfloats(low - __builtin_bit_cast(float, top << 16),
                         high - __builtin_bit_cast(float, top & 0xffff0000u))};
}

constant constexpr ushort kWideHead = 256;

// A head's eight dimensions of a lane: 16 bytes of high and 16 of low parts, in odd heads the other way
// round, which keeps lanes that read two heads at once out of each other's banks.
METAL_FUNC threadgroup uint4* query_piece(threadgroup float* queries, ushort head, ushort piece, ushort low) {
    return (threadgroup uint4*)queries + (head * kSimd + piece) * 2 + (low ^ (head & 1));
}

template <>
struct SplitQueries<bfloat, 8, 8, true> {
    METAL_FUNC static void put(threadgroup float* queries, ushort head, ushort lane, thread const float* x) {
        uint4 high, low;
#pragma unroll
        for (ushort i = 0; i < 4; ++i) {
            const uint2 two = two_bfloats(x[2 * i], x[2 * i + 1]);
            high[i] = two[0];
            low[i] = two[1];
        }
        *query_piece(queries, head, lane, 0) = high;
        *query_piece(queries, head, lane, 1) = low;
    }
};

template <>
struct SplitScores<bfloat, 8, 8, true> {
    uint4 pieces[8];  // of row lane / 4, every fourth

    METAL_FUNC void load(thread const SplitBlock<bfloat>& block, ushort simd, ushort lane) {
#pragma unroll
        for (ushort j = 0; j < 8; ++j) pieces[j] = uint4(0);
        if (block.placed == 0) return;
        const uint row = min(uint(simd * kSplitKeys + lane / kQuarters), block.placed - 1u);
        device const uint4* from = (device const uint4*)(block.keys + row * kWideHead) + lane % kQuarters;
#pragma unroll
        for (ushort j = 0; j < 8; ++j) pieces[j] = from[j * kQuarters];
    }
    METAL_FUNC void write(thread const SplitBlock<bfloat>& block, thread const OwnRow<bfloat>& own,
                          threadgroup float* queries, threadgroup float* scores, ushort simd, ushort lane) {
        const ushort head = lane / 4, quarter = lane % kQuarters;
        if (block.own == simd * kSplitKeys + lane / kQuarters)
#pragma unroll
            for (ushort j = 0; j < 8; ++j)
                pieces[j] = ((threadgroup const uint4*)own.numbers)[j * kQuarters + quarter];
        float c[2][4] = {};
#pragma unroll
        for (ushort j = 0; j < 8; ++j) {
            const uint4 high = *query_piece(queries, head, j * kQuarters + quarter, 0);
            const uint4 low = *query_piece(queries, head, j * kQuarters + quarter, 1);
            // high and low of the first pair of columns, then of the second
            msl_multiply_bfloats_16(c[0], high[0], low[0], high[1], low[1], pieces[j][0], pieces[j][1]);
            msl_multiply_bfloats_16(c[1], high[2], low[2], high[3], low[3], pieces[j][2], pieces[j][3]);
        }
        *(threadgroup float2*)(scores + head * kScoreStride + simd * kSplitKeys + 2 * quarter) = {
            c[0][0] + c[1][0] + (c[0][2] + c[1][2]), c[0][1] + c[1][1] + (c[0][3] + c[1][3])};
    }
};

// Of four rows 8 bytes of high and 8 of low parts.
template <>
struct SplitShares<bfloat, 8, 8, true> {
    METAL_FUNC static void put(threadgroup float* scores, ushort lane, float2 shares) {
        const uint2 two = two_bfloats(shares[0], shares[1]);
        threadgroup uint* to = (threadgroup uint*)scores + lane / 2 * 4 + lane % 2;
        to[0] = two[0];
        to[2] = two[1];
    }
};

template <>
struct SplitSums<bfloat, 8, 8, true> {
    float c[4][4];       // of head lane / 4, high and low; column n of tile j is dimension 4 n + j
    uint2 pieces[4][4];  // of rows 16 m + 4 (lane % 4) + i, dimensions 4 (lane / 4) to + 3

    METAL_FUNC void clear() {
#pragma unroll
        for (ushort j = 0; j < 4; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) c[j][i] = 0;
    }
    METAL_FUNC void load(thread const SplitBlock<bfloat>& block, ushort simd, ushort lane) {
        const bool any = block.placed != 0;
        const uint last = any ? block.placed - 1u : 0u;
        device const bfloat* from = block.keys + block.plane + (simd * kSimd + lane / 4 * 4);
#pragma unroll
        for (ushort m = 0; m < 4; ++m)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) {
                const uint row = min(uint(16 * m + 4 * (lane % 4) + i), last);
                pieces[m][i] = any ? *(device const uint2*)(from + row * kWideHead) : uint2(0);
            }
    }
    METAL_FUNC void add(thread const SplitBlock<bfloat>& block, thread const OwnRow<bfloat>& own,
                        threadgroup const float* shares, threadgroup const float* shrinks, ushort simd,
                        ushort lane) {
        if (block.own != kSplitBlock)
#pragma unroll
            for (ushort m = 0; m < 4; ++m)
#pragma unroll
                for (ushort i = 0; i < 4; ++i)
                    if (16 * m + 4 * (lane % 4) + i == block.own)
                        pieces[m][i] = *(threadgroup const uint2*)(own.numbers + kWideHead + simd * kSimd +
                                                                   lane / 4 * 4);
        const float shrink = shrinks[lane / 4];
#pragma unroll
        for (ushort j = 0; j < 4; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) c[j][i] *= shrink;
#pragma unroll
        for (ushort m = 0; m < 4; ++m) {
            const uint4 a =
                *(threadgroup const uint4*)(shares + lane / 4 * kScoreStride + (4 * m + lane % 4) * 4);
#pragma unroll
            for (ushort j = 0; j < 4; ++j) {
                const uint pick = j % 2 == 0 ? 0x5410 : 0x7632;
                msl_multiply_bfloats_16(c[j], a[0], a[2], a[1], a[3],
                                        __nvvm_prmt(pieces[m][0][j / 2], pieces[m][1][j / 2], pick),
                                        __nvvm_prmt(pieces[m][2][j / 2], pieces[m][3][j / 2], pick));
            }
        }
    }
    METAL_FUNC void sums(ushort, thread float* out) {
#pragma unroll
        for (ushort j = 0; j < 4; ++j) {
            out[j] = c[j][0] + c[j][2];
            out[4 + j] = c[j][1] + c[j][3];
        }
    }
};
