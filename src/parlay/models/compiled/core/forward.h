/* One forward: every layer in one parallel region, a barrier wherever a thread reads what others wrote. */
#ifndef PARLAY_FORWARD_H
#define PARLAY_FORWARD_H

#include "attention.h"
#include "core.h"
#include "lanes.h"
#include "linear.h"

#ifdef _OPENMP
#include <omp.h>
#define BARRIER if (threads > 1) { _Pragma("omp barrier") } /* one that waits for nobody still asks the system */
#else
#define BARRIER
#endif

/* The parts of a forward's memory. Strides count 32-bit words. */
typedef struct {
    float *hidden;    /* [rows][hidden] */
    uint32_t *normed; /* [max(rows, wanted) + TILE][normed_stride]: inputs of a product */
    uint32_t *gated;  /* [rows + TILE][gated_stride] */
    float *qkv;       /* [rows][qkv_stride] */
    uint32_t *queries; /* [rows][heads * head words] */
    Tile *tiles;
    int64_t *cursors; /* per layer: tiles taken */
    char *threads;    /* per thread: scores, mixed values, slots of a path */
    int64_t normed_stride, gated_stride, qkv_stride, head_words, columns, thread_bytes, bytes;
} Space;

INLINE int64_t line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
INLINE int64_t group_of(const Model *model) { return model->heads / model->kv_heads; }

static int64_t queries_of_tile(const Model *model, int64_t columns)
{
    int64_t rows = MOST_SCORES / columns / group_of(model);
    return (rows < 1 ? 1 : rows > MOST_ROWS ? MOST_ROWS : rows) * group_of(model);
}

/* `longest`: keys of the sequence that has most, with its new rows. */
static Space lay_out(const Model *model, int64_t rows, int64_t wanted, int64_t longest, int64_t segments,
                     int64_t threads, char *at)
{
    int64_t each = model->bf16 ? 2 : 1, dim = model->head_dim, most = (rows > wanted ? rows : wanted) + TILE;
    int64_t mixed = model->heads * dim > model->hidden ? model->heads * dim : model->hidden;
    Space s;
    char *start = at;
    s.normed_stride = up_to(mixed, 2 * LANES) / each;
    s.gated_stride = up_to(model->ffn + PANEL, 2 * LANES) / each;
    s.qkv_stride = (model->heads + 2 * model->kv_heads) * dim;
    s.head_words = (dim + each - 1) / each;
    s.columns = up_to(longest, STRIP) + STRIP;
    int64_t queries = queries_of_tile(model, s.columns);
    s.thread_bytes = line(queries * s.columns * 4) + line(queries * (dim + LANES) * 4) + line(longest * 8);
    s.hidden = (float *)at, at += line(rows * model->hidden * 4);
    s.normed = (uint32_t *)at, at += line(most * s.normed_stride * 4);
    s.gated = (uint32_t *)at, at += line((rows + TILE) * s.gated_stride * 4);
    s.qkv = (float *)at, at += line(rows * s.qkv_stride * 4);
    s.queries = (uint32_t *)at, at += line(rows * model->heads * s.head_words * 4);
    s.tiles = (Tile *)at, at += line((rows + segments) * model->kv_heads * (int64_t)sizeof(Tile));
    s.cursors = (int64_t *)at, at += line(model->layers * 8);
    s.threads = at, at += threads * s.thread_bytes;
    s.bytes = at - start;
    return s;
}

static int64_t space_bytes(const Model *model, int64_t rows, int64_t wanted, int64_t longest, int64_t segments,
                           int64_t threads)
{
    return lay_out(model, rows, wanted, longest, segments, threads, 0).bytes;
}

/* Whole segments by head, in tiles of rows that share keys; the rows of a tree apart from those before it. */
static int64_t cut_tiles(const Model *model, const Batch *batch, const Space *space)
{
    int64_t count = 0, most = queries_of_tile(model, space->columns) / group_of(model);
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment *segment = &batch->segment[s];
        int64_t rows = segment->pending + segment->nodes;
        for (int64_t head = 0; head < model->kv_heads; head++)
            for (int64_t from = segment->base, to; from < rows; from = to) {
                int64_t until = from < segment->pending ? segment->pending : rows;
                to = from + most < until ? from + most : until;
                space->tiles[count++] = (Tile){(int32_t)s, (int32_t)head, (int32_t)from, (int32_t)to};
            }
    }
    return count;
}

/* x / sqrt(|x|^2 + floor) (* weight), into the activation type or float32. */
INLINE void norm_row(const float *x, int64_t size, float floor, const float *weight, int bf16, void *out)
{
    vf squares = {0};
    int64_t whole = size / LANES * LANES;
    float rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    for (int64_t i = whole; i < size; i++) rest += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf(sum(squares) + rest + floor);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf value = load(x + i) * scale;
        store_as(bf16, out, i, weight ? value * load(weight + i) : value);
    }
    for (int64_t i = whole; i < size; i++) store_one(bf16, out, i, weight ? x[i] * scale * weight[i] : x[i] * scale);
}

