/* One row times a matrix of bfloat16, with four ways to leave zeros out. See products.py, which compiles and calls it.
 *
 * Rows of the matrix are outputs. Inputs are a multiple of 64, outputs of 4. Masks have a bit for each weight that is
 * kept, of 32 inputs each; blocks have a byte for each 32 inputs. Four outputs are summed at once, so that the wait for
 * one's place in its weights hides behind the others.
 */
#include <immintrin.h>
#include <stdint.h>

enum { GROUP = 32, AT_ONCE = 4 };

static inline __m512i loaded(const uint16_t *from) {
    __m512i numbers = _mm512_loadu_si512(from);
    __asm__("" : "+v"(numbers)); /* or it becomes vpexpandw from memory, which is many times slower */
    return numbers;
}

static inline __m512 added(__m512 sum, __m512i weights, __m512i inputs) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)inputs);
}

/* All weights, those of four outputs for 32 inputs side by side: so one stream comes from memory. */
void dense(const uint16_t *weights, const uint16_t *x, float *y, long outputs, long inputs) {
    for (long o = 0; o < outputs; o += AT_ONCE) {
        __m512 sums[AT_ONCE] = {0};
        for (long i = 0; i < inputs; i += GROUP) {
            __m512i seen = _mm512_loadu_si512(x + i);
            for (int each = 0; each < AT_ONCE; each++, weights += GROUP)
                sums[each] = added(sums[each], loaded(weights), seen);
        }
        for (int each = 0; each < AT_ONCE; each++) y[o + each] = _mm512_reduce_add_ps(sums[each]);
    }
}

/* Any weights may be missing: those that are kept lie close together, and starts say where each output's begin. */
void bitmap(const uint16_t *weights, const uint32_t *masks, const int64_t *starts, const uint16_t *x, float *y,
            long outputs, long inputs) {
    long groups = inputs / GROUP;
    for (long o = 0; o < outputs; o += AT_ONCE) {
        __m512 sums[AT_ONCE] = {0};
        const uint16_t *own[AT_ONCE];
        for (int each = 0; each < AT_ONCE; each++) own[each] = weights + starts[o + each];
        for (long g = 0; g < groups; g++) {
            __m512i seen = _mm512_loadu_si512(x + GROUP * g);
            for (int each = 0; each < AT_ONCE; each++) {
                uint32_t mask = masks[(o + each) * groups + g];
                sums[each] = added(sums[each], _mm512_maskz_expand_epi16(mask, loaded(own[each])), seen);
                own[each] += __builtin_popcount(mask);
            }
        }
        for (int each = 0; each < AT_ONCE; each++) y[o + each] = _mm512_reduce_add_ps(sums[each]);
    }
}

/* Of four neighbours two are kept: each group has 16 weights, so its place needs no counting. */
void two_of_four(const uint16_t *weights, const uint32_t *masks, const uint16_t *x, float *y, long outputs,
                 long inputs) {
    long groups = inputs / GROUP;
    for (long o = 0; o < outputs; o += AT_ONCE) {
        __m512 sums[AT_ONCE] = {0};
        for (long g = 0; g < groups; g++) {
            __m512i seen = _mm512_loadu_si512(x + GROUP * g);
            for (int each = 0; each < AT_ONCE; each++) {
                long group = (o + each) * groups + g;
                __m256i half = _mm256_loadu_si256((const __m256i *)(weights + GROUP / 2 * group));
                __m512i wide = _mm512_castsi256_si512(half);
                __asm__("" : "+v"(wide));
                sums[each] = added(sums[each], _mm512_maskz_expand_epi16(masks[group], wide), seen);
            }
        }
        for (int each = 0; each < AT_ONCE; each++) y[o + each] = _mm512_reduce_add_ps(sums[each]);
    }
}

/* Whole groups of 32 inputs are missing, for four outputs alike. places lists those that are kept, counts how many. */
void blocks(const uint16_t *weights, const int32_t *places, const int32_t *counts, const uint16_t *x, float *y,
            long outputs) {
    for (long o = 0; o < outputs; o += AT_ONCE) {
        __m512 sums[AT_ONCE] = {0};
        for (int32_t kept = counts[o / AT_ONCE]; kept > 0; kept--, places++) {
            __m512i seen = _mm512_loadu_si512(x + GROUP * (long)*places);
            for (int each = 0; each < AT_ONCE; each++, weights += GROUP)
                sums[each] = added(sums[each], loaded(weights), seen);
        }
        for (int each = 0; each < AT_ONCE; each++) y[o + each] = _mm512_reduce_add_ps(sums[each]);
    }
}
