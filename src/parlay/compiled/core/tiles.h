/* Attention of a batch: every tile (rows of one segment, one key head) is a piece of a phase. A thread computes a piece in its
 * own part of the space. When it commits the piece, it writes the results as inputs of the out product (o_proj).
 *
 * Context parallelism: if several ranks share the keys of each text, span s of every path belongs to rank s % count. Each
 * rank sums up its own spans, for the rows of all ranks. Then the ranks exchange these sums, and each joins them for its own
 * rows, span by span in the order in which a single rank does it: so a row has the same bits whatever the number of ranks. A
 * round is one span of each rank:
 *
 *     span     0       1       2       3       4       5
 *     rank     0       1       2       0       1       2
 *     round    0       0       0       1       1       1
 */
#ifndef PARLAY_TILES_H
#define PARLAY_TILES_H

#include "phases.h"
#include "ranks.h"
#include "rows.h"

/* Copies a tile's quantised queries to [blocks][queries], as SCORE reads them. */
static InputBlock *lay_blocks(const Heads *heads, const uint32_t *const *queries, int64_t count, char *at)
{
    InputBlock *blocks = (InputBlock *)at, *to = blocks;
    for (int64_t b = 0; in_blocks(heads) && b < blocks_of(heads); b++)
        for (int64_t q = 0; q < count; q++) *to++ = ((const InputBlock *)queries[q])[b];
    return blocks;
}

/* The layer whose attention runs; what it has in common with
 * others whose keys are in the same pages; its number of tiles. */
INLINE const Layer *layer_here(const Pass *pass) { return &pass->model->layer[pass->here / 2]; }
INLINE const Alike *alike_here(const Pass *pass) { return &pass->space->alike[layer_here(pass)->recent]; }
INLINE int64_t tiles_here(const Pass *pass) { return pass->tiles[layer_here(pass)->recent]; }
INLINE const Tile *tile_here(const Pass *pass, int64_t number) { return &alike_here(pass)->tiles[pass->first_tile + number]; }

/* A tile's segment, with the pages that the running layer reads. */
INLINE Segment segment_of(const Pass *pass, const Tile *tile)
{
    return in_pages_of(layer_here(pass), &pass->batch->segment[tile->segment]);
}

/* The index [layer][key head] of a tile in `chosen` and `votes`; -1 where the layer has a window. */
INLINE int64_t head_here(const Pass *pass, const Tile *tile)
{
    return layer_here(pass)->window ? -1 : pass->here / 2 * pass->model->keys[0].count + tile->head;
}

/* The hidden pages that a tile's rows see after all, or null. */
INLINE const int32_t *chosen_of(const Pass *pass, const Tile *tile, const Segment *segment)
{
    const int64_t head = head_here(pass, tile);
    return segment->chosen && head >= 0 ? segment->chosen + head * segment->chosen_pages : 0;
}

/* Puts together the work on a tile, whose memory is the thread's own part of the space. */
static Work work_of(const Pass *pass, const Tile *tile, const Segment *segment, int64_t thread, const uint32_t **queries,
                    int64_t **slots)
{
    const Model *model = pass->model;
    const Space *space = pass->space;
    const Layer *layer = layer_here(pass);
    const Alike *alike = alike_here(pass);
    const int64_t prefix = segment->prefix ? segment->prefix->pitch : 0, kv_heads = alike->kv_heads;
    int64_t group = alike->heads.group, most = alike->queries_each;
    const int64_t words = words_of_query(&alike->heads);
    char *own = space->threads + thread * space->thread_bytes;
    char *blocks = own + line(most * COLUMNS * 4) + 2 * sums_bytes(alike);
    for (int64_t row = tile->from; row < tile->to; row++)
        for (int64_t i = 0; i < group; i++)
            queries[(row - tile->from) * group + i] =
                space->queries + ((segment->begin + row) * model->heads + tile->head * group + i) * words;
    *slots = (int64_t *)(blocks + tile_blocks_bytes(alike));
    return (Work){.segment = segment,
                  .heads = alike->heads,
                  .keys = part_of(kv_heads, segment->pitch, layer->place, 0, tile->head),
                  .values = part_of(kv_heads, segment->pitch, layer->place, 1, tile->head),
                  .prefix_keys = part_of(kv_heads, prefix, pass->here / 2, 0, tile->head),
                  .prefix_values = part_of(kv_heads, prefix, pass->here / 2, 1, tile->head),
                  .queries = queries,
                  .blocks = lay_blocks(&alike->heads, queries, (tile->to - tile->from) * group, blocks),
                  .count = (tile->to - tile->from) * group,
                  .scores = (float *)own,
                  .span = sums_of_thread(space, alike, thread, 0),
                  .whole = sums_of_thread(space, alike, thread, 1),
                  .window = layer->window,
                  .span_keys = model->span,
                  .chosen = chosen_of(pass, tile, segment),
                  .cap = (float)layer->score_cap,
                  .sinks = layer->sinks ? layer->sinks + tile->head * group : 0};
}

