/* One forward: a job of the pool. A phase of it ends wherever a thread reads what others wrote.
 *
 * Sub-layers are numbered: 2 * layer is its attention, 2 * layer + 1 its feed-forward.
 */
#ifndef PARLAY_FORWARD_H
#define PARLAY_FORWARD_H

#include "pool.h"
#include "rows.h"

#define FEW_NUMBERS 8192    /* of rows: one thread is done with them before it could share them out */
#define PIECES 32           /* of a product, for each thread */
#define LEAST_WEIGHTS 65536 /* numbers that a piece reads: to claim one takes as long as reading some thousands */
#define MOST_RESULTS 65536  /* numbers of one piece: they should stay in the second-level cache */

/* A forward as one thread sees it. */
typedef struct {
    const Model *model;
    const Batch *batch;
    const Space *space;
    Member *me;
    int64_t rows, tiles; /* that run in this layer; tiles of attention */
    int64_t all_tiles;   /* when late rows have joined */
    int64_t here, next; /* the sub-layer that runs, and the one that runs after it, past the last: the head */
} Pass;

/* A part of the work on rows, which are cut into `parts`. */
typedef void Step(const Pass *pass, int64_t part, int64_t parts);

typedef struct {
    const Pass *pass;
    Step *step;
    int64_t parts;
} RowsTask;

typedef struct {
    RowsTask after; /* what is made of the outputs once they are all there */
    Product product;
    int64_t rows, threads, panels;
    int64_t unit, each, pieces; /* panels of a unit, and of a piece, in whole units; pieces of each thread's panels */
} ProductTask;

/* In which forms products want the rows that they share. */
static int forms(const Linear *const linear[3])
{
    int wanted = 0;
    for (int i = 0; i < 3 && linear[i]; i++) wanted |= format_of(linear[i])->input;
    return wanted;
}

static Product attention_inputs(const Pass *pass, int64_t layer)
{
    const Layer *own = &pass->model->layer[layer];
    return (Product){{&own->query, &own->key, &own->value}, pass->space->normed, KEEP, pass->space->qkv,
                     pass->space->qkv_stride};
}

static Product gates(const Pass *pass, int64_t layer)
{
    const Layer *own = &pass->model->layer[layer];
    return (Product){.linear = {&own->gate, &own->up},
                     .x = pass->space->normed,
                     .ending = GATE,
                     .gated = &pass->space->gated,
                     .wanted = format_of(&own->down)->input};
}

static int64_t sublayers(const Pass *pass) { return 2 * pass->model->layers; }

static int64_t next_sublayer(const Pass *pass, int64_t from)
{
    while (from < sublayers(pass) && pass->batch->skip && pass->batch->skip[from]) from++;
    return from;
}

/* ----------------------------------------------------------------------------------------------- the steps of rows */

/* The rows that the head reads, normed: exact ones to where taps go, then the inputs of its product. */
static void norm_last(const Pass *pass, int64_t part, int64_t parts)
{
    const Model *model = pass->model;
    const Batch *batch = pass->batch;
    const Space *space = pass->space;
    float floor = (float)(model->hidden * model->eps);
    float *tap = batch->taps ? batch->taps[model->layers] : 0;
    for (int64_t row = batch->rows * part / parts; tap && row < batch->rows * (part + 1) / parts; row++)
        norm_row(space->hidden + row * model->hidden, model->hidden, floor, model->raw_tap ? 0 : model->final_norm, 0,
                 tap + row * model->hidden);
    int wanted = format_of(&model->head)->input;
    for (int64_t i = batch->wanted * part / parts; i < batch->wanted * (part + 1) / parts; i++)
        norm_input(model, space, model->final_norm, wanted, batch->wanted_rows[i], i);
}

/* Rows normed for the sub-layer that runs next. */
static void norm_next(const Pass *pass, int64_t from, int64_t to)
{
    const Layer *own = &pass->model->layer[pass->next / 2];
    Product product = pass->next % 2 ? gates(pass, pass->next / 2) : attention_inputs(pass, pass->next / 2);
    const float *weight = pass->next % 2 ? own->feed_forward_norm : own->attention_norm;
    int wanted = forms(product.linear);
    for (int64_t row = from; row < to; row++)
        if (pass->next == 0 && pass->model->beside_norm)
            norm_beside(pass->model, pass->batch, pass->space, wanted, row);
        else
            norm_input(pass->model, pass->space, weight, wanted, row, row);
}

