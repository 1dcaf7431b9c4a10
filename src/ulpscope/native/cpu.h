/* What the processor has and its system keeps registers for. `cpuid` is asked here, not __builtin_cpu_supports: what that
 * reads lies in libgcc, where another linker (zig's) cannot reach it from a shared library. */
#ifndef ULPSCOPE_CPU_H
#define ULPSCOPE_CPU_H
#include <stdlib.h>
#include <string.h>
enum { CPU_FOLD = 1, CPU_FOLD_WIDE = 2, CPU_AVX2 = 4, CPU_AVX512 = 8 };
#ifdef __x86_64__
#include <cpuid.h>
/* ULPSCOPE_ISA=base or avx2 keeps to less than the machine has: to find out whether a kernel is at fault. */
static unsigned cpu_has(void) {
    const unsigned SSE = bit_PCLMUL | bit_SSE4_1, AVX = bit_OSXSAVE | bit_AVX, NARROW = AVX | bit_FMA | bit_F16C;
    const unsigned WIDE = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    const unsigned YMM = 0x06, ZMM = 0xE6; /* of the state that the system saves: SSE and AVX; masks and both halves of ZMM */
    const char *wish = getenv("ULPSCOPE_ISA");
    unsigned a, b, c, d, b7 = 0, c7 = 0, state = 0, has = 0;
    if ((wish && !strcmp(wish, "base")) || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) b7 = c7 = 0;
    if ((c & AVX) == AVX) __asm__ volatile("xgetbv" : "=a"(state), "=d"(d) : "c"(0));
    if ((c & SSE) == SSE) has |= CPU_FOLD;
    if ((state & YMM) == YMM && (c & NARROW) == NARROW && (b7 & bit_AVX2)) has |= CPU_AVX2;
    if ((state & ZMM) != ZMM || (wish && !strcmp(wish, "avx2"))) return has;
    if ((has & CPU_AVX2) && (b7 & WIDE) == WIDE) has |= CPU_AVX512;
    if ((has & CPU_FOLD) && (b7 & bit_AVX512F) && (c7 & bit_VPCLMULQDQ)) has |= CPU_FOLD_WIDE;
    return has;
}
#endif
#endif
