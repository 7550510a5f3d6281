/* Blocks of weights as products read them: small whole numbers, unpacked once for all rows, and exact sums of them.
 *
 * A strip is LANES outputs. Of each block of 32 inputs it holds vectors of LANES words, a word for each output: four
 * codes of four bits lie beside those of 16 inputs later, in one byte each; what they have beyond four bits follows,
 * then the scales. Codes of eight bits lie one to a byte.
 */
#ifndef PARLAY_CODES_H
#define PARLAY_CODES_H

#include "lanes.h"
#include "quantise.h"

#define GROUPS (BLOCK / 4) /* words of a block: four inputs each */

/* Rows and strips whose codes are multiplied at once. Where registers hold few codes, these stay in memory beside them,
 * and what is loaded must serve several products. */
#if LANES == 8
#define ROWS_AT_ONCE 4
#define STRIPS_AT_ONCE 2
#define SETTLE(X) __asm__("" : "+x"(X)) /* else a compiler makes all products first, and has no registers for them */
#define KEEP_IN_MEMORY(X) __asm__("" : "+m"(X)) /* else it holds codes in registers that sums need */
#else
#define SETTLE(X) ((void)0)
#define KEEP_IN_MEMORY(X) ((void)0)
#define ROWS_AT_ONCE 1
#define STRIPS_AT_ONCE 1
#endif

/* How the scales of a block are stored: in half precision or bfloat16; K blocks have small whole numbers, and share
 * two numbers in half precision between 8 blocks. */
typedef enum { NO_SCALE, HALF, HALF_AND_MINIMUM, BRAIN, K_SCALE, K_MINIMUM, K_HALVES } Scales;

/* What tells formats apart. All of it is known when a product is compiled. */
typedef struct {
    int bits;   /* of a stored code: 4, 5, 6 or 8 */
    int zero;   /* what a stored code is above its value: a power of two, or 0 */
    int table;  /* codes are numbers of values: 1: IQ4's, 2: MXFP4's */
    Scales scales;
} Form;

typedef uint16_t vw __attribute__((vector_size(LANES * 4))); /* the bits of LANES words */
typedef struct {
    vw of[GROUPS]; /* codes of inputs 4 g to 4 g + 3, a byte each */
} Codes;

INLINE vw load_bits(const void *at) { vw v; memcpy(&v, at, sizeof v); return v; }
INLINE vw splat_byte(int x) { return (uint16_t)(x * 257) - (vw){0}; }

static const uint8_t tables[3][16] = {
    {0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
}; /* values + 128 */

INLINE vw look_up(const int table, vw codes)
{
#if defined(__AVX512BW__)
    __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)tables[table]));
    return (vw)_mm512_shuffle_epi8(values, (__m512i)codes);
#elif defined(__AVX2__)
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)tables[table]));
    return (vw)_mm256_shuffle_epi8(values, (__m256i)codes);
#else
    uint8_t bytes[LANES * 4];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < LANES * 4; i++) bytes[i] = tables[table][bytes[i]];
    return load_bits(bytes);
#endif
}

INLINE int64_t code_bytes(const int bits) { return LANES * 4 * bits; } /* of a strip's block */

INLINE void unpack(const Form form, const char *at, Codes *codes)
{
    if (form.bits == 8) {
        UNROLL for (int g = 0; g < GROUPS; g++) codes->of[g] = load_bits(at + g * LANES * 4);
        return;
    }
    UNROLL for (int i = 0; i < GROUPS / 2; i++) {
        vw both = load_bits(at + i * LANES * 4);
        codes->of[i] = both & splat_byte(15);
        codes->of[i + GROUPS / 2] = both >> 4 & splat_byte(15);
    }
    const int more = form.bits - 4; /* bits of every group's codes, one group's above another's in a byte */
    UNROLL for (int g = 0; more && g < GROUPS; g++) {
        vw high = load_bits(at + (4 + g * more / 8) * LANES * 4);
        const int place = g * more % 8;
        high = place < 4 ? high << (4 - place) : high >> (place - 4);
        codes->of[g] |= high & splat_byte(((1 << more) - 1) << 4);
    }
    if (form.table)
        UNROLL for (int g = 0; g < GROUPS; g++) codes->of[g] = look_up(form.table, codes->of[g]);
}

