/* Reads two tensors once, side by side, and says how they differ; finds the end of a JSON value.
 * Knows two buffers and their dtype codes.  The State contrast() adds to is described in pairs.py, and pairs_fallback.py
 * gives the same numbers in numpy: change all three together.
 * The kernels are in pairs_kernels.h, which is included for each vector size VB, so that every kernel is written once, and
 * in pairs_near.h.  Sums run in 8 lanes whatever the vector size and a product that is rounded is never fused with a sum
 * (setup.py): a result does not depend on the machine. */
#include "abi.h"
#include <math.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include "crc.h"
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "elements are read as they lie in memory");

enum { BLOCK = 4096, LANES = 8, LARGE = 16384, DTYPES = 21, ASIDE = 16, TILE = 512, SUMMED = 4 * BLOCK };
enum { DOT, REFERENCE, TARGET_SIDE, DIFFERENCE, ABSOLUTE, RELATIVE, ULP, SUMS };
enum { MAX_ABSOLUTE, MAX_RELATIVE, MAX_ULP, LIMITS };
/* What is not finite: NaN or infinite in the reference only, and so on; EITHER is in how many places. */
enum { NAN_REFERENCE, NAN_TARGET, NAN_BOTH, INF_REFERENCE, INF_TARGET, INF_SAME, INF_OPPOSITE, EITHER, KINDS };

#define ALIAS __attribute__((may_alias))
typedef uint8_t u8; typedef int8_t i8;
typedef uint16_t ALIAS u16; typedef uint32_t ALIAS u32; typedef uint64_t ALIAS u64;
typedef int16_t ALIAS i16; typedef int32_t ALIAS i32; typedef int64_t ALIAS i64;
typedef float ALIAS f32; typedef double ALIAS f64;

typedef struct {
    double sum[SUMS][LANES], limit[LIMITS];
    uint64_t equal, thousandth, five_thousandths; /* elements whose relative error is not below */
} Block;
typedef struct {
    uint64_t count, differing, thousandth, five_thousandths; /* the last two: relative error below */
    uint64_t special[KINDS];
    uint64_t place; /* of the largest difference, counted from 1 */
    double limit[LIMITS], sum[SUMS][LANES];
} State;
/* Where the next block lies in either stream, and the bytes of as many elements as there are lanes. */
typedef struct {
    const u8 *at[2];
    size_t step[2];
} Ahead;
/* The elements of a block that are not close, and what pairs_near.h makes of the others. */
typedef struct {
    size_t count;
    _Alignas(64) f32 side[2][ASIDE + BLOCK / 32 + 4 * LANES], size[TILE + 2 * LANES], seen[TILE + 2 * LANES];
} Aside;
typedef void (*Widen)(const void *, void *, size_t);
typedef void (*Difference)(const u64 *, const u64 *, f64 *, size_t);
typedef struct {
    int (*pair)(const void *, const void *, const f64 *exact, size_t, double low, const Ahead *, Block *);
    int (*square)(const void *, size_t, Block *);
    void (*clean)(const void *, const void *, size_t, void *, void *, uint64_t *special);
} Kernels;
typedef struct {
    Kernels by_width[2];
    int (*near)(const f32 *, const f32 *, size_t, float limit, float low, const Ahead *, Aside *, Block *);
    Widen widen[DTYPES], f32_to_f64;
    Difference signed_difference, unsigned_difference;
} Machine;

/* Written once, when the module is made; read-only from then on. */
static float float8[5][256];

