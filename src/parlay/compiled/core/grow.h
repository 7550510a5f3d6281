/* Trees that a draft head or a draft model grows level by level (Li et al. 2024, EAGLE-2), in one job: for a head a
 * product that makes the inputs of the text's rows, then these rows, then each level of the trees. Between two levels
 * one thread lays out the next.
 *
 * Each level runs the likeliest candidates of the level before, on their embeddings or on the hidden states that left the
 * layer above them, and each of them offers candidates. All levels share a layout of memory, and what a late thread may
 * still read of a level is written once.
 */
#ifndef PARLAY_GROW_H
#define PARLAY_GROW_H

#include "draw.h"
#include "forward.h"

/* A token that may join a draft: its chance below its parent (a candidate, or -1 for the root), and its path's chance. */
typedef struct {
    int64_t token, parent;
    double chance, path;
} Candidate;

/* The tree of one segment at work. */
typedef struct {
    Candidate *all;
    int32_t *ran, *parents; /* candidates that ran, in order, and the place of each one's parent among them, or -1 */
    int32_t *places;        /* of candidates in the draft */
    int64_t offered, count; /* candidates so far; those that ran */
    int64_t latest;         /* the first candidate that the latest forward offered */
    int64_t row, logits;    /* the tree's first row in the latest forward, and among its logits */
    int64_t newest;         /* candidates that ran in the latest forward; 0: the root did */
} Grown;

/* One level: what runs, and which trees it belongs to. */
typedef struct {
    Batch batch;
    Space space;
    Pass pass;
    Grown **growing; /* per segment */
    Segment *segment;
} Level;

/* All levels at work. */
typedef struct {
    const Model *model;
    const Growth *growth;
    Level *level;
    Grown *trees; /* of all segments */
    int64_t *ids;
    int32_t *wanted;
    float *inputs, *states, *logits; /* [rows][hidden], [rows][hidden], [rows][vocab] */
    float *noisy;                    /* [vocab] */
    float **taps;
    Inputs features; /* of the product that comes first */
} Levels;

/* What one row guesses: `scores` are its logits with the noise of the request, if it samples. So guesses are what its
 * sampler would choose. */
typedef struct {
    const float *logits, *scores;
    int64_t vocab;
    const Sampling *sampling;
} Guesses;

/* The best places, without those that truncation certainly drops. */
static int64_t best_guesses(const Guesses *own, int64_t width, int32_t *best)
{
    const Sampling *sampling = own->sampling;
    int truncates = sampling->temperature > 0 && (sampling->top_k || sampling->top_p < 1 || sampling->log_min_p > -INFINITY);
    int64_t found = best_places(own->scores, own->vocab, truncates && width < TRIES ? TRIES : width, best), kept = 0;
    if (!truncates) return found;
    Row row = {own->logits, own->vocab, sampling->temperature, .top_k = sampling->top_k, .top_p = sampling->top_p};
    if (row.top_k > MOST_K) row.top_k = MOST_K;
    row.top = top_of(&row);
    row.least = (double)row.top + sampling->log_min_p;
    for (int64_t i = 0; i < found && kept < width; i++)
        if (stays(&row, best[i])) best[kept++] = best[i];
    return kept;
}

/* The candidates below a row, unless their paths are too unlikely. `above` is the row's own candidate, -1 at the root. */
static void offer(const Growth *growth, Grown *tree, int64_t above, const Guesses *own)
{
    int32_t best[MOST_CHILDREN + TRIES];
    int64_t found = best_guesses(own, growth->width, best);
    if (!found) return;
    float most = own->scores[best[0]], total = exponentials(own->scores, own->vocab, most);
    double path = above < 0 ? 1.0 : tree->all[above].path;
    for (int64_t i = 0; i < found; i++) {
        double chance = __builtin_expf(own->scores[best[i]] - most) / total;
        if (!(path * chance >= growth->least)) break; /* of NaN, too */
        tree->all[tree->offered++] = (Candidate){growth->tokens[best[i]], above, chance, path * chance};
    }
}

/* The least likely path in a draft of `budget` nodes; 0 while it would hold all candidates. */
static double worst_drafted(const Grown *tree, int64_t budget, double *best)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < tree->offered; i++) {
        double path = tree->all[i].path;
        if (kept == budget && path <= best[kept - 1]) continue;
        int64_t at = kept < budget ? kept++ : kept - 1;
        for (; at > 0 && best[at - 1] < path; at--) best[at] = best[at - 1];
        best[at] = path;
    }
    return kept < budget ? 0 : best[kept - 1];
}

