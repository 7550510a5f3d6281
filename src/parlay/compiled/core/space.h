/* The memory of one forward, and how its attention is cut into tiles. */
#ifndef PARLAY_SPACE_H
#define PARLAY_SPACE_H

#include "attention.h"
#include "core.h"
#include "lanes.h"
#include "linear.h"

/* Rows on their way through experts: `runs` of each row, gathered expert by expert. */
typedef struct {
    float *logits;          /* [rows][router outputs] */
    float *weights;         /* [rows][runs]: of what its experts give */
    int32_t *expert, *place; /* [rows][runs]: experts in rising order, and where the row is among the gathered ones */
    int32_t *first;         /* [experts + 1]: the first gathered row of each */
    Inputs gathered, gated; /* of rows * runs */
    float *given;           /* [rows * runs][hidden] */
    const LowRank **adapters; /* [rows * runs]: as a batch has them */
} Routed;

/* The parts of a forward's memory. Strides count 32-bit words. */
typedef struct {
    float *hidden;    /* [rows][hidden] */
    Inputs normed;    /* of as many rows as there are or want logits, whichever is more */
    Inputs gated;
    float *qkv;       /* [all rows][qkv_stride] */
    Routed routed;    /* of models with experts */
    float *given;     /* [rows][hidden]: what a sub-layer gives, where it is summed or normed before it is added */
    uint32_t *queries; /* [all rows][heads * query words] */
    Tile *tiles;
    float *parts, *joined; /* of models whose keys several ranks have, see tiles.h */
    char *threads;    /* per thread: what Work has of a tile, slots of a path */
    Heads heads;
    int64_t qkv_stride, queries_each, thread_bytes, bytes;
    int64_t rounds; /* for which parts have room */
} Space;

#define MOST_PARTS (1 << 20) /* numbers that a rank gives at once, if one round has no more */

INLINE int64_t line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
INLINE int64_t group_of(const Model *model) { return model->heads / model->kv_heads; }

static int64_t queries_of_tile(const Model *model)
{
    int64_t rows = MOST_QUERIES / group_of(model);
    return (rows < 1 ? 1 : rows) * group_of(model);
}

/* Whether what a sub-layer gives is changed before it is added. */
INLINE int sets_outputs_apart(const Model *model)
{
    if (model->ranks) return 1;
    for (int64_t i = 0; i < model->layers; i++)
        if (model->layer[i].attention_out_norm || model->layer[i].feed_forward_out_norm) return 1;
    return 0;
}

/* The experts of a layer, and how many a row runs. */
INLINE int64_t experts_of(const Layer *layer) { return layer->experts + (layer->shared != NOT_SHARED); }
INLINE int64_t runs_of(const Layer *layer) { return layer->chosen + (layer->shared != NOT_SHARED); }

/* Products read some rows more than there are. */
static Inputs lay_out_inputs(int64_t rows, int64_t numbers, char **at)
{
    Inputs inputs = {.stride = up_to(numbers, 2 * BLOCK), .rows = rows};
    inputs.floats = (float *)*at, *at += line((rows + TILE) * inputs.stride * 4);
    inputs.brains = (uint16_t *)*at, *at += line((rows + TILE) * inputs.stride * 2);
    inputs.blocks = (InputBlock *)*at;
    *at += line((inputs.stride / BLOCK * rows + STRIP_ROWS) * (int64_t)sizeof(InputBlock));
    return inputs;
}

/* The most that any layer needs. */
static Routed lay_out_routed(const Model *model, int64_t rows, char **at)
{
    Routed routed = {0};
    int64_t runs = 0, experts = 0, outputs = 0, inner = 0;
    for (int64_t i = 0; i < model->layers; i++) {
        const Layer *layer = &model->layer[i];
        if (!layer->experts) continue;
        runs = most_of(runs, runs_of(layer)), experts = most_of(experts, experts_of(layer));
        outputs = most_of(outputs, layer->router.out);
        for (int64_t e = 0; e < experts_of(layer); e++) inner = most_of(inner, layer->expert[e].gate.out);
    }
    if (!experts) return routed;
    routed.logits = (float *)*at, *at += line(rows * outputs * 4);
    routed.weights = (float *)*at, *at += line(rows * runs * 4);
    routed.expert = (int32_t *)*at, *at += line(rows * runs * 4);
    routed.place = (int32_t *)*at, *at += line(rows * runs * 4);
    routed.first = (int32_t *)*at, *at += line((experts + 1) * 4);
    routed.gathered = lay_out_inputs(rows * runs, model->hidden, at);
    routed.gated = lay_out_inputs(rows * runs, inner, at);
    routed.given = (float *)*at, *at += line(rows * runs * model->hidden * 4);
    routed.adapters = (const LowRank **)*at, *at += line(rows * runs * (int64_t)sizeof(LowRank *));
    return routed;
}

