/* Blocks of weights as products read them: small whole numbers, unpacked once for all rows.
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

/* How the scales of a block are stored: in half precision or bfloat16; HALF_AND_ZERO has a whole number of eight bits
 * besides, which is subtracted from codes; K blocks have small whole numbers, and share
 * one number in half precision, or two, between 8 blocks. K_HALVES have a scale for each half of a block, and
 * K_MINIMUMS a minimum for each half besides. With GROUP_AND_ZERO four blocks share what HALF_AND_ZERO has in each. */
typedef enum { NO_SCALE, HALF, HALF_AND_MINIMUM, BRAIN, HALF_AND_ZERO, K_SCALE, K_MINIMUM, K_HALVES, K_MINIMUMS, GROUP_AND_ZERO } Scales;

/* What tells formats apart. All of it is known when a product is compiled. */
typedef struct {
    int bits;   /* of a stored code: 4, 5, 6 or 8 */
    int zero;   /* what a stored code is above its value: a power of two, or 0 */
    int table;  /* codes are numbers of values: 1: IQ4's, 2: MXFP4's, 3: IQ3_XXS's, 4: IQ3_S's, 5: IQ2's, 6: IQ1's */
    Scales scales;
    int parts; /* the shared scale counts such parts of what it says; 0: it counts whole */
} Form;

typedef uint16_t vw __attribute__((vector_size(LANES * 4))); /* the bits of LANES words */
typedef struct {
    vw of[GROUPS]; /* codes of inputs 4 g to 4 g + 3, a byte each */
} Codes;

INLINE vw load_bits(const void *at) { vw v; memcpy(&v, at, sizeof v); return v; }
INLINE vw splat_byte(int x) { return (uint16_t)(x * 257) - (vw){0}; }

static const uint8_t tables[7][16] = {
    {0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190},
    {113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143},
    {85, 103, 120, 136, 153, 171, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128},
    {119, 121, 127, 129, 135, 137, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128},
}; /* values + 128 */

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

#endif