/* Names by VB and W: NAME(pair) is pair_64_32, TYPE(f) is f32. */
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
#define SET(W) {JOIN3(pair, VB, W), JOIN3(square, VB, W), JOIN3(clean, VB, W)}
/* LARGER is b where one is NaN.  COUNT adds one where a >= b, ADD_BELOW adds a where a < b; neither is so with a NaN. */
#define LARGER JOIN2(LARGER_, VB)
#define LARGER_16(a, b) ((Wide)(((Mask)((a) > (b)) & (Mask)(a)) | (~(Mask)((a) > (b)) & (Mask)(b))))
#define LARGER_32(a, b) _mm256_max_pd(a, b)
#define LARGER_64(a, b) _mm512_max_pd(a, b)
#define COUNTER JOIN2(COUNTER_, VB)
#define COUNTER_16 uint64_t
#define COUNTER_32 uint64_t
#define COUNTER_64 uint32_t
#define COUNT JOIN2(COUNT_, VB)
#define COUNT_16(to, a, b) to -= (Counter)((a) >= (b))
#define COUNT_32 COUNT_16
#define COUNT_64(to, a, b) TALLY(to, _mm512_cmp_pd_mask(a, b, _CMP_GE_OQ))
#define TALLY(to, mask) to = (Counter)_mm256_mask_add_epi32((__m256i)to, mask, (__m256i)to, _mm256_set1_epi32(1))
#define ADD_BELOW JOIN2(ADD_BELOW_, VB)
#define ADD_BELOW_16(to, a, b) to += (Wide)((Mask)(a) & (Mask)((a) < (b)))
#define ADD_BELOW_32 ADD_BELOW_16
#define ADD_BELOW_64(to, a, b) to = _mm512_mask_add_pd(to, _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), to, a)

/* Adds a product that is exact in float64, as of two float32: there, and only there, product and sum may be one instruction. */
#define EXACT JOIN2(EXACT_, VB)
#define EXACT_16(to, a, b) to += (a) * (b)
#define EXACT_32(to, a, b) to = _mm256_fmadd_pd(a, b, to)
#define EXACT_64(to, a, b) to = _mm512_fmadd_pd(a, b, to)

#define VB 16
#include "pairs_kernels.h"
#ifdef __x86_64__
#define VB 32
#include "pairs_kernels.h"
#define VB 64
#include "pairs_kernels.h"
#endif

static const Machine *machine = &machine_16;

/* By dtype code.  `wide`: it takes a float64 to hold one.  A float has `digits` bits of mantissa and is normal from
 * 2^exponent on; complex dtypes are left to the fallback. */
enum { FLOAT, SIGNED, UNSIGNED, COMPLEX };
typedef struct {
    uint8_t item, wide, kind, digits;
    int16_t exponent;
} Dtype;
static const Dtype dtypes[DTYPES] = {
    {4, 0, FLOAT, 23, -126}, {8, 1, FLOAT, 52, -1022}, {2, 0, FLOAT, 10, -14}, {2, 0, FLOAT, 7, -126},
    {1, 0, SIGNED, 0, 0},    {1, 0, UNSIGNED, 0, 0},   {2, 0, SIGNED, 0, 0},   {4, 1, SIGNED, 0, 0},
    {8, 1, SIGNED, 0, 0},    {1, 0, UNSIGNED, 0, 0},   {2, 0, UNSIGNED, 0, 0}, {4, 1, UNSIGNED, 0, 0},
    {8, 1, UNSIGNED, 0, 0},  {8, 0, COMPLEX, 0, 0},    {16, 1, COMPLEX, 0, 0}, {4, 0, COMPLEX, 0, 0},
    {1, 0, FLOAT, 3, -6},    {1, 0, FLOAT, 2, -14},    {1, 0, FLOAT, 3, -7},   {1, 0, FLOAT, 2, -15},
    {1, 0, FLOAT, 0, -127},
};

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
    }
}

/* What is decided once for two streams.  The unit in the last place is that of the float with fewer digits; `low` is
 * where its numbers begin to be denormal.  For integers it is one: there `low` is above all of them. */
typedef struct {
    const Dtype *type[2];
    long code[2];
    int wide, same, exact;
    double low, unit;
} Pair;
static Pair pair_of(long reference, long target) {
    const Dtype *r = &dtypes[reference], *t = &dtypes[target], *coarse = r->kind == FLOAT ? r : t;
    int fewer = t->digits < r->digits || (t->digits == r->digits && t->exponent > r->exponent);
    if (r->kind == FLOAT && t->kind == FLOAT && fewer) coarse = t;
    int integers = coarse->kind != FLOAT;
    return (Pair){{r, t}, {reference, target}, r->wide || t->wide, reference == target,
                  integers && (r->item == 8 || t->item == 8), ldexp(1, integers ? 77 : coarse->exponent),
                  ldexp(1, integers ? 76 : coarse->digits - 1)};
}

typedef struct {
    _Alignas(64) f64 side[2][BLOCK], clean[2][BLOCK], exact[BLOCK];
    _Alignas(64) f32 narrow[BLOCK];
    Aside aside;
    int suspect, waiting;
} Scratch;

