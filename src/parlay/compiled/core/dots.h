/* The innermost loop of products with quantised weights: for each row and output of a strip, the sum of
 * (code - zero) * input code over some groups of one block (a group is four inputs). `dot_codes` keeps sums in whole
 * numbers, so they are exact, and returns them as float32, which holds them exactly too. blocks.h calls it, and formats.c
 * for adapters. Each instruction set has its own form: VNNI's dpbusd, AVX2's and AVX-512's maddubs, NEON's sdot.
 */
#ifndef PARLAY_DOTS_H
#define PARLAY_DOTS_H

#include "codes.h"

/* How many rows and strips are multiplied at once, so that each loaded code serves all these rows and each loaded input
 * all these strips: STRIPS_OF_FEW for up to FEW_ROWS rows (formats.h), STRIPS_OF_MANY for more. One strip is read from
 * memory in order, which is what few rows wait for. With 16 registers (AVX2) not all codes of a block fit beside the sums,
 * so they stay in memory, and every load must serve several products. With 32 (AVX-512) codes of two strips fit, but no
 * scales beside them. */
#if LANES == 8
#define ROWS_AT_ONCE 4
#define MOST_AT_ONCE 4
#define STRIPS_OF_FEW 2
#define STRIPS_OF_MANY 2
/* Pins X to a register here: else a compiler makes all products first, and runs out of registers for them. */
#define SETTLE(X) __asm__("" : "+x"(X))
/* Pins codes or scales to memory: else they take the registers that sums need. */
#define CODES_TO_MEMORY(X) __asm__("" : "+m"(X))
#define SCALES_TO_MEMORY(X) __asm__("" : "+m"(X))
#elif LANES == 16
#define ROWS_AT_ONCE 4 /* with fewer, each product waits for the one before; other rows' fill these gaps */
#define MOST_AT_ONCE 6
#define STRIPS_OF_FEW 1
#define STRIPS_OF_MANY 2
#define SETTLE(X) __asm__("" : "+v"(X))
#define CODES_TO_MEMORY(X) ((void)0)
#define SCALES_TO_MEMORY(X) __asm__("" : "+m"(X))
#else
#if defined(__aarch64__)
#define ROWS_AT_ONCE 4
#define MOST_AT_ONCE 4
#define STRIPS_OF_FEW 2
#define STRIPS_OF_MANY 2
#else
#define ROWS_AT_ONCE 1
#define MOST_AT_ONCE 1
#define STRIPS_OF_FEW 1
#define STRIPS_OF_MANY 1
#endif
#define SETTLE(X) ((void)0)
#define CODES_TO_MEMORY(X) ((void)0)
#define SCALES_TO_MEMORY(X) ((void)0)
#endif

/* How many of `rows` rows, at most FEW_ROWS, are multiplied at once: about the same number each time. The sums of up to
 * twelve rows leave registers for MOST_AT_ONCE of them; six at once take 4 percent less time than four and two. */
INLINE int rows_together(const int rows)
{
    const int most = rows <= 12 ? MOST_AT_ONCE : ROWS_AT_ONCE, times = (rows + most - 1) / most;
    return (rows + times - 1) / times;
}

/* Each instruction set defines these, on vectors of 32-bit sums (Whole), one sum for each output:
 *   value_of        turns stored codes into the form that is multiplied
 *   start_of        where the sum of a row begins: -zero * sum of its codes, where codes are multiplied as they are stored
 *   add_products    adds four products to each output's sum
 *   groups_of_sum   over how many groups add_products may add up before `add_sum` must move the sum to the total, because
 *                   it has fewer bits
 *   first_sum       where such a sum begins
 * Instructions that saturate are used only where no sum can reach the limit.
 */
#if defined(__AVX2__) || defined(__AVX512F__)

#if defined(__AVX512F__)
#define OPERATION(NAME) _mm512_##NAME
typedef __m512i Whole;
#else
#define OPERATION(NAME) _mm256_##NAME
typedef __m256i Whole;
#endif

INLINE Whole splat_whole(int32_t x) { return OPERATION(set1_epi32)(x); }
INLINE vf to_floats(Whole x) { return (vf)OPERATION(cvtepi32_ps)(x); }

/* -zero * sum of the row's codes over these groups: all of the block, or one half. InputBlock has -128 times the sum of
 * all and -32 times the sums of halves, so shifts give the other zeros, which are powers of two. */
INLINE Whole start_of_codes(const int zero, const InputBlock *x, const int from, const int to)
{
    if (!zero) return (Whole){0};
    if (to - from == GROUPS)
        return OPERATION(srai_epi32)(splat_whole(x->start), zero == 4 ? 5 : zero == 8 ? 4 : zero == 16 ? 3 : zero == 32 ? 2 : 0);
    Whole half = splat_whole(x->half[from ? 1 : 0]);
    return zero == 128 ? OPERATION(slli_epi32)(half, 2) : zero == 4 ? OPERATION(srai_epi32)(half, 3) : half;
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

INLINE Whole value_of(const Form form, Whole stored) { return stored; }

INLINE Whole start_of(const Form form, const InputBlock *x, const int from, const int to)
{
    return start_of_codes(form.zero, x, from, to);
}

INLINE int groups_of_sum(const Form form) { return GROUPS; }
INLINE Whole first_sum(Whole total) { return total; }
INLINE Whole add_sum(Whole total, Whole sum) { return sum; }

INLINE Whole add_products(const Form form, Whole sum, Whole code, Whole input)
{
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, code, input);
#else
    return _mm256_dpbusd_avx_epi32(sum, code, input);
#endif
}

