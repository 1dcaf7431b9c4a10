/* Reads one tensor's memory once and says what is in it: statistics, a CRC-32, a count sketch, a fingerprint.
 * Knows a pointer, a dtype code, a shape and strides; knows nothing of torch.  The row measure() writes is in schema.h;
 * measuring_fallback.py gives the same numbers in numpy: change both together.
 * The kernels are in measure_kernels.h.  Sums run in 16 lanes whatever the vector size: a result does not depend on the machine. */
#include "abi.h"
#include <float.h>
#include <math.h>
#include <stddef.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include "crc.h"
#include "measure.h"
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are written as they lie in memory");

enum { BY_ROWS = 128 }; /* a flag; the others are the kinds of a measure */
enum { ROW = MEASURE_BYTES, BLOCK = 2048, LANES = 16, BUCKETS = 256, CHUNK = 64, STRIPE = 1024, MAX_DIMS = 64, LARGE = 32768, NARROWEST = 8 };

#define ALIAS __attribute__((may_alias))
typedef uint8_t u8; typedef int8_t i8;
typedef uint16_t ALIAS u16; typedef uint32_t ALIAS u32; typedef uint64_t ALIAS u64;
typedef int16_t ALIAS i16; typedef int32_t ALIAS i32; typedef int64_t ALIAS i64;
typedef float ALIAS f32; typedef double ALIAS f64;

typedef struct {
    double sum[2 * LANES];   /* of the values, then of their squares */
    double limit[2 * LANES]; /* maxima, then minima */
    uint64_t zero, nan, posinf, neginf;
    int64_t imax, imin;
} Stats;
typedef struct {
    int (*scan)(const void *, size_t, Stats *, int certain);
    void (*clean)(const void *, size_t, Stats *, void *);
    void (*sketch)(const void *, uint64_t, size_t, void *);
    void (*row)(const void *, uint64_t, size_t, double *);
    void (*half)(const void *, void *, size_t), (*bfloat)(const void *, void *, size_t);
} Kernels;

static inline uint64_t mix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static inline uint32_t mix32(uint32_t h) {
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}
/* Signs of the sketch for each turn. Written once, as those below. */
static uint32_t sketch_mask[256][8];

/* Names by VB and W: NAME(scan) is scan_64_32, TYPE(f) is f32. */
#define JOIN2_(a, b) a##b
#define JOIN3_(a, b, c) a##_##b##_##c
#define JOIN2(a, b) JOIN2_(a, b)
#define JOIN3(a, b, c) JOIN3_(a, b, c)
#define NAME(name) JOIN3(name, VB, W)
#define TYPE(kind) JOIN2(kind, W)
#define TARGET JOIN2(TARGET_, VB)
#define TARGET_16
#define TARGET_32 __attribute__((target("avx2,fma,f16c")))
#define TARGET_64 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define SET(B, W) {JOIN3(scan, B, W), JOIN3(clean, B, W), JOIN3(sketch, B, W), JOIN3(row, B, W), JOIN3(half, B, W), JOIN3(bfloat, B, W)}
#define PICK(test, a, b) ((Vector)(((Mask)(test) & (Mask)(a)) | (~(Mask)(test) & (Mask)(b))))
#define PICK_max(a, b) PICK((a) > (b), a, b)
#define PICK_min(a, b) PICK((a) < (b), a, b)
#define LIMIT_16_32(op, a, b) PICK_##op(a, b)
#define LIMIT_16_64(op, a, b) PICK_##op(a, b)
#define LIMIT_32_32(op, a, b) _mm256_##op##_ps(a, b)
#define LIMIT_32_64(op, a, b) _mm256_##op##_pd(a, b)
#define LIMIT_64_32(op, a, b) _mm512_##op##_ps(a, b)
#define LIMIT_64_64(op, a, b) _mm512_##op##_pd(a, b)

#define VB 16
#include "measure_kernels.h"
#ifdef __x86_64__
#define VB 32
#include "measure_kernels.h"
#define VB 64
#include "measure_kernels.h"
#endif

/* Written once, when the module is made; read-only from then on. */
static const Kernels *kernels = kernels_16;
static uint64_t stripe_key[2][STRIPE / 8];
static float float8[5][256];

/* A tensor, walked in logical order; strides in bytes. */
typedef struct {
    const u8 *at;
    size_t item, numel;
    int ndim, contiguous;
    int64_t shape[MAX_DIMS], stride[MAX_DIMS], index[MAX_DIMS];
} View;