/* The numbers of one side as float32, or as float64 if either side is wide; in place if they lie so. */
static const void *widened(const Pair *p, int side, const u8 *raw, size_t n, Scratch *b) {
    const Dtype *t = p->type[side];
    Widen widen = machine->widen[p->code[side]];
    if (t->wide == p->wide && !widen) return raw;
    if (t->wide == p->wide) return widen(raw, b->side[side], n), b->side[side];
    if (widen) widen(raw, b->narrow, n), raw = (const u8 *)b->narrow;
    machine->f32_to_f64(raw, b->side[side], n);
    return b->side[side];
}

/* |target - reference| of integers where one is of 64 bits, rounded once. */
static const f64 *exact_difference(const Pair *p, const u8 *raw[2], const f64 *wide[2], size_t n, Scratch *b) {
    const u64 *x[2];
    int is_signed[2];
    for (int k = 0; k < 2; k++) {
        is_signed[k] = p->type[k]->item < 8 || p->type[k]->kind == SIGNED;
        x[k] = (const u64 *)raw[k];
        if (p->type[k]->item == 8) continue;
        for (size_t i = 0; i < n; i++) ((i64 *)b->clean[k])[i] = (i64)wide[k][i];
        x[k] = (const u64 *)b->clean[k];
    }
    if (is_signed[0] == is_signed[1]) {
        (is_signed[0] ? machine->signed_difference : machine->unsigned_difference)(x[0], x[1], b->exact, n);
        return b->exact;
    }
    for (size_t i = 0; i < n; i++) {
        u64 u = x[is_signed[0]][i], s = x[is_signed[1]][i], d = (i64)s < 0 ? u - s : u > s ? u - s : s - u;
        /* Of a sum of 65 bits half is rounded, the lowest bit kept as one that tells which way. */
        b->exact[i] = (i64)s < 0 && d < u ? 2 * (double)(d >> 1 | (d & 1) | 1ull << 63) : (double)d;
    }
    return b->exact;
}

static double difference_at(const Pair *p, const void *x, const void *y, const f64 *exact, size_t i) {
    if (exact) return exact[i];
    if (p->wide) return fabs(((const f64 *)y)[i] - ((const f64 *)x)[i]);
    return fabs((double)((const f32 *)y)[i] - (double)((const f32 *)x)[i]);
}

/* The first place that differs by `most`. */
static size_t place_of(const Pair *p, const void *x, const void *y, const f64 *exact, size_t n, double most) {
    enum { AT_ONCE = 64 };
    size_t i = 0;
    if (!p->wide) {
        const f32 *r = x, *t = y;
        for (int found = 0; i + AT_ONCE <= n && !found; i += found ? 0 : AT_ONCE)
            for (size_t k = i; k < i + AT_ONCE; k++) found |= fabs((double)t[k] - (double)r[k]) == most;
    }
    while (i < n - 1 && difference_at(p, x, y, exact, i) != most) i++;
    return i;
}

/* All of a block but the elements that are not close, which are put aside.  0 if it has to be taken whole. */
static int add_near(const Pair *p, const f32 *x, const f32 *y, size_t n, double worst, const Ahead *ahead, Scratch *b,
                    Block *out) {
    /* With the largest relative error known so far, what is close cannot change it.  The margin is more than what the
     * products of float32 are off, denormals included. */
    double limit = 1 / worst * (1 + 0x1p-10);
    limit = limit > 1010 ? limit : 1010;
    if (p->wide || !p->same || !(worst > 0) || b->waiting-- > 0) return 0;
    int done = machine->near(x, y, n, (float)limit, (float)p->low, ahead, &b->aside, out);
    /* With more than one in 64 that is not close, the kernel that takes everything is faster: it gets the next blocks. */
    b->waiting = done && b->aside.count * 64 <= n ? 0 : 15;
    return done;
}

/* Says how blocks differ; cleaned if need be. */
static void add_all(const Pair *p, const void **x, const void **y, const f64 *exact, size_t n, int same, const Ahead *ahead,
                    Scratch *b, Block *out, uint64_t *special) {
    const Kernels *kernel = &machine->by_width[p->wide];
    /* After a block with something that is not finite, the next is not tried as if all were. */
    for (int cleaned = b->suspect;; cleaned = 1) {
        if (cleaned) {
            kernel->clean(*x, *y, n, b->clean[0], b->clean[1], special);
            *x = b->clean[0], *y = b->clean[1];
        }
        int finite = same ? kernel->square(*x, n, out) : kernel->pair(*x, *y, exact, n, p->low, ahead, out);
        if (finite || cleaned) break;
    }
    b->suspect = special[EITHER] > 0;
}

