/* A tile of attention at work, and the sums that all of it comes down to: strips of scores, strips of mixed values. */
#ifndef PARLAY_STRIPS_H
#define PARLAY_STRIPS_H

#include "formats.h"
#include "paths.h"

/* Whether two bfloat16 numbers are multiplied at once. Where they are not, attention multiplies float32 numbers: it
 * widens keys and values as it reads them, and queries and weights are only rounded. */
#if defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

/* Queries, at most, that share what is loaded of keys or values, and vectors of these. Registers hold their sums. */
#if LANES == 16
#define QUERIES 8
#else
#define QUERIES 6
#endif
#define VECTORS 2
#define FORWARD 64        /* keys fetched before their values are needed: four pages, each a stream of its own */
#define STRIP (VECTORS * LANES)
#define KEYS 256          /* of a block: with a tile's scores they stay in the second-level cache */
#define COLUMNS (KEYS + STRIP)
#define MOST_QUERIES 96   /* of a tile, unless a row has more: they share what is made of keys and values */
#define LONGEST_HEAD 512  /* numbers */

/* Sizes that all share; `words` of a head as the cache has it, of blocks those of the codes. */
typedef struct {
    int cached;
    int64_t group, head_dim, words;
} Heads;

/* What is multiplied with plain numbers of the cache. Codes are multiplied with queries in blocks, and as values, which
 * bfloat16 has exactly, with weights that have taken in the scale. */
INLINE int form_of(const int cached) { return cached != CACHE_BF16 ? FLOAT32 : PAIRED ? BFLOAT16 : ROUNDED; }
INLINE int in_blocks(const Heads *heads) { return heads->cached == CACHE_Q8_0; }
INLINE int is_paired(const Heads *heads) { return PAIRED && heads->cached != CACHE_F32; }
INLINE int64_t blocks_of(const Heads *heads) { return heads->head_dim / BLOCK; }
INLINE int64_t words_of_query(const Heads *heads)
{
    if (in_blocks(heads)) return blocks_of(heads) * (int64_t)sizeof(InputBlock) / 4;
    return is_paired(heads) ? heads->words : heads->head_dim;
}

/* Sums over some keys, of each query: values mixed by their weights, the largest score, and the sum of the weights. */
typedef struct {
    float *mixed, *most, *total; /* mixed: [count][width_of(heads)], the others [count] */
} Sums;

/* One tile at work. */
typedef struct {
    const Segment *segment;
    Heads heads;
    int64_t keys, values;           /* where those of its head begin in each page */
    int64_t prefix_keys, prefix_values; /* and in each page of a prefix, which has all layers */
    const uint32_t *const *queries; /* by query: its words */
    InputBlock *blocks;             /* [blocks_of(heads)][count]: the same; some are read behind the last */
    int64_t count;                  /* queries: rows * group */
    float *scores;                  /* [count][COLUMNS]: of a block, then its weights */
    Sums span, whole;               /* over the keys of a span so far, and over all spans before */
    int64_t window, span_keys;
    const int32_t *chosen; /* of the layer and head: pages in the hidden span, or null; see Segment */
    float cap; /* of scores; 0: none */
    const float *sinks; /* [group] or null: see Layer */
} Work;

INLINE int64_t row_bytes(const Heads *heads) { return heads->words * 4; }

/* LANES keys lie word by word, a word of each key beside those of the others: as columns, in which they are multiplied. */
INLINE int64_t strip_bytes_of(const Heads *heads)
{
    return in_blocks(heads) ? blocks_of(heads) * KEY_BYTES : heads->words * LANES * 4;
}

/* Where the strip that has a slot begins. */
INLINE char *strip_at(const Segment *segment, int64_t part, int64_t bytes, int64_t slot)
{
    return row_at(segment, part, slot, 0) + slot % PAGE / LANES * bytes;
}

/* Numbers of a row of mixed values, which are summed a strip at a time. */
INLINE int64_t width_of(const Heads *heads) { return up_to(heads->head_dim, STRIP); }

/* A strip of sums for each of some queries: what is added are `words` words of their inputs times those of the columns,
 * each [words][LANES]. Scores are such sums, of queries and keys, and mixed values are, of weights and values. */
typedef struct {
    const uint32_t *columns[VECTORS];
    int64_t words;
    const uint32_t *inputs[QUERIES];
    float *sums[QUERIES];
} Strip;

INLINE void add_some(const int paired, const int count, const Strip *strip)
{
    vf totals[QUERIES][VECTORS];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) totals[i][v] = load(strip->sums[i] + v * LANES);
    for (int64_t k = 0; k < strip->words; k++) {
        vu columns[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) columns[v] = load_words(strip->columns[v] + k * LANES);
        UNROLL for (int i = 0; i < count; i++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                totals[i][v] = dot(paired, totals[i][v], columns[v], splat_word(strip->inputs[i][k]));
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(strip->sums[i] + v * LANES, totals[i][v]);
}

#if QUERIES == 8
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#define ADD(COUNT)                                                                                                   \
    case COUNT:                                                                                                      \
        paired ? add_some(1, COUNT, strip) : add_some(0, COUNT, strip);                                              \
        return;

static void add_strip(const int paired, int64_t count, const Strip *strip)
{
    switch (count) { EACH_COUNT(ADD) }
}

#endif
