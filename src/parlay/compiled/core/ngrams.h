/* N-gram embeddings, which some models add to those of tokens: for each row, finds the longest known n-gram of tokens
 * that ends there, and adds its embedding. core.h says what `Ngrams` has. */
#ifndef PARLAY_NGRAMS_H
#define PARLAY_NGRAMS_H

#include "core.h"

/* The index of a key, or -1. A binary search without branches that are hard to predict. */
static int64_t find_key(const Ngrams *table, int64_t key)
{
    const int64_t *first = table->keys;
    int64_t left = table->count;
    while (left > 1) {
        int64_t half = left / 2;
        first += first[half] <= key ? half : 0;
        left -= half;
    }
    return left && *first == key ? first - table->keys : -1;
}

/* The row of the token before; below 0 for tokens before the segment's rows. A node's is its parent. */
static int64_t row_above(const Segment *segment, int64_t row)
{
    return row < segment->pending ? row - 1 : segment->pending + segment->parents[row - segment->pending];
}

/* The index of the longest known n-gram that ends at a row of a segment, or -1. It is found token by token, backwards. */
static int64_t find_ngram(const Ngrams *table, const Segment *segment, int64_t row)
{
    int64_t found = -1, node = segment->tokens[row];
    for (int64_t length = 2; length <= table->longest; length++) {
        row = row_above(segment, row);
        int64_t before = segment->tokens[row];
        int64_t place = before < 0 ? -1 : find_key(table, node * table->vocab + before);
        if (place < 0) break;
        found = place, node = table->vocab + place;
    }
    return found;
}

/* Adds n-gram embeddings to the hidden states of rows from..to of a batch. */
static void add_ngrams(const Ngrams *table, const Batch *batch, float *hidden, int64_t size, int64_t from, int64_t to)
{
    for (const Segment *segment = batch->segment; segment < batch->segment + batch->segments; segment++) {
        int64_t first = segment->begin + segment->base, end = segment->begin + segment->pending + segment->nodes;
        for (int64_t row = first > from ? first : from; row < (end < to ? end : to); row++) {
            int64_t found = find_ngram(table, segment, row - segment->begin);
            const uint16_t *embedding = table->embeddings + found * size;
            for (int64_t i = 0; found >= 0 && i < size; i++) {
                union { uint32_t bits; float number; } wide = {(uint32_t)embedding[i] << 16};
                hidden[row * size + i] += wide.number;
            }
        }
    }
}

#endif
