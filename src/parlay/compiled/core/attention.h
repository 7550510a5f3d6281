/* Attention of one tile: flash attention on a CPU. tiles.h calls `attend_tile` for each tile; paths.h says which keys a row
 * sees.
 *
 * A tile's queries go through the keys in blocks of KEYS, with an online softmax (Milakov and Gimelshein 2018; Dao et al.
 * 2022). For each block:
 *
 *     score_keys     scores = queries . keys                               to memory, [queries][COLUMNS]
 *     weigh_block    hides what a row may not see, weights = exp(scores - largest so far), shrinks what is mixed already
 *     mix_keys       mixed += weights * values
 *
 * Blocks are grouped into spans (Model.span). Each span's sums begin anew, and `join_sums` adds them up in order, as ranks
 * that share the spans out do, too.
 *
 * A row's result has the same bits whatever rows share the work and wherever its keys lie: the key at position p of a path is
 * always summed at the same place. Blocks begin at multiples of KEYS, all sums run over the block by p, and a hidden key adds
 * zero. Keys are read where they lie in the cache, and a vector of them never comes from two pages.
 *
 * Nodes of a tree share the text's keys, whose slots are their positions; then each row reads the slots of its own path.
 */
#ifndef PARLAY_ATTENTION_H
#define PARLAY_ATTENTION_H

#include "codes_of_keys.h"
#include "values.h"

/* Copies the keys with these slots into a strip of their own. Lanes from
 * `count` on are filled with the last key; nobody uses their sums. */
static void gather_columns(const Work *work, const int64_t *slots, int64_t count, uint32_t *columns)
{
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t slot = slots[lane < count ? lane : count - 1];
        const uint32_t *strip = (const uint32_t *)strip_at(work->segment, work->keys, strip_bytes_of(&work->heads), slot);
        for (int64_t k = 0; k < work->heads.words; k++) columns[k * LANES + lane] = strip[k * LANES + slot % LANES];
    }
}

/* Widens columns of bfloat16 pairs to twice as many columns of float32. */
INLINE void widen_columns(const uint32_t *columns, int64_t words, uint32_t *wide)
{
    for (int64_t k = 0; k < words; k++) {
        vu both = load_words(columns + k * LANES);
        store(wide + 2 * k * LANES, as_floats(both << 16));
        store(wide + (2 * k + 1) * LANES, as_floats(both & 0xffff0000u));
    }
}

/* Computes the scores of queries first..last and keys from..to of one block. `slots` has the keys' slots, slots[0] for
 * key `from`; null: a key's slot is its position. */
static void score_keys(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to, const int64_t *slots)
{
    if (in_blocks(&work->heads)) {
        score_codes(work, first, last, from, to, slots);
        return;
    }
    uint32_t gathered[LONGEST_HEAD * LANES] __attribute__((aligned(64)));
    uint32_t wide[VECTORS][LONGEST_HEAD * LANES] __attribute__((aligned(64)));
    const int widens = work->heads.cached == CACHE_BF16 && !PAIRED;
    for (int64_t key = from; key < to; key += COLUMNS_AT_ONCE) {
        ColumnSums product = {.words = words_of_query(&work->heads)};
        for (int v = 0; v < VECTORS; v++) {
            int64_t own = key + v * LANES < to ? key + v * LANES : key;
            uint32_t *columns = widens ? gathered : wide[v];
            if (slots) gather_columns(work, slots + own - from, to - own, columns);
            const char *strip_of_key = strip_at(work->segment, work->keys, strip_bytes_of(&work->heads), own);
            const uint32_t *stored = slots ? columns : (const uint32_t *)strip_of_key;
            if (widens) widen_columns(stored, work->heads.words, wide[v]);
            product.columns[v] = widens ? wide[v] : stored;
        }
        for (int64_t q = first, count; q < last; q += count) {
            count = last - q < QUERIES ? last - q : QUERIES;
            for (int64_t i = 0; i < count; i++) {
                product.inputs[i] = work->queries[q + i];
                product.sums[i] = work->scores + (q + i) * COLUMNS + key % KEYS;
                memset(product.sums[i], 0, COLUMNS_AT_ONCE * 4);
            }
            add_columns(is_paired(&work->heads), count, &product);
        }
    }
}

