// The products of metal/quant.h on an NVIDIA GPU: four rows times a vector on the matrix unit, which takes a
// weight in two thirds of an instruction where a fused multiply-add and what makes its operand take four. A
// decode step is held up by its instructions otherwise: two thirds of an H200's bandwidth stay unused.
//
// mma has 16 rows, so a row is taken in four segments, and 8 columns, so that each segment has two of its own:
// the vector in two halves, x = high + low to 22 bits. A field of 4 or 8 bits is a subnormal half as it lies in
// its word, q 2^-24, and needs no conversion. Only the products of a segment with its own columns count.
//
// Sectors, 32 bytes of a row, go to the segments by turns; in each, a lane has 8 bytes of two segments of one
// row, as mma wants them: row lane / 4 % 4, segments lane / 16 and two more. Weights lie in shared memory by
// then, where they go without passing through registers. Loops are not unrolled: a decode step runs a kernel's
// code once, and it has to be fetched as well. Included inside namespace lily.

constant constexpr uint kSegments = 4;
constant constexpr uint kLanding = 45056;  // bytes of a threadgroup's weights under way: Ahead
constant constexpr uint kVectorBlock = 320;  // bytes of 64 numbers of a vector: args::vector_floats

METAL_FUNC uint halves(float low, float high) {
    uint pair;
    __asm__("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
METAL_FUNC float2 floats(uint pair) { return float2(__builtin_bit_cast(half2, pair)); }
template <class T>
METAL_FUNC T across(T x, uint mask) {
    return __builtin_bit_cast(T, __nvvm_shfl_sync_bfly_i32(MSL_WARP, __builtin_bit_cast(int, x), (int)mask, 31));
}

// A block of 64 numbers: 16 pieces of 8, the high and low half of each behind one another, in the order in
// which a word's fields become pairs, (0, 4) (1, 5) (2, 6) (3, 7), with a sixteenth of the odd columns, whose
// fields stand 4 bits higher. Then the sums of each 32, and what undoes the power of two that all are times
// so that the largest of them nearly fills a half.
METAL_FUNC threadgroup uchar* piece(threadgroup float* x, uint i) {
    return (threadgroup uchar*)x + i / 8 * kVectorBlock + i % 2 * 128 + i / 2 % 4 * 32;
}
METAL_FUNC threadgroup const uchar* piece(threadgroup const float* x, uint i) {
    return (threadgroup const uchar*)x + i / 8 * kVectorBlock + i % 2 * 128 + i / 2 % 4 * 32;
}

constant constexpr ushort kQuads = 2;  // of four numbers that a thread puts at a time
constant constexpr ushort kAheadShared = 1;  // of sixteen SIMD-groups, for which there is room

// Where a thread may keep four numbers until it puts them.
METAL_FUNC threadgroup float4* slot(threadgroup float* x, uint i) {
    return (threadgroup float4*)(piece(x, i / 8) + i % 8 / 4 * 16);
}

// Lanes meet: all of a SIMD-group call it, those past the end with zeros.
METAL_FUNC void put_quads(threadgroup float* x, uint n, uint i, thread const float4* quads) {
    float sum = 0, most = 0;
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
        most = max(most, max(fabs(quads[0][c]), fabs(quads[1][c])));
        sum += quads[0][c] + quads[1][c];
    }
    for (uint mask = 1; mask < 8; mask *= 2) most = max(most, across(most, mask));
    for (uint mask = 1; mask < 4; mask *= 2) sum += across(sum, mask);
    const uint exponent = clamp(__builtin_bit_cast(uint, most) >> 23, 14u, 244u);
    const float scale = __builtin_bit_cast(float, (268 - exponent) << 23);  // to below 2^15
    uint4 high, low;
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
        const float s = c % 2 ? scale * 0.0625f : scale, first = quads[0][c] * s, second = quads[1][c] * s;
        high[c] = halves(first, second);
        const float2 rounded = floats(high[c]);
        low[c] = halves(first - rounded[0], second - rounded[1]);
    }
    if (i >= (n + 63) / 64 * 64) return;
    threadgroup uchar* to = piece(x, i / 8);
    *(threadgroup uint4*)to = high;
    *(threadgroup uint4*)(to + 16) = low;
    threadgroup float* rest = (threadgroup float*)((threadgroup uchar*)x + i / 64 * kVectorBlock + 256);
    if (i % 32 == 0) rest[i / 32 % 2] = sum;
    if (i % 64 == 0) rest[2] = __builtin_bit_cast(float, (exponent + 10) << 23);  // 2^24: of the fields
}