/* A phase of `count` tiles: `compute` leaves sums in the thread's
 * own part of the space, `store` writes them where others read. */
typedef struct {
    const Pass *pass;
    int64_t count;
    void (*compute)(const Pass *pass, int64_t piece, int64_t thread);
    void (*store)(const Pass *pass, int64_t piece, int64_t thread);
} TilesTask;

static void compute_piece(const void *own, int64_t piece, Member *me)
{
    const TilesTask *task = own;
    task->compute(task->pass, piece, me->index);
}

/* Commits a piece. If there are more tiles than MOST_PIECES, a piece is several: the first one has been computed, the
 * others are computed and stored here. */
static void commit_pieces(const void *own, int64_t piece, Member *me)
{
    const TilesTask *task = own;
    task->store(task->pass, piece, me->index);
    for (int64_t more = piece + MOST_PIECES; more < task->count; more += MOST_PIECES) {
        task->compute(task->pass, more, me->index);
        task->store(task->pass, more, me->index);
    }
}

/* Runs a phase of tiles. */
static int run_tiles(const TilesTask *task)
{
    int64_t pieces = task->count < MOST_PIECES ? task->count : MOST_PIECES;
    Phase phase = {.pieces = pieces, .compute = compute_piece, .commit = commit_pieces, .task = task};
    return parlay_pool_phase(task->pass->me, &phase);
}

/* Computes the attention of one tile, to the thread's sums. */
static void compute_tile(const Pass *pass, int64_t piece, int64_t thread)
{
    const Tile *tile = tile_here(pass, piece);
    const uint32_t *queries[MOST_QUERIES];
    int64_t *slots;
    const Segment segment = segment_of(pass, tile);
    Work work = work_of(pass, tile, &segment, thread, queries, &slots);
    attend_tile(&work, tile, slots);
}

/* The forms in which the out product and its adapters read what the heads give. */
INLINE int wanted_of_heads(const Pass *pass)
{
    return format_of(&layer_here(pass)->out)->input | forms_of_adapters(pass->batch);
}

/* Whether the out product's codes can only be made when all heads are there: heads end within a block, or the codes are
 * in another order. Else each head makes its own. */
INLINE int codes_come_last(const Pass *pass)
{
    return alike_here(pass)->heads.head_dim % BLOCK || layer_here(pass)->out.order;
}

/* Writes a head's output for one row into the inputs of the out product. */
static void put_mixed(const Pass *pass, int wanted, int64_t row, int64_t head, const float *mixed)
{
    const Inputs *inputs = &pass->space->normed;
    int64_t dim = alike_here(pass)->heads.head_dim, at = head * dim, i = 0;
    for (; i + LANES <= dim; i += LANES) put_input(inputs, wanted, row, at + i, load(mixed + i));
    for (; i < dim; i++) put_one_input(inputs, wanted, row, at + i, mixed[i]);
    if (!codes_come_last(pass)) put_codes(inputs, wanted, row, at, dim);
}

/* The row in the batch and the query head of a tile's query; and how many queries a tile has. */
INLINE int64_t row_of_query(const Pass *pass, const Tile *tile, int64_t q)
{
    return pass->batch->segment[tile->segment].begin + tile->from + q / alike_here(pass)->heads.group;
}
INLINE int64_t head_of_query(const Pass *pass, const Tile *tile, int64_t q)
{
    return tile->head * alike_here(pass)->heads.group + q % alike_here(pass)->heads.group;
}
INLINE int64_t queries_of(const Pass *pass, const Tile *tile)
{
    return (tile->to - tile->from) * alike_here(pass)->heads.group;
}

/* Writes the votes of a tile's rows, when their sums are there (Segment.votes). */
static void store_votes(const Pass *pass, const Tile *tile, int64_t thread)
{
    const uint32_t *queries[MOST_QUERIES];
    int64_t *slots;
    const Segment segment = segment_of(pass, tile);
    const int64_t rows = segment.pending + segment.nodes - segment.base, head = head_here(pass, tile);
    if (!segment.votes || head < 0) return;
    const Work work = work_of(pass, tile, &segment, thread, queries, &slots);
    vote(&work, segment.votes_pages, segment.votes + (head * rows + tile->from - segment.base) * segment.votes_pages);
}

/* Writes the outputs of a tile. */
static void store_tile(const Pass *pass, int64_t piece, int64_t thread)
{
    const Alike *alike = alike_here(pass);
    const Tile *tile = tile_here(pass, piece);
    const float *mixed = sums_of_thread(pass->space, alike, thread, 1).mixed;
    const int wanted = wanted_of_heads(pass);
    for (int64_t q = 0; q < queries_of(pass, tile); q++) {
        const int64_t row = row_of_query(pass, tile, q);
        put_mixed(pass, wanted, pass->place ? pass->place[row] : row, head_of_query(pass, tile, q),
                  mixed + q * width_of(&alike->heads));
    }
    store_votes(pass, tile, thread);
}

/* ------------------------------------------------------------------------------------------ keys of several ranks */

