// metal/tile.h on an NVIDIA GPU: the same three types on mma.sync, with their layouts as PTX documents them.
// The lanes of a warp hold a 16 x 16 quarter of Left in four registers of two bfloats, Right likewise, and
// Sum in eight floats. Included inside namespace lily.

constant constexpr ushort kStage = 1;       // not needed, but an array has a size
constant constexpr ushort kSlabRows = 128;  // outputs of a threadgroup that multiplies: csrc/gpu/cuda.cpp

METAL_FUNC void load_matrices(thread uint* r, threadgroup const void* p) {
    const uint address = (uint)(size_t)p;
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
}

METAL_FUNC void load_turned(thread uint* r, threadgroup const void* p) {
    const uint address = (uint)(size_t)p;
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
}

struct Left {
    uint part[2][4];  // of columns 0 to 15, 16 to 31

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, threadgroup float*, ushort lane) {
#pragma unroll
        for (ushort k = 0; k < 2; ++k)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) {
                const ushort row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8 + k * 16;
                const bfloat2 pair = {value(row, column), value(row, ushort(column + 1))};
                part[k][i] = __builtin_bit_cast(uint, pair);
            }
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(threadgroup bfloat* p, ushort stride) {
        const uint lane = msl_warp_lane();
        threadgroup const bfloat* at = p + lane % 16 * stride + lane / 16 * 8;
#pragma unroll
        for (ushort k = 0; k < 2; ++k) load_matrices(part[k], at + k * 16);
    }
};

struct Right {
    uint part[2][4];  // of rows 0 to 15, 16 to 31: columns 0 to 7 in the first two, 8 to 15 in the others

    // element (row, column) = p[column * stride + row]
    METAL_FUNC void load_transposed(threadgroup bfloat* p, ushort stride) {
        const uint lane = msl_warp_lane();
        threadgroup const bfloat* at = p + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
#pragma unroll
        for (ushort k = 0; k < 2; ++k) load_matrices(part[k], at + k * 16);
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(threadgroup bfloat* p, ushort stride) {
        const uint lane = msl_warp_lane();
        threadgroup const bfloat* at = p + lane % 16 * stride + lane / 16 * 8;
#pragma unroll
        for (ushort k = 0; k < 2; ++k) load_turned(part[k], at + k * 16 * stride);
    }
};

using PlainRight = Right;

constant constexpr ushort kScale = kTile;  // floats that scale 16 rows

struct RowScale {
    threadgroup const float* factors;

    // Of the kScale floats, which were 0, those that scale a row.
    METAL_FUNC static void put(threadgroup float* scales, ushort row, float factor) { scales[row] = factor; }
    METAL_FUNC void load(threadgroup const float* scales) { factors = scales; }
};

struct Sum {
    float part[2][4];  // of columns 0 to 7, 8 to 15

    METAL_FUNC void clear() {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) part[j][i] = 0;
    }

    // this += a b
    METAL_FUNC void add(thread Left& a, thread Right& b) {
#pragma unroll
        for (ushort k = 0; k < 2; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
                // a quarter of a Left, half a quarter of a Right
                msl_multiply_bfloats_16(part[j], a.part[k][0], a.part[k][1], a.part[k][2], a.part[k][3],
                                        b.part[k][2 * j], b.part[k][2 * j + 1]);
    }

    // every row times its number
    METAL_FUNC void scale(thread RowScale& rows) {
        const ushort lane = msl_warp_lane();
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) part[j][i] *= rows.factors[row(lane, i)];
    }

    // p[row * stride + column] = element (row, column)
    METAL_FUNC void store(threadgroup float* p, ushort stride) {
        const ushort lane = msl_warp_lane();
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) p[row(lane, i) * stride + column(lane, i, j)] = part[j][i];
    }

    METAL_FUNC static ushort row(ushort lane, ushort i) { return lane / 4 + i / 2 * 8; }
    METAL_FUNC static ushort column(ushort lane, ushort i, ushort j) { return j * 8 + lane % 4 * 2 + i % 2; }

    // visit(row, column, element) for every element, each by one lane
    template <class Visit>
    METAL_FUNC void each(Visit visit, threadgroup float*, ushort lane) {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) visit(row(lane, i), column(lane, i, j), part[j][i]);
    }

    // The same with the element of another sum beside it.
    template <class Visit>
    METAL_FUNC void each(thread Sum& other, Visit visit, threadgroup float*, ushort lane) {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i)
                visit(row(lane, i), column(lane, i, j), part[j][i], other.part[j][i]);
    }
};

using PlainSum = Sum;

// Rows that a SIMD-group multiplies by, copied to shared memory while it does something else. 16 bytes of
// padding spread a row's neighbours over the banks.
template <ushort kRows, ushort kColumns>
struct Panel {
    static constant constexpr const ushort kStride = kColumns + 8, kPieces = kColumns / 8;
    static constant constexpr const uint kBytes = kRows * kStride * 2;
    threadgroup bfloat* at;

    template <ushort kSimds>
    METAL_FUNC threadgroup uchar* begin(threadgroup uchar* landing, ushort simd) {
        at = (threadgroup bfloat*)(landing + simd * kBytes);
        return landing + kSimds * kBytes;
    }
    METAL_FUNC void ask(device bfloat* p, uint stride, bool present, ushort lane) const {
        simdgroup_barrier(mem_flags::mem_threadgroup);  // nobody reads what was there
        if (present)
#pragma unroll
            for (ushort j = 0; j < kRows * kPieces / 32; ++j) {
                const ushort i = j * 32 + lane;
                __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                     (uint)(size_t)(at + i / kPieces * kStride + i % kPieces * 8)),
                                 "l"((size_t)(p + i / kPieces * stride + i % kPieces * 8))
                                 : "memory");
            }
        __asm__ volatile("cp.async.commit_group;" ::: "memory");
    }
    METAL_FUNC void wait() const {
        __asm__ volatile("cp.async.wait_group 1;" ::: "memory");
        simdgroup_barrier(mem_flags::mem_threadgroup);  // what other lanes copied
    }
    METAL_FUNC void load_transposed(thread Right& tile, ushort row, ushort column) const {
        tile.load_transposed(at + row * kStride + column, kStride);
    }
    METAL_FUNC void load(thread PlainRight& tile, ushort row, ushort column) const {
        tile.load(at + row * kStride + column, kStride);
    }
};

// Sums of cuda_multiply.h, where mma's rows are outputs and its columns rows: parts are of rows 0 to 7, 8
// to 15. A lane has two rows' sums of two neighbouring outputs.
struct BlockSum {
    float part[2][4];

    METAL_FUNC void clear() {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) part[j][i] = 0;
    }
    template <class Visit>
    METAL_FUNC void each(Visit visit, threadgroup float*, ushort lane) {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 2; ++i)
                visit(j * 8 + lane % 4 * 2 + i, lane / 4 * 2, float2(part[j][i], part[j][i + 2]));
    }
    template <class Visit>
    METAL_FUNC void each(thread BlockSum& other, Visit visit, threadgroup float*, ushort lane) {
#pragma unroll
        for (ushort j = 0; j < 2; ++j)
#pragma unroll
            for (ushort i = 0; i < 2; ++i)
                visit(j * 8 + lane % 4 * 2 + i, lane / 4 * 2, float2(part[j][i], part[j][i + 2]),
                      float2(other.part[j][i], other.part[j][i + 2]));
    }
};
