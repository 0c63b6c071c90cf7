// metal/tile.h on an NVIDIA GPU: the same three types on mma.sync, with their layouts as PTX documents them.
// The lanes of a warp hold a 16 x 16 quarter of Left in four registers of two bfloats, Right likewise, and
// Sum in eight floats. Included inside namespace lily.

constant constexpr ushort kStage = 1;  // not needed, but an array has a size

METAL_FUNC void load_matrices(thread uint* r, threadgroup const void* p) {
    const uint address = (uint)(size_t)p;
    __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
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
    METAL_FUNC void load_transposed(device bfloat* p, uint stride) {
        const uint lane = msl_warp_lane();
#pragma unroll
        for (ushort k = 0; k < 2; ++k)
#pragma unroll
            for (ushort i = 0; i < 4; ++i)
                part[k][i] = *(device const uint*)(p + (lane / 4 + i / 2 * 8) * stride + k * 16 + i % 2 * 8 +
                                                   lane % 4 * 2);
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(device bfloat* p, uint stride) {
        const uint lane = msl_warp_lane();
#pragma unroll
        for (ushort k = 0; k < 2; ++k)
#pragma unroll
            for (ushort i = 0; i < 4; ++i) {
                device const bfloat* at =
                    p + (k * 16 + i % 2 * 8 + lane % 4 * 2) * stride + i / 2 * 8 + lane / 4;
                const bfloat2 pair = {at[0], at[stride]};
                part[k][i] = __builtin_bit_cast(uint, pair);
            }
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
                __asm__(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                    "{%8,%9}, "
                    "{%0,%1,%2,%3};"
                    : "+f"(part[j][0]), "+f"(part[j][1]), "+f"(part[j][2]), "+f"(part[j][3])
                    : "r"(a.part[k][0]), "r"(a.part[k][1]), "r"(a.part[k][2]), "r"(a.part[k][3]),
                      "r"(b.part[k][2 * j]), "r"(b.part[k][2 * j + 1]));
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
