// The loop of metal/matmul.h on an NVIDIA GPU: everything that is multiplied was asked for a step before.
//
// A warp has all rows of the block and a quarter of its outputs, so no weight is dequantised twice. Rows of
// the left matrix land in shared memory by cp.async; weights go from device memory to registers. They are
// mma's first operand, whose four registers arithmetic can leave side by side, and rows of the left matrix
// the second, which lies side by side in a row. The order of the products in a sum of 64 is free, which
// spares both a rearrangement: lane t of four takes columns 16 t to 16 t + 15, as they follow each other in a
// row of packed words and in one of the left matrix. Included inside namespace lily.

using Block16 = Block<1, 1, 4>;
using Block32 = Block<2, 1, 4>;
using Block128 = Block<8, 1, 4>;  // 128 accumulators a lane

constant constexpr uint kLine = 128;  // bytes of a row that land in a step: all banks

// A lane's share of the weights in a group: 16 numbers, as pairs, of each eight outputs.
template <class B>
struct Pairs {
    static constant constexpr const ushort kCount = 2 * B::kColumnTiles;
    uint pair[kCount][8];
};

// The slab's row whose numbers a lane has for its SIMD-group's i-th eight outputs: neighbours are in two of
// them, so that a lane has the sums of both.
template <class B, class Matrices>
METAL_FUNC Place place_of(Matrices w, ushort i, ushort simd, ushort lane) {
    const ushort tile = i / 2, row = Outputs<B>::column(simd, tile) + lane / 4 * 2 + i % 2;
    return w.place(row, tile >= B::kColumnTiles / 2);
}

