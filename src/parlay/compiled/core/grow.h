/* Grows draft trees with a draft head or a draft model, level by level (Li et al. 2024, EAGLE-2), for all sequences of a batch
 * in one job of the pool. `grow` is what Python calls, through the table in kernels.c.
 *
 * The first level is a forward over the text's rows; a draft head may need a product first, which makes their inputs. Each
 * row offers its likeliest tokens as candidates below it. The likeliest candidates of a level run as the rows of the next
 * one, on their tokens' embeddings (draft model) or on the hidden states that left the rows above (head), and offer in turn:
 *
 *     level 0:  forward of the text  ->  candidates below the root
 *     level 1:  forward of the best `width` of them  ->  candidates below each
 *     ...       in the end the candidates with the likeliest paths become the draft
 *
 * Between two levels one thread takes the candidates and lays out the next level. All levels use the same arrays; only what a
 * late thread may still read of a level (batch, tiles, segments) has memory of its own.
 *
 * A draft may also favour what followed the same tokens earlier in its text; see copies.h.
 */
#ifndef PARLAY_GROW_H
#define PARLAY_GROW_H

#include "copies.h"
#include "draw.h"
#include "forward.h"

/* A token that may join a draft. parent: a candidate, or -1 for the root. chance: its probability there. path: the
 * product of the chances from the root down. */
typedef struct {
    int64_t token, parent;
    double chance, path;
} Candidate;

/* The tree of one segment while it grows. */
typedef struct {
    Candidate *all;
    int32_t *ran, *parents; /* ran: candidates that ran, in order; parents: where each one's parent is among them, or -1 */
    int32_t *places;        /* of each candidate: its place in the draft */
    int64_t offered, count; /* offered: candidates so far; count: those that ran */
    int64_t latest;         /* the first candidate of the latest level */
    int64_t row, logits;    /* where the tree's rows begin in the latest forward, and among its logits */
    int64_t newest;         /* candidates that ran in the latest forward; 0: it was the root */
} Grown;

/* One level: its forward, and which tree each of its segments belongs to. */
typedef struct {
    Batch batch;
    Space space;
    Pass pass;
    Grown **growing; /* [segments] */
    Segment *segment;
} Level;

/* All levels and trees of a job. */
typedef struct {
    const Model *model;
    const Growth *growth;
    Level *level;
    Grown *trees; /* [segments] */
    int64_t *ids;
    int32_t *wanted;
    float *inputs, *states, *logits; /* inputs, states [rows][hidden], logits [rows][vocab], of the level at work */
    float *noisy;                    /* [vocab]: one row's logits plus noise */
    void **taps;
    Inputs features; /* inputs of Growth.first */
} Levels;

/* What one row guesses. `scores` are its logits, plus the request's noise where it samples: so the guesses are what its
 * sampler would most likely choose. */
typedef struct {
    const float *logits, *scores;
    int64_t vocab;
    const Sampling *sampling;
} Guesses;

/* Finds the outputs of the best scores, `width` at most, without those that top-k, top-p or min-p certainly drop. */
static int64_t best_guesses(const Guesses *own, int64_t width, int32_t *best)
{
    const Sampling *sampling = own->sampling;
    int truncates = sampling->temperature > 0 && (sampling->top_k || sampling->top_p < 1 || sampling->log_min_p > -INFINITY);
    int64_t found = best_places(own->scores, own->vocab, truncates && width < TRIES ? TRIES : width, best), kept = 0;
    if (!truncates) return found;
    Row row = {own->logits, own->vocab, sampling->temperature, .top_k = sampling->top_k, .top_p = sampling->top_p};
    if (row.top_k > MOST_K) row.top_k = MOST_K;
    row.top = largest_quotient(&row, 0, row.size);
    row.least = (double)row.top + sampling->log_min_p;
    for (int64_t i = 0; i < found && kept < width; i++)
        if (stays(&row, best[i])) best[kept++] = best[i];
    return kept;
}

/* Adds the candidates below a row, except those whose paths are less likely than growth->least. `above`: the row's own
 * candidate, -1 for the root. */
static void offer(const Growth *growth, Grown *tree, int64_t above, const Guesses *own)
{
    int32_t best[MOST_CHILDREN + TRIES];
    int64_t found = best_guesses(own, growth->width, best);
    if (!found) return;
    float most = own->scores[best[0]], total = exponentials(own->scores, own->vocab, most);
    double path = above < 0 ? 1.0 : tree->all[above].path;
    for (int64_t i = 0; i < found; i++) {
        double chance = __builtin_expf(own->scores[best[i]] - most) / total;
        if (!(path * chance >= growth->least)) break; /* NaN stops here, too */
        tree->all[tree->offered++] = (Candidate){growth->tokens[best[i]], above, chance, path * chance};
    }
}

/* The probability of the least likely path in a draft of `budget` nodes; 0 while the draft has room for all candidates.
 * `best` is memory for as many paths. */
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

/* Whether a token ends the text of a segment. */
static int ends_text(const Growth *growth, int64_t segment, int64_t token)
{
    for (int64_t i = growth->ends_from[segment]; i < growth->ends_from[segment + 1]; i++)
        if (growth->ends[i] == token) return 1;
    return 0;
}