/* Hides columns from..to of a block: their weights become zero. */
INLINE void hide(float *scores, int64_t from, int64_t to)
{
    for (int64_t key = from; key < to; key++) scores[key] = -__builtin_inff();
}

/* Turns a query's scores of one block into weights, in place and in the form that values are multiplied with
 * (`form_of`); only columns before `end` count. What was mixed before shrinks if there is a new largest score. */
static void soften(const Work *work, int64_t query, int64_t end)
{
    const int form = form_of(work->heads.cached);
    float *scores = work->scores + query * COLUMNS, *mixed = work->span.mixed + query * width_of(&work->heads);
    float *total_so_far = work->span.total + query;
    vf most = load(scores), total = {0};
    for (int64_t key = LANES; key < end; key += LANES) {
        vf here = load(scores + key);
        most = larger(here, most);
    }
    float before = work->span.most[query], top = largest(most);
    if (top > before) {
        vf shrink = exponential(splat(before - top));
        for (int64_t i = 0; before > -__builtin_inff() && i < work->heads.head_dim; i += LANES)
            store(mixed + i, load(mixed + i) * shrink);
        *total_so_far *= shrink[0];
        work->span.most[query] = top;
    } else
        top = before;
    for (int64_t key = 0; key < end; key += LANES) {
        vf weight = exponential(load(scores + key) - top);
        total += weight;
        store_as(form, scores, key, weight);
    }
    for (int64_t key = up_to(end, LANES); key < KEYS; key += LANES) store_as(form, scores, key, (vf){0});
    *total_so_far += sum(total);
}

/* Turns the scores of queries first..last of one block into weights, where each query sees columns from..to. */
static void weigh_block(const Work *work, int64_t first, int64_t last, int64_t from, int64_t to)
{
    for (int64_t q = first; q < last; q++) {
        float *scores = work->scores + q * COLUMNS;
        for (int64_t key = 0; work->cap > 0 && key < KEYS; key += LANES)
            store(scores + key, bounded(load(scores + key), work->cap));
        if (from >= to) {
            memset(scores, 0, KEYS * 4);
            continue;
        }
        hide(scores, 0, from);
        hide(scores, to, up_to(to, LANES));
        soften(work, q, to);
    }
}

/* The same work over the pages of the prefix. `pages` is memory for the segment that stands for them. */
static Work work_on_prefix(const Work *work, Segment *pages)
{
    const Prefix *prefix = work->segment->prefix;
    Work own = *work;
    *pages = (Segment){.pages = prefix->pages, .pitch = prefix->pitch};
    own.segment = pages;
    own.keys = work->prefix_keys;
    own.values = work->prefix_values;
    return own;
}

/* Attends to the first `keys` keys in the pages, all of which the queries from `first` on see. */
static void attend_pages(const Work *work, int64_t first, int64_t keys)
{
    for (int64_t block = 0; block < keys; block += KEYS) {
        int64_t end = block + KEYS < keys ? block + KEYS : keys;
        score_keys(work, first, work->count, block, end, 0);
        weigh_block(work, first, work->count, 0, end - block);
        mix_keys(work, first, work->count, block, end, 0);
    }
}

/* Attends to the prefix: the queries from `first` on see all of it. */
static void attend_prefix(const Work *work, int64_t first)
{
    Segment pages;
    Work own = work_on_prefix(work, &pages);
    attend_pages(&own, first, work->segment->prefix->keys);
}

/* Attends to the chosen pages among the hidden ones, which all
 * rows of the tile see. `pages` has room for their addresses. */
static void attend_chosen(const Work *work, char **pages)
{
    const Segment *segment = work->segment;
    const Segment chosen = {.pages = pages, .pitch = segment->pitch};
    Work own = *work;
    for (int64_t i = 0; i < segment->chosen_pages; i++) pages[i] = segment->pages[work->chosen[i]];
    own.segment = &chosen;
    attend_pages(&own, 0, segment->chosen_pages * PAGE);
}

