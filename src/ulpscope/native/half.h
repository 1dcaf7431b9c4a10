/* float16 to float32, for each vector size VB: included with WIDEN_HALF as the name of the function. */
TARGET static void WIDEN_HALF(const void *p, void *out, size_t n) {
    const u16 *x = p;
    size_t i = 0;
#if VB == 64
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps((f32 *)out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
#elif VB == 32
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((f32 *)out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#endif
    for (; i < n; i++) {
        /* A float32 with the same digits is 2^112 too small; the product is exact, denormals included. */
        u32 bits = (u32)(x[i] & 0x7FFF) << 13, special = (x[i] & 0x7C00) == 0x7C00 ? 0x7F800000u : 0;
        f32 scaled = *(const f32 *)&bits * 0x1p112f;
        ((u32 *)out)[i] = *(const u32 *)&scaled | special | (u32)(x[i] & 0x8000) << 16;
    }
}
#undef WIDEN_HALF