static int ends_text(const Growth *growth, int64_t segment, int64_t token)
{
    for (int64_t i = growth->ends_from[segment]; i < growth->ends_from[segment + 1]; i++)
        if (growth->ends[i] == token) return 1;
    return 0;
}

/* The candidates of the latest level that run next: the likeliest, in the order in which they were offered. What stands
 * below one that is no likelier than the worst drafted can't join the draft, and what stands below an end the text. */
static int64_t choose_newest(const Growth *growth, const Grown *tree, int64_t segment, double worst, int32_t *chosen)
{
    int64_t budget = growth->budgets[segment];
    int64_t kept = 0, left = growth->embedded ? budget - tree->count : growth->width;
    int64_t most = growth->width < left ? growth->width : left;
    for (int64_t i = tree->latest; most > 0 && i < tree->offered; i++) {
        if (tree->all[i].path <= worst || ends_text(growth, segment, tree->all[i].token)) continue;
        int64_t least = 0;
        for (int64_t k = 1; kept == most && k < kept; k++)
            if (tree->all[chosen[k]].path <= tree->all[chosen[least]].path) least = k;
        if (kept == most && tree->all[i].path <= tree->all[chosen[least]].path) continue;
        if (kept == most)
            memmove(chosen + least, chosen + least + 1, (size_t)(--kept - least) * sizeof *chosen);
        chosen[kept++] = (int32_t)i;
    }
    return kept;
}

static int64_t place_among(const int32_t *ran, int64_t count, int64_t candidate)
{
    for (int64_t i = count - 1; i >= 0; i--)
        if (ran[i] == candidate) return i;
    return -1;
}

/* The chosen candidates become the next rows of the tree, whose latest segment was `before`. */
static void join(const Levels *levels, Grown *tree, Segment before, const int32_t *chosen, int64_t newest, Level *next)
{
    int64_t row = next->batch.rows, begun = tree->count - tree->newest, hidden = levels->model->hidden;
    for (int64_t i = 0; i < newest; i++) {
        const Candidate *own = &tree->all[chosen[i]];
        int64_t parent = place_among(tree->ran, tree->count, own->parent);
        int64_t above = tree->row + (parent < 0 ? 0 : parent - begun);
        if (!levels->growth->embedded)
            memcpy(levels->inputs + (row + i) * hidden, levels->states + above * hidden, (size_t)hidden * 4);
        levels->ids[row + i] = own->token;
        levels->wanted[row + i] = (int32_t)(row + i);
        tree->parents[tree->count + i] = (int32_t)parent;
    }
    memcpy(tree->ran + tree->count, chosen, (size_t)newest * sizeof *chosen);
    before.base = before.pending + tree->count;
    before.nodes = tree->count + newest;
    before.begin = row - before.base;
    before.parents = tree->parents;
    tree->count += newest;
    tree->newest = newest;
    tree->row = tree->logits = row;
    next->segment[next->batch.segments] = before;
    next->growing[next->batch.segments++] = tree;
    next->batch.rows = next->batch.wanted = row + newest;
}

static Guesses guesses_of(const Levels *levels, int64_t segment, int64_t level, const float *logits)
{
    const Growth *growth = levels->growth;
    int64_t vocab = levels->model->vocab;
    const Sampling *sampling = &growth->samplings[segment];
    Guesses own = {logits, logits, vocab, sampling};
    if (sampling->temperature <= 0) return own;
    memcpy(levels->noisy, logits, (size_t)vocab * 4);
    add_quick_noise(levels->noisy, growth->tokens, vocab, growth->streams[segment * growth->levels + level],
                    sampling->temperature);
    own.scores = levels->noisy;
    return own;
}

static void offer_all(const Levels *levels, const Level *latest)
{
    for (int64_t s = 0; s < latest->batch.segments; s++) {
        Grown *tree = latest->growing[s];
        tree->latest = tree->offered;
        for (int64_t i = 0; i < (tree->newest ? tree->newest : 1); i++) {
            const float *logits = levels->logits + (tree->logits + i) * levels->model->vocab;
            Guesses own = guesses_of(levels, tree - levels->trees, latest - levels->level, logits);
            offer(levels->growth, tree, tree->newest ? tree->ran[tree->count - tree->newest + i] : -1, &own);
        }
    }
}