#else

/* Without VNNI: maddubs multiplies bytes without a sign by bytes with one, and adds pairs in 16 bits with saturation.
 * Small codes are multiplied as they are stored. Codes of eight bits and table values would saturate, so zero is
 * subtracted first, and |code| is multiplied with the input, which takes the code's sign. */
INLINE int is_signed(const Form form) { return form.bits == 8 || form.table; }

INLINE Whole value_of(const Form form, Whole stored)
{
    return is_signed(form) ? OPERATION(sub_epi8)(stored, OPERATION(set1_epi8)(-128)) : stored;
}

INLINE Whole start_of(const Form form, const InputBlock *x, const int from, const int to)
{
    return is_signed(form) ? (Whole){0} : start_of_codes(form.zero, x, from, to);
}

/* How many groups fit into sums of 16 bits, at most 32767: eight of codes below 16 (8 * 2 * 15 * 127), four below 32,
 * two below 64, and one of any code with its sign moved to the input (2 * 128 * 127). */
INLINE int groups_of_sum(const Form form) { return is_signed(form) ? 1 : 32 >> (form.bits - 2); }
INLINE Whole first_sum(Whole total) { return (Whole){0}; }

INLINE Whole add_sum(Whole total, Whole sum)
{
    return OPERATION(add_epi32)(total, OPERATION(madd_epi16)(sum, OPERATION(set1_epi16)(1)));
}

/* x, with its sign changed where the code is negative. */
INLINE Whole signed_like(Whole code, Whole x)
{
#if defined(__AVX512F__)
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(code), (Whole){0}, x);
#else
    return _mm256_sign_epi8(x, code);
#endif
}

INLINE Whole add_products(const Form form, Whole sum, Whole code, Whole input)
{
    if (is_signed(form)) input = signed_like(code, input), code = OPERATION(abs_epi8)(code);
    return OPERATION(add_epi16)(sum, OPERATION(maddubs_epi16)(code, input));
}

#endif
#elif defined(__aarch64__)

typedef int32x4_t Whole;

INLINE Whole splat_whole(int32_t x) { return vdupq_n_s32(x); }
INLINE vf to_floats(Whole x) { return (vf)vcvtq_f32_s32(x); }

INLINE Whole value_of(const Form form, Whole stored) /* subtracts zero, for sdot multiplies bytes that both have signs */
{
    return form.zero ? (Whole)vsubq_s8((int8x16_t)stored, vdupq_n_s8((int8_t)form.zero)) : stored;
}

INLINE Whole start_of(const Form form, const InputBlock *x, const int from, const int to) { return (Whole){0}; }
INLINE int groups_of_sum(const Form form) { return GROUPS; }
INLINE Whole first_sum(Whole total) { return total; }
INLINE Whole add_sum(Whole total, Whole sum) { return sum; }

INLINE Whole add_products(const Form form, Whole sum, Whole code, Whole input)
{
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, (int8x16_t)code, (int8x16_t)input);
#else /* without sdot: pairs of products fit into 16 bits, 2 * 128 * 127 */
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)code), vget_low_s8((int8x16_t)input));
    return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8((int8x16_t)code, (int8x16_t)input)));
#endif
}

#endif

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__aarch64__)

/* Sums over the groups from..to of one block, for `rows` rows and `strips`
 * strips. A loaded code serves all rows, a loaded input all strips. */
INLINE void dot_codes(const Form form, const int strips, const int rows, const Codes *codes, const InputBlock *x,
                      const int from, const int to, vf (*dots)[STRIPS])
{
    const int together = groups_of_sum(form);
    Whole total[MOST_AT_ONCE][STRIPS], sum[MOST_AT_ONCE][STRIPS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) total[i][s] = start_of(form, x + i, from, to);
    UNROLL for (int g = from; g < to; g++) {
        Whole code[STRIPS];
        UNROLL for (int s = 0; s < strips; s++) {
            code[s] = value_of(form, (Whole)codes[s].of[g]);
            SETTLE(code[s]);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t word; /* four input codes of the row, broadcast to all outputs */
            memcpy(&word, x[i].codes + 4 * g, 4);
            Whole input = splat_whole(word);
            UNROLL for (int s = 0; s < strips; s++) {
                if ((g - from) % together == 0) sum[i][s] = first_sum(total[i][s]);
                sum[i][s] = add_products(form, sum[i][s], code[s], input);
                SETTLE(sum[i][s]);
                if ((g - from) % together < together - 1 && g < to - 1) continue;
                total[i][s] = add_sum(total[i][s], sum[i][s]);
                SETTLE(total[i][s]);
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) dots[i][s] = to_floats(total[i][s]);
}

#else

/* Plain C: one row and one strip, in float32. All sums are whole numbers below 2^24, so they are exact. */
INLINE void dot_codes(const Form form, const int strips, const int rows, const Codes *codes, const InputBlock *x,
                      const int from, const int to, vf (*dots)[STRIPS])
{
    vf total = {0};
    for (int g = from; g < to; g++) {
        vi word = (vi)codes->of[g];
        for (int i = 0; i < 4; i++) {
            vi code = (word >> (8 * i) & 255) - form.zero;
            total += __builtin_convertvector(code, vf) * (float)x->codes[4 * g + i];
        }
    }
    dots[0][0] = total;
}

#endif
#endif
