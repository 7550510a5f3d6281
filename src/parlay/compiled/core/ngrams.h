/* Frequent n-grams: the longest that ends at a row, whose embedding is added to that of the row's token. */
#ifndef PARLAY_NGRAMS_H
#define PARLAY_NGRAMS_H

#include "core.h"

/* The place of a key, or -1. */
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

/* The row above, or for the first one the last token before the rows, which is row -1. */
static int64_t row_above(const Segment *segment, int64_t row)
{
    return row < segment->pending ? row - 1 : segment->pending + segment->parents[row - segment->pending];
}

/* The longest n-gram that ends at a row of a segment, or -1. */
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

/* What the rows from..to of a batch read besides their embeddings joins these. */
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