static void copy_run(u8 *to, const u8 *from, size_t item, size_t n, int64_t stride) {
    if (stride == (int64_t)item) memcpy(to, from, n * item);
#define STRIDED(size)                                                                                                  \
    else if (item == size) for (size_t i = 0; i < n; i++) memcpy(to + i * size, from + (int64_t)i * stride, size);
    STRIDED(1) STRIDED(2) STRIDED(4) STRIDED(8) STRIDED(16)
}

/* Copies the next n elements of a view that is not contiguous; they must be there. */
static const u8 *take(View *v, u8 *buffer, size_t n) {
    int last = v->ndim - 1;
    u8 *to = buffer;
    for (size_t run; n; n -= run, to += run * v->item) {
        size_t left = (size_t)(v->shape[last] - v->index[last]);
        run = n < left ? n : left;
        copy_run(to, v->at, v->item, run, v->stride[last]);
        v->index[last] += (int64_t)run, v->at += (int64_t)run * v->stride[last];
        for (int d = last; d > 0 && v->index[d] == v->shape[d]; v->index[d--] = 0)
            v->at += v->stride[d - 1] - v->shape[d] * v->stride[d], v->index[d - 1]++;
    }
    return buffer;
}

/* The next n elements, in place where they are contiguous. */
static const u8 *next_block(View *v, u8 *buffer, size_t n) {
    if (!v->contiguous) return take(v, buffer, n);
    v->at += n * v->item;
    return v->at - n * v->item;
}

/* The fingerprint; measuring_fallback.fingerprint has the definition. */
static void add_stripe(const u8 *p, uint64_t number, uint64_t sum[2]) {
    uint64_t t[2] = {0, 0}, a, b;
    for (int i = 0; i < STRIPE / 8; i += 2, p += 16) {
        memcpy(&a, p, 8), memcpy(&b, p + 8, 8);
        for (int g = 0; g < 2; g++) {
            unsigned __int128 product = (unsigned __int128)(a ^ stripe_key[g][i]) * (b ^ stripe_key[g][i + 1]);
            t[g] += (uint64_t)product ^ (uint64_t)(product >> 64);
        }
    }
    sum[0] += mix64(t[0] + number * 0xD6E8FEB86659FD93u), sum[1] += mix64(t[1] + number * 0xA0761D6478BD642Fu);
}
static void digest(View *v, uint64_t out[2]) {
    u8 buffer[4 * STRIPE], padded[STRIPE] = {0};
    uint64_t sum[2] = {0, 0}, number = 0, length = v->numel * v->item;
    for (size_t left = v->numel, step = sizeof buffer / v->item, n; left; left -= n) {
        n = left < step ? left : step;
        size_t bytes = n * v->item;
        const u8 *p = next_block(v, buffer, n);
        for (; bytes >= STRIPE; bytes -= STRIPE, p += STRIPE) add_stripe(p, ++number, sum);
        if (bytes) add_stripe(memcpy(padded, p, bytes), ++number, sum);
    }
    out[0] = mix64(sum[0] ^ mix64(length)), out[1] = mix64(sum[1] ^ mix64(~length));
}

#define WIDEN(name, from, to, value)                                                                                   \
    static void name(const void *p, void *out, size_t n) {                                                             \
        const from *x = p;                                                                                             \
        for (size_t i = 0; i < n; i++) ((to *)out)[i] = (to)(value);                                                   \
    }
WIDEN(from_i8, i8, f32, x[i]) WIDEN(from_i16, i16, f32, x[i])
WIDEN(from_u8, u8, f32, x[i]) WIDEN(from_u16, u16, f32, x[i])
WIDEN(from_i32, i32, f64, x[i]) WIDEN(from_i64, i64, f64, x[i])
WIDEN(from_u32, u32, f64, x[i]) WIDEN(from_u64, u64, f64, x[i])
WIDEN(from_bool, u8, f32, x[i] != 0) WIDEN(from_e8m0, u8, f32, float8[4][x[i]])
WIDEN(from_e4m3, u8, f32, float8[0][x[i]]) WIDEN(from_e4m3z, u8, f32, float8[2][x[i]])
WIDEN(from_e5m2, u8, f32, float8[1][x[i]]) WIDEN(from_e5m2z, u8, f32, float8[3][x[i]])
static void from_bf16(const void *p, void *out, size_t n) { kernels[0].bfloat(p, out, n); }
static void from_half(const void *p, void *out, size_t n) { kernels[0].half(p, out, n); }

/* By dtype code: bytes, whether it takes a float64 to hold one, parts, what max and min are, how to widen.  Integers of
 * at most 16 bits are exact in float32, also summed over a chunk of the sketch. */