/* Numbers of one query's sums over a span as ranks exchange them: the mixed values, the largest score, and the total. */
INLINE int64_t part_numbers(const Model *model) { return up_to(model->head_dim, LANES) + 2; }

/* A round takes one span of each rank. */
INLINE int64_t rounds_of(const Model *model, int64_t keys)
{
    return model->context ? (keys + model->span * model->context->count - 1) / (model->span * model->context->count) : 0;
}

/* As many rounds run at once as few numbers. */
static void lay_out_parts(const Model *model, int64_t rows, int64_t longest, Space *space, char **at)
{
    int64_t numbers = rows * model->heads * part_numbers(model);
    space->rounds = least_of(rounds_of(model, longest), most_of(1, MOST_PARTS / numbers));
    if (!model->context) return;
    space->parts = (float *)*at, *at += line(model->context->count * space->rounds * numbers * 4);
    space->joined = (float *)*at, *at += line(numbers * 4);
}

/* Of a tile's sums: over a span, and over all. */
INLINE int64_t sums_bytes(const Space *space)
{
    return line(space->queries_each * width_of(&space->heads) * 4) + 2 * line(space->queries_each * 4);
}

/* A thread's sums: the first ones or the second. */
INLINE Sums sums_of_thread(const Space *space, int64_t thread, int which)
{
    char *at = space->threads + thread * space->thread_bytes + line(space->queries_each * COLUMNS * 4);
    float *mixed = (float *)(at + which * sums_bytes(space)), *most = mixed + line(space->queries_each * width_of(&space->heads) * 4) / 4;
    return (Sums){mixed, most, most + line(space->queries_each * 4) / 4};
}

/* Of a tile's queries in blocks. */
INLINE int64_t tile_blocks_bytes(const Space *space)
{
    if (!in_blocks(&space->heads)) return 0;
    return line((space->queries_each * blocks_of(&space->heads) + STRIP_ROWS) * (int64_t)sizeof(InputBlock));
}

/* `longest`: keys of the sequence that has most, with its new rows. */
static Space lay_out(const Model *model, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                     int64_t segments, int64_t threads, char *at)
{
    int64_t each = model->cached == CACHE_Q8_0 ? 4 : model->cached == CACHE_BF16 ? 2 : 1, dim = model->head_dim;
    int64_t read = model->hidden * (model->beside_norm ? 2 : 1); /* by the products of attention, at most */
    int64_t mixed = model->heads * dim > read ? model->heads * dim : read;
    Space s;
    char *start = at;
    s.qkv_stride = (model->heads + 2 * model->kv_heads) * dim;
    s.heads = (Heads){(int)model->cached, group_of(model), dim, (dim + each - 1) / each};
    s.queries_each = queries_of_tile(model);
    s.thread_bytes = line(s.queries_each * COLUMNS * 4) + 2 * sums_bytes(&s) + tile_blocks_bytes(&s) + line(longest * 8);
    s.hidden = (float *)at, at += line(rows * model->hidden * 4);
    s.normed = lay_out_inputs(rows > wanted ? rows : wanted, mixed, &at);
    s.gated = lay_out_inputs(rows, model->ffn, &at);
    s.routed = lay_out_routed(model, rows, &at);
    s.qkv = (float *)at, at += line(up_to(all_rows, model->context ? model->context->count : 1) * s.qkv_stride * 4);
    s.given = (float *)at, at += sets_outputs_apart(model) ? line(rows * model->hidden * 4) : 0;
    s.queries = (uint32_t *)at, at += line(all_rows * model->heads * words_of_query(&s.heads) * 4);
    lay_out_parts(model, all_rows, longest, &s, &at);
    s.tiles = (Tile *)at, at += line((all_rows + segments) * model->kv_heads * (int64_t)sizeof(Tile));
    s.threads = at, at += threads * s.thread_bytes;
    s.bytes = at - start;
    return s;
}

/* Enough for every forward whose longest sequence has at most so many keys. */
static int64_t space_bytes(const Model *model, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                           int64_t segments, int64_t threads)
{
    return lay_out(model, rows, all_rows, wanted, longest, segments, threads, 0).bytes;
}

INLINE int64_t all_rows_of(const Batch *batch) { return batch->all_rows ? batch->all_rows : batch->rows; }

/* Whole segments by head, in tiles of rows that share keys; the rows of a tree apart from those before it. */
static int64_t cut_tiles(const Model *model, const Batch *batch, const Space *space)
{
    int64_t count = 0, most = space->queries_each / group_of(model);
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

#endif