static void add_block(const Pair *p, const u8 *raw[2], size_t n, Scratch *b, State *s) {
    const f64 *exact = NULL;
    Block out;
    uint64_t special[KINDS] = {0};
    Ahead ahead;
    for (int k = 0; k < 2; k++) ahead.step[k] = LANES * p->type[k]->item, ahead.at[k] = raw[k] + n * p->type[k]->item;
    int same = p->same && !memcmp(raw[0], raw[1], n * p->type[0]->item);
    const void *x = widened(p, 0, raw[0], n, b), *y = same ? x : widened(p, 1, raw[1], n, b);
    if (p->exact && !same) exact = exact_difference(p, raw, (const f64 *[2]){x, y}, n, b);
    if (!same && add_near(p, x, y, n, s->limit[MAX_RELATIVE], &ahead, b, &out)) {
        if (b->aside.count) {
            const void *r = b->aside.side[0], *t = b->aside.side[1];
            Block rest;
            add_all(p, &r, &t, NULL, b->aside.count, 0, &ahead, b, &rest, special);
            for (int i = 0; i < SUMS; i++)
                for (int k = 0; k < LANES; k++) out.sum[i][k] += rest.sum[i][k];
            for (int k = 0; k < LIMITS; k++) out.limit[k] = out.limit[k] > rest.limit[k] ? out.limit[k] : rest.limit[k];
            out.equal -= b->aside.count - rest.equal;
            out.thousandth = rest.thousandth, out.five_thousandths = rest.five_thousandths;
        }
    } else {
        add_all(p, &x, &y, exact, n, same, &ahead, b, &out, special);
    }
    if (out.limit[MAX_ABSOLUTE] > s->limit[MAX_ABSOLUTE])
        s->place = s->count + place_of(p, x, y, exact, n, out.limit[MAX_ABSOLUTE]) + 1;
    out.limit[MAX_ULP] *= p->unit;
    for (int k = 0; k < LANES; k++) out.sum[ULP][k] *= p->unit;
    for (int k = 0; k < LIMITS; k++) s->limit[k] = out.limit[k] > s->limit[k] ? out.limit[k] : s->limit[k];
    for (int i = 0; i < SUMS; i++)
        for (int k = 0; k < LANES; k++) s->sum[i][k] += out.sum[i][k];
    /* An element that is finite on one side only is not good; on neither, it is taken for equal. */
    uint64_t sides = 0, matching = special[NAN_BOTH] + special[INF_SAME];
    for (int k = 0; k < EITHER; k++) sides += special[k];
    uint64_t alone = 2 * special[EITHER] - sides - matching - special[INF_OPPOSITE];
    s->count += n, s->differing += n - out.equal + special[EITHER] - matching;
    s->thousandth += n - out.thousandth - alone, s->five_thousandths += n - out.five_thousandths - alone;
    for (int k = 0; k < KINDS; k++) s->special[k] += special[k];
}

static int check_count(Py_ssize_t found, Py_ssize_t expected) {
    if (found == expected) return 0;
    return PyErr_Format(PyExc_TypeError, "takes %zd positional arguments, got %zd", expected, found), -1;
}

/* Two streams, the state they are added to and, if they are wanted, the states of both streams' checksums. */
typedef struct {
    Pair p;
    size_t count;
    Py_buffer view[4];
    int held;
    State s;
    uint32_t crc[2];
} Streams;

