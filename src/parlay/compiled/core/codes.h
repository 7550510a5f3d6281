/* How quantised weights lie in memory, and how their codes are unpacked. Much like ggml's repacked types (q4_0x8), it
 * interleaves the same block of LANES outputs; stored.h makes this layout of ggml's blocks when a model is loaded, and
 * blocks.h multiplies it.
 *
 * A panel is two strips (STRIPS), a strip is LANES outputs. It has, for each block of 32 inputs in turn, the codes of all
 * its outputs, then their scales. Where blocks share numbers, as in K formats, these come before the first of them. A word
 * of 32 bits belongs to one output, and a vector has the words of LANES outputs. Codes of 4 to 6 bits, of one block:
 *
 *     vector 0         vector 1         vector 2         vector 3          vector 4 (5)        behind them
 *     inputs 0-3 in    inputs 4-7 in    inputs 8-11 in   inputs 12-15 in   bits from the       LANES scales, then
 *     low nibbles,     low nibbles,     low nibbles,     low nibbles,      fifth on, of all    LANES minimums, as
 *     16-19 in high    20-23 in high    24-27 in high    28-31 in high     32 codes            Scales below says
 *
 * Codes of 2 and 3 bits have their low pairs of bits in two vectors, so that a byte of vector 0 has those of inputs j, 8 + j,
 * 16 + j and 24 + j, and the third bits in a third. Byte j of a word is input 4 g + j of group g. Codes of eight bits take
 * one byte each: eight vectors, group after group.
 */
#ifndef PARLAY_CODES_H
#define PARLAY_CODES_H

#include "lanes.h"
#include "quantise.h"

/* Groups of a block: four inputs, whose codes are a word of four bytes once they are unpacked. */
#define GROUPS (BLOCK / 4)

/* The scales that a strip's block stores for each output. A weight is scale * (code - zero) + minimum.
 *   HALF, BFLOAT                one scale, in half precision or in bfloat16
 *   HALF_AND_MINIMUM            a scale and a minimum, in half precision
 *   HALF_AND_ZERO               a scale, and a whole number of eight bits, the zero that is subtracted from codes
 *   GROUP_AND_ZERO              the same, shared by four blocks: groups of 128 inputs (AWQ, GPTQ)
 *   K_SCALE                     a whole number of eight bits, times a scale in half precision that 8 blocks share
 *   K_MINIMUM                   that, and the same for a minimum, which is subtracted
 *   K_HALVES                    K_SCALE's, for each half of the block: 16 inputs
 *   K_MINIMUMS                  K_HALVES', and the same for the minimums of both halves
 */
typedef enum {
    NO_SCALE, HALF, HALF_AND_MINIMUM, BFLOAT, HALF_AND_ZERO, K_SCALE, K_MINIMUM, K_HALVES, K_MINIMUMS, GROUP_AND_ZERO
} Scales;

/* All that tells block formats apart. Every function here gets it as a constant and is inlined, so a compiler makes
 * separate code for each format. */
typedef struct {
    int bits;   /* of a stored code: 2 to 6, or 8 */
    int zero;   /* how far stored codes, which have no sign, are above their values: a power of two, or 0 */
    /* Which row of `tables` codes are looked up in; 0: codes are the values. 1: IQ4's, 2: MXFP4's, 3: IQ3_XXS's, 4:
     * IQ3_S's, 5: IQ2's, 6: IQ1's. */
    int table;
    Scales scales;
    int parts; /* the shared scale is divided by it, unless it is 0 */
} Form;

/* The bits of LANES words. Elements of 16 bits, for x86 shifts no bytes. */
typedef uint16_t vw __attribute__((vector_size(LANES * 4)));
/* A strip's block, unpacked: each code is a byte. */
typedef struct {
    vw of[GROUPS]; /* of[g]: the codes of inputs 4 g to 4 g + 3, which are the four bytes of each output's word */
} Codes;

INLINE vw load_bits(const void *at) { vw v; memcpy(&v, at, sizeof v); return v; }
INLINE vw splat_byte(int x) { return (uint16_t)(x * 257) - (vw){0}; }

/* What codes stand for in IQ formats and MXFP4, plus 128, so that products need no signed codes. */
static const uint8_t tables[7][16] = {
    {0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190},
    {113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143},
    {85, 103, 120, 136, 153, 171, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128},
    {119, 121, 127, 129, 135, 137, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128},
};

/* Replaces each byte of `codes` by the table's entry of that number. */
INLINE vw look_up(const int table, vw codes)
{
#if defined(__AVX512BW__)
    __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)tables[table]));
    return (vw)_mm512_shuffle_epi8(values, (__m512i)codes);
#elif defined(__AVX2__)
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)tables[table]));
    return (vw)_mm256_shuffle_epi8(values, (__m256i)codes);
#elif defined(__aarch64__)
    return (vw)vqtbl1q_u8(vld1q_u8(tables[table]), (uint8x16_t)codes);
#else
    uint8_t bytes[LANES * 4];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < LANES * 4; i++) bytes[i] = tables[table][bytes[i]];
    return load_bits(bytes);
#endif
}

/* How many of a code's lowest bits the first vectors have; those behind them have the others. */
INLINE int low_bits(const int bits) { return bits < 4 ? 2 : 4; }
INLINE int64_t code_bytes(const int bits) { return LANES * 4 * bits; } /* of the codes of one block in a strip */

/* Unpacks the codes of one strip's block: `at` is its first vector. */
INLINE void unpack(const Form form, const char *at, Codes *codes)
{
    if (form.bits == 8) {
        UNROLL for (int g = 0; g < GROUPS; g++) codes->of[g] = load_bits(at + g * LANES * 4);
        return;
    }
    const int low = low_bits(form.bits), more = form.bits - low;
    UNROLL for (int i = 0; i < low; i++) {
        vw several = load_bits(at + i * LANES * 4);
        UNROLL for (int g = i; g < GROUPS; g += low) codes->of[g] = several >> (g - i) & splat_byte((1 << low) - 1);
    }
    /* The bits beyond. Each byte of a vector has those of 8 / more groups, the first group's in its lowest bits. */
    UNROLL for (int g = 0; more && g < GROUPS; g++) {
        vw high = load_bits(at + (low + g * more / 8) * LANES * 4);
        const int place = g * more % 8;
        high = place < low ? high << (low - place) : high >> (place - low);
        codes->of[g] |= high & splat_byte(((1 << more) - 1) << low);
    }
    if (form.table)
        UNROLL for (int g = 0; g < GROUPS; g++) codes->of[g] = look_up(form.table, codes->of[g]);
}

#endif