typedef struct {
    u8 item, wide, parts, integer;
    void (*widen)(const void *, void *, size_t);
} Dtype;
static const Dtype dtypes[] = {
    {4, 0, 1, 0, NULL},             {8, 1, 1, 0, NULL},            {2, 0, 1, 0, from_half},
    {2, 0, 1, 0, from_bf16},        {1, 0, 1, KIND_SIGNED, from_i8},    {1, 0, 1, KIND_UNSIGNED, from_u8},
    {2, 0, 1, KIND_SIGNED, from_i16},    {4, 1, 1, KIND_SIGNED, from_i32},   {8, 1, 1, KIND_SIGNED, from_i64},
    {1, 0, 1, KIND_UNSIGNED, from_bool}, {2, 0, 1, KIND_UNSIGNED, from_u16}, {4, 1, 1, KIND_UNSIGNED, from_u32},
    {8, 1, 1, KIND_UNSIGNED, from_u64},  {8, 0, 2, 0, NULL},            {16, 1, 2, 0, NULL},
    {4, 0, 2, 0, from_half},        {1, 0, 1, 0, from_e4m3},       {1, 0, 1, 0, from_e5m2},
    {1, 0, 1, 0, from_e4m3z},       {1, 0, 1, 0, from_e5m2z},      {1, 0, 1, 0, from_e8m0},
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static float small_float(unsigned byte, int mantissa, int bias) {
    int exponent = (int)((byte & 127) >> mantissa), fraction = (int)(byte & ((1u << mantissa) - 1));
    fraction += exponent ? 1 << mantissa : 0;
    return (float)copysign(ldexp(fraction, (exponent ? exponent : 1) - bias - mantissa), byte & 128 ? -1 : 1);
}
static void fill_tables(void) {
    for (unsigned i = 0; i < 256; i++) {
        float infinity = i & 128 ? -INFINITY : INFINITY;
        float8[0][i] = (i & 127) == 127 ? NAN : small_float(i, 3, 7);
        float8[1][i] = (i & 127) > 124 ? NAN : (i & 127) == 124 ? infinity : small_float(i, 2, 15);
        float8[2][i] = i == 128 ? NAN : small_float(i, 3, 8);
        float8[3][i] = i == 128 ? NAN : small_float(i, 2, 16);
        float8[4][i] = i == 255 ? NAN : (float)ldexp(1, (int)i - 127);
        stripe_key[i >> 7][i & 127] = mix64(i);
        for (unsigned w = 0; w < 8; w++) sketch_mask[i][w] = mix32(0x756C7073u ^ (8 * i + w));
    }
}

/* Block b adds into accumulator b & 3: a load must not meet the stores of the block just before, which lie at another
 * offset and could not be forwarded.  An accumulator is 512 long, so that a rotated block need not wrap. */
enum { ACCUMULATORS = 4, SPAN = 2 * BUCKETS };
typedef struct {
    uint64_t block;
    double total[BUCKETS];
    f64 sum[ACCUMULATORS * SPAN]; /* as float32 for the narrower dtypes */
} Sketch;

/* Only as many accumulators as there are blocks are ever used, and so cleared: most tensors are small. */
static void clear_sums(Sketch *s, uint64_t blocks, int wide) {
    memset(s->sum, 0, (blocks < ACCUMULATORS ? blocks : ACCUMULATORS) * SPAN * (wide ? 8 : 4));
}
/* By hand in pairs: a compiler does not do it. */
static void fold_sums(Sketch *s, int wide) {
    typedef f64 Pair __attribute__((vector_size(16), aligned(8), may_alias));
    typedef f32 Narrow __attribute__((vector_size(8), aligned(4), may_alias));
    int used = (s->block < ACCUMULATORS ? (int)s->block : ACCUMULATORS) * SPAN;
    const f32 *narrow = (const f32 *)s->sum;
    for (int k = 0; k < BUCKETS; k += 2) {
        Pair total = *(const Pair *)(s->total + k);
        if (wide) for (int a = k; a < used; a += BUCKETS) total += *(const Pair *)(s->sum + a);
        else for (int a = k; a < used; a += BUCKETS) total += __builtin_convertvector(*(const Narrow *)(narrow + a), Pair);
        *(Pair *)(s->total + k) = total;
    }
}

/* n is a multiple of 256 except at the end of the tensor. */
static void add_to_sketch(Sketch *s, const void *values, size_t n, int wide) {
    size_t item = wide ? 8 : 4, blocks = n / BUCKETS, rest = n % BUCKETS;
    kernels[wide].sketch(values, s->block, blocks, s->sum);
    s->block += blocks;
    if (rest) {
        double padded[BUCKETS] = {0};
        memcpy(padded, (const u8 *)values + blocks * BUCKETS * item, rest * item);
        kernels[wide].sketch(padded, s->block++, 1, s->sum);
    } else if (!wide && s->block % CHUNK == 0) {
        fold_sums(s, wide), clear_sums(s, ACCUMULATORS, wide);
    }
}

/* Adds a block to the statistics; returns it with zeros for what is not finite, copied only where there is such. */
static const void *add_to_stats(Stats *s, const void *x, size_t n, int wide, void *clean) {
    if (kernels[wide].scan(x, n, s, 0)) return x;
    uint64_t before = s->nan + s->posinf + s->neginf;
    kernels[wide].clean(x, n, s, clean);
    Stats kept = *s;
    kernels[wide].scan(clean, n, s, 1);
    memcpy(s->limit, kept.limit, sizeof kept.limit);
    s->zero -= s->nan + s->posinf + s->neginf - before;
    return clean;
}

/* |z|: NaN if either part is, whatever hypot() makes of inf; a finite z whose modulus overflows stays finite. */
static void modulus(const void *z, int wide, f64 *out, size_t n) {
    for (size_t i = 0; !wide && i < n; i++) {
        double re = ((const f32 *)z)[2 * i], im = ((const f32 *)z)[2 * i + 1];
        out[i] = sqrt(re * re + im * im);
    }
    for (size_t i = 0; wide && i < n; i++) {
        double re = ((const f64 *)z)[2 * i], im = ((const f64 *)z)[2 * i + 1];
        double r = isnan(re) || isnan(im) ? NAN : hypot(re, im);
        out[i] = isinf(r) && !isinf(re) && !isinf(im) ? DBL_MAX : r;
    }
}

/* The limits of 64-bit integers.  Flipping the top bit turns the order of unsigned ones into that of signed ones. */
static uint64_t flip_of(const Dtype *t) { return t->integer == KIND_UNSIGNED ? 1ull << 63 : 0; }
static void add_exact_limits(Stats *s, const u64 *x, size_t n, uint64_t flip) {
    for (size_t k = 0; k < n; k++) {
        int64_t v = (int64_t)(x[k] ^ flip);
        s->imax = v > s->imax ? v : s->imax, s->imin = v < s->imin ? v : s->imin;
    }
}

/* Two numbers of each row: the sum of its elements with signs, and their norm. */
typedef struct {
    size_t width, at; /* how long a row is, and where in it we are */
    double sums[2];
    f32 *to;
} Rows;
static void add_to_rows(Rows *r, const u8 *values, size_t n, int wide) {
    for (size_t run; n; n -= run, values += run * (wide ? 8 : 4)) {
        run = r->width - r->at < n ? r->width - r->at : n;
        kernels[wide].row(values, r->at, run, r->sums);
        if ((r->at += run) < r->width) continue;
        *r->to++ = (f32)r->sums[0], *r->to++ = (f32)sqrt(r->sums[1]);
        r->at = 0, r->sums[0] = r->sums[1] = 0;
    }
}
/* How many rows there are, if they are worth it. */
static size_t rows_of(size_t numel, const Dtype *t, long flags, int64_t width) {
    if (!(flags & BY_ROWS) || t->integer || t->parts == 2 || width < NARROWEST || !numel) return 0;
    size_t rows = numel / (size_t)width;
    return rows > 1 && rows <= MOST_ROWS ? rows : 0;
}

typedef struct {
    _Alignas(64) f64 parts[BLOCK], values[BLOCK], clean[2 * BLOCK];
    _Alignas(64) u8 gathered[BLOCK * 16];
} Scratch;

static void measure_block(const Dtype *t, const u8 *raw, size_t n, Stats *s, Sketch *sketch, Rows *rows, Scratch *b) {
    const void *values = t->widen ? (const void *)b->parts : raw;
    uint64_t before = s->nan + s->posinf;
    if (t->widen) t->widen(raw, b->parts, n * t->parts);
    if (t->integer && t->item == 8) add_exact_limits(s, (const u64 *)raw, n, flip_of(t));
    if (t->parts == 1) {
        values = add_to_stats(s, values, n, t->wide, b->clean);
    } else {
        modulus(values, t->wide, b->values, n);
        add_to_stats(s, b->values, n, 1, b->clean);
        if (s->nan + s->posinf != before) {
            Stats unused = {0};
            kernels[t->wide].clean(values, 2 * n, &unused, b->clean);
            values = b->clean;
        }
    }
    if (sketch) add_to_sketch(sketch, values, n * t->parts, t->wide);
    if (rows) add_to_rows(rows, values, n, t->wide);
}

/* The norm of float64 values whose squares leave the range: a second pass, scaled by the largest magnitude. */
static double scaled_norm(View v, const Dtype *t, double largest, Scratch *b) {
    double sum = 0;
    for (size_t left = v.numel, n; left; left -= n) {
        n = left < BLOCK ? left : BLOCK;
        const f64 *x = (const f64 *)next_block(&v, b->gathered, n);
        if (t->parts == 2) modulus(x, 1, b->values, n), x = b->values;
        for (size_t i = 0; i < n; i++) sum += isfinite(x[i]) ? (x[i] / largest) * (x[i] / largest) : 0;
    }
    return largest * sqrt(sum);
}

static void put_stats(MeasureRow *row, const View *v, const Dtype *t, const Stats *s, Scratch *b) {
    double max = -INFINITY, min = INFINITY, sum = 0, square = 0;
    for (int k = 0; k < LANES; k++) {
        max = s->limit[k] > max ? s->limit[k] : max;
        min = s->limit[LANES + k] < min ? s->limit[LANES + k] : min;
        sum += s->sum[k], square += s->sum[LANES + k];
    }
    if (v->numel == s->nan + s->posinf + s->neginf) max = min = 0;
    double largest = -min > max ? -min : max, norm = sqrt(square);
    /* Below 2^-900 the squares have lost bits to the denormals. */
    if (largest > 0 && (!isfinite(square) || square < 0x1p-900)) norm = scaled_norm(*v, t, largest, b);
    /* Which of 0.0 and -0.0 wins depends on the order; adding zero makes both 0.0. */
    max += 0.0;
    min += 0.0;
    if (!t->integer) {
        memcpy(&row->max_bits, &max, sizeof max);
        memcpy(&row->min_bits, &min, sizeof min);
    } else if (t->item < 8 || !v->numel) {
        row->max_bits = (uint64_t)(int64_t)max;
        row->min_bits = (uint64_t)(int64_t)min;
    } else {
        row->max_bits = (uint64_t)s->imax ^ flip_of(t);
        row->min_bits = (uint64_t)s->imin ^ flip_of(t);
    }
    row->sum = sum;
    row->norm = norm;
    row->nan = s->nan;
    row->posinf = s->posinf;
    row->neginf = s->neginf;
    row->zero = s->zero;
}

/* From here on a number is what masks are made of; 0 where nothing is. */
static double mask_limit(const Dtype *t) {
    return t->integer || t->parts == 2 || t->item == 1 ? 0 : t->widen == from_half ? 0x1p13 : 0x1p29;
}
/* Statistics and a sketch of what lies below the limit, where some do not: one number of a mask is larger than all the rest. */
static size_t put_unmasked(u8 *to, const MeasureRow *row, View v, const Dtype *t, uint32_t length, Sketch *sketch, Scratch *b) {
    double edge[2], limit = mask_limit(t), number[4] = {-INFINITY, INFINITY, 0, 0};
    uint64_t count[2] = {0};
    memcpy(edge, &row->max_bits, 8), memcpy(edge + 1, &row->min_bits, 8);
    if (!limit || (edge[0] < limit && edge[1] > -limit)) return 0;
    memset(sketch, 0, offsetof(Sketch, sum)), clear_sums(sketch, ACCUMULATORS, t->wide);
    for (size_t left = v.numel, n; left; left -= n) {
        n = left < BLOCK ? left : BLOCK;
        const void *values = next_block(&v, b->gathered, n);
        if (t->widen) t->widen(values, b->parts, n), values = b->parts;
        for (size_t i = 0; i < n; i++) {
            double x = t->wide ? ((const f64 *)values)[i] : ((const f32 *)values)[i];
            int kept = x < limit && x > -limit;
            if (kept) {
                count[0]++, count[1] += x == 0;
                number[0] = x > number[0] ? x : number[0], number[1] = x < number[1] ? x : number[1];
                number[2] += x, number[3] += x * x;
            }
            if (t->wide) b->clean[i] = kept ? x : 0;
            else ((f32 *)b->clean)[i] = kept ? (f32)x : 0;
        }
        if (length) add_to_sketch(sketch, b->clean, n, t->wide);
    }
    if (!count[0]) number[0] = number[1] = 0;
    number[0] += 0.0, number[1] += 0.0, number[3] = sqrt(number[3]);
    memcpy(to, count, sizeof count), memcpy(to + sizeof count, number, sizeof number);
    if (length) fold_sums(sketch, t->wide);
    for (uint32_t k = 0; k < length; k++) ((f32 *)(to + UNMASKED_BYTES))[k] = (f32)sketch->total[k];
    return UNMASKED_BYTES + 4 * (size_t)length;
}

static uint32_t sketch_length(size_t numel, const Dtype *t, long flags) {
    if (!(flags & SKETCH)) return 0;
    return numel < BUCKETS / t->parts ? (uint32_t)numel * t->parts : BUCKETS;
}
/* Fills the row but for its payload, and writes what follows it: its sketch, and more. Returns how long that is. */
static size_t measure_view(const View *view, const Dtype *t, int flags, int64_t width, MeasureRow *row, u8 *to) {
    View v = *view;
    Stats s = {.imax = INT64_MIN, .imin = INT64_MAX};
    Sketch sketch;
    Scratch b;
    uint32_t state = ~0u, length = sketch_length(v.numel, t, flags), count = (uint32_t)rows_of(v.numel, t, flags, width);
    f32 by_rows[2 * MOST_ROWS];
    Rows rows = {.width = (size_t)width, .to = by_rows};
    flags &= ~BY_ROWS;
    row->numel = v.numel;
    row->sketch_len = length;
    for (int k = 0; k < 2 * LANES; k++) s.limit[k] = k < LANES ? -INFINITY : INFINITY;
    if (length) {
        memset(&sketch, 0, offsetof(Sketch, sum));
        clear_sums(&sketch, row->numel / (BUCKETS / t->parts) + 1, t->wide);
    }
    size_t step = v.contiguous && flags == CRC ? v.numel : BLOCK;
    for (size_t left = flags ? v.numel : 0, n; left; left -= n) {
        n = left < step ? left : step;
        const u8 *raw = next_block(&v, b.gathered, n);
        if (flags & CRC) state = crc_update(state, raw, n * v.item);
        if (flags != CRC) measure_block(t, raw, n, &s, length ? &sketch : NULL, count ? &rows : NULL, &b);
    }
    if (flags & STATS) put_stats(row, view, t, &s, &b);
    row->crc = flags & CRC ? ~state : 0;
    row->kind = (uint32_t)flags | (flags & STATS ? t->integer : 0);
    if (length) fold_sums(&sketch, t->wide);
    for (uint32_t k = 0; k < length; k++) ((f32 *)to)[k] = (f32)sketch.total[k];
    size_t size = 4 * (size_t)length;
    size_t more = flags & STATS ? put_unmasked(to + size, row, *view, t, length, &sketch, &b) : 0;
    row->known = count << 1 | (more != 0);
    memcpy(to + size + more, by_rows, 8 * (size_t)count);
    return size + more + 8 * (size_t)count;
}

/* Fills a view; dimensions of size one go, whatever their strides, neighbours that lie as one become one.  -1 if there is no such
 * tensor. */
static int fill_view(View *v, const u8 *at, size_t item, Py_ssize_t ndim, const int64_t *shape, const int64_t *stride) {
    int64_t numel = 1, reach = 0, dense = (int64_t)item, extent;
    int bad = 0, empty = 0, n = 0;
    v->at = at, v->item = item;
    for (Py_ssize_t d = 0; d < ndim; d++) bad |= shape[d] < 0, empty |= shape[d] == 0;
    /* Innermost first, and the arrays are filled from their ends. */
    int64_t *sizes = v->shape + MAX_DIMS, *strides = v->stride + MAX_DIMS;
    for (Py_ssize_t d = ndim; d-- > 0 && !bad && !empty;) {
        int64_t size = shape[d], step = dense;
        if (size == 1) continue;
        if (stride) bad |= __builtin_mul_overflow(stride[d], (int64_t)item, &step);
        bad |= step < 0 || __builtin_mul_overflow(numel, size, &numel) || __builtin_mul_overflow(dense, size, &dense) ||
               __builtin_mul_overflow(step, size, &extent) || __builtin_add_overflow(reach, extent, &reach);
        if (bad) break;
        if (n && *strides * *sizes == step) {
            *sizes *= size;
        } else {
            *--sizes = size, *--strides = step, n++;
        }
    }
    if (bad || (!empty && !v->at))
        return PyErr_SetString(PyExc_ValueError, "no such tensor: null pointer, negative size or stride, overflow"), -1;
    memmove(v->shape, sizes, (size_t)n * sizeof *sizes), memmove(v->stride, strides, (size_t)n * sizeof *strides);
    memset(v->index, 0, (size_t)n * sizeof *v->index);
    v->numel = empty ? 0 : (size_t)numel, v->ndim = n;
    v->contiguous = n == 0 || (n == 1 && v->stride[0] == (int64_t)item);
    return 0;
}
static int parse_view(View *v, PyObject *ptr, PyObject *shape, PyObject *stride, size_t item) {
    int contiguous = stride == Py_None;
    int64_t numbers[2][MAX_DIMS];
    const u8 *at = (const u8 *)(uintptr_t)PyLong_AsUnsignedLongLong(ptr);
    if (PyErr_Occurred()) return -1;
    if (!PyTuple_Check(shape) || !(contiguous || PyTuple_Check(stride)))
        return PyErr_SetString(PyExc_TypeError, "shape must be a tuple of int, stride a tuple of int or None"), -1;
    Py_ssize_t ndim = PyTuple_Size(shape), steps = contiguous ? ndim : PyTuple_Size(stride);
    if (ndim > MAX_DIMS || steps != ndim)
        return PyErr_Format(PyExc_ValueError, "%zd sizes, %zd strides: must be as many, at most 64", ndim, steps), -1;
    for (Py_ssize_t d = 0; d < ndim; d++) {
        numbers[0][d] = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
        if (!contiguous && !PyErr_Occurred()) numbers[1][d] = PyLong_AsLongLong(PyTuple_GetItem(stride, d));
        if (PyErr_Occurred()) return -1;
    }
    return fill_view(v, at, item, ndim, numbers[0], contiguous ? NULL : numbers[1]);
}

static int parse_item(PyObject *object, size_t *item) {
    *item = PyLong_AsSize_t(object);
    if (!PyErr_Occurred() && (*item > 16 || !*item || *item & (*item - 1)))
        PyErr_Format(PyExc_ValueError, "itemsize is %zu; it must be 1, 2, 4, 8 or 16", *item);
    return PyErr_Occurred() ? -1 : 0;
}
static int check_count(Py_ssize_t found, Py_ssize_t least, Py_ssize_t most) {
    if (found >= least && found <= most) return 0;
    return PyErr_Format(PyExc_TypeError, "takes %zd positional arguments, got %zd", most, found), -1;
}

/* Lets other threads run meanwhile, if there is much to do. */
static PyThreadState *release(size_t elements) { return elements > LARGE ? PyEval_SaveThread() : NULL; }
static void restore(PyThreadState *released) { if (released) PyEval_RestoreThread(released); }

/* NULL where one of them is not known. */
static const Dtype *known_dtype(long code, long flags) {
    if (code >= 0 && code < DTYPES && !(flags & ~(STATS | CRC | SKETCH | BY_ROWS))) return &dtypes[code];
    PyErr_Format(PyExc_ValueError, "unknown dtype code %ld (known: 0 to %d) or flags %ld (known: 1, 2, 4, 128)", code, DTYPES - 1,
                 flags);
    return NULL;
}
/* Writes a row that begins as `row`, where payload and sketch are, and what follows it; `width` is the last size. How long that is. */
static Py_ssize_t write_row(const View *v, const Dtype *t, long flags, int64_t width, MeasureRow row, char *to) {
    PyThreadState *released = release(v->numel);
    size_t size = measure_view(v, t, (int)flags, width, &row, (u8 *)to + ROW);
    restore(released);
    memcpy(to, &row, ROW);
    return ROW + (Py_ssize_t)size;
}
static PyObject *measure(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    View v;
    uint64_t offsets[3] = {0};
    if (check_count(count, 8, 8)) return NULL;
    long code = PyLong_AsLong(args[1]), flags = PyErr_Occurred() ? 0 : PyLong_AsLong(args[4]);
    for (int k = 0; k < 3 && !PyErr_Occurred(); k++) offsets[k] = PyLong_AsUnsignedLongLong(args[5 + k]);
    const Dtype *t = PyErr_Occurred() ? NULL : known_dtype(code, flags);
    if (!t || parse_view(&v, args[0], args[2], args[3], t->item)) return NULL;
    Py_ssize_t ndim = PyTuple_Size(args[2]);
    int64_t width = ndim ? PyLong_AsLongLong(PyTuple_GetItem(args[2], ndim - 1)) : 0;
    _Alignas(16) char to[MOST_OF_ROW];
    MeasureRow row = {.payload_offset = offsets[0], .payload_nbytes = offsets[1], .sketch_offset = offsets[2]};
    return PyBytes_FromStringAndSize(to, write_row(&v, t, flags, width, row, to));
}
static Py_ssize_t measure_for_c(const Measured *m, char *row) {
    View v;
    const Dtype *t = known_dtype(m->code, m->flags);
    if (m->dim > MAX_DIMS) return PyErr_SetString(PyExc_ValueError, "more than 64 sizes"), -1;
    if (!t || fill_view(&v, m->at, t->item, (Py_ssize_t)m->dim, m->sizes, m->strides)) return -1;
    int64_t width = m->dim ? m->sizes[m->dim - 1] : 0;
    return write_row(&v, t, m->flags, width, (MeasureRow){.payload_offset = NONE64, .sketch_offset = m->sketch_offset}, row);
}

static void gather_bytes(View *v, size_t start, size_t nbytes, u8 *to) {
    u8 buffer[BLOCK * 4];
    size_t element = start / v->item, skip = start % v->item, n;
    for (int d = v->ndim - 1; d >= 0; v->at += v->index[d] * v->stride[d], element /= (size_t)v->shape[d--])
        v->index[d] = (int64_t)(element % (size_t)v->shape[d]);
    /* Through a buffer, because the range may begin or end inside an element. */
    for (; nbytes; nbytes -= n, to += n, skip = 0) {
        n = (skip + nbytes < sizeof buffer ? skip + nbytes : sizeof buffer) - skip;
        memcpy(to, take(v, buffer, (skip + n + v->item - 1) / v->item) + skip, n);
    }
}
static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    View v;
    Py_buffer dest;
    size_t item;
    if (check_count(count, 7, 7) || parse_item(args[1], &item) || parse_view(&v, args[0], args[2], args[3], item))
        return NULL;
    size_t start = PyLong_AsSize_t(args[4]), nbytes = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[5]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[6], &dest, PyBUF_WRITABLE)) return NULL;
    size_t total = v.numel * item, room = (size_t)dest.len;
    int fits = start <= total && nbytes <= total - start && nbytes <= room;
    PyThreadState *released = release(fits ? nbytes / item : 0);
    if (fits && nbytes && v.contiguous) memcpy(dest.buf, v.at + start, nbytes);
    if (fits && nbytes && !v.contiguous) gather_bytes(&v, start, nbytes, dest.buf);
    restore(released);
    PyBuffer_Release(&dest);
    if (fits) return Py_NewRef(Py_None);
    return PyErr_Format(PyExc_ValueError, "%zu bytes from %zu do not fit a tensor of %zu bytes and a buffer of %zu",
                        nbytes, start, total, room);
}

