/* The inputs of products in eight bits: 32 neighbours share a scale. */
#ifndef PARLAY_QUANTISE_H
#define PARLAY_QUANTISE_H

#include "lanes.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define BLOCK 32 /* inputs of a block */

typedef struct {
    int8_t codes[BLOCK];
    float scale;     /* an input is about its code times this */
    float sum;       /* of the codes */
    int32_t start;   /* -128 times that sum: what a product starts from where stored codes are 128 too large ... */
    int32_t half[2]; /* ... and -32 times the sum of each half of the codes */
} InputBlock;

/* Inputs below 4e-37 count as zeros. */
INLINE float inverse_of(float largest)
{
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    return inverse <= 3e38f ? inverse : 0.0f;
}

/* Rounds values to codes: to nearest, ties to even. Returns the largest of their sizes. One number that is none makes
 * that none either, for compared as whole numbers the bits of sizes grow with them, and NaN lies above infinity. */
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
        float shifted = values[i] * inverse + 12582912.0f; /* 1.5 * 2^23: its last bit is worth 1 */
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        codes[i] = bits - 0x4b400000;
    }
    for (int i = 0; i < BLOCK; i++) block->codes[i] = (int8_t)codes[i];
    return largest;
}

#endif

/* The sums of the two halves of a block's codes. */
INLINE void sum_halves(const int8_t *codes, int32_t half[2])
{
#if defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128(), sign = _mm_set1_epi8(-128);
    for (int i = 0; i < 2; i++) { /* sums of eight bytes + 128 each */
        __m128i sums = _mm_sad_epu8(_mm_xor_si128(_mm_loadu_si128((const __m128i *)codes + i), sign), zero);
        half[i] = _mm_cvtsi128_si32(sums) + _mm_cvtsi128_si32(_mm_srli_si128(sums, 8)) - 128 * BLOCK / 2;
    }
#else
    for (int i = 0; i < BLOCK; i++) half[i / (BLOCK / 2)] += codes[i];
#endif
}

/* x[0 .. count), zeros behind them, to one block. */
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
