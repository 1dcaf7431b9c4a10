/* Reads one tensor's memory once and says what is in it: statistics, a CRC-32, a count sketch, a fingerprint.
 * Knows a pointer, a dtype code, a shape and strides; knows nothing of torch.  The row measure() writes is in schema.h;
 * measuring_fallback.py gives the same numbers in numpy: change both together.
 * The file includes itself per vector size VB and float width W (the part at the end), so that every kernel is written
 * once.  Sums run in 16 lanes whatever the vector size: a result does not depend on the machine. */
#ifndef VB
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

enum { ROW = MEASURE_BYTES, BLOCK = 2048, LANES = 16, BUCKETS = 256, CHUNK = 64, STRIPE = 1024, MAX_DIMS = 64, LARGE = 32768 };

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
#define SET(B, W) {JOIN3(scan, B, W), JOIN3(clean, B, W), JOIN3(sketch, B, W), JOIN3(half, B, W), JOIN3(bfloat, B, W)}
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
#include "measure.c"
#ifdef __x86_64__
#define VB 32
#include "measure.c"
#define VB 64
#include "measure.c"
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
_Static_assert(MOST_OF_ROW == ROW + 4 * BUCKETS, "a row with the longest sketch");
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

typedef struct {
    _Alignas(64) f64 parts[BLOCK], values[BLOCK], clean[2 * BLOCK];
    _Alignas(64) u8 gathered[BLOCK * 16];
} Scratch;

static void measure_block(const Dtype *t, const u8 *raw, size_t n, Stats *s, Sketch *sketch, Scratch *b) {
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

static uint32_t sketch_length(size_t numel, const Dtype *t, long flags) {
    if (!(flags & SKETCH)) return 0;
    return numel < BUCKETS / t->parts ? (uint32_t)numel * t->parts : BUCKETS;
}
/* Fills the row but for its payload, and writes its sketch. */
static void measure_view(const View *view, const Dtype *t, int flags, MeasureRow *row, f32 *to) {
    View v = *view;
    Stats s = {.imax = INT64_MIN, .imin = INT64_MAX};
    Sketch sketch;
    Scratch b;
    uint32_t state = ~0u, length = sketch_length(v.numel, t, flags);
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
        if (flags != CRC) measure_block(t, raw, n, &s, length ? &sketch : NULL, &b);
    }
    if (flags & STATS) put_stats(row, view, t, &s, &b);
    row->crc = flags & CRC ? ~state : 0;
    row->kind = (uint32_t)flags | (flags & STATS ? t->integer : 0);
    if (length) fold_sums(&sketch, t->wide);
    for (uint32_t k = 0; k < length; k++) to[k] = (float)sketch.total[k];
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
    if (code >= 0 && code < DTYPES && !(flags & ~(STATS | CRC | SKETCH))) return &dtypes[code];
    PyErr_Format(PyExc_ValueError, "unknown dtype code %ld (known: 0 to %d) or flags %ld (known: 1, 2, 4)", code, DTYPES - 1,
                 flags);
    return NULL;
}
/* Writes a row that begins as `row`, where payload and sketch are, and its sketch. */
static void write_row(const View *v, const Dtype *t, long flags, MeasureRow row, char *to) {
    PyThreadState *released = release(v->numel);
    measure_view(v, t, (int)flags, &row, (f32 *)(to + ROW));
    restore(released);
    memcpy(to, &row, ROW);
}
static PyObject *measure(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    View v;
    uint64_t offsets[3] = {0};
    if (check_count(count, 8, 8)) return NULL;
    long code = PyLong_AsLong(args[1]), flags = PyErr_Occurred() ? 0 : PyLong_AsLong(args[4]);
    for (int k = 0; k < 3 && !PyErr_Occurred(); k++) offsets[k] = PyLong_AsUnsignedLongLong(args[5 + k]);
    const Dtype *t = PyErr_Occurred() ? NULL : known_dtype(code, flags);
    if (!t || parse_view(&v, args[0], args[2], args[3], t->item)) return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, ROW + 4 * (Py_ssize_t)sketch_length(v.numel, t, flags));
    MeasureRow row = {.payload_offset = offsets[0], .payload_nbytes = offsets[1], .sketch_offset = offsets[2]};
    if (result) write_row(&v, t, flags, row, PyBytes_AsString(result));
    return result;
}
static Py_ssize_t measure_for_c(const Measured *m, char *row) {
    View v;
    const Dtype *t = known_dtype(m->code, m->flags);
    if (m->dim > MAX_DIMS) return PyErr_SetString(PyExc_ValueError, "more than 64 sizes"), -1;
    if (!t || fill_view(&v, m->at, t->item, (Py_ssize_t)m->dim, m->sizes, m->strides)) return -1;
    write_row(&v, t, m->flags, (MeasureRow){.payload_offset = NONE64, .sketch_offset = m->sketch_offset}, row);
    return ROW + 4 * (Py_ssize_t)sketch_length(v.numel, t, m->flags);
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

#elif !defined(W)
#define W 32
#include "measure.c"
#define W 64
#include "measure.c"
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

#define WIDEN_HALF NAME(half)
#include "half.h"

TARGET static void NAME(bfloat)(const void *p, void *out, size_t n) {
    for (size_t i = 0; i < n; i++) ((u32 *)out)[i] = (u32)((const u16 *)p)[i] << 16;
}
#undef W
#endif