template <class Value>
METAL_FUNC void write_vector(threadgroup float* x, uint n, uint thread_index, uint threads, Value value) {
    const uint whole = (n + 255) / 256 * 256;
#pragma clang loop unroll(disable)
    for (uint i = 8 * thread_index; i < whole; i += 8 * threads) {
        float4 quads[2] = {float4(0.0f), float4(0.0f)};
        if (i < n) {
            quads[0] = value(i);
            quads[1] = value(i + 4);
        }
        put_quads(x, n, i, quads);
    }
}

METAL_FUNC float vector_element(threadgroup const float* x, uint i) {
    threadgroup const uchar* at = piece(x, i / 8) + i % 4 * 4 + i / 4 % 2 * 2;
    const float scaled = float(*(threadgroup const half*)at) + float(*(threadgroup const half*)(at + 16));
    const float factor = *(threadgroup const float*)((threadgroup const uchar*)x + i / 64 * kVectorBlock + 264);
    return scaled * (i % 2 ? 16.0f : 1.0f) * (factor * 0x1p-24f);
}

// A lane's part of the four products: that of its row, if a segment of it is the lane's.
struct Shares {
    float mine = 0;
};

METAL_FUNC uint row_of_lane(ushort lane) { return lane / 4 % 4; }
METAL_FUNC uint segment_of_lane(ushort lane) { return lane % 4; }
METAL_FUNC bool counts(ushort lane) { return lane % 2 == lane / 16; }

METAL_FUNC uint sector_of(thread const Rows& rows, uint column) { return column * rows.bits / 256; }

// N times eight sectors of four rows, on their way to shared memory: 16 bytes a lane and copy, in the order in
// which they lie, where loads in mma's would ask for four lines to get 256 bytes. Where there is a second half,
// it takes what comes next while the first is multiplied.
template <ushort N>
struct Ahead {
    static constant constexpr const uint kHalves = N == 4 ? 1 : 2;
    static constant constexpr const uint kRow = N * 256 + 32, kGroups = N * 16 + 16;  // bytes; apart in banks
    static constant constexpr const uint kBytes = kRowsOfSimd * (kRow + 2 * kGroups);
    uint turn;

    METAL_FUNC threadgroup uchar* words(uint r) const {
        threadgroup uchar* all = (threadgroup uchar*)msl_threadgroup_memory(kLanding, 16, 0);
        return all + (__nvvm_read_ptx_sreg_tid_x() / 32 * kHalves + turn) * kBytes + r * kRow;
    }
    METAL_FUNC threadgroup uchar* scales(uint r) const { return words(0) + kRowsOfSimd * kRow + 2 * r * kGroups; }
    METAL_FUNC threadgroup uchar* biases(uint r) const { return scales(r) + kGroups; }
};

METAL_FUNC void copy_16(threadgroup void* to, device const void* from) {
    __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint)(size_t)to), "l"((size_t)from)
                     : "memory");
}

