/* The first halves of what adapters of low rank add to products: a row's inputs times the matrix of its own adapter. */
#ifndef PARLAY_ADAPTERS_H
#define PARLAY_ADAPTERS_H

#include "linear.h"

#define LOWERED_TOGETHER 4 /* rows of one adapter that share what is loaded of it */

INLINE float input_at(const int brains, const Inputs *x, int64_t row, int64_t index)
{
    return brains ? widen(x->brains[row * x->stride + index]) : x->floats[row * x->stride + index];
}

/* `count` rows from `row` on, to out [rows][apart]: the even inputs in order, the odd ones, then both. */
INLINE void lower_some(const int count, const int bf16, const int brains, const LowRank *own, const Inputs *x, int64_t in,
                       int64_t row, float *out, int64_t apart)
{
    for (int64_t first = 0; first < own->rank; first += LANES) {
        vf sums[LOWERED_TOGETHER][2];
        UNROLL for (int i = 0; i < count; i++) sums[i][0] = sums[i][1] = (vf){0};
        for (int64_t k = 0; k < in; k += 2)
            UNROLL for (int odd = 0; odd < 2; odd++) {
                vf down = load_low_rank(bf16, own->down, first * in + (k + odd) * LANES);
                UNROLL for (int i = 0; i < count; i++)
                    sums[i][odd] = multiply_add(splat(input_at(brains, x, row + i, k + odd)), down, sums[i][odd]);
            }
        UNROLL for (int i = 0; i < count; i++) store(out + i * apart + first, sums[i][0] + sums[i][1]);
    }
}

#define LOWER(COUNT)                                                                                                 \
    case COUNT:                                                                                                      \
        if (brains) lower_some(COUNT, 1, 1, own, x, in, row, out, apart);                                            \
        else if (own->bf16) lower_some(COUNT, 1, 0, own, x, in, row, out, apart);                                    \
        else lower_some(COUNT, 0, 0, own, x, in, row, out, apart);                                                   \
        return;

/* Inputs are in bfloat16 where adapters are, and nowhere else. Their number is even. */
static void lower(int64_t count, const LowRank *own, const Inputs *x, int brains, int64_t in, int64_t row, float *out,
                  int64_t apart)
{
    switch (count) { LOWER(1) LOWER(2) LOWER(3) LOWER(4) }
}

/* Rows from..to of a product's inputs. Which rows are together changes no bit. */
static void lower_rows(const Product *product, float *lowered, int64_t from, int64_t to)
{
    int wanted = 0;
    for (int i = 0; i < 3 && product->linear[i]; i++) wanted |= format_of(product->linear[i])->input;
    for (int64_t row = from, count; row < to; row += count) {
        const LowRank *own = product->adapters[row];
        for (count = 1; count < LOWERED_TOGETHER && row + count < to && product->adapters[row + count] == own;) count++;
        for (int i = 0; own && i < 3 && product->linear[i]; i++)
            lower(count, own + product->first + i, &product->x, !(wanted & (FLOATS | CODES)), product->linear[i]->in, row,
                  lowered + (row * 3 + i) * product->most_rank, 3 * product->most_rank);
    }
}

#endif