/* Sums of codes times a row's codes over some groups, for each output; exact, as floating-point numbers. Instructions
 * that stop at the largest number are never used, but where they can't reach it. */
#if defined(__AVX2__) || defined(__AVX512F__)

#if defined(__AVX512F__)
#define OPERATION(NAME) _mm512_##NAME
typedef __m512i Whole;
#else
#define OPERATION(NAME) _mm256_##NAME
typedef __m256i Whole;
#endif

INLINE Whole word_of(const InputBlock *x, const int group) /* four codes, for every output */
{
    int32_t word;
    memcpy(&word, x->codes + 4 * group, 4);
    return OPERATION(set1_epi32)(word);
}

/* What the sum over a block or half of it starts from: stored codes are `zero` too large. */
INLINE Whole start_of(const int zero, const InputBlock *x, const int from, const int to)
{
    if (!zero) return (Whole){0};
    int32_t start = to - from == GROUPS ? x->start : from ? x->second : x->start - x->second;
    return OPERATION(srai_epi32)(OPERATION(set1_epi32)(start), zero == 8 ? 4 : zero == 16 ? 3 : zero == 32 ? 2 : 0);
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

INLINE int is_signed(const Form form) { return 0; }

INLINE int groups_of_sum(const Form form) { return GROUPS; }

INLINE Whole add_products(const Form form, Whole sum, Whole code, Whole input)
{
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, code, input);
#else
    return _mm256_dpbusd_avx_epi32(sum, code, input);
#endif
}

INLINE Whole first_sum(Whole total) { return total; }

INLINE Whole add_sum(Whole total, Whole sum) { return sum; }

#else

/* Whether codes are multiplied with their signs: sizes of codes times inputs that have taken these signs. */
INLINE int is_signed(const Form form) { return form.bits == 8 || form.table; }

/* Sums have sixteen bits. Pairs of products fit them: of codes below 16 eight pairs (8 * 2 * 15 * 127), below 32 four,
 * below 64 two, and of any code one, if the sign moves to the input (2 * 128 * 127). */
INLINE int groups_of_sum(const Form form) { return is_signed(form) ? 1 : 32 >> (form.bits - 2); }

/* x, with the sign of the code that it meets. */
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

INLINE Whole first_sum(Whole total) { return (Whole){0}; }

INLINE Whole add_sum(Whole total, Whole sum)
{
    return OPERATION(add_epi32)(total, OPERATION(madd_epi16)(sum, OPERATION(set1_epi16)(1)));
}

#endif

/* `rows` rows, a block of each, times `strips` strips. A code that is loaded serves all rows, an input all strips. */
INLINE void dot_codes(const Form form, const int strips, const int rows, const Codes *codes, const InputBlock *x,
                      const int from, const int to, vf (*dots)[BLOCKS])
{
    Whole total[ROWS_AT_ONCE][BLOCKS], sum[ROWS_AT_ONCE][BLOCKS];
    const Whole middle = OPERATION(set1_epi8)(-128);
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++)
            total[i][s] = is_signed(form) ? (Whole){0} : start_of(form.zero, x + i, from, to);
    const int together = groups_of_sum(form);
    UNROLL for (int g = from; g < to; g++) {
        Whole code[BLOCKS];
        UNROLL for (int s = 0; s < strips; s++) {
            code[s] = (Whole)codes[s].of[g];
            if (is_signed(form)) code[s] = OPERATION(sub_epi8)(code[s], middle);
            SETTLE(code[s]);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            Whole input = word_of(x + i, g);
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
        UNROLL for (int s = 0; s < strips; s++) dots[i][s] = (vf)OPERATION(cvtepi32_ps)(total[i][s]);
}

#else

/* In floating-point numbers, where all of these sums are exact: below 2^24. */
INLINE void dot_codes(const Form form, const int strips, const int rows, const Codes *codes, const InputBlock *x,
                      const int from, const int to, vf (*dots)[BLOCKS])
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