/* Chooses the latest level's candidates that run next: the likeliest, in the order in which they were offered. A
 * candidate is left out if it ends the text, or if its path is no likelier than the worst in the draft: then nothing
 * below it can join. Returns how many are chosen. */
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

/* The index of a candidate among those that ran, or -1. */
static int64_t place_among(const int32_t *ran, int64_t count, int64_t candidate)
{
    for (int64_t i = count - 1; i >= 0; i--)
        if (ran[i] == candidate) return i;
    return -1;
}

/* Makes the chosen candidates the next level's rows of a tree. `before` is the tree's segment in the latest level. */
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

/* The guesses of one row: with noise if its request samples. */
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

/* Hides the tokens of other tenants than the segment's own. */
static void hide_others(const Levels *levels, int64_t segment, float *logits)
{
    const Growth *growth = levels->growth;
    float *slots = logits + levels->model->vocab - growth->slots;
    for (int64_t i = 0; i < growth->slots; i++)
        if (growth->tenants[i] && growth->tenants[i] != growth->asking[segment]) slots[i] = -INFINITY;
}

/* Writes the last tokens above a row's children, the latest first: those of its path, then of its text. Returns how many. */
static int64_t last_tokens(const Growth *growth, const Grown *tree, int64_t segment, int64_t above, int32_t *last)
{
    int64_t known = 0;
    for (; above >= 0 && known < MOST_SAME; above = tree->all[above].parent) last[known++] = (int32_t)tree->all[above].token;
    for (int64_t at = growth->lengths[segment] - 1; at >= 0 && known < MOST_SAME; at--)
        last[known++] = growth->texts[segment][at];
    return known;
}

/* Raises the chance of the copy below a row, if its text has one. */
static void favour_copy(const Levels *levels, const Grown *tree, int64_t above, float *logits)
{
    const Growth *growth = levels->growth;
    int64_t segment = tree - levels->trees;
    int32_t last[MOST_SAME];
    Copy copy;
    if (!growth->lengths[segment]) return;
    int64_t known = last_tokens(growth, tree, segment, above, last);
    if (find_copy(growth->texts[segment], growth->lengths[segment], last, known, &copy))
        raise_copy(&copy, growth->tokens, logits, levels->model->vocab);
}

/* Takes the candidates below all rows of the latest level. */
static void offer_all(const Levels *levels, const Level *latest)
{
    for (int64_t s = 0; s < latest->batch.segments; s++) {
        Grown *tree = latest->growing[s];
        tree->latest = tree->offered;
        for (int64_t i = 0; i < (tree->newest ? tree->newest : 1); i++) {
            float *logits = levels->logits + (tree->logits + i) * levels->model->vocab;
            int64_t above = tree->newest ? tree->ran[tree->count - tree->newest + i] : -1;
            hide_others(levels, tree - levels->trees, logits);
            favour_copy(levels, tree, above, logits);
            Guesses own = guesses_of(levels, tree - levels->trees, latest - levels->level, logits);
            offer(levels->growth, tree, above, &own);
        }
    }
}

/* Lays out the next level, with the trees that have rows to run. */
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

/* Writes the draft of one segment: the candidates with the likeliest paths, in the order in which they were offered. A
 * node's parent was offered earlier and its path is at least as likely, so it is in the draft, too. */
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

/* Ends a level whose logits are there: takes its candidates and lays out the next. One thread does this. */
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

/* Writes the features of rows from..to as inputs of Growth.first. */
static void put_features(const Growth *growth, const Inputs *inputs, int64_t from, int64_t to)
{
    int64_t in = growth->first->in, whole = in / LANES * LANES;
    int wanted = format_of(growth->first)->input, form = (int)growth->features_form;
    for (int64_t row = from; row < to; row++) {
        const void *features = growth->features[row];
        for (int64_t i = 0; i < whole; i += LANES) put_input(inputs, wanted, row, i, load_as(form, features, i));
        for (int64_t i = whole; i < in; i++) put_one_input(inputs, wanted, row, i, load_one(form, features, i));
        put_codes_of_row(inputs, wanted, row, in, growth->first->order);
    }
}

typedef struct {
    const Levels *levels;
    int64_t rows, parts;
} FeaturesTask;

static void commit_features(const void *own, int64_t piece, Member *me)
{
    const FeaturesTask *task = own;
    (void)me;
    put_features(task->levels->growth, &task->levels->features, task->rows * piece / task->parts,
                 task->rows * (piece + 1) / task->parts);
}

/* Computes the inputs of the text's rows from their features. */
static int run_first(const Levels *levels, Member *me)
{
    Pass pass = levels->level[0].pass;
    pass.me = me;
    int64_t rows = pass.batch->rows, most = 4 * me->count;
    FeaturesTask task = {levels, rows, rows < most ? 1 : most};
    Phase put = {.pieces = task.parts, .commit = commit_features, .task = &task};
    if (!parlay_pool_phase(me, &put)) return 0;
    Product first = {{levels->growth->first}, levels->features, KEEP, levels->inputs, levels->model->hidden};
    return run_product(&pass, first, pass.batch->rows, 0);
}

