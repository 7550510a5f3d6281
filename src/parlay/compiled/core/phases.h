/* How the threads of a forward share its work: phases over rows (`run_rows`), over the panels of a product (`run_product`),
 * or done by one thread (`run_once`). A phase is a barrier (pool.h), and ends wherever a thread reads what others wrote.
 *
 * All these functions return 0 when the job has ended meanwhile, because this thread was late: the caller leaves at once.
 *
 * A product's panels are cut into ranges, one for each thread, and each range into pieces of some panels. Threads steal
 * pieces of other ranges when their own are done:
 *
 *     panels   | thread 0                | thread 1                | ...
 *     pieces   | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  |        `each` panels to a piece
 */
#ifndef PARLAY_PHASES_H
#define PARLAY_PHASES_H

#include "adapters.h"
#include "pool.h"
#include "space.h"

/* If the hidden states of all rows have at most FEW_NUMBERS numbers, one thread takes a step on rows alone: the others
 * would not arrive in time to help. */
#define FEW_NUMBERS 8192
/* About how many pieces of a product each thread gets: few enough to claim cheaply, enough to share evenly. */
#define PIECES 32
/* The fewest weights that a piece reads, because to claim one takes as long as to read some thousands. */
#define LEAST_WEIGHTS 65536
#define MOST_RESULTS 65536  /* the most results of a piece, which should stay in the second-level cache */

/* A forward as one thread sees it: each has a copy. What differs between threads is `me`, and how far each has come. */
typedef struct {
    const Model *model;
    const Batch *batch;
    const Space *space;
    Member *me;
    int64_t rows;                   /* rows that run in this layer: late ones only once they have joined */
    /* The rows with logits as a batch of their own, which the last layer's
     * attention goes on with; null: all rows run to the end. */
    const Batch *kept;
    const int32_t *place; /* each row's index in `kept`, -1: it is not there; null while all rows run */
    /* How many tiles attention has, for both kinds of layers
     * (Space.alike); and how many once the late rows have joined. */
    int64_t tiles[2], all_tiles[2];
    int64_t first_tile, kept_tiles; /* where the tiles of the layer that runs begin; how many the rows with logits have */
    int64_t here, next; /* the sub-layer that runs, and the one after it: 2 * layers stands for the head */
    int64_t entered; /* layers entered so far, where some are read from a file */
    /* Context parallelism, in attention: rounds of spans (tiles.h)
     * from `round` on, `rounds` of them at once, of all_rounds. */
    int64_t round, rounds, all_rounds;
} Pass;

/* A step on rows: does part `part` of `parts`, and computes itself which rows these are. */
typedef void Step(const Pass *pass, int64_t part, int64_t parts);

/* A phase over rows; `commit_rows` runs a piece of it. */
typedef struct {
    const Pass *pass;
    Step *step;
    int64_t parts;
} RowsTask;

/* A phase that computes a product. */
typedef struct {
    RowsTask after; /* the step on rows that follows at once, if few rows run */
    Product product;
    int64_t rows, threads, panels;
    /* unit: panels that stay together (`unit_of`). each: panels of a
     * piece, whole units. pieces: how many each thread's range has. */
    int64_t unit, each, pieces;
} ProductTask;

static void commit_rows(const void *own, int64_t piece, Member *me)
{
    const RowsTask *task = own;
    (void)me;
    task->step(task->pass, piece, task->parts);
}

/* Ends a product: whoever finishes the last piece takes the step on all rows. */
static void close_with_rows(const void *own)
{
    const RowsTask *task = own;
    task->step(task->pass, 0, 1);
}

static int has_few_rows(const Pass *pass) { return pass->batch->rows * pass->model->hidden <= FEW_NUMBERS; }

/* Runs a step on rows in `parts` pieces. */
static int run_parts(const Pass *pass, Step *step, int64_t parts)
{
    RowsTask task = {pass, step, parts};
    Phase phase = {.pieces = parts, .commit = commit_rows, .task = &task};
    return parlay_pool_phase(pass->me, &phase);
}