/* Whether rows that are late join before the sub-layer that runs next. */
INLINE int join_next(const Pass *pass)
{
    return pass->rows < pass->batch->rows && pass->next >= 2 * pass->batch->join;
}

/* Between two sub-layers: late rows join, rows that enter a tapped layer are put aside, then normed for what runs next. */
static void enter_next(const Pass *pass, int64_t part, int64_t parts)
{
    const Batch *batch = pass->batch;
    int64_t rows = join_next(pass) ? batch->rows : pass->rows;
    int64_t from = rows * part / parts, to = rows * (part + 1) / parts, hidden = pass->model->hidden;
    for (int64_t row = from > pass->rows ? from : pass->rows; row < to; row++)
        join_row(pass->model, pass->space, &batch->joining[row - pass->rows], row);
    for (int64_t layer = (pass->here + 2) / 2; batch->taps && layer < pass->model->layers && 2 * layer <= pass->next; layer++)
        if (batch->taps[layer])
            memcpy(batch->taps[layer] + from * hidden, pass->space->hidden + from * hidden, (size_t)((to - from) * hidden) * 4);
    if (pass->next < sublayers(pass))
        norm_next(pass, from, to);
    else
        norm_last(pass, part, parts);
}

static void begin(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->batch->rows;
    embed(pass->model, pass->batch, pass->space, rows * part / parts, rows * (part + 1) / parts);
}

static void prepare_attention(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->rows;
    prepare(pass->model, pass->batch, pass->space, pass->here / 2, rows * part / parts, rows * (part + 1) / parts);
}

static void commit_rows(const void *own, int64_t piece, Member *me)
{
    const RowsTask *task = own;
    (void)me;
    task->step(task->pass, piece, task->parts);
}

static void close_with_rows(const void *own)
{
    const RowsTask *task = own;
    task->step(task->pass, 0, 1);
}

static int has_few_rows(const Pass *pass) { return pass->batch->rows * pass->model->hidden <= FEW_NUMBERS; }

/* A step as a phase of its own. */
static int run_rows(const Pass *pass, Step *step)
{
    int64_t most = 4 * pass->me->count, rows = pass->batch->rows;
    RowsTask task = {pass, step, has_few_rows(pass) ? 1 : rows < most ? rows : most};
    Phase phase = {.pieces = task.parts, .commit = commit_rows, .task = &task};
    return parlay_pool_phase(pass->me, &phase);
}

/* --------------------------------------------------------------------------------------------------------- products */

/* Gates stay in whole units. Other products may cut one, so that threads have even shares. */
static int64_t whole_panels(const ProductTask *task) { return task->product.ending == GATE ? task->unit : 1; }

static int64_t first_of_thread(const ProductTask *task, int64_t thread)
{
    int64_t whole = whole_panels(task), panel = (task->panels + whole - 1) / whole * thread / task->threads * whole;
    return panel < task->panels ? panel : task->panels;
}

static int64_t first_panel(const ProductTask *task, int64_t piece)
{
    int64_t thread = piece / task->pieces, panel = first_of_thread(task, thread) + piece % task->pieces * task->each;
    int64_t end = first_of_thread(task, thread + 1);
    return panel < end ? panel : end;
}

static void compute_product(const void *own, int64_t piece, Member *me)
{
    const ProductTask *task = own;
    int64_t first = first_panel(task, piece), count = first_panel(task, piece + 1) - first;
    float *sums = (float *)parlay_pool_private(me, (size_t)(task->each * PANEL * task->rows) * 4);
    multiply_panels(&task->product, task->rows, first, count, sums);
}

static void commit_product(const void *own, int64_t piece, Member *me)
{
    const ProductTask *task = own;
    int64_t first = first_panel(task, piece), count = first_panel(task, piece + 1) - first;
    finish_panels(&task->product, task->rows, first, count, (const float *)me->private);
}

static int64_t panels_of_piece(const ProductTask *task)
{
    int64_t each = task->panels / task->threads / PIECES, few = LEAST_WEIGHTS / (PANEL * task->product.linear[0]->in);
    int64_t most = MOST_RESULTS / (PANEL * (task->rows > 0 ? task->rows : 1)), least = 2 * task->panels / MOST_PIECES + 1;
    if (each < few) each = few;
    if (each > most) each = most;
    if (each < least) each = least;
    return (each + task->unit - 1) / task->unit * task->unit;
}