// Copies from a sector on. Whether there is something to wait for.
template <ushort N>
METAL_FUNC bool load(thread const Rows& rows, uint first, ushort lane, thread Ahead<N>& ahead) {
    if (!rows.packed() || rows.begin == rows.end) return false;
#ifndef LILY_ARITHMETIC_ONLY
    const uint sectors = min(sector_of(rows, rows.end) - first, N * 8u), of_group = rows.bits / 4;
    msl_runtime_simd_barrier(0, 0);  // nobody reads what was there
#pragma unroll
    for (uint r = 0; r < kRowsOfSimd; ++r) {
        device const uchar* from = rows.row(r).weight + (first * 32 + lane * 16);
        threadgroup uchar* to = ahead.words(r) + lane * 16;
#pragma unroll
        for (uint i = 0; i < N * 8; i += 16)
            if (i + lane / 2 < sectors) copy_16(to + i * 32, from + i * 32);
    }
    // of each row 8 groups' scales or biases a lane
    const uint groups = sectors / of_group, begin = lane % 4 * 8;
    const Weights row = rows.row(lane / 8);
    device const uchar* from = (lane / 4 % 2 ? row.biases : row.scales) + (first / of_group + begin) * 2;
    threadgroup uchar* to = (lane / 4 % 2 ? ahead.biases(lane / 8) : ahead.scales(lane / 8)) + begin * 2;
    if (begin + 8 <= groups && (size_t)from % 16 == 0)
        copy_16(to, from);
    else
#pragma clang loop unroll(disable)
        for (uint i = begin; i < min(groups, begin + 8); ++i)
            ((threadgroup ushort*)to)[i - begin] = ((device const ushort*)from)[i - begin];
    __asm__ volatile("cp.async.commit_group;" ::: "memory");
#endif
    return true;
}

template <ushort N>
METAL_FUNC Ahead<N> load(thread const Rows& rows, ushort lane) {
    Ahead<N> ahead = {0};
    load(rows, sector_of(rows, rows.begin), lane, ahead);
    return ahead;
}

// c += the four fields of each of two words, a pair of them at each end, times b.
METAL_FUNC void multiply_halves(thread float* c, uint first, uint second, uint first_rest, uint second_rest,
                                uint b, uint b_rest) {
    __asm__(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(first), "r"(second), "r"(first_rest), "r"(second_rest), "r"(b), "r"(b_rest));
}

// A sector's products with its piece of the vector, of the segment in column lane / 8: 64 numbers of 4 bits.
// In two sums, since a product waits for the one before it in its sum.
template <ushort kBits>
METAL_FUNC void add_sector(thread float (*c)[4], uint2 first, uint2 second, threadgroup const float* x,
                           uint sector, ushort lane) {
    const uint half_of = lane / 4 % 2 * 16;
    if (kBits == 4) {
#pragma unroll
        for (uint i = 0; i < 2; i += twin::step(1, 2)) {
            const uint4 b =
                *(threadgroup const uint4*)(piece(x, sector * 8 + 2 * (lane % 4) + i) + half_of);
            const uint u = first[i], v = second[i];
            multiply_halves(c[i], u & 0x000f000f, v & 0x000f000f, u & 0x00f000f0, v & 0x00f000f0, b[0], b[1]);
            if (twin::step(1, 2) == 1)
                multiply_halves(c[i], u >> 8 & 0x000f000f, v >> 8 & 0x000f000f, u >> 8 & 0x00f000f0,
                                v >> 8 & 0x00f000f0, b[2], b[3]);
        }
    } else {
        const uint4 b = *(threadgroup const uint4*)(piece(x, sector * 4 + lane % 4) + half_of);
#pragma unroll
        for (uint i = 0; i < 2; i += twin::step(1, 2)) {
            const uint pick = i == 0 ? 0x5410 : 0x7632;  // columns 4 i and 4 i + 2 of the piece
            const half2 odd = __builtin_bit_cast(half2, __nvvm_prmt(b[1], b[3], pick)) * half2(16.0h);
            multiply_halves(c[i], first[i] & 0x00ff00ff, second[i] & 0x00ff00ff, first[i] >> 8 & 0x00ff00ff,
                            second[i] >> 8 & 0x00ff00ff, __nvvm_prmt(b[0], b[2], pick),
                            __builtin_bit_cast(uint, odd));
        }
    }
}

