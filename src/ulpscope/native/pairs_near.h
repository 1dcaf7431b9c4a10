/* The pass over a block whose elements are nearly all close: included by pairs_kernels.h for each vector size VB.
 *
 * Where |t - r| is below a thousandth of |r|, the difference of two float32 is a float32, exactly, and so is its size in
 * units in the last place; half as many vectors do.  What is left for float64 are sums, of exact products; those of t
 * follow from t = r + (t - r).  Four quotients are added as one.  All other elements are put aside, for the kernel that
 * takes everything. */
#define FLAT(name) JOIN2(JOIN2(name, _), VB)
#define WIDE FLAT(WIDE)
#define MOST FLAT(MOST)
#define ONE_WHERE FLAT(ONE_WHERE)
#define BEYOND FLAT(BEYOND)
#ifndef WIDE_16
#define WIDE_16(p) __builtin_convertvector(*(const Part *)(p), Wide)
#define WIDE_32 WIDE_16
#define WIDE_64(p) _mm512_cvtps_pd((__m256)*(const Part *)(p))
/* Bits of numbers that are not negative are ordered as the numbers are. */
#define MOST_16(a, b) (((a) & (Bits)((a) > (b))) | ((b) & ~(Bits)((a) > (b))))
#define MOST_32(a, b) (Bits)_mm256_max_epi32((__m256i)(a), (__m256i)(b))
#define MOST_64(a, b) (Bits)_mm512_max_epi32((__m512i)(a), (__m512i)(b))
/* One where there is a number above zero. */
#define ONE_WHERE_16(a) (one & (Bits)((a) > zero))
#define ONE_WHERE_32(a) (Bits)_mm256_min_epi32((__m256i)(a), (__m256i)one)
#define ONE_WHERE_64(a) (Bits)_mm512_min_epi32((__m512i)(a), (__m512i)one)
/* Bit k tells whether a[k] <= b[k] is not so. */
#ifdef __x86_64__
/* Read once, whatever the compiler thinks of reading it again. */
#define KEEP(v) __asm__("" : "+v"(v))
#define BEYOND_16(a, b) (unsigned)_mm_movemask_ps(_mm_cmpnle_ps((__m128)(a), (__m128)(b)))
#else
#define KEEP(v)
#define BEYOND_16(a, b) beyond_16((const float *)&(a), (const float *)&(b))
#endif
#define BEYOND_32(a, b) (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_NLE_UQ))
#define BEYOND_64(a, b) (unsigned)_mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_NLE_UQ)
#ifndef __x86_64__
static unsigned beyond_16(const float *a, const float *b) {
    unsigned found = 0;
    for (int k = 0; k < 4; k++) found |= (unsigned)!(a[k] <= b[k]) << k;
    return found;
}
#endif
#endif

/* Says how n elements differ, but for those it puts aside; returns 0, and nonsense, if they are too many or one may be too
 * large for it.  An element is put aside if the difference times `limit` is above its size. */