static PyObject *crc32(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer data;
    if (check_count(count, 1, 2)) return NULL;
    uint32_t value = count == 2 ? (uint32_t)PyLong_AsUnsignedLongMask(args[1]) : 0;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    PyThreadState *released = release((size_t)data.len / 4);
    value = ~crc_update(~value, data.buf, (size_t)data.len);
    restore(released);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(value);
}

static PyObject *fingerprint(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    View v;
    size_t item;
    uint64_t out[2];
    if (check_count(count, 4, 4) || parse_item(args[1], &item) || parse_view(&v, args[0], args[2], args[3], item))
        return NULL;
    PyThreadState *released = release(v.numel);
    digest(&v, out);
    restore(released);
    return PyBytes_FromStringAndSize((const char *)out, sizeof out);
}

static const char *choose_kernels(void) {
#ifdef __x86_64__
    unsigned has = cpu_has();
    if (has & CPU_AVX512) return kernels = kernels_64, "avx512";
    if (has & CPU_AVX2) return kernels = kernels_32, "avx2";
#endif
    return "base";
}

static int execute(PyObject *module) {
    fill_tables();
    crc_begin();
    if (PyModule_AddStringConstant(module, "ISA", choose_kernels())) return -1;
    if (PyModule_AddIntConstant(module, "VERSION", 2)) return -1;
    static const MeasureForC function = measure_for_c;
    PyObject *capsule = PyCapsule_New((void *)&function, MEASURE_FOR_C, NULL);
    if (!capsule || PyModule_AddObject(module, "MEASURE_FOR_C", capsule)) return Py_XDECREF(capsule), -1;
    return 0;
}
static PyMethodDef methods[] = {
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL, "The 112-byte row, then the sketch."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "Copy a range of the logical bytes into dest."},
    {"crc32", (PyCFunction)(void (*)(void))crc32, METH_FASTCALL, "CRC-32 of a buffer, as zlib.crc32."},
    {"fingerprint", (PyCFunction)(void (*)(void))fingerprint, METH_FASTCALL, "16 bytes that tell tensors apart."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_measure", .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__measure(void) { return PyModuleDef_Init(&definition); }