/* Takes hold of the buffers, which end() lets go, whatever begin() says. */
static int begin(Streams *x, PyObject *const *args, Py_ssize_t count) {
    int given = count == 6 ? 4 : 3;
    long code[2];
    x->held = 0;
    if (count != 6 && check_count(count, 5)) return -1;
    for (int k = 0; k < 2; k++) {
        code[k] = PyLong_AsLong(args[2 * k + 1]);
        if (PyErr_Occurred()) return -1;
        if (code[k] < 0 || code[k] >= DTYPES || dtypes[code[k]].kind == COMPLEX)
            return PyErr_Format(PyExc_ValueError, "dtype code %ld is of no real dtype (0 to 12, 16 to 20)", code[k]), -1;
    }
    for (; x->held < given; x->held++) {
        int k = x->held;
        if (PyObject_GetBuffer(args[k < 3 ? 2 * k : 5], &x->view[k], k > 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return -1;
    }
    const Py_buffer *view = x->view;
    if (view[2].len != sizeof x->s)
        return PyErr_Format(PyExc_ValueError, "state has %zd bytes; it must have %zu", view[2].len, sizeof x->s), -1;
    if (given == 4 && view[3].len != sizeof x->crc)
        return PyErr_Format(PyExc_ValueError, "checksums have %zd bytes; they must have %zu", view[3].len, sizeof x->crc), -1;
    x->p = pair_of(code[0], code[1]);
    x->count = (size_t)view[0].len / x->p.type[0]->item;
    if (x->count * x->p.type[0]->item != (size_t)view[0].len || x->count * x->p.type[1]->item != (size_t)view[1].len)
        return PyErr_Format(PyExc_ValueError, "%zd bytes of dtype code %ld and %zd of %ld are not equally many elements",
                            view[0].len, code[0], view[1].len, code[1]), -1;
    memcpy(&x->s, view[2].buf, sizeof x->s);
    if (given == 4) memcpy(x->crc, view[3].buf, sizeof x->crc);
    return 0;
}
static void end(Streams *x, int keep) {
    if (keep) memcpy(x->view[2].buf, &x->s, sizeof x->s);
    if (keep && x->held == 4) memcpy(x->view[3].buf, x->crc, sizeof x->crc);
    while (x->held) PyBuffer_Release(&x->view[--x->held]);
}

static void add_streams(Streams *x) {
    const Pair *p = &x->p;
    const u8 *raw[2] = {x->view[0].buf, x->view[1].buf};
    size_t n = x->count;
    Scratch b;
    b.suspect = b.waiting = 0;
    /* Numbers that are widened have to stay in the first cache. */
    int widen = machine->widen[p->code[0]] || machine->widen[p->code[1]];
    for (size_t at = 0, step, most = widen ? BLOCK / 2 : BLOCK; at < n; at += step) {
        step = n - at < most ? n - at : most;
        size_t summed = n - at < SUMMED ? n - at : SUMMED;
        for (int k = 0; x->held == 4 && at % SUMMED == 0 && k < 2; k++)
            x->crc[k] = ~crc_update(~x->crc[k], raw[k], summed * p->type[k]->item);
        add_block(p, raw, step, &b, &x->s);
        for (int k = 0; k < 2; k++) raw[k] += step * p->type[k]->item;
    }
}

static PyObject *contrast(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Streams x;
    int failed = begin(&x, args, count);
    if (!failed) {
        PyThreadState *released = x.count > LARGE ? PyEval_SaveThread() : NULL;
        add_streams(&x);
        if (released) PyEval_RestoreThread(released);
    }
    end(&x, !failed);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* A list of what contrast() takes, one after the other without the lock: to get it back takes long where threads wait. */
static PyObject *contrast_all(PyObject *module, PyObject *list) {
    Py_ssize_t count = PyList_Size(list), begun = 0;
    int failed = count < 0;
    Streams *all = count > 0 ? malloc((size_t)count * sizeof *all) : NULL;
    if (count > 0 && !all) return PyErr_NoMemory();
    for (; begun < count && !failed; begun++) {
        PyObject *one = PyList_GetItem(list, begun), *args[6] = {NULL};
        Py_ssize_t given = one ? PyTuple_Size(one) : -1;
        all[begun].held = 0;
        for (Py_ssize_t k = 0; k < given && k < 6; k++) args[k] = PyTuple_GetItem(one, k);
        failed = given < 0 || begin(&all[begun], args, given);
    }
    if (!failed) {
        PyThreadState *released = PyEval_SaveThread();
        for (Py_ssize_t k = 0; k < count; k++) add_streams(&all[k]);
        PyEval_RestoreThread(released);
    }
    while (begun--) end(&all[begun], !failed);
    free(all);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Bit k tells whether p[k], with the bits of `set` added, is c. */
static inline uint64_t mask_of(const u8 *p, u8 c, u8 set) {
    uint64_t mask = 0;
#ifdef __x86_64__
    __m128i wanted = _mm_set1_epi8((char)c), with = _mm_set1_epi8((char)set);
    for (int k = 0; k < 4; k++) {
        __m128i bytes = _mm_or_si128(_mm_loadu_si128((const __m128i *)(p + 16 * k)), with);
        mask |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, wanted)) << (16 * k);
    }
#else
    for (int k = 0; k < 64; k++) mask |= (uint64_t)((p[k] | set) == c) << k;
#endif
    return mask;
}

/* 64 bytes at a time: the quotes that are not escaped say what is inside a string, the brackets outside are counted. */
typedef struct {
    uint64_t in_string, escaped; /* all ones inside a string; one if a backslash came last */
    int64_t depth;
} Nesting;
static int close_within(Nesting *s, const u8 *p) {
    uint64_t backslash = mask_of(p, '\\', 0), quote = mask_of(p, '"', 0), escaped = s->escaped;
    s->escaped = 0;
    if (backslash | escaped) {
        for (uint64_t left = backslash & ~escaped; left;) {
            uint64_t next = (left & -left) << 1;
            escaped |= next;
            s->escaped = !next;
            left &= left - 1, left &= ~next;
        }
        quote &= ~escaped;
    }
    uint64_t inside = quote;
    for (int k = 1; k < 64; k *= 2) inside ^= inside << k;
    inside ^= s->in_string;
    s->in_string = (uint64_t)((int64_t)inside >> 63);
    /* The two brackets of a kind differ in one bit. */
    uint64_t opening = mask_of(p, '{', 32) & ~inside, closing = mask_of(p, '}', 32) & ~inside;
    int64_t closings = __builtin_popcountll(closing);
    if (closings < s->depth) {
        s->depth += __builtin_popcountll(opening) - closings;
        return -1;
    }
    for (uint64_t both = opening | closing; both; both &= both - 1) {
        s->depth += opening & both & -both ? 1 : -1;
        if (!s->depth) return __builtin_ctzll(both);
    }
    return -1;
}
static Py_ssize_t skip_nested(const u8 *p, Py_ssize_t at, Py_ssize_t end) {
    Nesting s = {0};
    int found;
    for (; end - at >= 64; at += 64)
        if ((found = close_within(&s, p + at)) >= 0) return at + found + 1;
    u8 last[64] = {0};
    memcpy(last, p + at, (size_t)(end - at));
    return (found = close_within(&s, last)) >= 0 ? at + found + 1 : -1;
}
static Py_ssize_t skip_string(const u8 *p, Py_ssize_t at, Py_ssize_t end) {
    for (Py_ssize_t from = at + 1; from < end;) {
        const u8 *quote = memchr(p + from, '"', (size_t)(end - from));
        if (!quote) return -1;
        Py_ssize_t slashes = 0, place = quote - p;
        while (p[place - 1 - slashes] == '\\') slashes++;
        if (slashes % 2 == 0) return place + 1;
        from = place + 1;
    }
    return -1;
}
/* A number ends in a digit; NaN and Infinity are what the json module writes. */
static Py_ssize_t skip_word(const u8 *p, Py_ssize_t at, Py_ssize_t end) {
    static const char *const words[] = {"true", "false", "null", "NaN", "Infinity", "-Infinity"};
    Py_ssize_t to = at;
    while (to < end && p[to] && strchr("+-.0123456789eEINaflnrstuiy", p[to])) to++;
    for (size_t k = 0; k < sizeof words / sizeof *words; k++)
        if ((size_t)(to - at) == strlen(words[k]) && !memcmp(p + at, words[k], strlen(words[k]))) return to;
    if (to == at || p[to - 1] < '0' || p[to - 1] > '9' || (p[at] != '-' && (p[at] < '0' || p[at] > '9'))) return -1;
    return to;
}
static PyObject *skip_json(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer text;
    if (check_count(count, 2)) return NULL;
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), end = -1;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE)) return NULL;
    const u8 *p = text.buf;
    if (at >= 0 && at < text.len) {
        PyThreadState *released = text.len - at > LARGE ? PyEval_SaveThread() : NULL;
        end = (p[at] == '{' || p[at] == '[' ? skip_nested : p[at] == '"' ? skip_string : skip_word)(p, at, text.len);
        if (released) PyEval_RestoreThread(released);
    }
    PyBuffer_Release(&text);
    if (end < 0) return PyErr_Format(PyExc_ValueError, "no whole JSON value begins at byte %zd", at);
    return PyLong_FromSsize_t(end);
}

