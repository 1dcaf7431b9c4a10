/* What pairs.c does with a block of elements, by vector size VB: it includes this file once for each, and the file includes
 * itself for the float widths W. */
#ifndef W
#define W 32
#include "pairs_kernels.h"
#define W 64
#include "pairs_kernels.h"
#include "pairs_near.h"
#define FROM(name) JOIN2(JOIN2(from_, name), JOIN2(_, VB))
#define WIDEN(name, from, to, value)                                                                                   \
    TARGET static void FROM(name)(const void *p, void *out, size_t n) {                                                \
        const from *x = p;                                                                                             \
        for (size_t i = 0; i < n; i++) ((to *)out)[i] = (to)(value);                                                   \
    }
WIDEN(i8, i8, f32, x[i]) WIDEN(i16, i16, f32, x[i]) WIDEN(u8, u8, f32, x[i]) WIDEN(u16, u16, f32, x[i])
WIDEN(i32, i32, f64, x[i]) WIDEN(i64, i64, f64, x[i]) WIDEN(u32, u32, f64, x[i]) WIDEN(u64, u64, f64, x[i])
WIDEN(bool, u8, f32, x[i] != 0) WIDEN(e8m0, u8, f32, float8[4][x[i]]) WIDEN(f32, f32, f64, x[i])
WIDEN(e4m3, u8, f32, float8[0][x[i]]) WIDEN(e4m3z, u8, f32, float8[2][x[i]])
WIDEN(e5m2, u8, f32, float8[1][x[i]]) WIDEN(e5m2z, u8, f32, float8[3][x[i]])
WIDEN(bf16, u16, u32, (u32)x[i] << 16)
#define DIFFERENCE_OF(name, type)                                                                                      \
    TARGET static void FROM(name)(const u64 *r, const u64 *t, f64 *restrict out, size_t n) {                           \
        for (size_t i = 0; i < n; i++) out[i] = (f64)((type)t[i] > (type)r[i] ? t[i] - r[i] : r[i] - t[i]);            \
    }
DIFFERENCE_OF(signed, i64) DIFFERENCE_OF(unsigned, u64)
#define WIDEN_HALF FROM(half)
#include "half.h"
static const Machine JOIN2(machine_, VB) = {
    {SET(32), SET(64)}, JOIN2(near_, VB),
    {NULL, NULL, FROM(half), FROM(bf16), FROM(i8), FROM(u8), FROM(i16), FROM(i32), FROM(i64), FROM(bool), FROM(u16),
     FROM(u32), FROM(u64), NULL, NULL, NULL, FROM(e4m3), FROM(e5m2), FROM(e4m3z), FROM(e5m2z), FROM(e8m0)},
    FROM(f32), FROM(signed), FROM(unsigned),
};
#undef WIDEN
#undef DIFFERENCE_OF
#undef FROM
#undef VB

#else
/* LOAD: some elements as float64.  FUSED adds a * b. */
#if W == 32 && VB == 64
#define LOAD(p) _mm512_cvtps_pd((__m256)*(const Part *)(p))
#else
#define LOAD(p) __builtin_convertvector(*(const Part *)(p), Wide)
#endif
#if W == 32
#define FUSED EXACT
#else
#define FUSED EXACT_16
#endif

/* Says how n elements differ; returns 0, and nonsense, if one may not be finite, which the squares tell; those of finite
 * float64 may overflow too.  Missing elements of the last step are zeros on both sides, which add nothing but equals. */