/* Writes votes [rows][pages]: which part of its attention each row pays to each of the first pages, summed over its
 * queries. All rows see these pages, and work->whole has the sums over all that they see. */
static void vote(const Work *work, int64_t pages, float *votes)
{
    memset(votes, 0, (size_t)(work->count / work->heads.group * pages) * 4);
    for (int64_t block = 0, keys = pages * PAGE; block < keys; block += KEYS) {
        int64_t end = block + KEYS < keys ? block + KEYS : keys;
        score_keys(work, 0, work->count, block, end, 0);
        for (int64_t q = 0; q < work->count; q++) {
            const float *scores = work->scores + q * COLUMNS, top = work->whole.most[q], total = work->whole.total[q];
            float *own = votes + q / work->heads.group * pages;
            for (int64_t key = block; key < end; key += LANES) {
                vf score = load(scores + key - block);
                if (work->cap > 0) score = bounded(score, work->cap);
                own[key / PAGE] += sum(exponential(score - top)) / total;
            }
        }
    }
}

/* Which keys the rows of a tile see, by position. Keys from..shared are read for all rows together; behind them each node
 * reads its own path (`nodes`). `end` is where the last row's keys end. Only keys first..limit count: the span at work.
 */
typedef struct {
    const Tile *tile;
    int nodes;
    int64_t from, shared, end, first, limit, *slots;
} Seen;

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* The keys of a row's own path, behind the shared ones, that lie in a block: returns where they begin, sets `end`, and
 * writes their slots to seen->slots. */
static int64_t own_keys(const Work *work, const Seen *seen, int64_t row, int64_t block, int64_t *end)
{
    int64_t limit = limit_of(work->segment, row), from = most_of(most_of(block, seen->shared), seen->first);
    *end = least_of(least_of(block + KEYS, limit), seen->limit);
    if (from < *end) path_slots(work->segment, row, from, limit, seen->slots);
    return from;
}

/* Attends to one block of keys: scores of the shared keys for all
 * rows, of own paths row by row; weights; then the values, likewise. */
static void attend_block(const Work *work, const Seen *seen, int64_t block)
{
    const Segment *segment = work->segment;
    int64_t group = work->heads.group, from = most_of(block, seen->from), shared = least_of(block + KEYS, seen->shared), end;
    if (from < shared) score_keys(work, 0, work->count, from, shared, 0);
    for (int64_t row = seen->tile->from, q = 0; row < seen->tile->to; row++, q += group) {
        int64_t begin = most_of(most_of(first_of(segment, work->window, row), block), seen->first);
        int64_t limit = least_of(limit_of(segment, row), seen->limit);
        if (seen->nodes) {
            int64_t own = own_keys(work, seen, row, block, &end);
            if (own < end) score_keys(work, q, q + group, own, end, seen->slots);
        }
        weigh_block(work, q, q + group, begin - block, least_of(limit - block, KEYS));
    }
    if (from < shared) mix_keys(work, 0, work->count, from, shared, 0);
    for (int64_t row = seen->tile->from, q = 0; seen->nodes && row < seen->tile->to; row++, q += group) {
        int64_t own = own_keys(work, seen, row, block, &end);
        if (own < end) mix_keys(work, q, q + group, own, end, seen->slots);
    }
}

/* Finds the keys that the rows of a tile see. `slots` has room for a path. */
static Seen seen_by(const Work *work, const Tile *tile, int64_t *slots)
{
    const Segment *segment = work->segment;
    Seen seen = {.tile = tile, .nodes = tile->from >= segment->pending && segment->nodes > 0, .slots = slots};
    seen.shared = seen.end = shared_to(segment, tile, seen.nodes);
    seen.from = shared_from(segment, tile, work->window, COLUMNS_AT_ONCE > PAGE ? COLUMNS_AT_ONCE : PAGE, seen.shared);
    for (int64_t row = tile->from; seen.nodes && row < tile->to; row++)
        seen.end = most_of(seen.end, limit_of(segment, row));
    return seen;
}