static void embed(const Model *model, const Batch *batch, const Space *space, int64_t from, int64_t to)
{
    for (int64_t row = from; row < to; row++) {
        float *out = space->hidden + row * model->hidden;
        if (batch->inputs)
            memcpy(out, batch->inputs + row * model->hidden, (size_t)model->hidden * 4);
        else if (model->bf16) {
            const uint16_t *in = (const uint16_t *)model->embedding + batch->ids[row] * model->hidden;
            for (int64_t i = 0; i < model->hidden; i++) out[i] = widen(in[i]);
        } else
            memcpy(out, (const float *)model->embedding + batch->ids[row] * model->hidden, (size_t)model->hidden * 4);
    }
}

static void norm_rows(const Model *model, const Space *space, int64_t from, int64_t to)
{
    for (int64_t row = from; row < to; row++)
        norm_row(space->hidden + row * model->hidden, model->hidden, (float)(model->hidden * model->eps), 0,
                 (int)model->bf16, space->normed + row * space->normed_stride);
}

/* Pairs (i, i + D/2) of a head turn by the row's position (Su et al. 2021). */
INLINE void turn(const float *x, const float *turns, int64_t half, float scale, int bf16, void *out)
{
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), cosine = load(turns + i), sine = load(turns + half + i);
        store_as(bf16, out, i, (a * cosine - b * sine) * scale);
        store_as(bf16, out, half + i, (b * cosine + a * sine) * scale);
    }
    for (; i < half; i++) {
        store_one(bf16, out, i, (x[i] * turns[i] - x[half + i] * turns[half + i]) * scale);
        store_one(bf16, out, half + i, (x[half + i] * turns[i] + x[i] * turns[half + i]) * scale);
    }
}

/* Where the keys (0) or values (1) of one head begin in a page. */
INLINE int64_t part_of(const Model *model, const Segment *segment, int64_t layer, int64_t which, int64_t head)
{
    return ((layer * 2 + which) * model->kv_heads + head) * segment->pitch;
}

/* Norms and turns of a row's queries and keys; keys and values go to the cache. */
static void prepare_row(const Model *model, const Segment *segment, const Space *space, int64_t layer, int64_t row)
{
    int64_t dim = model->head_dim, half = dim / 2, heads = model->heads, size = dim * (model->bf16 ? 2 : 4);
    int64_t slot = segment->start + row, flat = segment->begin + row;
    const float *norms = model->layer[layer].qk_norm, *turns = model->turns + position_of(segment, row) * dim;
    float *x = space->qkv + flat * space->qkv_stride;
    const float floor = (float)(dim * model->eps), scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t head = 0; head < heads + model->kv_heads; head++, x += dim) {
        if (norms) norm_row(x, dim, floor, norms + head * dim, 0, x);
        if (head < heads)
            turn(x, turns, half, scale, (int)model->bf16, space->queries + (flat * heads + head) * space->head_words);
        else
            turn(x, turns, half, 1.0f, (int)model->bf16,
                 row_at(segment, part_of(model, segment, layer, 0, head - heads), slot, size));
    }
    for (int64_t head = 0; head < model->kv_heads; head++, x += dim) {
        char *out = row_at(segment, part_of(model, segment, layer, 1, head), slot, size);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) store_as((int)model->bf16, out, i, load(x + i));
        for (; i < dim; i++) store_one((int)model->bf16, out, i, x[i]);
    }
}

static void prepare(const Model *model, const Batch *batch, const Space *space, int64_t layer, int64_t from, int64_t to)
{
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment *segment = &batch->segment[s];
        int64_t first = segment->begin + segment->base, end = segment->begin + segment->pending + segment->nodes;
        for (int64_t row = from > first ? from : first; row < (to < end ? to : end); row++)
            prepare_row(model, segment, space, layer, row - segment->begin);
    }
}

static void attend(const Model *model, const Batch *batch, const Space *space, int64_t layer, const Tile *tile,
                   int64_t thread)
{
    const Segment *segment = &batch->segment[tile->segment];
    int64_t dim = model->head_dim, group = group_of(model), most = queries_of_tile(model, space->columns);
    char *own = space->threads + thread * space->thread_bytes;
    const uint32_t *queries[MOST_ROWS * 64];
    int64_t longest = position_of(segment, tile->from);
    for (int64_t row = tile->from; row < tile->to; row++) {
        int64_t position = position_of(segment, row);
        longest = position > longest ? position : longest;
        for (int64_t i = 0; i < group; i++)
            queries[(row - tile->from) * group + i] =
                space->queries + ((segment->begin + row) * model->heads + tile->head * group + i) * space->head_words;
    }
    Work work = {.segment = segment,
                 .heads = {(int)model->bf16, group, dim, space->head_words},
                 .keys = part_of(model, segment, layer, 0, tile->head),
                 .values = part_of(model, segment, layer, 1, tile->head),
                 .queries = queries,
                 .count = (tile->to - tile->from) * group,
                 .scores = (float *)own,
                 .columns = up_to(longest + 1, STRIP) + STRIP,
                 .mixed = (float *)(own + line(most * space->columns * 4))};
    attend_tile(&work, tile, (int64_t *)(own + line(most * space->columns * 4) + line(most * (dim + LANES) * 4)));
    for (int64_t q = 0; q < work.count; q++) {
        int64_t row = segment->begin + tile->from + q / group, head = tile->head * group + q % group, i = 0;
        const float *mixed = work.mixed + q * (dim + LANES);
        char *out = (char *)(space->normed + row * space->normed_stride) + head * dim * (model->bf16 ? 2 : 4);
        for (; i + LANES <= dim; i += LANES) store_as((int)model->bf16, out, i, load(mixed + i));
        for (; i < dim; i++) store_one((int)model->bf16, out, i, mixed[i]);
    }
}

