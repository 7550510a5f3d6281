/* The KV cache in Q8_0: stores a row's codes, and computes scores by products of whole numbers, with queries in InputBlocks.
 *
 * LANES keys lie like a strip of Q8_0 weights (codes.h), so SCORE multiplies them where they lie, as a product does weights:
 *
 *     a page of one head    PAGE / LANES strips, each [blocks of the head][KEY_BYTES]
 *     KEY_BYTES             [8 groups][LANES] words of four codes, 128 above their values; then LANES scales in half precision
 *
 * Values are read row by row; core.h has their layout.
 */
#ifndef PARLAY_CODES_OF_KEYS_H
#define PARLAY_CODES_OF_KEYS_H

#include "codes.h"
#include "strips.h"

/* Multiplies each block with Hadamard's orthogonal matrix. If queries and keys both are, their products stay the same,
 * and one large number becomes 32 of middle size, so that a single scale serves all (Ashkboos et al. 2024, QuaRot). */
static void spread(float *x, int64_t count)
{
    for (float *block = x; block < x + count; block += BLOCK) {
        for (int half = BLOCK / 2; half; half /= 2)
            for (int i = 0; i < BLOCK; i += 2 * half)
                for (int j = i; j < i + half; j++) {
                    const float low = block[j], high = block[j + half];
                    block[j] = low + high, block[j + half] = low - high;
                }
        for (int i = 0; i < BLOCK; i++) block[i] *= 0.176776695f; /* 1 / sqrt(32) */
    }
}

/* Stores a quantised key in its slot. */
static void store_key(const Segment *segment, int64_t part, int64_t slot, const InputBlock *blocks, int64_t count)
{
    char *strip = strip_at(segment, part, count * KEY_BYTES, slot);
    for (int64_t b = 0; b < count; b++, strip += KEY_BYTES) {
        const uint16_t scale = round_half(blocks[b].scale);
        for (int g = 0; g < GROUPS; g++) {
            uint32_t word;
            memcpy(&word, blocks[b].codes + 4 * g, 4);
            word ^= 0x80808080u; /* stored codes are 128 above their values */
            memcpy(strip + (g * LANES + slot % LANES) * 4, &word, 4);
        }
        memcpy(strip + (GROUPS * LANES * 2 + slot % LANES) * 2, &scale, 2);
    }
}

/* Stores a quantised value in its slot. */
static void store_value(const Segment *segment, int64_t part, int64_t slot, const InputBlock *blocks, int64_t count)
{
    char *codes = row_at(segment, part, slot, count * BLOCK);
    for (int64_t b = 0; b < count; b++) {
        const uint16_t scale = round_half(blocks[b].scale);
        memcpy(codes + b * BLOCK, blocks[b].codes, BLOCK);
        memcpy(row_at(segment, part + PAGE * count * BLOCK + b * PAGE * 2, slot, 2), &scale, 2);
    }
}

/* Copies the keys with these slots into a strip of their own. Lanes from
 * `count` on are filled with the last key; nobody uses their sums. */
static void gather_keys(const Work *work, const int64_t *slots, int64_t count, char *strip)
{
    const int64_t blocks = blocks_of(&work->heads);
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t slot = slots[lane < count ? lane : count - 1], place = slot % LANES;
        const char *from = strip_at(work->segment, work->keys, strip_bytes_of(&work->heads), slot);
        char *to = strip;
        for (int64_t b = 0; b < blocks; b++, from += KEY_BYTES, to += KEY_BYTES) {
            for (int g = 0; g < GROUPS; g++) memcpy(to + (g * LANES + lane) * 4, from + (g * LANES + place) * 4, 4);
            memcpy(to + (GROUPS * LANES * 2 + lane) * 2, from + (GROUPS * LANES * 2 + place) * 2, 2);
        }
    }
}

/* `score_keys` (attention.h) for a cache in Q8_0. */
static void score_codes(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to, const int64_t *slots)
{
    char gathered[VECTORS][LONGEST_HEAD / BLOCK * KEY_BYTES] __attribute__((aligned(64)));
    const int64_t blocks = blocks_of(&work->heads);
    for (int64_t key = from; key < to; key += COLUMNS_AT_ONCE) {
        const char *strips[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int64_t own = key + v * LANES < to ? key + v * LANES : key;
            if (slots) gather_keys(work, slots + own - from, to - own, gathered[v]);
            strips[v] = slots ? gathered[v] : strip_at(work->segment, work->keys, strip_bytes_of(&work->heads), own);
        }
        for (int64_t q = first, count; q < last; q += count) {
            vf sums[STRIP_ROWS][STRIPS];
            count = last - q < STRIP_ROWS ? last - q : STRIP_ROWS;
            SCORE(strips[0], strips[1] - strips[0], work->blocks + q, work->count, blocks, count, sums);
            for (int64_t i = 0; i < count; i++)
                memcpy(work->scores + (q + i) * COLUMNS + key % KEYS, sums[i], COLUMNS_AT_ONCE * 4);
        }
    }
}

#endif