template <ushort kBits, class T, ushort N>
METAL_FUNC void add_packed(thread const Rows& rows, thread const Rows& then, thread Ahead<N>& ahead,
                           threadgroup const float* x, ushort lane, float factor, thread Shares& shares) {
    const uint end = sector_of(rows, rows.end), segment = segment_of_lane(lane), of_group = kBits / 4;
    const uint half_of = lane / 16, r = row_of_lane(lane);
    for (uint first = sector_of(rows, rows.begin); first < end; first += N * 8) {
        bool waits = false;
        Ahead<N> next = {1 - ahead.turn};
        if (Ahead<N>::kHalves == 2)
            waits = first + N * 8 < end ? load(rows, first + N * 8, lane, next)
                                        : load(then, sector_of(then, then.begin), lane, next);
        if (waits)
            __asm__ volatile("cp.async.wait_group 1;" ::: "memory");
        else
            __asm__ volatile("cp.async.wait_group 0;" ::: "memory");
        msl_runtime_simd_barrier(0, 0);  // what other lanes copied
        const uint sectors = min(end - first, N * 8u);
#pragma clang loop unroll(disable)
        for (uint s = 0; s < sectors; s += kSegments) {
            const uint last = sectors - 1, own = min(s + segment, last);
#ifdef LILY_ARITHMETIC_ONLY
            const Weights row = rows.row(r);
            const uint2 near = twin::load((device const uint2*)row.weight, first * 4 + s),
                        far = twin::load((device const uint2*)row.weight, first * 4 + s + 1);
            const ushort scale = twin::load((device const ushort*)row.scales, own / of_group),
                         bias = twin::load((device const ushort*)row.biases, own / of_group);
#else
            threadgroup const uint2* words = (threadgroup const uint2*)ahead.words(r) + lane % 4;
            const uint2 near = words[min(s + half_of, last) * 4], far = words[min(s + half_of + 2, last) * 4];
            const ushort scale = ((threadgroup const ushort*)ahead.scales(r))[own / of_group],
                         bias = ((threadgroup const ushort*)ahead.biases(r))[own / of_group];
#endif
            float c[2][4] = {};
            add_sector<kBits>(c, near, far, x, first + min(s + lane / 8, last), lane);
            const float dot = segment < 2 ? c[0][0] + c[0][1] + (c[1][0] + c[1][1])
                                          : c[0][2] + c[0][3] + (c[1][2] + c[1][3]);
            threadgroup const float* rest =
                (threadgroup const float*)((threadgroup const uchar*)x +
                                           (first + own) / of_group * kVectorBlock + 256);
            const float sum = kBits == 4 ? rest[0] + rest[1] : rest[(first + own) % 2];
            const float share = value<T>(scale) * rest[2] * dot + value<T>(bias) * sum;
            if (counts(lane) && s + segment <= last) shares.mine += factor * share;
        }
        if (Ahead<N>::kHalves == 2)
            ahead = next;
        else if (first + N * 8 < end)
            load(rows, first + N * 8, lane, ahead);
    }
}

METAL_FUNC void add_numbers(thread const Rows& rows, threadgroup const float* x, ushort lane, float factor,
                            thread Shares& shares) {
    const args::Matrix row = {1, rows.end, rows.bits, rows.type};
    for (ushort r = 0; r < kRowsOfSimd; ++r) {
        float sum = 0;
        for (uint k = rows.begin + lane; k < rows.end; k += kSimd)
            sum += element(rows.row(r), row, 0, k) * vector_element(x, k) * factor;
        sum = simd_sum(sum);
        if (lane == 4 * r) shares.mine += sum;
    }
}

METAL_FUNC void sums(thread const Shares& shares, ushort lane, thread float* y) {
    float sum = shares.mine;
    sum += across(sum, 1);
    sum += across(sum, 2);
    sum += across(sum, 16);
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = msl_shuffle(sum, 4 * r);
}
