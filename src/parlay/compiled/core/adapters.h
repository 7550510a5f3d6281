/* LoRA, first half: down(x), a row's inputs times the matrix `down` of its adapter, for the products of phases.h. linear.h adds
 * the second half, up(down(x)), to the outputs. Rows of a batch may have different adapters, or none.
 *
 * `down` is in strips of LANES ranks, [words of in][LANES], so one vector is the same input's weights of LANES ranks.
 */
#ifndef PARLAY_ADAPTERS_H
#define PARLAY_ADAPTERS_H

#include "linear.h"

#define LOWERED_TOGETHER 4 /* neighbouring rows of the same adapter that share its loads */
#define MOST_RANK 512      /* readers of adapters refuse larger ones */
/* Sums of a row that run side by side, each over every CHAINS-th word, so that additions need not wait for each other. */
#define CHAINS 4

/* Computes `count` rows from x on, to out [rows][apart]. Words that
 * are left over join the first chain; then the chains are added up. */
INLINE void lower_some(const int count, const int bf16, const LowRank *own, const uint32_t *x, int64_t stride, int64_t words,
                       float *out, int64_t apart)
{
    for (int64_t first = 0; first < own->rank; first += LANES) {
        const char *down = (const char *)own->down + first * words * 4;
        vf sums[LOWERED_TOGETHER][CHAINS];
        UNROLL for (int i = 0; i < count; i++) UNROLL for (int c = 0; c < CHAINS; c++) sums[i][c] = (vf){0};
        int64_t k = 0;
        for (; k + CHAINS <= words; k += CHAINS)
            UNROLL for (int c = 0; c < CHAINS; c++) {
                vu weights = load_words(down + (k + c) * LANES * 4);
                UNROLL for (int i = 0; i < count; i++)
                    sums[i][c] = dot(bf16, sums[i][c], weights, splat_word(x[i * stride + k + c]));
            }
        for (; k < words; k++)
            UNROLL for (int i = 0; i < count; i++)
                sums[i][0] = dot(bf16, sums[i][0], load_words(down + k * LANES * 4), splat_word(x[i * stride + k]));
        UNROLL for (int i = 0; i < count; i++)
            store_as(bf16 ? BFLOAT16 : FLOAT32, out + i * apart, first, (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
    }
}

#define EACH_LOWERED(COUNT)                                                                                          \
    case COUNT:                                                                                                      \
        if (bfloats) lower_some(COUNT, 1, own, x, stride, words, out, apart);                                        \
        else lower_some(COUNT, 0, own, x, stride, words, out, apart);                                                \
        return;

/* Calls `lower_some` with constants for `count` and the form, so that the sums stay in registers. */
static void lower(int64_t count, int bfloats, const LowRank *own, const uint32_t *x, int64_t stride, int64_t words, float *out,
                  int64_t apart)
{
    switch (count) { EACH_LOWERED(1) EACH_LOWERED(2) EACH_LOWERED(3) EACH_LOWERED(4) }
}

/* The same for an adapter in eight bits and rows in blocks. The results are quantised to blocks, too, for RAISE. */
static void lower_codes(int64_t count, const LowRank *own, const InputBlock *x, int64_t stride, int64_t in, float *out,
                        int64_t apart)
{
    float lowered[LOWERED_TOGETHER][MOST_RANK];
    const int64_t blocks = (in + BLOCK - 1) / BLOCK;
    const char *strip = own->down;
    for (int64_t first = 0; first < own->rank; first += LANES, strip += blocks * KEY_BYTES) {
        vf sums[LOWERED_TOGETHER][STRIPS];
        LOWER(strip, x, stride, blocks, count, sums);
        for (int64_t i = 0; i < count; i++) store(lowered[i] + first, sums[i][0]);
    }
    for (int64_t i = 0; i < count; i++) QUANTISE(lowered[i], own->rank, (InputBlock *)(out + i * apart), 1);
}

/* Computes down(x) for rows from..to and all matrices of a product. Inputs are even in number. Which rows share an
 * adapter's loads changes no bit. */
static void lower_rows(const Product *product, float *lowered, int64_t from, int64_t to)
{
    const int64_t pair = product->bfloats ? 2 : 1, stride = product->x.stride / pair;
    const uint32_t *x = product->bfloats ? (const uint32_t *)product->x.bfloats : (const uint32_t *)product->x.floats;
    for (int64_t row = from, count; row < to; row += count) {
        const LowRank *own = product->adapters[row];
        for (count = 1; count < LOWERED_TOGETHER && row + count < to && product->adapters[row + count] == own;) count++;
        for (int i = 0; own && i < 3 && product->linear[i]; i++) {
            const LowRank *one = own + product->first + i;
            const int64_t in = product->linear[i]->in, apart = 3 * product->most_rank;
            float *out = lowered + (row * 3 + i) * product->most_rank;
            if (one->codes) lower_codes(count, one, product->x.blocks + row, product->x.rows, in, out, apart);
            else lower(count, product->bfloats, one, x + row * stride, stride, in / pair, out, apart);
        }
    }
}

#endif
