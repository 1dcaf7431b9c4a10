/* The kernels of measure.c, by vector size VB and float width W: the file includes itself for each width, measure.c it for each
 * size, so that every kernel is written once. */
#ifndef W
#define W 32
#include "measure_kernels.h"
#define W 64
#include "measure_kernels.h"
static const Kernels JOIN2(kernels_, VB)[2] = {SET(VB, 32), SET(VB, 64)};
#undef VB

#else
/* Adds n values to the statistics.  Unless `certain`, leaves them alone and returns 0 if one may not be finite, which
 * the squares tell; those of finite float64 may overflow too.  Zeros are counted by their bits, so that -0.0 is one and
 * flush-to-zero mode does not make zeros of denormals. */
TARGET static int NAME(scan)(const void *p, size_t n, Stats *stats, int certain) {
    typedef TYPE(f) Vector __attribute__((vector_size(VB)));
    typedef TYPE(u) Mask __attribute__((vector_size(VB)));
    typedef double Wide __attribute__((vector_size(VB)));
    typedef TYPE(f) Load __attribute__((vector_size(VB), aligned(1), may_alias));
    typedef TYPE(f) Part __attribute__((vector_size(VB / 8 * sizeof(TYPE(f))), aligned(1), may_alias));
    enum { F = VB / sizeof(TYPE(f)), D = VB / 8, NF = LANES / F, ND = LANES / D };
    const TYPE(f) *x = p;
    TYPE(f) edge[2 * LANES];
    Stats out = *stats;
    Vector limit[2 * NF];
    Wide sum[2 * ND];
    Mask zero[NF] = {{0}};
    size_t i = 0;
    for (int k = 0; k < 2 * LANES; k++) edge[k] = (TYPE(f))out.limit[k];
    memcpy(limit, edge, sizeof limit), memcpy(sum, out.sum, sizeof sum);
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < NF; k++) {
            Vector v = *(const Load *)(x + i + k * F);
            limit[k] = NAME(LIMIT)(max, v, limit[k]);
            limit[NF + k] = NAME(LIMIT)(min, v, limit[NF + k]);
            zero[k] += (Mask)(((Mask)v << 1) == 0);
        }
        for (int k = 0; k < ND; k++) {
            Wide v = __builtin_convertvector(*(const Part *)(x + i + k * D), Wide);
            sum[k] += v, sum[ND + k] += v * v;
        }
    }
    memcpy(edge, limit, sizeof limit), memcpy(out.sum, sum, sizeof sum);
    for (int k = 0; k < LANES; k++) out.zero += (TYPE(u))-zero[k / F][k % F];
    for (int k = 0; i < n; i++, k++) {
        edge[k] = x[i] > edge[k] ? x[i] : edge[k];
        edge[LANES + k] = x[i] < edge[LANES + k] ? x[i] : edge[LANES + k];
        out.sum[k] += (double)x[i];
        out.sum[LANES + k] += (double)x[i] * (double)x[i];
        out.zero += ((const TYPE(u) *)x)[i] << 1 == 0;
    }
    double square = 0;
    for (int k = 0; k < LANES; k++) square += out.sum[LANES + k];
    for (int k = 0; k < 2 * LANES; k++) out.limit[k] = edge[k];
    if (!certain && !(square < INFINITY)) return 0;
    *stats = out;
    return 1;
}

/* Counts what is not finite and writes a copy with zeros there; takes the limits of the rest.  Limits are compared as
 * integers in the order of the floats: integer reductions may be reordered, and so are vectorised. */
TARGET static void NAME(clean)(const void *p, size_t n, Stats *s, void *out) {
    const TYPE(u) *x = p, inf = W == 64 ? (TYPE(u))0x7FF0000000000000u : 0x7F800000u, sign = (TYPE(u))1 << (W - 1);
    TYPE(i) max = (TYPE(i))sign, min = (TYPE(i))(sign - 1);
    TYPE(u) nan = 0, posinf = 0, neginf = 0;
    for (size_t i = 0; i < n; i++) {
        TYPE(u) bits = x[i], size = bits & (sign - 1);
        TYPE(i) key = (TYPE(i))(bits & sign ? bits ^ (sign - 1) : bits);
        TYPE(i) high = size < inf ? key : (TYPE(i))sign, low = size < inf ? key : (TYPE(i))(sign - 1);
        nan += size > inf, posinf += bits == inf, neginf += bits == (inf | sign);
        max = high > max ? high : max, min = low < min ? low : min;
        ((TYPE(u) *)out)[i] = size < inf ? bits : 0;
    }
    s->nan += nan, s->posinf += posinf, s->neginf += neginf;
    if (nan + posinf + neginf == n) return;
    TYPE(u) bits[2] = {(TYPE(u))max ^ (max < 0 ? sign - 1 : 0), (TYPE(u))min ^ (min < 0 ? sign - 1 : 0)};
    const TYPE(f) *edge = (const TYPE(f) *)bits;
    s->limit[0] = edge[0] > s->limit[0] ? edge[0] : s->limit[0];
    s->limit[LANES] = edge[1] < s->limit[LANES] ? edge[1] : s->limit[LANES];
}

