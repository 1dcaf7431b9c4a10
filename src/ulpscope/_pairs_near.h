/* The pass over a block whose elements are nearly all close: included by _pairs_kernels.h for each vector size VB.
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

/* Looks at n elements in float32: which are put aside, how many of the others differ, and by how much at most.  Writes the
 * sizes and the differences of those, a difference with the sign it has seen from a positive reference; zeros where one is
 * put aside.  Returns 0, and nonsense, if too many are. */
TARGET static int FLAT(sort_out)(const f32 *x, const f32 *y, size_t n, float limit, float low, const Ahead *ahead, Aside *aside,
                             Block *block) {
    typedef float Narrow __attribute__((vector_size(VB)));
    typedef int32_t Bits __attribute__((vector_size(VB)));
    typedef float Load __attribute__((vector_size(VB), aligned(4), may_alias));
    enum { STEP = 2 * LANES, F = VB / 4, NF = STEP / F };
    const Bits zero = {0}, sign = zero + INT32_MIN, top = zero + 0x7F800000, one = zero + 1, inverse = zero + 0x7F000000;
    const Bits floor = (Bits)((Narrow){0} + low) & top;
    const Narrow times = (Narrow){0} + limit;
    const u8 *next = ahead->at[0];
    Narrow units[NF];
    Bits differing[NF], most[NF], furthest[NF];
    f32 last[2][STEP] = {{0}};
    size_t whole = n / STEP * STEP, found = 0;
    memcpy(last[0], x + whole, (n - whole) * sizeof *x), memcpy(last[1], y + whole, (n - whole) * sizeof *y);
    for (int j = 0; j < NF; j++) units[j] = (Narrow){0}, differing[j] = most[j] = furthest[j] = zero;
    for (size_t part = 0, i = 0, end = whole; part < 2; part++, end = n) {
        for (; i < end; i += STEP) {
            const f32 *r = part ? last[0] : x + i, *t = part ? last[1] : y + i;
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
                if (found > ASIDE + i / 8) return 0;
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
            }
            for (int j = 0; j < NF; j++) {
                *(Bits *)(aside->size + i + j * F) = size[j], *(Bits *)(aside->seen + i + j * F) = seen[j];
                Bits exponent = size[j] & top;
                Narrow ulps = (Narrow)d[j] * (Narrow)(inverse - MOST(exponent, floor));
                units[j] += ulps, furthest[j] = MOST((Bits)ulps, furthest[j]), most[j] = MOST(d[j], most[j]);
                differing[j] += ONE_WHERE(d[j]);
            }
        }
    }
    *block = (Block){.equal = n};
    for (int j = 0; j < NF; j++)
        for (int k = 0; k < F; k++) {
            double distance = ((Narrow)most[j])[k], ulps = 2 * (double)((Narrow)furthest[j])[k];
            block->limit[MAX_ABSOLUTE] = distance > block->limit[MAX_ABSOLUTE] ? distance : block->limit[MAX_ABSOLUTE];
            block->limit[MAX_ULP] = ulps > block->limit[MAX_ULP] ? ulps : block->limit[MAX_ULP];
            block->sum[ULP][0] += 2 * (double)units[j][k], block->equal -= (uint64_t)differing[j][k];
        }
    /* sum_up reads two steps at a time. */
    size_t end = (n + STEP - 1) / STEP * STEP;
    memset(aside->size + end, 0, STEP * sizeof(f32)), memset(aside->seen + end, 0, STEP * sizeof(f32));
    aside->count = found;
    return 1;
}

/* The sums of the n elements that sort_out wrote; returns 0 if one may be too large for it. */
TARGET static int FLAT(sum_up)(const Aside *aside, size_t n, const Ahead *ahead, Block *block) {
    typedef double Wide __attribute__((vector_size(VB)));
    typedef uint64_t Mask __attribute__((vector_size(VB)));
    typedef float Part __attribute__((vector_size(VB / 2), may_alias));
    enum { STEP = 2 * LANES, D = VB / 8, ND = LANES / D };
    const u8 *next = ahead->at[1];
    const Wide none = {0}, least = none + 0x1p-149, one = none + 1;
    const Mask sign = ((Mask){0} + 1) << 63;
    Wide xx[ND], xs[ND], ss[ND], absolute[ND], shares[ND];
    for (int j = 0; j < ND; j++) xx[j] = xs[j] = ss[j] = absolute[j] = shares[j] = none;
    for (size_t i = 0; i < n; i += 2 * STEP) {
        Wide over[2][ND], under[2][ND];
        for (int half = 0; half < 2; half++) {
            /* Memory is read while this block is worked on. */
            __builtin_prefetch(next, 0, 2), next += 2 * ahead->step[1];
            const f32 *from = aside->size + i + half * STEP, *from_seen = aside->seen + i + half * STEP;
            Wide sizes[2 * ND], distances[2 * ND];
            for (int j = 0; j < 2 * ND; j++) {
                Wide a = WIDE(from + j * D), s = WIDE(from_seen + j * D);
                EXACT(xx[j % ND], a, a);
                EXACT(xs[j % ND], a, s);
                EXACT(ss[j % ND], s, s);
                distances[j] = (Wide)((Mask)s & ~sign), sizes[j] = LARGER(a, least);
                EXACT(absolute[j % ND], distances[j], one);
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
    double square = 0;
    for (int j = 0; j < ND; j++)
        for (int k = 0; k < D; k++) {
            int at = j * D + k;
            block->sum[REFERENCE][at] = xx[j][k], block->sum[DOT][at] = xx[j][k] + xs[j][k];
            block->sum[TARGET_SIDE][at] = xx[j][k] + (2 * xs[j][k] + ss[j][k]);
            block->sum[DIFFERENCE][at] = ss[j][k], block->sum[ABSOLUTE][at] = absolute[j][k];
            block->sum[RELATIVE][at] = shares[j][k];
            square += xx[j][k];
        }
    /* From 2^127 on, the inverse of the power of two is no float32. */
    return square < 0x1p254;
}
#undef FLAT
#undef WIDE
#undef MOST
#undef ONE_WHERE
#undef BEYOND