TARGET static int FLAT(near)(const f32 *x, const f32 *y, size_t n, float limit, float low, const Ahead *ahead, Aside *aside,
                             Block *block) {
    typedef double Wide __attribute__((vector_size(VB)));
    typedef uint64_t Mask __attribute__((vector_size(VB)));
    typedef float Narrow __attribute__((vector_size(VB)));
    typedef int32_t Bits __attribute__((vector_size(VB)));
    typedef float Load __attribute__((vector_size(VB), aligned(4), may_alias));
    typedef float Part __attribute__((vector_size(VB / 2), may_alias));
    enum { STEP = 2 * LANES, F = VB / 4, NF = STEP / F, D = VB / 8, ND = LANES / D };
    const Bits zero = {0}, sign = zero + INT32_MIN, top = zero + 0x7F800000, one = zero + 1, inverse = zero + 0x7F000000;
    const Bits floor = (Bits)((Narrow){0} + low) & top;
    const Narrow times = (Narrow){0} + limit;
    const Wide none = {0}, least = none + 0x1p-149;
    const Mask wide_sign = ((Mask){0} + 1) << 63;
    const u8 *next = ahead->at[0], *next_target = ahead->at[1];
    Wide xx[ND], xs[ND], ss[ND], absolute[ND], shares[ND];
    Narrow units[NF];
    Bits differing[NF], most[NF], furthest[NF];
    f32 last[2][STEP] = {{0}};
    size_t whole = n / STEP * STEP, found = 0;
    memcpy(last[0], x + whole, (n - whole) * sizeof *x), memcpy(last[1], y + whole, (n - whole) * sizeof *y);
    for (int j = 0; j < ND; j++) xx[j] = xs[j] = ss[j] = absolute[j] = shares[j] = none;
    for (int j = 0; j < NF; j++) units[j] = (Narrow){0}, differing[j] = most[j] = furthest[j] = zero;
    for (size_t start = 0; start < n; start += TILE) {
        size_t tile = n - start < TILE ? n - start : TILE, at = 0;
        /* In float32: the sizes of a tile, and its differences with the sign they have seen from a positive reference. */
        for (; at < tile; at += STEP) {
            size_t i = start + at;
            const f32 *r = i < whole ? x + i : last[0], *t = i < whole ? y + i : last[1];
            /* Memory is read while this block is worked on. */
            __builtin_prefetch(next, 0, 2), next += 2 * ahead->step[0];
            Bits d[NF], size[NF], seen[NF];
            unsigned far = 0;
            for (int j = 0; j < NF; j++) {
                Narrow a = *(const Load *)(r + j * F);
                KEEP(a);
                Narrow b = *(const Load *)(t + j * F) - a;
                d[j] = (Bits)b & ~sign, size[j] = (Bits)a & ~sign, seen[j] = (Bits)b ^ ((Bits)a & sign);
                Narrow product = (Narrow)d[j] * times, of = (Narrow)size[j];
                far |= BEYOND(product, of) << (j * F);
            }
            if (__builtin_expect(far != 0, 0)) {
                if (found > ASIDE + i / 32) return 0;
#if VB == 64
                /* Written whole: the instruction that writes some of a vector is slow on some machines. */
                __mmask16 put = (__mmask16)far, kept = (__mmask16)~far;
                _mm512_storeu_ps(aside->side[0] + found, _mm512_maskz_compress_ps(put, _mm512_loadu_ps(r)));
                _mm512_storeu_ps(aside->side[1] + found, _mm512_maskz_compress_ps(put, _mm512_loadu_ps(t)));
                found += (size_t)__builtin_popcount(far);
                d[0] = (Bits)_mm512_maskz_mov_epi32(kept, (__m512i)d[0]);
                size[0] = (Bits)_mm512_maskz_mov_epi32(kept, (__m512i)size[0]);
                seen[0] = (Bits)_mm512_maskz_mov_epi32(kept, (__m512i)seen[0]);
#else
                int32_t kept[STEP] __attribute__((aligned(VB)));
                for (int k = 0; k < STEP; k++) kept[k] = -(int32_t)!(far >> k & 1);
                for (int j = 0; j < NF; j++) {
                    Bits mask = *(const Bits *)(kept + j * F);
                    d[j] &= mask, size[j] &= mask, seen[j] &= mask;
                }
                for (; far; far &= far - 1, found++) {
                    int k = __builtin_ctz(far);
                    aside->side[0][found] = r[k], aside->side[1][found] = t[k];
                }
#endif
            }
            for (int j = 0; j < NF; j++) {
                *(Bits *)(aside->size + at + j * F) = size[j], *(Bits *)(aside->seen + at + j * F) = seen[j];
                Bits exponent = size[j] & top;
                Narrow ulps = (Narrow)d[j] * (Narrow)(inverse - MOST(exponent, floor));
                units[j] += ulps, furthest[j] = MOST((Bits)ulps, furthest[j]), most[j] = MOST(d[j], most[j]);
                differing[j] += ONE_WHERE(d[j]);
            }
        }
        /* In float64, two steps at a time: the sums. */
        for (int k = 0; k < STEP; k++) aside->size[at + k] = aside->seen[at + k] = 0;
        for (size_t i = 0; i < tile; i += 2 * STEP) {
            Wide over[2][ND], under[2][ND];
            for (int half = 0; half < 2; half++) {
                __builtin_prefetch(next_target, 0, 2), next_target += 2 * ahead->step[1];
                const f32 *from = aside->size + i + half * STEP, *from_seen = aside->seen + i + half * STEP;
                Wide sizes[2 * ND], distances[2 * ND];
                for (int j = 0; j < 2 * ND; j++) {
                    Wide a = WIDE(from + j * D), s = WIDE(from_seen + j * D);
                    EXACT(xx[j % ND], a, a);
                    EXACT(xs[j % ND], a, s);
                    EXACT(ss[j % ND], s, s);
                    distances[j] = (Wide)((Mask)s & ~wide_sign), sizes[j] = LARGER(a, least);
                    absolute[j % ND] += distances[j];
                }
                for (int j = 0; j < ND; j++) {
                    over[half][j] = distances[j] * sizes[j + ND], under[half][j] = sizes[j] * sizes[j + ND];
                    EXACT(over[half][j], distances[j + ND], sizes[j]);
                }
            }
            for (int j = 0; j < ND; j++) {
                Wide sum = over[0][j] * under[1][j] + over[1][j] * under[0][j];
                shares[j] += sum / (under[0][j] * under[1][j]);
            }
        }
    }
    *block = (Block){.equal = n};
    double square = 0;
    for (int j = 0; j < ND; j++)
        for (int k = 0; k < D; k++) {
            int lane = j * D + k;
            block->sum[REFERENCE][lane] = xx[j][k], block->sum[DOT][lane] = xx[j][k] + xs[j][k];
            block->sum[TARGET_SIDE][lane] = xx[j][k] + (2 * xs[j][k] + ss[j][k]);
            block->sum[DIFFERENCE][lane] = ss[j][k], block->sum[ABSOLUTE][lane] = absolute[j][k];
            block->sum[RELATIVE][lane] = shares[j][k];
            square += xx[j][k];
        }
    for (int j = 1; j < NF; j++) {
        most[0] = MOST(most[j], most[0]), furthest[0] = MOST(furthest[j], furthest[0]);
        differing[0] += differing[j];
    }
    for (int k = 0; k < F; k++) {
        double distance = ((Narrow)most[0])[k], ulps = 2 * (double)((Narrow)furthest[0])[k];
        block->limit[MAX_ABSOLUTE] = distance > block->limit[MAX_ABSOLUTE] ? distance : block->limit[MAX_ABSOLUTE];
        block->limit[MAX_ULP] = ulps > block->limit[MAX_ULP] ? ulps : block->limit[MAX_ULP];
        block->equal -= (uint64_t)differing[0][k];
        /* A lane holds less than 2^24 halves of a unit: no sum of float32 was rounded. */
        for (int j = 0; j < NF; j++) block->sum[ULP][0] += 2 * (double)units[j][k];
    }
    aside->count = found;
    /* From 2^127 on, the inverse of the power of two is no float32. */
    return square < 0x1p254;
}
#undef FLAT
#undef WIDE
#undef MOST
#undef ONE_WHERE
#undef BEYOND