/* One query's sums as ranks exchange them: mixed values, the largest score, the sum of the weights. */
INLINE Sums sums_of_part(const Pass *pass, float *parts, int64_t round, int64_t row, int64_t head)
{
    int64_t numbers = part_numbers(pass->model), rows = all_rows_of(pass->batch);
    float *at = parts + ((round * rows + row) * pass->model->heads + head) * numbers;
    return (Sums){at, at + numbers - 2, at + numbers - 1};
}

/* Computes a tile's sums over this rank's span of one round. */
static void compute_part(const Pass *pass, int64_t piece, int64_t thread)
{
    const Ranks *context = pass->model->context;
    const int64_t tiles = tiles_here(pass);
    const Tile *tile = tile_here(pass, piece % tiles);
    int64_t span = (pass->round + piece / tiles) * context->count + context->rank, *slots;
    const uint32_t *queries[MOST_QUERIES];
    const Segment segment = segment_of(pass, tile);
    Work work = work_of(pass, tile, &segment, thread, queries, &slots);
    Seen seen = seen_by(&work, tile, slots);
    attend_span(&work, &seen, span * pass->model->span);
}

/* Writes these sums to this rank's part. */
static void store_part(const Pass *pass, int64_t piece, int64_t thread)
{
    const Alike *alike = alike_here(pass);
    const Tile *tile = tile_here(pass, piece % tiles_here(pass));
    const int64_t dim = alike->heads.head_dim, round = pass->model->context->rank * pass->rounds + piece / tiles_here(pass);
    Sums sums = sums_of_thread(pass->space, alike, thread, 0);
    for (int64_t q = 0; q < queries_of(pass, tile); q++) {
        Sums own = sums_of_query(&sums, q, width_of(&alike->heads));
        Sums to = sums_of_part(pass, pass->space->parts, round, row_of_query(pass, tile, q), head_of_query(pass, tile, q));
        for (int64_t i = 0; i < dim; i += LANES) store(to.mixed + i, load(own.mixed + i));
        *to.most = *own.most, *to.total = *own.total;
    }
}

/* Exchanges the parts of all ranks. One thread does this. */
static void gather_parts(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    int64_t numbers = pass->rounds * all_rows_of(pass->batch) * pass->model->heads * part_numbers(pass->model);
    gather_over_ranks(pass->model->context, pass->space->parts, numbers);
}

/* Joins the sums of all ranks, for one of this rank's rows and one head, to those of earlier rounds. After the last
 * round it writes the head's output. */
static void join_rounds(const Pass *pass, int64_t row, int64_t head)
{
    const Model *model = pass->model;
    const float *sinks = layer_here(pass)->sinks;
    int64_t all = pass->batch->own + row, dim = alike_here(pass)->heads.head_dim;
    Sums whole = sums_of_part(pass, pass->space->joined, 0, row, head);
    if (!pass->round) {
        memset(whole.mixed, 0, (size_t)part_numbers(model) * 4), *whole.most = -__builtin_inff();
        begin_with_sink(whole, sinks ? sinks + head : 0);
    }
    for (int64_t round = 0; round < pass->rounds; round++)
        for (int64_t rank = 0; rank < model->context->count; rank++)
            join_sums(whole, sums_of_part(pass, pass->space->parts, rank * pass->rounds + round, all, head), dim);
    if (pass->round + pass->rounds < pass->all_rounds) return;
    divide(whole, dim);
    put_mixed(pass, wanted_of_heads(pass), row, head, whole.mixed);
}

static void join_parts(const Pass *pass, int64_t part, int64_t parts)
{
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        for (int64_t head = 0; head < pass->model->heads; head++) join_rounds(pass, row, head);
}

/* ----------------------------------------------------------------------------------------------- attention as a whole */

/* Attention under context parallelism: as many rounds at once as the space has room for. */
static int attend_with_ranks(Pass pass)
{
    for (pass.round = 0; pass.round < pass.all_rounds; pass.round += pass.rounds) {
        pass.rounds = least_of(pass.space->rounds, pass.all_rounds - pass.round);
        TilesTask task = {&pass, tiles_here(&pass) * pass.rounds, compute_part, store_part};
        if (!run_tiles(&task) || !run_once(&pass, gather_parts) || !run_rows(&pass, join_parts)) return 0;
    }
    return 1;
}

/* Makes the out product's codes, when all heads are there. */
static void put_mixed_codes(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->rows;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        put_codes_of_row(&pass->space->normed, CODES, row, pass->model->heads * alike_here(pass)->heads.head_dim,
                         layer_here(pass)->out.order);
}

/* Computes the attention of all rows of the layer, up to the inputs of the out product. */
static int attend(const Pass *pass)
{
    TilesTask task = {pass, tiles_here(pass), compute_tile, store_tile};
    int apart = wanted_of_heads(pass) & CODES && codes_come_last(pass);
    return (pass->model->context ? attend_with_ranks(*pass) : run_tiles(&task)) && (!apart || run_rows(pass, put_mixed_codes));
}

#endif
