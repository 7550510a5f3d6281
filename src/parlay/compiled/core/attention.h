/* Attention of new rows over cached keys and their own; paths.h says which of them a row sees.
 *
 * Key number p of a path is summed at the same place whatever rows share the work: scores go to memory, the softmax and
 * the mix of values run over them by p, and a key that is hidden from a row adds zero to its sums. Nor does it matter
 * which pages of the cache hold the keys: they are read where they lie, a vector of them never from two pages.
 */
#ifndef PARLAY_ATTENTION_H
#define PARLAY_ATTENTION_H

#include "lanes.h"
#include "paths.h"

/* Whether two bfloat16 numbers are multiplied at once. Where they are not, attention multiplies float32 numbers: it
 * widens keys and values as it reads them, and queries and weights are only rounded. */
#if defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif

/* Queries, at most, that share what is loaded of the keys; vectors of values at a time. Registers hold their sums. */
#if LANES == 16
#define QUERIES 8
#define WIDTH 4
#else
#define QUERIES 6
#define WIDTH 2
#endif
#define MIXED 6           /* queries whose values are mixed at a time */
#define FORWARD 64        /* keys fetched before their values are needed: four pages, each a stream of its own */
#define VECTORS 2         /* of keys, too */
#define STRIP (VECTORS * LANES)
#define MOST_SCORES 65536 /* of one tile of rows: they should stay in the second-level cache */
#define MOST_ROWS 16      /* of a tile */
#define LONGEST_HEAD 512  /* numbers */

/* Sizes that all share; `words` of a head as the cache has it. */
typedef struct {
    int bf16;
    int64_t group, head_dim, words;
} Heads;

/* What is multiplied with bfloat16 numbers of the cache. */
INLINE int form_of(const int bf16) { return !bf16 ? FLOAT32 : PAIRED ? BFLOAT16 : ROUNDED; }
INLINE int is_paired(const Heads *heads) { return PAIRED && heads->bf16; }
INLINE int64_t words_of_query(const Heads *heads) { return is_paired(heads) ? heads->words : heads->head_dim; }

/* One tile at work. */
typedef struct {
    const Segment *segment;
    Heads heads;
    int64_t keys, values;           /* where those of its head begin in each page */
    const uint32_t *const *queries; /* by query: its words */
    int64_t count;                  /* queries: rows * group */
    float *scores;                  /* [count][columns] */
    int64_t columns, before;        /* before: the column of the prefix's first key */
    float *mixed;                   /* [count][head_dim] */
    int64_t window;
    float cap; /* of scores; 0: none */
} Work;

INLINE int64_t row_bytes(const Heads *heads) { return heads->words * 4; }