/* The job, as each thread runs it. */
static void run_levels(const void *context, Member *me)
{
    const Levels *levels = context;
    int goes_on = !levels->growth->first || run_first(levels, me);
    if (goes_on && !levels->growth->levels) {
        Pass pass = levels->level[0].pass;
        pass.me = me;
        run_forward(pass);
        return; /* a late thread must not look at `levels` again: the job may be over */
    }
    for (int64_t level = 0; goes_on && level < levels->growth->levels && levels->level[level].batch.segments; level++) {
        Pass pass = levels->level[level].pass;
        LevelTask task = {levels, level};
        Phase end = {.pieces = 1, .commit = end_level, .task = &task};
        pass.me = me;
        goes_on = run_forward(pass) && parlay_pool_phase(me, &end);
    }
}

/* ---------------------------------------------------------------------------------------------------------- its memory */

/* Takes the memory of one tree: its candidates and those that ran. `tree` null: only the size counts. */
static void lay_out_tree(Grown *tree, const Growth *growth, char **at)
{
    int64_t nodes = growth->width * growth->levels;
    int64_t room = nodes ? growth->width + (growth->levels - 1) * growth->width * growth->width : 0;
    Candidate *all = (Candidate *)take(at, room * (int64_t)sizeof(Candidate));
    int32_t *ran = (int32_t *)take(at, nodes * 4), *parents = (int32_t *)take(at, nodes * 4);
    int32_t *places = (int32_t *)take(at, room * 4);
    if (tree) *tree = (Grown){.all = all, .ran = ran, .parents = parents, .places = places};
}

/* Takes the memory that a level does not share with others. */
static void lay_out_level(const Model *model, Level *level, const Space *space, int64_t rows, int64_t segments, char **at)
{
    Tile *own = (Tile *)take(at, tiles_of(model, rows, segments) * (int64_t)sizeof(Tile));
    Grown **growing = (Grown **)take(at, segments * 8);
    Segment *segment = (Segment *)take(at, segments * (int64_t)sizeof(Segment));
    if (!level) return;
    *level = (Level){.space = *space, .growing = growing, .segment = segment};
    lay_tiles(model, rows, segments, &level->space, own);
}

/* Lays out the memory of a job from `start` on; if that is null, only its size counts. `at` gets the end. */
static Levels lay_out_levels(const Model *model, const Batch *first, const Growth *growth, char *start, char **at)
{
    int64_t segments = first->segments, most = segments * growth->width, hidden = model->hidden;
    int64_t rows = first->rows > most ? first->rows : most, wanted = first->wanted > most ? first->wanted : most;
    int64_t longest = longest_of(first) + growth->width * growth->levels;
    Space space = lay_out(model, rows, rows, wanted, longest, segments, first->threads, start);
    *at = start + line(space.bytes);
    Levels levels = {.model = model, .growth = growth};
    int64_t count = growth->levels ? growth->levels : 1;
    levels.level = (Level *)take(at, count * (int64_t)sizeof(Level));
    levels.trees = (Grown *)take(at, segments * (int64_t)sizeof(Grown));
    levels.ids = (int64_t *)take(at, most * 8), levels.wanted = (int32_t *)take(at, most * 4);
    levels.inputs = (float *)take(at, rows * hidden * 4), levels.states = (float *)take(at, rows * hidden * 4);
    levels.logits = (float *)take(at, wanted * model->vocab * 4), levels.noisy = (float *)take(at, model->vocab * 4);
    levels.taps = (void **)take(at, (model->layers + 1) * 8);
    if (growth->first) levels.features = lay_out_inputs(first->rows, growth->first->in, at);
    for (int64_t i = 0; i < count; i++)
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

/* Grows the draft trees of all segments of `first`, the batch of the text's rows, which wants the logits of each segment's
 * last row. With no levels it wants none, and the rows' keys and values alone are computed and stored. */
static void grow(const Model *model, const Batch *first, const Growth *growth)
{
    char *end;
    Levels levels = lay_out_levels(model, first, growth, growth->memory, &end);
    Level *root = &levels.level[0];
    memset(levels.taps, 0, (size_t)(model->layers + 1) * 8);
    levels.taps[model->layers] = levels.states;
    for (int64_t s = 0; s < first->segments && growth->levels; s++) {
        levels.trees[s].row = first->wanted_rows[s], levels.trees[s].logits = s;
        root->growing[s] = &levels.trees[s];
    }
    root->batch = *first;
    root->batch.taps = growth->embedded || !growth->levels ? 0 : levels.taps, root->batch.logits = levels.logits;
    root->batch.tap_stride = model->hidden, root->batch.tap_form = FLOAT32;
    if (growth->first) root->batch.inputs = levels.inputs;
    root->pass = pass_of(model, &root->batch, &root->space);
    parlay_pool_run(growth->stop ? BESIDE : DECODING, first->threads, run_levels, &levels);
    for (int64_t s = 0; s < first->segments && growth->levels; s++) write_draft(growth, &levels.trees[s], s);
}

#endif