/* Lets go of the whole pages within views of mapped files; of views that lie side by side in one go, for each has to be told
 * to all cores.  Between two views less than a page apart there is no page of anybody else. */
static PyObject *let_go(PyObject *module, PyObject *const *args, Py_ssize_t count) {
#ifdef MADV_DONTNEED
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = 0, end = 0;
    Py_ssize_t held = 0;
    Py_buffer *view = count ? malloc((size_t)count * sizeof *view) : NULL;
    if (count && !view) return PyErr_NoMemory();
    for (; held < count; held++)
        if (PyObject_GetBuffer(args[held], &view[held], PyBUF_SIMPLE)) break;
    int failed = held < count;
    PyThreadState *released = PyEval_SaveThread();
    for (Py_ssize_t k = 0; k <= held && !failed; k++) {
        uintptr_t from = k < held ? (uintptr_t)view[k].buf : 0, to = k < held ? from + (uintptr_t)view[k].len : 0;
        if (k < held && from >= end && from - end < page) {
            end = to;
            continue;
        }
        start = (start + page - 1) / page * page, end = end / page * page;
        if (end > start) madvise((void *)start, end - start, MADV_DONTNEED);
        start = from, end = to;
    }
    PyEval_RestoreThread(released);
    while (held--) PyBuffer_Release(&view[held]);
    free(view);
    if (failed) return NULL;
#endif
    return Py_NewRef(Py_None);
}