/* Of the thread that has most. */
static int64_t pieces_of_thread(const ProductTask *task)
{
    int64_t whole = whole_panels(task), units = (task->panels + whole - 1) / whole;
    return ((units + task->threads - 1) / task->threads * whole + task->each - 1) / task->each;
}

/* A product of so many rows, then `after`, which may be null: by whoever ends the product where it is done at once. */
static int run_product(const Pass *pass, Product product, int64_t rows, Step *after)
{
    int64_t few = has_few_rows(pass);
    ProductTask task = {{pass, after, 1}, product, rows, pass->me->count, panels_of_product(&product), unit_of(&product)};
    task.each = panels_of_piece(&task);
    task.pieces = pieces_of_thread(&task);
    Phase phase = {.pieces = task.threads * task.pieces,
                   .compute = compute_product,
                   .commit = commit_product,
                   .close = after && few ? close_with_rows : 0,
                   .task = &task,
                   .detached = 1};
    return parlay_pool_phase(pass->me, &phase) && (!after || few || run_rows(pass, after));
}

/* -------------------------------------------------------------------------------------------------------- attention */

/* A tile at work, in the thread's own part of the space. */
static Work work_of(const Pass *pass, const Tile *tile, int64_t thread, const uint32_t **queries, int64_t **slots)
{
    const Model *model = pass->model;
    const Space *space = pass->space;
    const Segment *segment = &pass->batch->segment[tile->segment];
    int64_t dim = model->head_dim, group = group_of(model), most = queries_of_tile(model, space->columns), longest = 0;
    const int64_t words = words_of_query(&space->heads);
    char *own = space->threads + thread * space->thread_bytes;
    int64_t keys = first_seer(segment, tile) < tile->to ? segment->prefix->keys : 0;
    for (int64_t row = tile->from; row < tile->to; row++) {
        int64_t position = position_of(segment, row);
        longest = position > longest ? position : longest;
        for (int64_t i = 0; i < group; i++)
            queries[(row - tile->from) * group + i] =
                space->queries + ((segment->begin + row) * model->heads + tile->head * group + i) * words;
    }
    *slots = (int64_t *)(own + line(most * space->columns * 4) + line(most * (dim + LANES) * 4));
    return (Work){.segment = segment,
                  .heads = space->heads,
                  .keys = part_of(model, segment, pass->here / 2, 0, tile->head),
                  .values = part_of(model, segment, pass->here / 2, 1, tile->head),
                  .queries = queries,
                  .count = (tile->to - tile->from) * group,
                  .scores = (float *)own,
                  .columns = up_to(prefix_column(longest + 1) + keys, STRIP) + STRIP,
                  .before = prefix_column(longest + 1),
                  .mixed = (float *)(own + line(most * space->columns * 4))};
}

static void compute_tile(const void *own, int64_t piece, Member *me)
{
    const Pass *pass = own;
    const Tile *tile = &pass->space->tiles[piece];
    const uint32_t *queries[MOST_ROWS * 64];
    int64_t *slots;
    Work work = work_of(pass, tile, me->index, queries, &slots);
    attend_tile(&work, tile, slots);
}

static void store_tile(const Pass *pass, const Tile *tile, int64_t thread)
{
    const Model *model = pass->model;
    const Space *space = pass->space;
    const Segment *segment = &pass->batch->segment[tile->segment];
    int64_t dim = model->head_dim, group = group_of(model), count = (tile->to - tile->from) * group;
    int wanted = format_of(&model->layer[pass->here / 2].out)->input;
    const float *mixed = (const float *)(space->threads + thread * space->thread_bytes +
                                         line(queries_of_tile(model, space->columns) * space->columns * 4));
    for (int64_t q = 0; q < count; q++, mixed += dim + LANES) {
        int64_t row = segment->begin + tile->from + q / group, head = tile->head * group + q % group, i = 0;
        int64_t at = head * dim;
        for (; i + LANES <= dim; i += LANES) put_input(&space->normed, wanted, row, at + i, load(mixed + i));
        for (; i < dim; i++) put_one_input(&space->normed, wanted, row, at + i, mixed[i]);
        if (dim % BLOCK == 0) put_codes(&space->normed, wanted, row, at, dim);
    }
}

/* Heads that end within a block: what they make together gets its codes when all are there. */
static void put_mixed_codes(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->rows;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        put_codes(&pass->space->normed, CODES, row, 0, pass->model->heads * pass->model->head_dim);
}