TARGET static void NAME(sketch)(const void *p, uint64_t block, size_t blocks, void *sums) {
    typedef TYPE(f) Vector __attribute__((vector_size(VB)));
    typedef TYPE(u) Mask __attribute__((vector_size(VB)));
    typedef TYPE(f) Load __attribute__((vector_size(VB), aligned(1), may_alias));
    enum { F = VB / sizeof(TYPE(f)) };
    const TYPE(f) *x = p;
    uint32_t words[8];
    Mask lane;
    for (int k = 0; k < F; k++) lane[k] = (TYPE(u))1 << k;
    for (uint64_t b = block; b < block + blocks; b++, x += 256) {
        uint32_t place = b & 255, group = (uint32_t)(b >> 8);
        uint32_t turn = (53 * (place ^ place >> 4) + (group * 0x9E3779B1u >> 24)) & 255;
        uint32_t flip = mix32(0x6F706521u ^ (turn + 256 * (group >> 5))) >> (group & 31) & 1;
        for (unsigned w = 0; w < 8; w++) words[w] = sketch_mask[turn][w] ^ -flip;
        TYPE(f) *to = (TYPE(f) *)sums + b % 4 * 512 + turn;
        for (int j = 0; j < 256; j += F) {
            Mask minus = (Mask)((lane & (TYPE(u))(words[j >> 5] >> (j & 31))) != 0) << (W - 1);
            *(Load *)(to + j) += (Vector)((Mask) * (const Load *)(x + j) ^ minus);
        }
    }
}

/* Adds n elements of a row, from its j-th on, to its two sums: with signs, and of squares. Sixteen lanes, as in scan. */
TARGET static void NAME(row)(const void *p, uint64_t j, size_t n, double *sums) {
    typedef TYPE(f) Vector __attribute__((vector_size(VB)));
    typedef TYPE(u) Mask __attribute__((vector_size(VB)));
    typedef TYPE(f) Load __attribute__((vector_size(VB), aligned(1), may_alias));
    enum { F = VB / sizeof(TYPE(f)), NF = LANES / F };
    const TYPE(f) *x = p;
    Vector sum[2 * NF] = {{0}};
    TYPE(f) all[2 * LANES];
    Mask lane;
    size_t i = 0;
    for (int k = 0; k < F; k++) lane[k] = (TYPE(u))1 << k;
#define WORD(at) (sketch_mask[(at) >> 8 & 255][(at) >> 5 & 7] >> ((at) & 31))
#define ONE sums[0] += WORD(j + i) & 1 ? -(double)x[i] : (double)x[i], sums[1] += (double)x[i] * (double)x[i]
    for (; i < n && (j + i) % LANES; i++) ONE;
    for (; i + LANES <= n; i += LANES) {
        uint32_t word = WORD(j + i);
        for (int k = 0; k < NF; k++) {
            Vector v = *(const Load *)(x + i + k * F);
            Mask minus = (Mask)((lane & (TYPE(u))(word >> k * F)) != 0) << (W - 1);
            sum[k] += (Vector)((Mask)v ^ minus), sum[NF + k] += v * v;
        }
    }
    memcpy(all, sum, sizeof all);
    for (int k = 0; k < LANES; k++) sums[0] += all[k], sums[1] += all[LANES + k];
    for (; i < n; i++) ONE;
#undef ONE
#undef WORD
}

#define WIDEN_HALF NAME(half)
#include "half.h"

TARGET static void NAME(bfloat)(const void *p, void *out, size_t n) {
    for (size_t i = 0; i < n; i++) ((u32 *)out)[i] = (u32)((const u16 *)p)[i] << 16;
}
#undef W
#endif