/* Scores of `count` queries from `first` on against STRIP keys. */
INLINE void score_some(const int paired, const int count, const Work *work, const uint32_t *columns, int64_t first,
                       int64_t key)
{
    const int64_t words = words_of_query(&work->heads);
    vf totals[QUERIES][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < words; k++) {
        vu keys[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) keys[v] = load_words(columns + (v * words + k) * LANES);
        UNROLL for (int i = 0; i < count; i++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                totals[i][v] = dot(paired, totals[i][v], keys[v], splat_word(work->queries[first + i][k]));
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            store(work->scores + (first + i) * work->columns + key + v * LANES, totals[i][v]);
}

#define SCORE(COUNT)                                                                                                 \
    if (is_paired(&work->heads))                                                                                     \
        score_some(1, COUNT, work, columns, q, key);                                                                 \
    else                                                                                                             \
        score_some(0, COUNT, work, columns, q, key);                                                                 \
    q += COUNT

/* Where LANES keys from `key` on lie; those beyond the last stand for it: their scores are not used. */
INLINE void place_rows(const Work *work, int64_t key, int64_t from, int64_t to, const int64_t *slots,
                       const uint32_t **rows)
{
    const int64_t bytes = row_bytes(&work->heads), ahead = key + 2 * STRIP;
    if (slots || key + LANES > to) {
        for (int i = 0; i < LANES; i++) {
            int64_t seen = key + i < to ? key + i : to - 1;
            rows[i] = (const uint32_t *)row_at(work->segment, work->keys, slots ? slots[seen - from] : seen, bytes);
        }
        return;
    }
    const char *first = row_at(work->segment, work->keys, key, bytes);
    for (int i = 0; i < LANES; i++) rows[i] = (const uint32_t *)(first + i * bytes);
    if (ahead >= to) return;
    first = row_at(work->segment, work->keys, ahead, bytes);
    for (int64_t i = 0; i < LANES * bytes; i += 64) __builtin_prefetch(first + i);
}

/* Columns of two bfloat16 numbers to two of one, from the last on: they are in the same place. */
INLINE void widen_columns(int64_t words, uint32_t *columns)
{
    for (int64_t k = words - 1; k >= 0; k--) {
        vu both = load_words(columns + k * LANES);
        store(columns + 2 * k * LANES, as_floats(both << 16));
        store(columns + (2 * k + 1) * LANES, as_floats(both & 0xffff0000u));
    }
}

/* Keys from..to of queries first..last; slots[0] belongs to key `from`, null: slots are key numbers. */
static void score_keys(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to, const int64_t *slots)
{
    uint32_t columns[LONGEST_HEAD * STRIP] __attribute__((aligned(64)));
    const int64_t apart = words_of_query(&work->heads) * LANES;
    for (int64_t key = from; key < to; key += STRIP) {
        const uint32_t *rows[STRIP];
        for (int v = 0; v < VECTORS; v++)
            place_rows(work, key + v * LANES, from, to, slots, rows + v * LANES);
        for (int v = 0; v < VECTORS; v++) {
            transpose(rows + v * LANES, work->heads.words, columns + v * apart);
            if (work->heads.bf16 && !PAIRED) widen_columns(work->heads.words, columns + v * apart);
        }
        for (int64_t q = first; q < last;) {
            if (last - q >= QUERIES) { SCORE(QUERIES); }
            else if (last - q >= 4) { SCORE(4); }
            else if (last - q >= 3) { SCORE(3); }
            else if (last - q >= 2) { SCORE(2); }
            else { SCORE(1); }
        }
    }
}

INLINE void hide(float *scores, int64_t from, int64_t to)
{
    for (int64_t key = from; key < to; key++) scores[key] = -__builtin_inff();
}

INLINE void cap_scores(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to)
{
    for (int64_t q = first; work->cap > 0 && q < last; q++)
        for (int64_t key = from; key < to; key += LANES) {
            float *at = work->scores + q * work->columns + key;
            store(at, bounded(load(at), work->cap));
        }
}

/* Scores of one query, from column `from` on, to weights that sum to what is returned, in the activation type, in place. */
static float soften(float *scores, int64_t from, int64_t columns, int form)
{
    vf most = load(scores + from), total = {0};
    for (int64_t key = from + LANES; key < columns; key += LANES) {
        vf here = load(scores + key);
        most = choose(here > most, here, most);
    }
    vf shift = splat(largest(most));
    for (int64_t key = from; key < columns; key += LANES) {
        vf weight = exponential(load(scores + key) - shift);
        total += weight;
        store_as(form, scores, key, weight);
    }
    return sum(total);
}

/* A step along the keys: a key, or two of them where bfloat16 numbers are paired. */
INLINE int step_of(const int bf16) { return bf16 && PAIRED ? 2 : 1; }

/* LANES numbers; zeros behind the `left` that there are. */
INLINE vf load_values(const int bf16, const char *at, int64_t left)
{
    char some[LANES * 4] = {0};
    if (left < LANES) at = memcpy(some, at, (size_t)left * (bf16 ? 2 : 4));
    return bf16 ? widen_all(load_halfwords(at)) : load(at);
}

/* `width` vectors of words of a step from `at` on. */
INLINE void value_words(const int bf16, const int width, const char *first, const char *second, int64_t at,
                        int64_t head_dim, vu *words)
{
#if PAIRED
    if (bf16 && width == 4 && at + 64 <= head_dim) {
        static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        __m512i places = _mm512_loadu_si512(low), more = _mm512_add_epi16(places, _mm512_set1_epi16(16));
        UNROLL for (int half = 0; half < 2; half++) {
            __m512i one = _mm512_loadu_si512((const uint16_t *)first + at + half * 32);
            __m512i two = _mm512_loadu_si512((const uint16_t *)second + at + half * 32);
            words[2 * half] = (vu)_mm512_permutex2var_epi16(one, places, two);
            words[2 * half + 1] = (vu)_mm512_permutex2var_epi16(one, more, two);
        }
        return;
    }
#endif
    const int64_t bytes = bf16 ? 2 : 4;
    UNROLL for (int w = 0; w < width; w++, at += LANES) {
        words[w] = (vu)load_values(bf16, first + at * bytes, head_dim - at);
        if (step_of(bf16) == 2) words[w] = words[w] >> 16 | (vu)load_values(bf16, second + at * bytes, head_dim - at);
    }
}

/* Adds one step along the keys, from `key` on, to the sums of `count` queries. */
INLINE void mix_step(const int bf16, const int width, const int count, const Work *work, int64_t first, int64_t at,
                     int64_t key, const char *one, const char *two, vf (*totals)[WIDTH])
{
    vu values[WIDTH];
    value_words(bf16, width, one, two, at, work->heads.head_dim, values);
    UNROLL for (int i = 0; i < count; i++) {
        const uint32_t *weights = (const uint32_t *)(work->scores + (first + i) * work->columns);
        vu weight = splat_word(weights[key / step_of(bf16)]);
        UNROLL for (int w = 0; w < width; w++)
            totals[i][w] = dot(step_of(bf16) == 2, totals[i][w], values[w], weight);
    }
}

/* Adds keys from..to of `count` queries to their sums, LANES * width numbers of the head from `at` on. `from` is even,
 * and without slots it begins a page. A second key that is not there has no weight. */
INLINE void mix_some(const int bf16, const int width, const int count, const Work *work, int64_t first, int64_t at,
                     int64_t from, int64_t to, const int64_t *slots)
{
    vf totals[MIXED][WIDTH];
    const int64_t bytes = row_bytes(&work->heads);
    const int step = step_of(bf16);
    float *sums[QUERIES];
    UNROLL for (int i = 0; i < count; i++) {
        sums[i] = work->mixed + (first + i) * (work->heads.head_dim + LANES) + at;
        UNROLL for (int w = 0; w < width; w++) totals[i][w] = load(sums[i] + w * LANES);
    }
    for (int64_t key = from; slots && key < to; key += step) {
        const char *one = row_at(work->segment, work->values, slots[key - from], bytes);
        const char *two = key + 1 < to ? row_at(work->segment, work->values, slots[key + 1 - from], bytes) : one;
        mix_step(bf16, width, count, work, first, at, key, one, two, totals);
    }
    for (int64_t key = from; !slots && key < to;) {
        int64_t end = key + PAGE < to ? key + PAGE : to;
        const char *one = row_at(work->segment, work->values, key, bytes), *ahead = one;
        if (key + FORWARD < to) ahead = row_at(work->segment, work->values, key + FORWARD, bytes);
        for (; key < end; key += step, one += step * bytes, ahead += step * bytes) {
            UNROLL for (int b = 0; b < width * LANES * (bf16 ? 2 : 4); b += 64)
                UNROLL for (int k = 0; k < step; k++)
                    if (!first) /* for the queries after these, too */
                        __builtin_prefetch(ahead + k * bytes + at * (bf16 ? 2 : 4) + b);
            mix_step(bf16, width, count, work, first, at, key, one, key + 1 < end ? one + bytes : one, totals);
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int w = 0; w < width; w++) store(sums[i] + w * LANES, totals[i][w]);
}

#define MIX(WIDTH, COUNT)                                                                                            \
    if (work->heads.bf16)                                                                                            \
        mix_some(1, WIDTH, COUNT, work, q, at, from, to, slots);                                                     \
    else                                                                                                             \
        mix_some(0, WIDTH, COUNT, work, q, at, from, to, slots)

static void mix_keys(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to, const int64_t *slots)
{
    for (int64_t at = 0; at < work->heads.head_dim;) {
        int wide = work->heads.head_dim - at > (WIDTH - 1) * LANES;
        for (int64_t q = first; q < last;) {
            if (wide && last - q >= MIXED) { MIX(WIDTH, MIXED); q += MIXED; }
            else if (wide && last - q >= 4) { MIX(WIDTH, 4); q += 4; }
            else if (wide && last - q >= 3) { MIX(WIDTH, 3); q += 3; }
            else if (wide && last - q >= 2) { MIX(WIDTH, 2); q += 2; }
            else if (wide) { MIX(WIDTH, 1); q += 1; }
            else if (last - q >= 4) { MIX(1, 4); q += 4; }
            else { MIX(1, 1); q += 1; }
        }
        at += wide ? WIDTH * LANES : LANES;
    }
}

/* The work with a prefix in place of the sequence's own keys; `pages` stands for it, and `slots` are those of its keys. */
static Work work_on_prefix(const Work *work, Segment *pages, int64_t *slots)
{
    const Prefix *prefix = work->segment->prefix;
    Work own = *work;
    *pages = (Segment){.pages = prefix->pages, .pitch = prefix->pitch};
    own.segment = pages;
    own.keys = work->keys / work->segment->pitch * prefix->pitch;
    own.values = work->values / work->segment->pitch * prefix->pitch;
    for (int64_t key = 0; key < prefix->keys; key++) slots[key] = key;
    return own;
}

/* Scores of a tile's queries from `first` on against the prefix. */
static void score_prefix(const Work *work, int64_t first, int64_t *slots)
{
    Segment pages;
    Work own = work_on_prefix(work, &pages, slots);
    int64_t end = work->before + work->segment->prefix->keys;
    score_keys(&own, first, work->count, work->before, end, slots);
    cap_scores(work, first, work->count, work->before, end);
    for (int64_t q = first; q < work->count; q++) hide(work->scores + q * work->columns, end, work->columns);
}

static void mix_prefix(const Work *work, int64_t first, int64_t *slots)
{
    Segment pages;
    Work own = work_on_prefix(work, &pages, slots);
    mix_keys(&own, first, work->count, work->before, work->before + work->segment->prefix->keys, slots);
}

/* Scores of the keys from..shared that all queries of a tile see, then of those that a row sees alone; the others hidden. */
static void score_tile(const Work *work, const Tile *tile, int nodes, int64_t from, int64_t shared, int64_t *slots)
{
    int64_t group = work->heads.group;
    score_keys(work, 0, work->count, from, shared, 0);
    cap_scores(work, 0, work->count, from, shared);
    for (int64_t row = tile->from, first = 0; row < tile->to; row++, first += group) {
        int64_t limit = limit_of(work->segment, row), begin = first_of(work->segment, work->window, row);
        if (nodes) {
            path_slots(work->segment, row, shared, limit, slots);
            score_keys(work, first, first + group, shared, limit, slots);
            cap_scores(work, first, first + group, shared, limit);
        }
        for (int64_t q = first; q < first + group; q++) {
            hide(work->scores + q * work->columns, from, begin);
            hide(work->scores + q * work->columns, limit, work->columns);
        }
    }
}

/* What the rows of a tile see alike, then for nodes what each sees alone, and for some the prefix. `slots` has room for
 * a path, and for the prefix. */
static void attend_tile(const Work *work, const Tile *tile, int64_t *slots)
{
    const Segment *segment = work->segment;
    int64_t group = work->heads.group, seers = (first_seer(segment, tile) - tile->from) * group;
    int nodes = tile->from >= segment->pending && segment->nodes > 0;
    int64_t shared = shared_to(segment, tile, nodes), from = shared_from(segment, tile, work->window, STRIP > PAGE ? STRIP : PAGE, shared);
    float totals[MOST_ROWS * 64];
    score_tile(work, tile, nodes, from, shared, slots);
    if (seers < work->count) score_prefix(work, seers, slots);
    for (int64_t q = 0; q < work->count; q++)
        totals[q] = soften(work->scores + q * work->columns, from, work->columns, form_of(work->heads.bf16));
    memset(work->mixed, 0, (size_t)(work->count * (work->heads.head_dim + LANES)) * 4);
    mix_keys(work, 0, work->count, from, shared, 0);
    for (int64_t row = tile->from, first = 0; nodes && row < tile->to; row++, first += group) {
        int64_t limit = limit_of(segment, row);
        path_slots(segment, row, shared, limit, slots);
        mix_keys(work, first, first + group, shared, limit, slots);
    }
    if (seers < work->count) mix_prefix(work, seers, slots);
    for (int64_t q = 0; q < work->count; q++)
        for (int64_t i = 0; i < work->heads.head_dim; i++) work->mixed[q * (work->heads.head_dim + LANES) + i] /= totals[q];
}

#endif
