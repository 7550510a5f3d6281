/* Quantises the inputs of products to eight bits: blocks of 32 neighbours share a scale, as in ggml's q8_1. Every
 * product with a block format reads rows in this form, and so do the scores of a cache in Q8_0. linear.h calls it
 * through QUANTISE, which formats.c compiles. */
#ifndef PARLAY_QUANTISE_H
#define PARLAY_QUANTISE_H

#include "lanes.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define BLOCK 32 /* inputs of a block, in rows as in weights */

/* A block of a row's inputs. Products multiply stored codes, which are `zero` above their values (codes.h), with these
 * codes; the sums below let them subtract zero * sum of codes without adding anything up again. */
typedef struct {
    int8_t codes[BLOCK];
    float scale;     /* input i is about codes[i] * scale */
    float sum;       /* of the codes; times a block's minimum it gives what minimums contribute */
    int32_t start;   /* -128 * sum: where a product's total begins, if stored codes are 128 too large */
    int32_t half[2]; /* -32 times the sum of each half of the codes */
} InputBlock;

/* The factor that turns a block's inputs into codes; `largest` is their largest absolute value. Below 4e-37 all become
 * zeros, because the factor would overflow. */
INLINE float inverse_of(float largest)
{
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    return inverse <= 3e38f ? inverse : 0.0f;
}

/* Rounds 32 values to codes, to nearest, ties to even, and returns their largest absolute value. If one value is NaN or
 * infinite, so is the result: bits of absolute values are compared as whole numbers, and those of infinity are above
 * all numbers', those of NaN above infinity's. */
#if defined(__AVX512F__)

INLINE float round_block(const float *values, InputBlock *block)
{
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
    __m512i most = _mm512_max_epi32(_mm512_and_si512((__m512i)low, size), _mm512_and_si512((__m512i)high, size));
    float largest = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128(_mm512_reduce_max_epi32(most)));
    __m512 inverse = _mm512_set1_ps(inverse_of(largest));
    _mm_storeu_si128((__m128i *)block->codes, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse))));
    _mm_storeu_si128((__m128i *)block->codes + 1, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))));
    return largest;
}

#else

INLINE float round_block(const float *values, InputBlock *block)
{
    int32_t most = 0, codes[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        int32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    float inverse = inverse_of(largest);
    for (int i = 0; i < BLOCK; i++) {
        /* 1.5 * 2^23: adding it rounds to a whole number, which the lowest bits then have. */
        float shifted = values[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        codes[i] = bits - 0x4b400000;
    }
    for (int i = 0; i < BLOCK; i++) block->codes[i] = (int8_t)codes[i];
    return largest;
}

#endif

/* Adds up each half of a block's codes. */
INLINE void sum_halves(const int8_t *codes, int32_t half[2])
{
#if defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128(), sign = _mm_set1_epi8(-128);
    for (int i = 0; i < 2; i++) { /* SAD adds up eight bytes at a time, each 128 above its code */
        __m128i sums = _mm_sad_epu8(_mm_xor_si128(_mm_loadu_si128((const __m128i *)codes + i), sign), zero);
        half[i] = _mm_cvtsi128_si32(sums) + _mm_cvtsi128_si32(_mm_srli_si128(sums, 8)) - 128 * BLOCK / 2;
    }
#else
    for (int i = 0; i < BLOCK; i++) half[i / (BLOCK / 2)] += codes[i];
#endif
}

/* Quantises x[0 .. count) to one block; zeros fill it up. */
INLINE void quantise_block(const float *x, int64_t count, InputBlock *block)
{
    float last[BLOCK] = {0};
    int32_t sums[2] = {0, 0};
    if (count < BLOCK) x = memcpy(last, x, (size_t)count * 4);
    float largest = round_block(x, block);
    sum_halves(block->codes, sums);
    block->scale = largest / 127.0f;
    block->sum = (float)(sums[0] + sums[1]);
    block->start = -128 * (sums[0] + sums[1]);
    block->half[0] = -32 * sums[0], block->half[1] = -32 * sums[1];
}

#endif
