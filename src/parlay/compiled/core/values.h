/* Mixes the values of one block of keys by the queries' weights: `mix_keys`, the second half of attention. If more than
 * QUERIES queries share the values, or keys are not in order, it first gathers the values as columns; few queries read
 * them where they lie. Both ways sum key after key, so they give the same bits. */
#ifndef PARLAY_VALUES_H
#define PARLAY_VALUES_H

#include "strips.h"

/* Keys of one step along the sums: two where bfloat16 numbers are multiplied in pairs, else one. */
INLINE int step_of(const int cached) { return cached != CACHE_F32 && PAIRED ? 2 : 1; }

/* Bytes of a value's number in the cache, without scales. */
INLINE int64_t bytes_of(const int cached) { return cached == CACHE_Q8_0 ? 1 : cached == CACHE_BF16 ? 2 : 4; }

/* Loads LANES numbers or codes as floats; zeros where only `left` are there. */
INLINE vf load_values(const int cached, const char *at, int64_t left)
{
    char some[LANES * 4] = {0};
    if (left < LANES) at = memcpy(some, at, (size_t)(left * bytes_of(cached)));
    return cached == CACHE_Q8_0 ? load_small(at) : cached == CACHE_BF16 ? widen_all(load_halfwords(at)) : load(at);
}

/* Loads numbers at.. at + COLUMNS_AT_ONCE of the values of a step's key
 * `one`, or of both keys, interleaved to words of two bfloat16. */
INLINE void value_words(const int cached, const char *one, const char *two, int64_t at, int64_t head_dim, vu words[VECTORS])
{
#if PAIRED
    if (cached == CACHE_BF16 && at + COLUMNS_AT_ONCE <= head_dim) {
        static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i places = _mm512_loadu_si512(low), more = _mm512_add_epi16(places, _mm512_set1_epi16(16));
        const __m512i first = _mm512_loadu_si512((const uint16_t *)one + at), second = _mm512_loadu_si512((const uint16_t *)two + at);
        words[0] = (vu)_mm512_permutex2var_epi16(first, places, second);
        words[1] = (vu)_mm512_permutex2var_epi16(first, more, second);
        return;
    }
#endif
    const int64_t bytes = bytes_of(cached);
    UNROLL for (int v = 0; v < VECTORS; v++, at += LANES) {
        int64_t left = head_dim < at ? 0 : head_dim - at;
        words[v] = (vu)load_values(cached, one + at * bytes, left);
        if (step_of(cached) == 2) words[v] = words[v] >> 16 | (vu)load_values(cached, two + at * bytes, left);
    }
}

/* Where the values of keys from `key` on lie, up to key `end`: the rest of a page, or one step where keys have slots.
 * If the second key of a step is missing, its weight is zero, and any value will do. */
typedef struct {
    const char *one, *ahead;
    int64_t apart, end; /* apart: bytes from one key's value to the next. ahead: what to prefetch, or null */
} Values;

/* Finds the values from `key` on: without slots up to the end of its page, else one step. */
INLINE Values values_from(const Work *work, int64_t key, int64_t from, int64_t to, const int64_t *slots)
{
    const int64_t bytes = row_bytes(&work->heads), step = step_of(work->heads.cached);
    Values values = {row_at(work->segment, work->values, slots ? slots[key - from] : key, bytes), 0, bytes, key + step};
    if (slots) {
        if (step == 2 && key + 1 < to)
            values.apart = row_at(work->segment, work->values, slots[key + 1 - from], bytes) - values.one;
        return values;
    }
    values.end = key + PAGE < to ? key + PAGE : to;
    if (key + KEYS_AHEAD < to) values.ahead = row_at(work->segment, work->values, key + KEYS_AHEAD, bytes);
    return values;
}

INLINE void fetch_ahead(const Values *values, int64_t bytes, int64_t place)
{
    for (int64_t b = 0; values->ahead && b < bytes; b += 64) __builtin_prefetch(values->ahead + place * values->apart + b);
}

/* Gathers numbers at .. at + COLUMNS_AT_ONCE of the values of keys from..to as columns: [VECTORS][steps][LANES]. */
static void gather_values(const Work *work, int64_t at, int64_t from, int64_t to, const int64_t *slots, uint32_t *columns)
{
    const int cached = work->heads.cached, step = step_of(cached);
    const int64_t words = (to - from + step - 1) / step, ahead = at ? 0 : step * row_bytes(&work->heads);
    for (int64_t key = from, k = 0; key < to;) {
        Values values = values_from(work, key, from, to, slots);
        for (int64_t i = 0; key < values.end; key += step, i += step, k++) {
            const char *one = values.one + i * values.apart;
            vu found[VECTORS];
            fetch_ahead(&values, ahead, i);
            value_words(cached, one, key + 1 < to ? one + values.apart : one, at, work->heads.head_dim, found);
            UNROLL for (int v = 0; v < VECTORS; v++) store(columns + (v * words + k) * LANES, as_floats(found[v]));
        }
    }
}

