/* The phases of a forward, in which threads share the work on rows or on a product. A phase ends wherever a thread reads
 * what others wrote. */
#ifndef PARLAY_PHASES_H
#define PARLAY_PHASES_H

#include "adapters.h"
#include "pool.h"
#include "space.h"

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
    int64_t rows;                   /* that run in this layer */
    const Batch *kept;              /* the rows with logits alone, as which the last layer's attention goes on; or null */
    int64_t kept_tiles, first_tile; /* how many of attention in that layer; the first one of the layer that runs */
    const int32_t *place;           /* where the batch's rows are among those that run; null: where they are in the batch */
    int64_t tiles[2], all_tiles[2]; /* of attention in layers as Space has them; when late rows have joined */
    int64_t here, next; /* the sub-layer that runs, and the one that runs after it, past the last: the head */
    int64_t entered; /* layers so far, where some are read from a file */
    int64_t round, rounds, all_rounds; /* of spans that several ranks have: the first at work, how many, and of how many */
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

static int run_parts(const Pass *pass, Step *step, int64_t parts)
{
    RowsTask task = {pass, step, parts};
    Phase phase = {.pieces = parts, .commit = commit_rows, .task = &task};
    return parlay_pool_phase(pass->me, &phase);
}

/* A step as a phase of its own. */
static int run_rows(const Pass *pass, Step *step)
{
    int64_t most = 4 * pass->me->count, rows = pass->batch->rows;
    return run_parts(pass, step, has_few_rows(pass) ? 1 : rows < most ? rows : most);
}

/* A step that one thread takes for all. */
static int run_once(const Pass *pass, Step *step) { return run_parts(pass, step, 1); }

/* --------------------------------------------------------------------------------------------------------- adapters */

typedef struct {
    const Product *product;
    float *lowered;
    int64_t rows, parts;
} LowerTask;

static void commit_lowered(const void *own, int64_t piece, Member *me)
{
    const LowerTask *task = own;
    (void)me;
    lower_rows(task->product, task->lowered, task->rows * piece / task->parts, task->rows * (piece + 1) / task->parts);
}

static int run_lower(const Pass *pass, const Product *product, int64_t rows)
{
    int64_t most = 4 * pass->me->count;
    LowerTask task = {product, pass->batch->lowered, rows, rows < most ? rows : most};
    Phase phase = {.pieces = task.parts, .commit = commit_lowered, .task = &task};
    return parlay_pool_phase(pass->me, &phase);
}

/* In which form adapters want the inputs of products, if any row has one. */
INLINE int forms_of_adapters(const Batch *batch)
{
    return !batch->adapters || batch->codes ? 0 : batch->brains ? BRAINS : FLOATS;
}

/* A layer's product with what the rows' adapters add to it; its first matrix is number `first` of LAYER_PRODUCTS. */
static Product with_adapters(const Pass *pass, Product product, int64_t layer, int64_t first)
{
    product.adapters = pass->batch->adapters;
    product.lowered = pass->batch->lowered, product.most_rank = pass->batch->most_rank;
    product.brains = (int)pass->batch->brains;
    product.first = layer * LAYER_PRODUCTS + first;
    return product;
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
    if (product.adapters && product.lowers && !run_lower(pass, &product, rows)) return 0;
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

#endif