/* The next level of all trees that grow on. */
static void lay_out_next(const Levels *levels, const Level *latest, Level *next)
{
    double best[MOST_DRAFT];
    int32_t chosen[MOST_CHILDREN];
    next->batch = latest->batch;
    next->batch.rows = next->batch.wanted = next->batch.segments = 0;
    next->batch.ids = levels->ids, next->batch.wanted_rows = levels->wanted;
    next->batch.inputs = levels->growth->embedded ? 0 : levels->inputs;
    next->batch.segment = next->segment;
    for (int64_t s = 0; s < latest->batch.segments; s++) {
        Grown *tree = latest->growing[s];
        int64_t segment = tree - levels->trees;
        double worst = worst_drafted(tree, levels->growth->budgets[segment], best);
        int64_t newest = choose_newest(levels->growth, tree, segment, worst, chosen);
        if (newest) join(levels, tree, latest->batch.segment[s], chosen, newest, next);
    }
    next->pass = pass_of(levels->model, &next->batch, &next->space);
}

/* The draft of one segment: its likeliest candidates in the order in which they were offered. A node's parent is likelier
 * or came earlier, so it is there. */
static void write_draft(const Growth *growth, Grown *tree, int64_t segment)
{
    double best[MOST_DRAFT];
    int64_t budget = growth->budgets[segment], at = segment * growth->most, count = 0, equals = budget;
    double worst = worst_drafted(tree, budget, best);
    for (int64_t i = 0; i < tree->offered; i++) equals -= tree->all[i].path > worst;
    for (int64_t i = 0; i < tree->offered; i++) {
        const Candidate *own = &tree->all[i];
        if (own->path < worst || (own->path == worst && equals-- <= 0)) continue;
        growth->drafted[at + count] = own->token;
        growth->parents[at + count] = own->parent < 0 ? -1 : tree->places[own->parent];
        growth->chances[at + count] = own->chance;
        growth->ran[at + count] = place_among(tree->ran, tree->count, i);
        tree->places[i] = (int32_t)count++;
    }
    growth->counts[segment] = count;
}

/* ------------------------------------------------------------------------------------------------------- the one job */

typedef struct {
    const Levels *levels;
    int64_t level;
} LevelTask;

/* When a level's logits are there, by one thread. */
static void end_level(const void *own, int64_t piece, Member *me)
{
    const LevelTask *task = own;
    const Levels *levels = task->levels;
    (void)piece, (void)me;
    offer_all(levels, &levels->level[task->level]);
    int stopped = levels->growth->stop && __atomic_load_n(levels->growth->stop, __ATOMIC_RELAXED);
    if (task->level + 1 < levels->growth->levels && !stopped)
        lay_out_next(levels, &levels->level[task->level], &levels->level[task->level + 1]);
}

static int run_first(const Levels *levels, Member *me)
{
    Pass pass = levels->level[0].pass;
    pass.me = me;
    Product first = {{levels->growth->first}, levels->features, KEEP, levels->inputs, levels->model->hidden};
    return run_product(&pass, first, pass.batch->rows, 0);
}

static void run_levels(const void *context, Member *me)
{
    const Levels *levels = context;
    int goes_on = !levels->growth->first || run_first(levels, me);
    for (int64_t level = 0; goes_on && level < levels->growth->levels && levels->level[level].batch.segments; level++) {
        Pass pass = levels->level[level].pass;
        LevelTask task = {levels, level};
        Phase end = {.pieces = 1, .commit = end_level, .task = &task};
        pass.me = me;
        goes_on = run_forward(pass) && parlay_pool_phase(me, &end);
    }
}

/* ---------------------------------------------------------------------------------------------------------- its memory */

static void lay_out_tree(Grown *tree, const Growth *growth, char **at)
{
    int64_t nodes = growth->width * growth->levels;
    int64_t room = growth->width + (growth->levels - 1) * growth->width * growth->width;
    Candidate *all = (Candidate *)take(at, room * (int64_t)sizeof(Candidate));
    int32_t *ran = (int32_t *)take(at, nodes * 4), *parents = (int32_t *)take(at, nodes * 4);
    int32_t *places = (int32_t *)take(at, room * 4);
    if (tree) *tree = (Grown){.all = all, .ran = ran, .parents = parents, .places = places};
}