METAL_FUNC uint multiply_add(uint a, uint b, uint c) {  // of two bfloats each
    uint sum;
    __asm__("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Weights of 4 or 8 bits with bfloat scales.
template <class B, ushort kBits>
struct PackedWeights {
    static constant constexpr const ushort kCount = Pairs<B>::kCount, kWords = kBits / 2;
    uint at[kCount];  // the first of a lane's numbers
    uint words[kCount][kWords];
    ushort scales[kCount], biases[kCount];

    template <class Matrices>
    METAL_FUNC void begin(Matrices w, ushort simd, ushort lane) {
#pragma unroll
        for (ushort i = 0; i < kCount; ++i) {
            const Place from = place_of<B>(w, i, simd, lane);
            at[i] = from.row * from.m.columns + lane % 4 * 16;
        }
    }
    // Asks for what the group at column k takes.
    template <class Matrices>
    METAL_FUNC void load(Matrices w, uint k, ushort, ushort) {
#pragma unroll
        for (ushort i = 0; i < kCount; ++i) {
            const Weights from = w.place(0, i / 2 >= B::kColumnTiles / 2).w;
#pragma unroll
            for (ushort j = 0; j < kWords; j += 2) {
                device const uint2* two =
                    (device const uint2*)from.weight + ((at[i] + k) / 16 * (kWords / 2) + j / 2);
                __asm__("ld.global.nc.L2::256B.v2.u32 {%0,%1}, [%2];"  // the next groups come along
                        : "=r"(words[i][j]), "=r"(words[i][j + 1])
                        : "l"((size_t)two));
            }
            scales[i] = ((device const ushort*)from.scales)[(at[i] + k) / kGroup];
            biases[i] = ((device const ushort*)from.biases)[(at[i] + k) / kGroup];
        }
    }
    METAL_FUNC void dequantise(thread Pairs<B>& out) const {
#pragma unroll
        for (ushort i = 0; i < kCount; ++i)
#pragma unroll
            for (ushort j = 0; j < 8; ++j) out.pair[i][j] = kBits == 4 ? of_byte(i, j) : of_bytes(i, j);
    }
    // A byte's two fields become 128 + q and 128 + 8 q by the exponent put over them, then q and 8 q,
    // exactly; scale and bias take one rounding.
    METAL_FUNC uint of_byte(ushort i, ushort j) const {
        const uint word = words[i][j / 4 % kWords], twice = scales[i] * 0x10001u;
        const uint scale = multiply_add(twice, 0x3e003f80, 0x80008000);  // times 1 and 1/8, plus -0
        const uint pair = (__nvvm_prmt(word, word >> 1, 0x4400 + j % 4 * 0x1111) & 0x0078000f) | 0x43004300;
        return multiply_add(multiply_add(pair, 0x3f803f80, 0xc300c300), scale, biases[i] * 0x10001u);
    }
    METAL_FUNC uint of_bytes(ushort i, ushort j) const {
        const uint word = words[i][j / 2 % kWords] >> j % 2 * 16;
        const float scale = value<bfloat>(scales[i]), bias = value<bfloat>(biases[i]);
        return msl_bfloats(fma(scale, field(word, 0xff), bias), fma(scale, field(word >> 8, 0xff), bias));
    }
};

// Weights in any other form, which nothing asks for ahead.
template <class B, class Matrices>
struct AnyWeights {
    Matrices w;
    uint k;
    ushort simd, lane;

    METAL_FUNC void begin(Matrices, ushort, ushort) {}
    METAL_FUNC void load(Matrices from, uint column, ushort of_simd, ushort of_lane) {
        w = from;
        k = column;
        simd = of_simd;
        lane = of_lane;
    }
    METAL_FUNC void dequantise(thread Pairs<B>& out) const {
#pragma unroll
        for (ushort i = 0; i < Pairs<B>::kCount; ++i) {
            const Place from = place_of<B>(w, i, simd, lane);
            bfloat numbers[16];
            thread bfloat* to = numbers;
            dequantise_16(from, k + lane % 4 * 16, to);
#pragma unroll
            for (ushort j = 0; j < 8; ++j) {
                const bfloat2 pair = {numbers[2 * j], numbers[2 * j + 1]};
                out.pair[i][j] = __builtin_bit_cast(uint, pair);
            }
        }
    }
    METAL_FUNC static void dequantise_16(Place from, uint column, thread bfloat* out) {
        lily::dequantise<16>(from.w, from.m, from.row, column, out);
    }
};

// Steps of the left matrix: as many columns as a line takes, all 64 of a group or half of each lane's 16.
template <class B, class T>
struct Landing {
    static constant constexpr const ushort kHalves = sizeof(T) / 2;               // steps of a group
    static constant constexpr const ushort kProducts = 4 / kHalves;               // of depth 16 in a step
    static constant constexpr const uint kBytes = B::kRows * kLine, kStages = 4;  // csrc/gpu/cuda.cpp: tiling
    threadgroup uchar* at;

    // Copies 16 bytes of every 16th row a thread; a row's pieces change places, for banks. Past the last step
    // nothing is read.
    METAL_FUNC void copy(LeftRows<T> left, ushort tile, uint step, uint steps, ushort thread_index) const {
        const uint piece = thread_index % 8, row = thread_index / 8;
        const uint column = kHalves == 1 ? step * 64 + piece * 8
                                         : step / 2 * 64 + step % 2 * 8 + piece / 2 * 16 + piece % 2 * 4;
        threadgroup uchar* to =
            at + step % kStages * kBytes + (tile * 16 + row) * kLine + (piece ^ row % 8) * 16;
        device const T* from = left.x + (left.start[row + tile * 16] + column);
        __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint)(size_t)to),
                         "l"((size_t)from), "r"(step < steps ? 16 : 0)
                         : "memory");
    }
    // A lane's share of a row tile in a step, as pairs, of rows lane / 4 and eight on.
    METAL_FUNC void load(uint step, ushort tile, ushort lane, thread uint (&pair)[2][2 * kProducts]) const {
        const uint row = lane / 4;
        threadgroup const uchar* from = at + step % kStages * kBytes + (tile * 16 + row) * kLine;
#pragma unroll
        for (ushort half_of = 0; half_of < 2; ++half_of)
#pragma unroll
            for (ushort i = 0; i < 2; ++i) {
                threadgroup const uchar* piece = from + half_of * 8 * kLine + ((lane % 4 * 2 + i) ^ row) * 16;
                if (kHalves == 1) {
                    const uint4 four = *(threadgroup const uint4*)piece;
#pragma unroll
                    for (ushort j = 0; j < 4; ++j) pair[half_of][4 * i + j] = four[j];
                } else {
                    const float4 four = *(threadgroup const float4*)piece;
                    pair[half_of][2 * i] = msl_bfloats(four[0], four[1]);
                    pair[half_of][2 * i + 1] = msl_bfloats(four[2], four[3]);
                }
            }
    }
};