TARGET static int NAME(pair)(const void *reference, const void *target, const f64 *exact, size_t n, double low,
                             const Ahead *ahead, Block *block) {
    typedef double Wide __attribute__((vector_size(VB)));
    typedef uint64_t Mask __attribute__((vector_size(VB)));
    typedef COUNTER Counter __attribute__((vector_size(VB / 8 * sizeof(COUNTER))));
    typedef double Load __attribute__((vector_size(VB), aligned(1), may_alias));
    typedef TYPE(f) Part __attribute__((vector_size(VB / 8 * sizeof(TYPE(f))), aligned(1), may_alias));
    enum { D = VB / 8, ND = LANES / D };
    const TYPE(f) *x = reference, *y = target;
    const u8 *next = ahead->at[0], *next_target = ahead->at[1];
    const Wide none = {0}, least = none + low, inf = none + INFINITY, good = none + 0.001, fair = none + 0.005;
    const Mask one = (Mask){0} + 1, sign = one << 63, top = (Mask)inf;
    Wide dot[ND], xx[ND], yy[ND], dd[ND], absolute[ND], shares[ND], units[ND], most[ND], worst[ND], furthest[ND];
    Counter equal[ND], poor[ND], bad[ND];
    TYPE(f) last[2][LANES] = {{0}};
    f64 last_exact[LANES] = {0};
    size_t whole = n / LANES * LANES, rest = n - whole;
    memcpy(last[0], x + whole, rest * sizeof *x), memcpy(last[1], y + whole, rest * sizeof *y);
    if (exact) memcpy(last_exact, exact + whole, rest * 8);
    for (int j = 0; j < ND; j++) {
        dot[j] = xx[j] = yy[j] = dd[j] = absolute[j] = shares[j] = units[j] = most[j] = worst[j] = furthest[j] = none;
        equal[j] = poor[j] = bad[j] = (Counter){0};
    }
    for (size_t end = whole, part = 0; part < 2; part++) {
        for (size_t i = 0; i < end; i += LANES) {
            /* Memory is read while this block is worked on. */
            __builtin_prefetch(next, 0, 2), __builtin_prefetch(next_target, 0, 2);
            next += ahead->step[0], next_target += ahead->step[1];
            for (int j = 0; j < ND; j++) {
                Wide r = LOAD(x + i + j * D), t = LOAD(y + i + j * D);
                Wide size = (Wide)((Mask)r & ~sign), d = (Wide)((Mask)(t - r) & ~sign);
                if (W == 64 && exact) d = *(const Load *)(exact + i + j * D);
                /* 0/0 is NaN, which no comparison counts. */
                Wide relative = d / size;
                /* Twice the inverse of the power of two at the reference. */
                Wide inverse = (Wide)(top - ((Mask)LARGER(size, least) & top)), ulps = d * inverse;
                FUSED(dot[j], r, t);
                FUSED(xx[j], r, r);
                FUSED(yy[j], t, t);
                dd[j] += d * d, absolute[j] += d, units[j] += ulps;
                most[j] = LARGER(d, most[j]), worst[j] = LARGER(relative, worst[j]);
                furthest[j] = LARGER(ulps, furthest[j]);
#if W == 32 && VB == 64
                /* The same, of narrower numbers: no quotient of float32 but that by zero is infinite in float64. */
                __m256 narrow = (__m256)*(const Part *)(x + i), other = (__m256)*(const Part *)(y + i);
                TALLY(equal[j], _mm256_cmp_ps_mask(narrow, other, _CMP_EQ_OQ));
                __mmask8 divisible = _mm256_cmp_ps_mask(narrow, _mm256_setzero_ps(), _CMP_NEQ_OQ);
                shares[j] = _mm512_mask_add_pd(shares[j], divisible, shares[j], relative);
#else
                COUNT(equal[j], none, d);
                ADD_BELOW(shares[j], relative, inf);
#endif
                COUNT(poor[j], relative, good);
                COUNT(bad[j], relative, fair);
            }
        }
        x = last[0], y = last[1], exact = exact ? last_exact : NULL, end = rest;
    }
    *block = (Block){.equal = rest ? rest - LANES : 0};
    for (int j = 0; j < ND; j++) {
        const Wide sums[SUMS] = {dot[j], xx[j], yy[j], dd[j], absolute[j], shares[j], units[j]};
        const Wide limits[LIMITS] = {most[j], worst[j], furthest[j]};
        for (int k = 0; k < D; k++) {
            for (int i = 0; i < SUMS; i++) block->sum[i][j * D + k] = sums[i][k];
            for (int i = 0; i < LIMITS; i++)
                block->limit[i] = limits[i][k] > block->limit[i] ? limits[i][k] : block->limit[i];
            block->equal += equal[j][k], block->thousandth += poor[j][k], block->five_thousandths += bad[j][k];
        }
    }
    double square = 0;
    for (int k = 0; k < LANES; k++) square += block->sum[REFERENCE][k] + block->sum[TARGET_SIDE][k];
    return square < INFINITY;
}

/* The same where both sides are one: all that is left is the sum of squares. */
TARGET static int NAME(square)(const void *p, size_t n, Block *block) {
    typedef double Wide __attribute__((vector_size(VB)));
    typedef TYPE(f) Part __attribute__((vector_size(VB / 8 * sizeof(TYPE(f))), aligned(1), may_alias));
    enum { D = VB / 8, ND = LANES / D };
    const TYPE(f) *x = p;
    Wide sum[ND] = {{0}};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < ND; j++) {
            Wide r = LOAD(x + i + j * D);
            FUSED(sum[j], r, r);
        }
    *block = (Block){.equal = n};
    memcpy(block->sum[DOT], sum, sizeof sum);
    for (int k = 0; i < n; i++, k++) block->sum[DOT][k] += (double)x[i] * (double)x[i];
    double square = 0;
    for (int k = 0; k < LANES; k++) square += block->sum[DOT][k];
    memcpy(block->sum[REFERENCE], block->sum[DOT], sizeof *block->sum);
    memcpy(block->sum[TARGET_SIDE], block->sum[DOT], sizeof *block->sum);
    return square < INFINITY;
}

/* Counts what is not finite and writes copies with zeros on both sides there. */
TARGET static void NAME(clean)(const void *p, const void *q, size_t n, void *out, void *out_target,
                               uint64_t *special) {
    const TYPE(u) *x = p, *y = q, inf = W == 64 ? (TYPE(u))0x7FF0000000000000u : 0x7F800000u;
    const TYPE(u) size = ((TYPE(u))1 << (W - 1)) - 1;
    TYPE(u) *restrict to = out, *restrict to_target = out_target;
    TYPE(u) nan[3] = {0}, infinite[4] = {0}, either = 0; /* nan and infinite in the order of the enum */
    for (size_t i = 0; i < n; i++) {
        TYPE(u) r = x[i], t = y[i], a = r & size, b = t & size, both = (TYPE(u))-(TYPE(i))((a < inf) & (b < inf));
        TYPE(u) nan_r = a > inf, nan_t = b > inf, inf_r = a == inf, inf_t = b == inf, same = r == t;
        nan[0] += nan_r & ~nan_t, nan[1] += nan_t & ~nan_r, nan[2] += nan_r & nan_t;
        infinite[0] += inf_r & ~inf_t, infinite[1] += inf_t & ~inf_r;
        infinite[2] += inf_r & same, infinite[3] += inf_r & inf_t & ~same;
        either += both + 1;
        to[i] = r & both, to_target[i] = t & both;
    }
    for (int k = 0; k < 3; k++) special[NAN_REFERENCE + k] += nan[k];
    for (int k = 0; k < 4; k++) special[INF_REFERENCE + k] += infinite[k];
    special[EITHER] += either;
}
#undef LOAD
#undef FUSED
#undef W
#endif