/* Runs a step on rows as a phase of its own. */
static int run_rows(const Pass *pass, Step *step)
{
    int64_t most = 4 * pass->me->count, rows = pass->batch->rows;
    return run_parts(pass, step, has_few_rows(pass) ? 1 : rows < most ? rows : most);
}

/* Runs a step that one thread takes while the others wait. */
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

/* A phase that computes down(x) of the rows' adapters. */
static int run_lower(const Pass *pass, const Product *product, int64_t rows)
{
    int64_t most = 4 * pass->me->count;
    LowerTask task = {product, pass->batch->lowered, rows, rows < most ? rows : most};
    Phase phase = {.pieces = task.parts, .commit = commit_lowered, .task = &task};
    return parlay_pool_phase(pass->me, &phase);
}

/* The form in which adapters read the inputs of products, if any row
 * has one. In eight bits they read the same codes as the product. */
INLINE int forms_of_adapters(const Batch *batch)
{
    return !batch->adapters || batch->codes ? 0 : batch->bfloats ? BFLOATS : FLOATS;
}

/* Adds the rows' adapters to a layer's product. `first` is where its first matrix stands in LAYER_PRODUCTS. */
static Product with_adapters(const Pass *pass, Product product, int64_t layer, int64_t first)
{
    product.adapters = pass->batch->adapters;
    product.lowered = pass->batch->lowered, product.most_rank = pass->batch->most_rank;
    product.bfloats = (int)pass->batch->bfloats;
    product.first = layer * LAYER_PRODUCTS + first;
    return product;
}

/* --------------------------------------------------------------------------------------------------------- products */

/* How many panels a thread's range is a multiple of. Gates must stay in whole units; ranges of other products may cut
 * one, so that threads get even shares. */
static int64_t whole_panels(const ProductTask *task) { return task->product.ending == GATE ? task->unit : 1; }

/* The first panel of a thread's range. */
static int64_t first_of_thread(const ProductTask *task, int64_t thread)
{
    int64_t whole = whole_panels(task), panel = (task->panels + whole - 1) / whole * thread / task->threads * whole;
    return panel < task->panels ? panel : task->panels;
}

/* The first panel of a piece; the range's end, for the last pieces of a range that is shorter than others. */
static int64_t first_panel(const ProductTask *task, int64_t piece)
{
    int64_t thread = piece / task->pieces, panel = first_of_thread(task, thread) + piece % task->pieces * task->each;
    int64_t end = first_of_thread(task, thread + 1);
    return panel < end ? panel : end;
}

/* Computes a piece of a product, to raw sums in the thread's own memory; `commit_product` finishes it. */
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

/* How many panels make up a piece: about 1 / PIECES of a thread's range, within the limits above and MOST_PIECES. */
static int64_t panels_of_piece(const ProductTask *task)
{
    int64_t each = task->panels / task->threads / PIECES, few = LEAST_WEIGHTS / (PANEL * task->product.linear[0]->in);
    int64_t most = MOST_RESULTS / (PANEL * (task->rows > 0 ? task->rows : 1)), least = 2 * task->panels / MOST_PIECES + 1;
    if (each < few) each = few;
    if (each > most) each = most;
    if (each < least) each = least;
    return (each + task->unit - 1) / task->unit * task->unit;
}

/* The number of pieces in the longest range, which all ranges get. */
static int64_t pieces_of_thread(const ProductTask *task)
{
    int64_t whole = whole_panels(task), units = (task->panels + whole - 1) / whole;
    return ((units + task->threads - 1) / task->threads * whole + task->each - 1) / task->each;
}

/* Computes a product for `rows` rows, then takes the step `after`, unless it is null: if rows are few, the thread that
 * ends the product takes it at once; else it is a phase of its own. */
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
