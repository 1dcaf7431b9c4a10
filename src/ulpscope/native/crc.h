/* CRC-32 as in zlib, bits reflected; the state is the complement of the value.  crc_begin comes first. */
#ifndef ULPSCOPE_CRC_H
#define ULPSCOPE_CRC_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cpu.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Written once, by crc_begin; read-only from then on. */
static uint32_t crc_table[8][256];
static uint64_t crc_farthest[2], crc_far[2], crc_near[2];

static uint32_t times_x(uint32_t v) { return (v >> 1) ^ (v & 1 ? 0xEDB88320u : 0); }
static uint32_t crc_portable(uint32_t state, const uint8_t *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= state, state = 0;
        for (int k = 0; k < 8; k++) state ^= crc_table[7 - k][word >> (8 * k) & 255];
    }
    while (n--) state = (state >> 8) ^ crc_table[0][(state ^ *p++) & 255];
    return state;
}
static uint32_t (*crc_update)(uint32_t, const uint8_t *, size_t) = crc_portable;

/* The factors that move 128 bits by `distance` bits: x^(distance + 64) and x^distance modulo the polynomial, one power
 * less each, because a carry-less product of reflected operands comes out multiplied by x. */
static void fold_by(unsigned distance, uint64_t k[2]) {
    uint32_t v = 0x80000000u;
    for (unsigned n = 1; n < distance + 64; n++, v = times_x(v))
        if (n == distance) k[1] = (uint64_t)v << 32;
    k[0] = (uint64_t)v << 32;
}

#ifdef __x86_64__
#define CRC_LOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define CRC_FOLD(a, k, to)                                                                                             \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0), _mm_clmulepi64_si128(a, k, 17)), to)
/* The end of it: s holds what the bytes so far come to, in the place of the last 64. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_rest(__m128i *s, const uint8_t *p, size_t n) {
    __m128i far = CRC_LOAD(crc_far), near = CRC_LOAD(crc_near);
    for (; n >= 64; p += 64, n -= 64)
        for (int k = 0; k < 4; k++) s[k] = CRC_FOLD(s[k], far, CRC_LOAD(p + 16 * k));
    for (int k = 0; k < 3; k++) s[k + 1] = CRC_FOLD(s[k], near, s[k + 1]);
    return crc_portable(crc_portable(0, (const uint8_t *)(s + 3), 16), p, n);
}
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_folded(uint32_t state, const uint8_t *p, size_t n) {
    if (n < 128) return crc_portable(state, p, n);
    __m128i s[4] = {CRC_LOAD(p), CRC_LOAD(p + 16), CRC_LOAD(p + 32), CRC_LOAD(p + 48)};
    s[0] = _mm_xor_si128(s[0], _mm_cvtsi32_si128((int)state));
    return crc_rest(s, p + 64, n - 64);
}

#define CRC_WIDE_LOAD(p) _mm512_loadu_si512((const void *)(p))
#define CRC_WIDE_FOLD(a, k, to)                                                                                        \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0), _mm512_clmulepi64_epi128(a, k, 17), to, 0x96)
__attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq"))) static uint32_t crc_folded_wide(uint32_t state,
                                                                                            const uint8_t *p, size_t n) {
    if (n < 512) return crc_folded(state, p, n);
    __m512i farthest = _mm512_broadcast_i32x4(CRC_LOAD(crc_farthest)), far = _mm512_broadcast_i32x4(CRC_LOAD(crc_far));
    __m512i wide[4] = {CRC_WIDE_LOAD(p), CRC_WIDE_LOAD(p + 64), CRC_WIDE_LOAD(p + 128), CRC_WIDE_LOAD(p + 192)};
    wide[0] = _mm512_xor_si512(wide[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
        for (int k = 0; k < 4; k++) wide[k] = CRC_WIDE_FOLD(wide[k], farthest, CRC_WIDE_LOAD(p + 64 * k));
    for (int k = 0; k < 3; k++) wide[k + 1] = CRC_WIDE_FOLD(wide[k], far, wide[k + 1]);
    __m128i s[4];
    _mm512_storeu_si512(s, wide[3]);
    return crc_rest(s, p, n);
}
#endif

static void crc_begin(void) {
    for (unsigned i = 0; i < 256; i++) {
        crc_table[0][i] = i;
        for (int bit = 0; bit < 8; bit++) crc_table[0][i] = times_x(crc_table[0][i]);
    }
    for (unsigned i = 0; i < 7 * 256; i++) {
        uint32_t v = crc_table[i >> 8][i & 255];
        crc_table[(i >> 8) + 1][i & 255] = (v >> 8) ^ crc_table[0][v & 255];
    }
    fold_by(2048, crc_farthest), fold_by(512, crc_far), fold_by(128, crc_near);
#ifdef __x86_64__
    unsigned has = cpu_has();
    if (has & CPU_FOLD) crc_update = has & CPU_FOLD_WIDE ? crc_folded_wide : crc_folded;
#endif
}
#endif