/* The fields of a state in their order, the lanes of a sum added up. */
static PyObject *totals(PyObject *module, PyObject *state) {
    Py_buffer view;
    State s;
    if (PyObject_GetBuffer(state, &view, PyBUF_SIMPLE)) return NULL;
    int fits = view.len == sizeof s;
    if (fits) memcpy(&s, view.buf, sizeof s);
    else PyErr_Format(PyExc_ValueError, "state has %zd bytes; it must have %zu", view.len, sizeof s);
    PyBuffer_Release(&view);
    enum { COUNTS = 4 + KINDS + 1 };
    PyObject *found = fits ? PyTuple_New(COUNTS + LIMITS + SUMS) : NULL;
    for (int k = 0; found && k < COUNTS + LIMITS + SUMS; k++) {
        uint64_t counts[] = {s.count, s.differing, s.thousandth, s.five_thousandths};
        double sum = 0;
        for (int j = 0; k >= COUNTS + LIMITS && j < LANES; j++) sum += s.sum[k - COUNTS - LIMITS][j];
        PyObject *item = k < 4              ? PyLong_FromUnsignedLongLong(counts[k])
                         : k < COUNTS - 1   ? PyLong_FromUnsignedLongLong(s.special[k - 4])
                         : k < COUNTS       ? PyLong_FromUnsignedLongLong(s.place)
                         : k < COUNTS + LIMITS ? PyFloat_FromDouble(s.limit[k - COUNTS])
                                               : PyFloat_FromDouble(sum);
        if (!item) Py_CLEAR(found);
        else PyTuple_SetItem(found, k, item);
    }
    return found;
}

static const char *choose_machine(void) {
#ifdef __x86_64__
    unsigned has = cpu_has();
    if (has & CPU_AVX512) return machine = &machine_64, "avx512";
    if (has & CPU_AVX2) return machine = &machine_32, "avx2";
#endif
    return "base";
}

static int execute(PyObject *module) {
    fill_tables();
    crc_begin();
    return PyModule_AddStringConstant(module, "ISA", choose_machine());
}
static PyMethodDef methods[] = {
    {"contrast", (PyCFunction)(void (*)(void))contrast, METH_FASTCALL, "Add how two streams differ to the state."},
    {"contrast_all", contrast_all, METH_O, "Add how the streams of a list differ to their states."},
    {"skip_json", (PyCFunction)(void (*)(void))skip_json, METH_FASTCALL, "Index behind the JSON value at start."},
    {"let_go", (PyCFunction)(void (*)(void))let_go, METH_FASTCALL, "Let go of the whole pages within views of mapped files."},
    {"totals", totals, METH_O, "What a state says, field by field."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_pairs", .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__pairs(void) { return PyModuleDef_Init(&definition); }