/* The same sums as `add_some`, over values that are read where they lie. */
INLINE void add_values(const int cached, const int count, const Work *work, const ColumnSums *product, int64_t at, int64_t from,
                       int64_t to)
{
    const int step = step_of(cached);
    const int64_t ahead = at ? 0 : step * row_bytes(&work->heads);
    vf totals[QUERIES][VECTORS];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) totals[i][v] = load(product->sums[i] + v * LANES);
    for (int64_t key = from, k = 0; key < to;) {
        Values values = values_from(work, key, from, to, 0);
        for (int64_t i = 0; key < values.end; key += step, i += step, k++) {
            const char *one = values.one + i * values.apart;
            vu found[VECTORS];
            fetch_ahead(&values, ahead, i);
            value_words(cached, one, key + 1 < to ? one + values.apart : one, at, work->heads.head_dim, found);
            UNROLL for (int j = 0; j < count; j++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    totals[j][v] = dot(step == 2, totals[j][v], found[v], splat_word(product->inputs[j][k]));
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(product->sums[i] + v * LANES, totals[i][v]);
}

#define VALUES(COUNT)                                                                                                \
    case COUNT:                                                                                                      \
        if (work->heads.cached == CACHE_Q8_0) add_values(CACHE_Q8_0, COUNT, work, product, at, from, to);            \
        else if (work->heads.cached == CACHE_BF16) add_values(CACHE_BF16, COUNT, work, product, at, from, to);       \
        else add_values(CACHE_F32, COUNT, work, product, at, from, to);                                              \
        return;

static void add_read(int64_t count, const Work *work, const ColumnSums *product, int64_t at, int64_t from, int64_t to)
{
    switch (count) { EACH_COUNT(VALUES) }
}

/* Q8_0: reads the scales of one block of the values of keys from..to, with zeros up to a whole vector. */
static void gather_scales(const Work *work, int64_t block, int64_t from, int64_t to, const int64_t *slots, float *scales)
{
    const int64_t part = work->values + PAGE * work->heads.head_dim + block * PAGE * 2;
    for (int64_t key = from; key < to && slots; key++) {
        char one[LANES * 2] = {0};
        scales[key - from] = load_halves(memcpy(one, row_at(work->segment, part, slots[key - from], 2), 2))[0];
    }
    for (int64_t key = from; key < to && !slots; key += LANES)
        store(scales + key - from, load_halves(row_at(work->segment, part, key, 2)));
    for (int64_t key = to; key < from + up_to(to - from, LANES); key++) scales[key - from] = 0;
}

/* Q8_0: the weights of `count` keys times the scales of their values, in the form that is multiplied with codes. */
INLINE const uint32_t *scale_weights(const float *weights, const float *scales, int64_t count, uint32_t *scaled)
{
    for (int64_t k = 0; k < count; k += LANES)
        store_as(PAIRED ? BFLOAT16 : FLOAT32, scaled, k, load(weights + k) * load(scales + k));
    return scaled;
}

/* Adds the values of keys from..to of one block, times their weights, to the mixed values of queries first..last.
 * `from` is even; without slots it begins a page. */
static void mix_keys(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to, const int64_t *slots)
{
    uint32_t columns[KEYS * COLUMNS_AT_ONCE] __attribute__((aligned(64))), scaled[QUERIES][KEYS];
    float scales[KEYS];
    const int step = step_of(work->heads.cached), gathers = slots || last - first > QUERIES;
    const int64_t width = width_of(&work->heads);
    ColumnSums product = {.words = (to - from + step - 1) / step};
    UNROLL for (int v = 0; v < VECTORS; v++) product.columns[v] = columns + v * product.words * LANES;
    for (int64_t at = 0; at < width; at += COLUMNS_AT_ONCE) {
        if (gathers) gather_values(work, at, from, to, slots, columns);
        if (in_blocks(&work->heads)) gather_scales(work, at / BLOCK, from, to, slots, scales);
        for (int64_t q = first, count; q < last; q += count) {
            count = last - q < QUERIES ? last - q : QUERIES;
            for (int64_t i = 0; i < count; i++) {
                const float *weights = work->scores + (q + i) * COLUMNS;
                product.inputs[i] = in_blocks(&work->heads)
                                      ? scale_weights(weights + from % KEYS, scales, to - from, scaled[i])
                                      : (const uint32_t *)weights + from % KEYS / step;
                product.sums[i] = work->span.mixed + (q + i) * width + at;
            }
            if (gathers)
                add_columns(is_paired(&work->heads), count, &product);
            else
                add_read(count, work, &product, at, from, to);
        }
    }
}

#endif
