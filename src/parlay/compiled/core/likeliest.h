/* The likeliest token of each row, found while the LM head's outputs are in registers. Where nobody reads logits, as in greedy
 * decoding, they are not even written: `finish_best` (linear.h) runs in place of what writes them.
 *
 * A row has one word, a key, to which every piece of the product joins the best of its panels. A larger key is a larger
 * logit, or the lower token of equal ones; so the order in which pieces end does not matter.
 */
#ifndef PARLAY_LIKELIEST_H
#define PARLAY_LIKELIEST_H

#include "lanes.h"

#define UNUSABLE UINT64_MAX /* the key of a row with NaN or +infinity; 0 stands for one in which all are -infinity */

/* The best of some outputs of a row, lane by lane. */
typedef struct {
    vf most;
    vi tokens, usable; /* usable: a mask, 0 in lanes that had NaN or +infinity */
} Leader;

INLINE Leader no_leader(void) { return (Leader){splat(-INFINITY), {0}, ~(vi){0}}; }

/* The numbers 0, 1, 2, ... */
INLINE vi lane_numbers(void)
{
    vi numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

/* Adds the outputs of the tokens from `first` on to the best; those from `end` on only fill up the last panel. */
INLINE Leader better(Leader best, vf outputs, int64_t first, int64_t end)
{
    const vi tokens = lane_numbers() + (int32_t)first, counts = tokens < (vi){0} + (int32_t)end;
    const vi more = (outputs > best.most) & counts;
    best.usable &= (outputs < INFINITY) | ~counts;
    best.most = choose(more, outputs, best.most);
    best.tokens = (tokens & more) | (best.tokens & ~more);
    return best;
}

INLINE uint64_t key_of(float logit, int32_t token)
{
    uint32_t bits;
    logit += 0.0f; /* -0 is equal to 0 */
    memcpy(&bits, &logit, 4);
    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~(uint32_t)token;
}

/* Joins the best to the key of its row, which other threads may do, too. */
INLINE void join_leader(const Leader *best, uint64_t *of_row)
{
    uint64_t key = 0, seen = __atomic_load_n(of_row, __ATOMIC_RELAXED);
    for (int i = 0; i < LANES; i++) {
        uint64_t own = !best->usable[i] ? UNUSABLE : best->most[i] > -INFINITY ? key_of(best->most[i], best->tokens[i]) : 0;
        key = own > key ? own : key;
    }
    while (seen < key && !__atomic_compare_exchange_n(of_row, &seen, key, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
}

#endif