// Adds a step's products of kTiles row tiles from r on, of depth 16 each, the group's `first` first.
template <ushort kTiles, class B, ushort kTogether, ushort kPairs>
METAL_FUNC void add_tiles(thread Outputs<B>& out, thread const Pairs<B>& w,
                          thread const uint (&x)[kTogether][2][kPairs], ushort r, ushort first) {
#pragma unroll
    for (ushort s = 0; s < kPairs / 2; ++s) {
        const ushort of = 2 * (first + s);
#pragma unroll
        for (ushort tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (ushort c = 0; c < B::kColumnTiles; ++c)
#pragma unroll
                for (ushort i = 0; i < 2; ++i)
                    msl_multiply_bfloats_16(out.sum[r + tile][c].part[i], w.pair[2 * c][of],
                                            w.pair[2 * c + 1][of], w.pair[2 * c][of + 1],
                                            w.pair[2 * c + 1][of + 1], x[tile][i][2 * s],
                                            x[tile][i][2 * s + 1]);
    }
}

template <class Weighted, class B, class T, class Matrices>
METAL_FUNC void multiply_as(thread Outputs<B>& out, Landing<B, T> landing, LeftRows<T> left, ushort tiles,
                            Matrices w, uint K, ushort thread_index, ushort simd, ushort lane) {
    typedef Landing<B, T> Landed;
    constexpr ushort kTogether =
        B::kRowTiles > 1 ? 2 : 1;  // row tiles, whose sums do not wait for each other
    const uint steps = K / kSlabColumns * Landed::kHalves, ahead = Landed::kStages - 1;
    Weighted weights;
    weights.begin(w, simd, lane);
    weights.load(w, 0, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // left.start
#pragma unroll
    for (uint step = 0; step < ahead; ++step) {
#pragma unroll
        for (ushort r = 0; r < B::kRowTiles; ++r)
            if (r < tiles) landing.copy(left, r, step, steps, thread_index);
        __asm__ volatile("cp.async.commit_group;" ::: "memory");
    }
    uint step = 0;
#pragma clang loop unroll(disable)
    for (uint k = 0; k < K; k += kSlabColumns) {
        Pairs<B> w_of;
        weights.dequantise(w_of);
        weights.load(w, min(k + kSlabColumns, K - kSlabColumns), simd, lane);
#pragma unroll
        for (ushort h = 0; h < Landed::kHalves; ++h, ++step) {
            __asm__ volatile("cp.async.wait_group 2;" ::: "memory");
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint x[kTogether][2][2 * Landed::kProducts];
#pragma unroll
            for (ushort r = 0; r < B::kRowTiles; r += kTogether) {
                if (r >= tiles) break;
                const bool both = kTogether == 2 && r + 1 < tiles;
#pragma unroll
                for (ushort two = 0; two < kTogether; ++two) {
                    landing.load(step, r + two, lane, x[two]);
                    if (two == 0 || both) landing.copy(left, r + two, step + ahead, steps, thread_index);
                }
                if (both)
                    add_tiles<kTogether>(out, w_of, x, r, h * Landed::kProducts);
                else
                    add_tiles<1>(out, w_of, x, r, h * Landed::kProducts);
            }
            __asm__ volatile("cp.async.commit_group;" ::: "memory");
        }
    }
    __asm__ volatile("cp.async.wait_all;" ::: "memory");
}

// out = left W^T, as in metal/matmul.h. Rows past the last tile of 16 that has any are not looked at.
template <class B, class T, class Matrices>
METAL_FUNC void multiply(thread Outputs<B>& out, LeftRows<T> left, uint rows, Matrices w, uint K,
                         threadgroup bfloat* slabs, threadgroup float*, ushort thread_index, ushort simd,
                         ushort lane) {
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles; ++c) out.sum[r][c].clear();
    const ushort tiles = (min(rows, uint(B::kRows)) + kTile - 1) / kTile;
    const args::Matrix m = w.place(0, false).m, other = w.place(kSlabRows / 2, true).m;
    const Landing<B, T> landing = {(threadgroup uchar*)slabs};
    const bool packed = m.bits == other.bits && m.type == args::kBf16 && other.type == args::kBf16;
    if (packed && m.bits == 4)
        multiply_as<PackedWeights<B, 4>>(out, landing, left, tiles, w, K, thread_index, simd, lane);
    else if (packed && m.bits == 8)
        multiply_as<PackedWeights<B, 8>>(out, landing, left, tiles, w, K, thread_index, simd, lane);
    else
        multiply_as<AnyWeights<B, Matrices>>(out, landing, left, tiles, w, K, thread_index, simd, lane);
}