static void lay_out_level(const Model *model, Level *level, const Space *space, int64_t rows, int64_t segments, char **at)
{
    Tile *own = (Tile *)take(at, tiles_of(model, rows, segments) * (int64_t)sizeof(Tile));
    Grown **growing = (Grown **)take(at, segments * 8);
    Segment *segment = (Segment *)take(at, segments * (int64_t)sizeof(Segment));
    if (!level) return;
    *level = (Level){.space = *space, .growing = growing, .segment = segment};
    lay_tiles(model, rows, segments, &level->space, own);
}

/* From `start` on, or for its size alone where that is null. */
static Levels lay_out_levels(const Model *model, const Batch *first, const Growth *growth, char *start, char **at)
{
    int64_t segments = first->segments, most = segments * growth->width, hidden = model->hidden;
    int64_t rows = first->rows > most ? first->rows : most, wanted = first->wanted > most ? first->wanted : most;
    int64_t longest = longest_of(first) + growth->width * growth->levels;
    Space space = lay_out(model, rows, rows, wanted, longest, segments, first->threads, start);
    *at = start + line(space.bytes);
    Levels levels = {.model = model, .growth = growth};
    levels.level = (Level *)take(at, growth->levels * (int64_t)sizeof(Level));
    levels.trees = (Grown *)take(at, segments * (int64_t)sizeof(Grown));
    levels.ids = (int64_t *)take(at, most * 8), levels.wanted = (int32_t *)take(at, most * 4);
    levels.inputs = (float *)take(at, rows * hidden * 4), levels.states = (float *)take(at, rows * hidden * 4);
    levels.logits = (float *)take(at, wanted * model->vocab * 4), levels.noisy = (float *)take(at, model->vocab * 4);
    levels.taps = (float **)take(at, (model->layers + 1) * 8);
    if (growth->first) levels.features = lay_out_inputs(first->rows, growth->first->in, at);
    for (int64_t i = 0; i < growth->levels; i++)
        lay_out_level(model, start ? &levels.level[i] : 0, &space, rows, segments, at);
    for (int64_t s = 0; s < segments; s++) lay_out_tree(start ? &levels.trees[s] : 0, growth, at);
    return levels;
}

static int64_t growth_bytes(const Model *model, const Batch *first, const Growth *growth)
{
    char *end;
    lay_out_levels(model, first, growth, 0, &end);
    return end - (char *)0;
}

/* The features of all rows, in the form that the first product wants. */
static void put_features(const Growth *growth, const Inputs *inputs, int64_t rows)
{
    int64_t in = growth->first->in, whole = in / LANES * LANES;
    int wanted = format_of(growth->first)->input;
    for (int64_t row = 0; row < rows; row++) {
        const float *features = growth->features + row * in;
        for (int64_t i = 0; i < whole; i += LANES) put_input(inputs, wanted, row, i, load(features + i));
        for (int64_t i = whole; i < in; i++) put_one_input(inputs, wanted, row, i, features[i]);
        put_codes_of_row(inputs, wanted, row, in, growth->first->order);
    }
}

/* `first` runs the text's rows, and wants the logits of each segment's last. */
static void grow(const Model *model, const Batch *first, const Growth *growth)
{
    char *end;
    Levels levels = lay_out_levels(model, first, growth, growth->memory, &end);
    Level *root = &levels.level[0];
    memset(levels.taps, 0, (size_t)(model->layers + 1) * 8);
    levels.taps[model->layers] = levels.states;
    for (int64_t s = 0; s < first->segments; s++) {
        levels.trees[s].row = first->wanted_rows[s], levels.trees[s].logits = s;
        root->growing[s] = &levels.trees[s];
    }
    root->batch = *first;
    root->batch.taps = growth->embedded ? 0 : levels.taps, root->batch.logits = levels.logits;
    if (growth->first) {
        put_features(growth, &levels.features, first->rows);
        root->batch.inputs = levels.inputs;
    }
    root->pass = pass_of(model, &root->batch, &root->space);
    parlay_pool_run(growth->stop ? BESIDE : DECODING, first->threads, run_levels, &levels);
    for (int64_t s = 0; s < first->segments; s++) write_draft(growth, &levels.trees[s], s);
}

#endif