/* Sets the sums of all queries to those over no keys. */
static void clear_sums(const Work *work, const Sums *sums)
{
    for (int64_t q = 0; q < work->count; q++) sums->most[q] = -__builtin_inff(), sums->total[q] = 0;
    memset(sums->mixed, 0, (size_t)(work->count * width_of(&work->heads)) * 4);
}

/* Sums up the keys of one span, `first` its first key, block by block; what rows see of other spans does not matter. It
 * is never inlined, so that it is compiled once and has the same bits for all callers. */
__attribute__((noinline)) static void attend_span(const Work *work, const Seen *seen, int64_t first)
{
    Seen own = *seen;
    own.first = first, own.limit = first + work->span_keys;
    own.from = most_of(seen->from, first), own.shared = least_of(seen->shared, own.limit);
    own.end = least_of(seen->end, own.limit);
    clear_sums(work, &work->span);
    for (int64_t block = own.from / KEYS * KEYS; block < own.end; block += KEYS)
        if (!is_hidden(work->segment, block)) attend_block(work, &own, block);
}

/* Adds one query's sums `more`, over other keys, to `to`. Whoever joins the spans in order gets the same bits. */
__attribute__((noinline)) static void join_sums(Sums to, Sums more, int64_t head_dim)
{
    if (*more.most == -__builtin_inff()) return;
    float top = *to.most > *more.most ? *to.most : *more.most;
    vf kept = *to.most == -__builtin_inff() ? (vf){0} : exponential(splat(*to.most - top));
    vf added = exponential(splat(*more.most - top));
    for (int64_t i = 0; i < head_dim; i += LANES)
        store(to.mixed + i, multiply_add(load(to.mixed + i), kept, load(more.mixed + i) * added));
    *to.total = multiply_add(splat(*to.total), kept, splat(*more.total) * added)[0];
    *to.most = top;
}

INLINE Sums sums_of_query(const Sums *sums, int64_t query, int64_t width)
{
    return (Sums){sums->mixed + query * width, sums->most + query, sums->total + query};
}

/* Begins a query's sums with its attention sink, a key without a value. */
INLINE void begin_with_sink(Sums sums, const float *sink)
{
    if (sink) *sums.most = *sink, *sums.total = 1;
}

/* Adds the sums over the span at work to the sums over all spans before. */
static void join_span(const Work *work)
{
    const int64_t width = width_of(&work->heads);
    for (int64_t q = 0; q < work->count; q++)
        join_sums(sums_of_query(&work->whole, q, width), sums_of_query(&work->span, q, width), work->heads.head_dim);
}

/* Ends the softmax: divides mixed values by the sum of their weights. */
INLINE void divide(Sums sums, int64_t head_dim)
{
    for (int64_t i = 0; i < head_dim; i++) sums.mixed[i] /= *sums.total;
}

/* Computes the attention of a tile: all spans that its rows see, then chosen hidden pages, then the prefix. */
static void attend_tile(const Work *work, const Tile *tile, int64_t *slots)
{
    const int64_t width = width_of(&work->heads), group = work->heads.group;
    const int64_t seers = (first_seer(work->segment, tile) - tile->from) * group;
    Seen seen = seen_by(work, tile, slots);
    clear_sums(work, &work->whole);
    for (int64_t q = 0; work->sinks && q < work->count; q++)
        begin_with_sink(sums_of_query(&work->whole, q, width), work->sinks + q % group);
    for (int64_t span = seen.from / work->span_keys * work->span_keys; span < seen.end; span += work->span_keys) {
        attend_span(work, &seen, span);
        join_span(work);
    }
    if (work->chosen) {
        clear_sums(work, &work->span);
        attend_chosen(work, (char **)slots);
        join_span(work);
    }
    if (seers < work->count) {
        clear_sums(work, &work->span);
        attend_prefix(work, seers);
        join_span(work);
    }
    for (int64_t q = 0; q < work->count; q++) divide(sums_of_query(&work->whole, q, width), work->heads.head_dim);
}

#endif