/* Beyond MOST_PIECES tiles a piece is several of them: the first is computed already. */
static void commit_tiles(const void *own, int64_t piece, Member *me)
{
    const Pass *pass = own;
    store_tile(pass, &pass->space->tiles[piece], me->index);
    for (int64_t more = piece + MOST_PIECES; more < pass->tiles; more += MOST_PIECES) {
        compute_tile(own, more, me);
        store_tile(pass, &pass->space->tiles[more], me->index);
    }
}

/* ---------------------------------------------------------------------------------------------------- the sub-layers */

/* Of the last layer only keys and values, if nobody reads what comes after: of a text that is fed in pieces, or of what
 * a draft head's one layer reads before it drafts. */
static int leaves_keys_alone(const Pass *pass)
{
    return pass->here == sublayers(pass) - 2 && !pass->batch->wanted && !pass->batch->taps;
}

static int run_attention(const Pass *pass)
{
    const Model *model = pass->model;
    const Linear *last = &model->layer[pass->here / 2].out;
    int64_t rows = pass->rows, tiles = pass->tiles < MOST_PIECES ? pass->tiles : MOST_PIECES;
    Product out = {{last}, pass->space->normed, ADD, pass->space->hidden, model->hidden};
    Phase attention = {.pieces = tiles, .compute = compute_tile, .commit = commit_tiles, .task = pass};
    int apart = format_of(last)->input == CODES && model->head_dim % BLOCK;
    return run_product(pass, attention_inputs(pass, pass->here / 2), rows, prepare_attention) &&
           parlay_pool_phase(pass->me, &attention) && (!apart || run_rows(pass, put_mixed_codes)) &&
           run_product(pass, out, rows, enter_next);
}

static int run_feed_forward(const Pass *pass)
{
    const Linear *last = &pass->model->layer[pass->here / 2].down;
    Product down = {{last}, pass->space->gated, ADD, pass->space->hidden, pass->model->hidden};
    return run_product(pass, gates(pass, pass->here / 2), pass->rows, 0) &&
           run_product(pass, down, pass->rows, enter_next);
}

/* All of a forward, as one thread walks through it. 0: the job has ended meanwhile. */
static int run_forward(Pass pass)
{
    pass.here = -1;
    pass.next = next_sublayer(&pass, 0);
    int goes_on = run_rows(&pass, begin) && run_rows(&pass, enter_next);
    while (goes_on && pass.next < sublayers(&pass)) {
        if (join_next(&pass)) pass.rows = pass.batch->rows, pass.tiles = pass.all_tiles;
        pass.here = pass.next;
        pass.next = next_sublayer(&pass, pass.here + 1);
        if (leaves_keys_alone(&pass))
            return run_product(&pass, attention_inputs(&pass, pass.here / 2), pass.batch->rows, prepare_attention);
        goes_on = pass.here % 2 ? run_feed_forward(&pass) : run_attention(&pass);
    }
    if (!goes_on || !pass.batch->wanted) return goes_on;
    Product head = {{&pass.model->head}, pass.space->normed, KEEP, pass.batch->logits, pass.model->vocab};
    return run_product(&pass, head, pass.batch->wanted, 0);
}

static void run(const void *context, Member *me)
{
    Pass pass = *(const Pass *)context; /* where and what comes next is each thread's own */
    pass.me = me;
    run_forward(pass);
}

/* Keys of the sequence that has most, with its new rows and what they see of a prefix. */
static int64_t longest_of(const Batch *batch)
{
    int64_t longest = 1;
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment *segment = &batch->segment[s];
        int64_t end = segment->start + segment->pending + segment->nodes;
        if (segment->prefix) end += LANES + segment->prefix->keys;
        longest = end > longest ? end : longest;
    }
    return longest;
}

/* Cuts the tiles of the batch into the space. */
static Pass pass_of(const Model *model, const Batch *batch, const Space *space)
{
    Batch early = *batch;
    early.segments -= batch->late_segments;
    Pass pass = {.model = model, .batch = batch, .space = space, .rows = batch->rows - batch->late};
    pass.tiles = cut_tiles(model, &early, space);
    pass.all_tiles = cut_tiles(model, batch, space);
    return pass;
}

static void forward(const Model *model, const Batch *batch)
{
    Space space =
        lay_out(model, batch->rows, batch->wanted, longest_of(batch), batch->segments, batch->threads, batch->space);
    Pass pass = pass_of(model, batch, &space);
    parlay_pool_run(batch->threads, run, &pass);
}

#endif
