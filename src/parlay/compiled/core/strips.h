/* What the loops of attention share: sizes, the state of a tile at work (`Work`), and `add_columns`, the one inner loop
 * for both scores (queries times keys) and mixed values (weights times values).
 *
 * Cached keys lie in strips of LANES keys, as columns: word k of all keys, then word k + 1. A query's word is broadcast and
 * multiplied with a column, which gives LANES scores at once; VECTORS strips go together. With plain numbers:
 *
 *               LANES keys
 *     word 0  [ k0 k1 k2 ... ]  <- one vector load
 *     word 1  [ k0 k1 k2 ... ]     a word is one float32, or two bfloat16 that follow each other
 */
#ifndef PARLAY_STRIPS_H
#define PARLAY_STRIPS_H

#include "formats.h"
#include "paths.h"

/* Whether the processor multiplies two bfloat16 numbers at once. Where it does not, attention over a bfloat16 cache
 * widens keys and values to float32 as it reads them; queries and weights are rounded to bfloat16 and kept in float32. */
#if defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

/* QUERIES: how many queries, at most, share each load of keys or values. VECTORS: how many vectors of keys, or of a
 * value's numbers, go together. Registers hold the QUERIES * VECTORS sums. */
#if LANES == 16
#define QUERIES 8
#else
#define QUERIES 6
#endif
#define VECTORS 2
/* How many keys ahead values are prefetched: four pages, which the processor sees as four streams. */
#define KEYS_AHEAD 64
/* How many sums of a query are added up at a time: the scores of this many keys, or this many numbers of mixed values. */
#define COLUMNS_AT_ONCE (VECTORS * LANES)
/* Keys of a block, the step of the online softmax: a tile's scores for it stay in the second-level cache. */
#define KEYS 256
#define COLUMNS (KEYS + COLUMNS_AT_ONCE)
/* Queries of a tile at most, unless one row has more: they share what is gathered of keys and values. */
#define MOST_QUERIES 96
#define LONGEST_HEAD 512  /* numbers of a head, at most */

/* The sizes of a layer's heads. cached: CACHE_F32, ...; group: query heads for each key head; words: 32-bit words of a
 * key or value in the cache, in Q8_0 of its codes. */
typedef struct {
    int cached;
    int64_t group, head_dim, words;
} Heads;

/* The form (lanes.h) in which queries and weights are multiplied with the cache. In Q8_0, queries are in blocks, and
 * values are codes, which float32 and bfloat16 hold exactly; their scales are multiplied into the weights. */
INLINE int form_of(const int cached) { return cached != CACHE_BF16 ? FLOAT32 : PAIRED ? BFLOAT16 : ROUNDED; }
INLINE int in_blocks(const Heads *heads) { return heads->cached == CACHE_Q8_0; }
INLINE int is_paired(const Heads *heads) { return PAIRED && heads->cached != CACHE_F32; }
INLINE int64_t blocks_of(const Heads *heads) { return heads->head_dim / BLOCK; }
/* Words of 32 bits that a rotated query takes. */
INLINE int64_t words_of_query(const Heads *heads)
{
    if (in_blocks(heads)) return blocks_of(heads) * (int64_t)sizeof(InputBlock) / 4;
    return is_paired(heads) ? heads->words : heads->head_dim;
}

/* The state of an online softmax over some keys, for each query: the values mixed by their weights so far (not yet
 * divided), the largest score, and the sum of the weights. */
typedef struct {
    float *mixed, *most, *total; /* mixed: [count][width_of(heads)], the others [count] */
} Sums;

/* One tile of attention, as a thread computes it. */
typedef struct {
    const Segment *segment;
    Heads heads;
    int64_t keys, values;           /* byte offsets of the head's keys and values in each page */
    int64_t prefix_keys, prefix_values; /* and in each page of the prefix, which has all layers */
    const uint32_t *const *queries; /* [count]: each query's words */
    /* Q8_0: [blocks_of(heads)][count], the queries as InputBlocks. Some more behind the last one may be read. */
    InputBlock *blocks;
    int64_t count;                  /* queries: rows of the tile times group */
    /* [count][COLUMNS]: scores of one block of keys; the softmax puts weights in their place. */
    float *scores;
    Sums span, whole;               /* over the current span so far, and over all spans before it */
    int64_t window, span_keys;
    const int32_t *chosen; /* hidden pages that the tile's rows see after all, or null; see Segment */
    float cap; /* score_cap of Layer */
    const float *sinks; /* [group] or null: see Layer */
} Work;

INLINE int64_t row_bytes(const Heads *heads) { return heads->words * 4; }

/* Bytes of a strip: LANES keys of one head. */
INLINE int64_t strip_bytes_of(const Heads *heads)
{
    return in_blocks(heads) ? blocks_of(heads) * KEY_BYTES : heads->words * LANES * 4;
}

/* The address of the strip that holds a slot's key. */
INLINE char *strip_at(const Segment *segment, int64_t part, int64_t bytes, int64_t slot)
{
    return row_at(segment, part, slot, 0) + slot % PAGE / LANES * bytes;
}

/* Numbers of a query's mixed values, padded to a multiple of COLUMNS_AT_ONCE. */
INLINE int64_t width_of(const Heads *heads) { return up_to(heads->head_dim, COLUMNS_AT_ONCE); }

/* A product of some queries with VECTORS * LANES columns: sums[query][column] += inputs[query] . column, over `words`
 * words. For scores, inputs are queries, columns are keys, and words run along the head. For mixed values, inputs are
 * weights, columns are numbers of the values, and words run along the keys. */
typedef struct {
    const uint32_t *columns[VECTORS];
    int64_t words;
    const uint32_t *inputs[QUERIES];
    float *sums[QUERIES];
} ColumnSums;

/* Computes a ColumnSums for `count` queries, a constant: their sums stay in registers. */
INLINE void add_some(const int paired, const int count, const ColumnSums *product)
{
    vf totals[QUERIES][VECTORS];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) totals[i][v] = load(product->sums[i] + v * LANES);
    for (int64_t k = 0; k < product->words; k++) {
        vu columns[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) columns[v] = load_words(product->columns[v] + k * LANES);
        UNROLL for (int i = 0; i < count; i++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                totals[i][v] = dot(paired, totals[i][v], columns[v], splat_word(product->inputs[i][k]));
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(product->sums[i] + v * LANES, totals[i][v]);
}

#if QUERIES == 8
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#define ADD(COUNT)                                                                                                   \
    case COUNT:                                                                                                      \
        paired ? add_some(1, COUNT, product) : add_some(0, COUNT, product);                                          \
        return;

static void add_columns(const int paired, int64_t count, const ColumnSums *product)
{
    switch (count) { EACH_COUNT(ADD) }
}

#endif
