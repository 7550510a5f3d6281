/* Packs quantised weights: reads blocks as ggml stores them, and lays them into strips (codes.h). formats.c compiles
 * `pack_rows` and `read_row` for each format; Python calls them when a model is loaded.
 *
 * A super-block of 256 weights (K formats and IQ) is eight parts of 32, each of which becomes a block of a strip.
 */
#ifndef PARLAY_STORED_H
#define PARLAY_STORED_H

#include "blocks.h"

/* Bytes of a stored block or super-block. IQ1, IQ2 and IQ3 blocks of files hold indices into tables of thousands of
 * numbers; the loader (models/weights/grids.py) rewrites them to one common form, which `take_indexed` reads. */
INLINE int64_t stored_bytes(const int kind)
{
    static const uint8_t bytes[] = {[Q2_K] = 84, [Q3_K] = 110, [IQ3_XXS] = 146, [IQ3_S] = 146, [IQ2_S] = 146, [IQ1_S] = 146,
                                    [Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24, [Q8_0] = 34, [Q4_K] = 144,
                                    [Q5_K] = 176, [Q6_K] = 210, [IQ4_NL] = 18, [IQ4_XS] = 136, [I8] = 32, [MXFP4] = 17, [Q4_Z] = 20,
                                    [Q4_Z128] = 68};
    return bytes[kind];
}

/* A block of 32 weights of one row, taken apart. */
typedef struct {
    uint32_t codes[GROUPS];  /* stored codes, a byte each, four to a word */
    uint16_t step, minimum;  /* scale and minimum in 16 bits; in K formats those of the super-block */
    /* Of K formats: multipliers of step, then of minimum or of the second
     * half's step; then minimums of halves. HALF_AND_ZERO's zero. */
    int8_t small[4];
} StoredBlock;

INLINE uint32_t word_at(const uint8_t *at) { uint32_t word; memcpy(&word, at, 4); return word; }
INLINE uint16_t half_at(const uint8_t *at) { uint16_t half; memcpy(&half, at, 2); return half; }
/* The same byte four times. */
INLINE uint32_t each_byte(uint32_t byte) { return byte * 0x01010101u; }

/* Takes 32 codes of four bits from 16 bytes: inputs 0 to 15 in the low nibbles, 16 to 31 in the high ones. */
INLINE void take_nibbles(const uint8_t *at, StoredBlock *block)
{
    UNROLL for (int g = 0; g < GROUPS / 2; g++) {
        block->codes[g] = word_at(at + 4 * g) & each_byte(15);
        block->codes[g + GROUPS / 2] = word_at(at + 4 * g) >> 4 & each_byte(15);
    }
}

/* Adds the fifth bits of 32 codes; bit i of a word belongs to code i. */
INLINE void take_fifth_bits(uint32_t bits, StoredBlock *block)
{
    UNROLL for (int g = 0; g < GROUPS; g++)
        block->codes[g] |= ((bits >> 4 * g & 15) * 0x00204081u & each_byte(1)) << 4;
}

/* Takes a part's scale and minimum, six bits each, from the twelve bytes of a K super-block. */
INLINE void take_k_scales(const uint8_t *at, int part, StoredBlock *block)
{
    if (part < 4) {
        block->small[0] = at[part] & 63, block->small[1] = at[part + 4] & 63;
    } else {
        block->small[0] = (at[part + 4] & 15) | (at[part - 4] >> 6) << 4;
        block->small[1] = at[part + 4] >> 4 | (at[part] >> 6) << 4;
    }
}

/* Takes a part's codes of four bits: parts 2 n and 2 n + 1 are the low and the high nibbles of 32 bytes. */
INLINE void take_k_nibbles(const uint8_t *at, int part, StoredBlock *block)
{
    UNROLL for (int g = 0; g < GROUPS; g++)
        block->codes[g] = word_at(at + part / 2 * 32 + 4 * g) >> (part % 2 * 4) & each_byte(15);
}

/* Takes a part of Q6_K: low four bits in 128 bytes, high two bits in 64, sixteen scales of eight bits, one step. */
INLINE void take_q6_k(const uint8_t *at, int part, StoredBlock *block)
{
    const uint8_t *low = at + part / 4 * 64 + part % 2 * 32, *high = at + 128 + part / 4 * 32;
    UNROLL for (int g = 0; g < GROUPS; g++)
        block->codes[g] = (word_at(low + 4 * g) >> (part % 4 / 2 * 4) & each_byte(15)) |
                          (word_at(high + 4 * g) >> (part % 4 * 2) & each_byte(3)) << 4;
    memcpy(block->small, at + 192 + 2 * part, 2);
    block->step = half_at(at + 208);
}

/* Takes a part's codes of two bits: parts 4 n to 4 n + 3 share 32 bytes. */
INLINE void take_pairs(const uint8_t *at, int part, StoredBlock *block)
{
    UNROLL for (int g = 0; g < GROUPS; g++)
        block->codes[g] = word_at(at + part / 4 * 32 + 4 * g) >> (part % 4 * 2) & each_byte(3);
}

/* Takes a part of Q2_K: sixteen bytes with a scale and a minimum of
 * four bits each, codes of two bits in 64, then step and minimum. */
INLINE void take_q2_k(const uint8_t *at, int part, StoredBlock *block)
{
    take_pairs(at + 16, part, block);
    UNROLL for (int half = 0; half < 2; half++)
        block->small[half] = at[2 * part + half] & 15, block->small[2 + half] = at[2 * part + half] >> 4;
    block->step = half_at(at + 80), block->minimum = half_at(at + 82);
}

/* Takes a part of Q3_K: third bits of codes in 32 bytes, their low bits in 64, then scales of six bits in twelve: the
 * low four bits of scales n and n + 8 in byte n, the high two of scales n, n + 4, n + 8 and n + 12 in byte 8 + n. */
INLINE void take_q3_k(const uint8_t *at, int part, StoredBlock *block)
{
    take_pairs(at + 32, part, block);
    UNROLL for (int g = 0; g < GROUPS; g++) block->codes[g] |= (word_at(at + 4 * g) >> part & each_byte(1)) << 2;
    UNROLL for (int half = 0; half < 2; half++) {
        int n = 2 * part + half, low = at[96 + n % 8] >> (n / 8 * 4) & 15, high = at[104 + n % 4] >> (n / 4 * 2) & 3;
        block->small[half] = (int8_t)((low | high << 4) - 32);
    }
    block->step = half_at(at + 108);
}

/* Takes a part of the loader's form of IQ1, IQ2 and IQ3: a step,
 * two small scales for each part, and codes of four bits. */
INLINE void take_indexed(const uint8_t *at, int part, StoredBlock *block)
{
    block->step = half_at(at), memcpy(block->small, at + 2 + 2 * part, 2), take_nibbles(at + 18 + 16 * part, block);
}

/* 2^(exponent - 128) in bfloat16, half of MXFP4's scale, for its
 * table has values twice as large. The two smallest are subnormal. */
INLINE uint16_t power_of_two(uint8_t exponent)
{
    return exponent < 2 ? (uint16_t)(0x20 << exponent) : (uint16_t)((exponent - 1) << 7);
}

/* Takes part number `part` of the stored block at `at`. */
INLINE void take(const int kind, const uint8_t *at, int part, StoredBlock *block)
{
    switch (kind) {
    case Q4_0: case IQ4_NL: block->step = half_at(at), take_nibbles(at + 2, block); break;
    case Q4_1: block->step = half_at(at), block->minimum = half_at(at + 2), take_nibbles(at + 4, block); break;
    case Q4_Z: block->step = half_at(at), block->small[0] = (int8_t)at[2], take_nibbles(at + 4, block); break;
    case Q4_Z128:
        block->step = half_at(at), block->small[0] = (int8_t)at[2], take_nibbles(at + 4 + 16 * part, block);
        break;
    case Q5_0: block->step = half_at(at), take_nibbles(at + 6, block), take_fifth_bits(word_at(at + 2), block); break;
    case Q5_1:
        block->step = half_at(at), block->minimum = half_at(at + 2), take_nibbles(at + 8, block);
        take_fifth_bits(word_at(at + 4), block);
        break;
    case Q8_0:
        block->step = half_at(at);
        UNROLL for (int g = 0; g < GROUPS; g++) block->codes[g] = word_at(at + 2 + 4 * g) ^ each_byte(128);
        break;
    case I8:
        UNROLL for (int g = 0; g < GROUPS; g++) block->codes[g] = word_at(at + 4 * g) ^ each_byte(128);
        break;
    case Q5_K:
    case Q4_K:
        block->step = half_at(at), block->minimum = half_at(at + 2), take_k_scales(at + 4, part, block);
        take_k_nibbles(at + (kind == Q5_K ? 48 : 16), part, block);
        if (kind == Q5_K)
            UNROLL for (int g = 0; g < GROUPS; g++)
                block->codes[g] |= (word_at(at + 16 + 4 * g) >> part & each_byte(1)) << 4;
        break;
    case Q2_K: take_q2_k(at, part, block); break;
    case Q3_K: take_q3_k(at, part, block); break;
    case Q6_K: take_q6_k(at, part, block); break;
    case IQ3_XXS: case IQ3_S: case IQ2_S: case IQ1_S: take_indexed(at, part, block); break;
    case IQ4_XS:
        block->step = half_at(at), take_nibbles(at + 8 + 16 * part, block);
        block->small[0] = (int8_t)(((at[4 + part / 2] >> part % 2 * 4 & 15) | (half_at(at + 2) >> 2 * part & 3) << 4) - 32);
        break;
    case MXFP4: block->step = power_of_two(at[0]), take_nibbles(at + 1, block); break;
    }
}

/* Writes a block into lane `lane` of a strip's block at `at`. Numbers that blocks share go to `shared`. */
INLINE void put(const Form form, const StoredBlock *block, int lane, char *shared, char *at)
{
    uint32_t words[GROUPS] = {0};
    const int low = low_bits(form.bits), more = form.bits - low, count = form.bits;
    if (form.bits == 8) {
        memcpy(words, block->codes, sizeof words);
    } else {
        UNROLL for (int g = 0; g < GROUPS; g++)
            words[g % low] |= (block->codes[g] & each_byte((1 << low) - 1)) << (g - g % low);
        UNROLL for (int g = 0; more && g < GROUPS; g++)
            words[low + g * more / 8] |= (block->codes[g] >> low & each_byte((1 << more) - 1)) << g * more % 8;
    }
    UNROLL for (int i = 0; i < count; i++) memcpy(at + (i * LANES + lane) * 4, words + i, 4);
    char *scales = at + code_bytes(form.bits);
    if (shares(form)) {
        memcpy(shared + lane * 2, &block->step, 2);
        if (shares_minimum(form)) memcpy(shared + (LANES + lane) * 2, &block->minimum, 2);
        if (form.scales == GROUP_AND_ZERO) {
            shared[2 * LANES + lane] = block->small[0];
            return;
        }
        const int small = form.scales == K_SCALE ? 1 : form.scales == K_MINIMUMS ? 4 : 2;
        for (int i = 0; i < small; i++) scales[i * LANES + lane] = block->small[i];
    } else if (form.scales != NO_SCALE) {
        memcpy(scales + lane * 2, &block->step, 2);
        if (form.scales == HALF_AND_MINIMUM) memcpy(scales + (LANES + lane) * 2, &block->minimum, 2);
        if (form.scales == HALF_AND_ZERO) scales[2 * LANES + lane] = block->small[0];
    }
}

/* Packs rows [out][in] to strips. Returns 0 if a scale is not finite, as in a damaged file. */
INLINE int pack_rows(const int kind, const Form form, const uint8_t *rows, int64_t out, int64_t in, char *strips)
{
    const int64_t parts = shares(form) ? share_of(form) : 1, bytes = stored_bytes(kind), blocks = (in + BLOCK - 1) / BLOCK;
    const int64_t row_bytes = kind == I8 ? in : in / (BLOCK * parts) * bytes, strip = strip_bytes(form, blocks);
    const uint16_t exponent = 0x7C00;
    int finite = 1;
    memset(strips, 0, (size_t)((out + PANEL - 1) / PANEL * STRIPS * strip));
    for (int64_t o = 0; o < out; o++, rows += row_bytes) {
        char *at = strips + o / LANES * strip, *shared = at;
        for (int64_t b = 0; b < blocks; b++, at += block_bytes(form)) {
            if (shares(form) && b % share_of(form) == 0) shared = at, at += shared_bytes(form);
            StoredBlock block = {0};
            uint8_t last[BLOCK] = {0};
            const uint8_t *from = rows + b / parts * bytes;
            if (kind == I8 && in - b * BLOCK < BLOCK) from = memcpy(last, from, (size_t)(in - b * BLOCK));
            take(kind, from, (int)(b % parts), &block);
            put(form, &block, (int)(o % LANES), shared, at);
            if (form.scales != BFLOAT) /* BFLOAT's are powers of two */
                finite &= (block.step & exponent) != exponent && (block.minimum & exponent) != exponent;
        }
    }
    return finite;
}

/* Reads one row back from strips, each weight as ggml dequantises it. */
INLINE void read_row(const Form form, const char *strips, int64_t row, int64_t in, float *values)
{
    const int64_t blocks = (in + BLOCK - 1) / BLOCK, lane = row % LANES;
    const char *at = strips + row / LANES * strip_bytes(form, blocks);
    vf shared[2] = {{0}, {0}};
    for (int64_t b = 0; b < blocks; b++, at += block_bytes(form)) {
        if (shares(form) && b % share_of(form) == 0) at = load_shared(form, at, shared);
        Codes codes;
        unpack(form, at, &codes);
        Worth now = worth(form, at + code_bytes(form.bits), shared);
        Minimums low = minimums(form, at + code_bytes(form.bits), shared);
        for (int64_t i = 0; i < BLOCK && b * BLOCK + i < in; i++) {
            int code = ((const uint8_t *)&codes.of[i / 4])[lane * 4 + i % 4] - form.zero;
            float step = form.scales == NO_SCALE ? 1.0f : now.step[has_halves(form) && i >= BLOCK / 2][lane];
            values[b * BLOCK + i] = step * (float)code + (has_minimum(form) ? now.minimum[lane] : low.of[i >= BLOCK / 2][lane]);
        }
    }
}

#endif