/* The rows that the head reads, normed: exact ones to where taps go, then the inputs of its product. */
static void final_rows(const Model *model, const Batch *batch, const Space *space, int64_t thread, int64_t threads)
{
    float floor = (float)(model->hidden * model->eps);
    float *tap = batch->taps ? batch->taps[model->layers] : 0;
    for (int64_t row = batch->rows * thread / threads; tap && row < batch->rows * (thread + 1) / threads; row++)
        norm_row(space->hidden + row * model->hidden, model->hidden, floor, model->final_norm, 0,
                 tap + row * model->hidden);
    for (int64_t i = batch->wanted * thread / threads; i < batch->wanted * (thread + 1) / threads; i++)
        norm_row(space->hidden + batch->wanted_rows[i] * model->hidden, model->hidden, floor, model->final_norm,
                 (int)model->bf16, space->normed + i * space->normed_stride);
}

static void run_attention(const Model *model, const Batch *batch, const Space *space, int64_t layer, int64_t tiles,
                          int64_t thread, int64_t threads)
{
    const Layer *own = &model->layer[layer];
    int64_t from = batch->rows * thread / threads, to = batch->rows * (thread + 1) / threads, tile;
    Product qkv = {space->normed, space->normed_stride, batch->rows, space->qkv, space->qkv_stride, KEEP};
    Product out = {space->normed, space->normed_stride, batch->rows, space->hidden, model->hidden, ADD};
    norm_rows(model, space, from, to);
    BARRIER
    product(&own->qkv, (int)model->bf16, &qkv, thread, threads);
    BARRIER
    prepare(model, batch, space, layer, from, to);
    BARRIER
    while ((tile = __atomic_fetch_add(&space->cursors[layer], 1, __ATOMIC_RELAXED)) < tiles)
        attend(model, batch, space, layer, &space->tiles[tile], thread);
    BARRIER
    product(&own->out, (int)model->bf16, &out, thread, threads);
    BARRIER
}

static void run_feed_forward(const Model *model, const Batch *batch, const Space *space, int64_t layer, int64_t thread,
                             int64_t threads)
{
    const Layer *own = &model->layer[layer];
    Product gate = {space->normed, space->normed_stride, batch->rows, space->gated, space->gated_stride, GATE};
    Product down = {space->gated, space->gated_stride, batch->rows, space->hidden, model->hidden, ADD};
    norm_rows(model, space, batch->rows * thread / threads, batch->rows * (thread + 1) / threads);
    BARRIER
    product(&own->gate_up, (int)model->bf16, &gate, thread, threads);
    BARRIER
    product(&own->down, (int)model->bf16, &down, thread, threads);
    BARRIER
}

static void run(const Model *model, const Batch *batch, const Space *space, int64_t tiles, int64_t thread,
                int64_t threads)
{
    int64_t from = batch->rows * thread / threads, to = batch->rows * (thread + 1) / threads, hidden = model->hidden;
    embed(model, batch, space, from, to);
    BARRIER
    for (int64_t layer = 0; layer < model->layers; layer++) {
        if (batch->taps && batch->taps[layer]) /* each thread norms the rows it tapped: no barrier between */
            memcpy(batch->taps[layer] + from * hidden, space->hidden + from * hidden, (size_t)((to - from) * hidden) * 4);
        if (!batch->skip || !batch->skip[2 * layer])
            run_attention(model, batch, space, layer, tiles, thread, threads);
        if (!batch->skip || !batch->skip[2 * layer + 1])
            run_feed_forward(model, batch, space, layer, thread, threads);
    }
    final_rows(model, batch, space, thread, threads);
    BARRIER
    Product head = {space->normed, space->normed_stride, batch->wanted, batch->logits, model->vocab, KEEP};
    product(&model->head, (int)model->bf16, &head, thread, threads);
}

static void forward(const Model *model, const Batch *batch)
{
    int64_t longest = 1;
    for (int64_t s = 0; s < batch->segments; s++) {
        int64_t end = batch->segment[s].start + batch->segment[s].pending + batch->segment[s].nodes;
        longest = end > longest ? end : longest;
    }
    Space space =
        lay_out(model, batch->rows, batch->wanted, longest, batch->segments, batch->threads, batch->space);
    memset(space.cursors, 0, (size_t)model->layers * 8);
    int64_t tiles = cut_tiles(model, batch, &space);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)batch->threads)
    run(model, batch, &space, tiles, omp_get_thread_num(), omp_get_num_threads());
#else
    run(model, batch, &space, tiles, 0, 1);
#endif
}

#endif
