/* Trees that a draft head grows level by level (Li et al. 2024, EAGLE-2), with no way back to Python between levels.
 *
 * Each level runs the likeliest candidates of the level before, on the hidden states that left the layer above them,
 * and each of them offers candidates.
 */
#ifndef PARLAY_GROW_H
#define PARLAY_GROW_H

#include <stdlib.h>

#include "forward.h"

/* The tree of one segment at work. */
typedef struct {
    Candidate *all;
    int32_t *ran, *parents; /* candidates that ran, in order, and the place of each one's parent among them, or -1 */
    int64_t offered, count; /* candidates so far; those that ran */
    int64_t latest;         /* the first candidate that the latest forward offered */
    int64_t row, logits;    /* the tree's first row in the latest forward, and among its logits */
    int64_t newest;         /* candidates that ran in the latest forward; 0: the root did */
} Grown;

/* What the levels below the root are laid out in. */
typedef struct {
    Grown *trees, **growing; /* of all segments; of those of the latest forward */
    Segment *segment;
    int64_t *ids;
    int32_t *wanted;
    float *inputs, *states, *logits; /* [rows][hidden], [rows][hidden], [rows][vocab] */
    float **taps;
} Levels;

static float exponentials(const float *logits, int64_t count, float most)
{
    vf sums = {0};
    int64_t whole = count / LANES * LANES;
    float total = 0;
    for (int64_t i = 0; i < whole; i += LANES) sums += exponential(load(logits + i) - most);
    for (int64_t i = whole; i < count; i++) total += __builtin_expf(logits[i] - most);
    return total + sum(sums);
}

/* The places of the largest numbers, best first; of equals the first. Returns how many. */
static int64_t best_places(const float *numbers, int64_t count, int64_t most, int32_t *found)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (kept == most && numbers[i] <= numbers[found[kept - 1]]) continue;
        int64_t at = kept < most ? kept++ : kept - 1;
        for (; at > 0 && numbers[found[at - 1]] < numbers[i]; at--) found[at] = found[at - 1];
        found[at] = (int32_t)i;
    }
    return kept;
}

/* The candidates below a row, unless their paths are too unlikely. `above` is the row's own candidate, -1 at the root. */
static void offer(const Growth *growth, Grown *tree, int64_t above, const float *logits, int64_t vocab)
{
    int32_t best[MOST_CHILDREN];
    int64_t found = best_places(logits, vocab, growth->width, best);
    float most = logits[best[0]], total = exponentials(logits, vocab, most);
    double path = above < 0 ? 1.0 : tree->all[above].path;
    for (int64_t i = 0; i < found; i++) {
        double chance = __builtin_expf(logits[best[i]] - most) / total;
        if (path * chance < growth->least) break;
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

/* The candidates of the latest level that run next: the likeliest, in the order in which they were offered. What stands
 * below one that is no likelier than the worst drafted can't join the draft. */
static int64_t choose_newest(const Growth *growth, const Grown *tree, double worst, int32_t *chosen)
{
    int64_t kept = 0;
    for (int64_t i = tree->latest; i < tree->offered; i++) {
        if (tree->all[i].path <= worst) continue;
        int64_t least = 0;
        for (int64_t k = 1; kept == growth->width && k < kept; k++)
            if (tree->all[chosen[k]].path <= tree->all[chosen[least]].path) least = k;
        if (kept == growth->width && tree->all[i].path <= tree->all[chosen[least]].path) continue;
        if (kept == growth->width)
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
static void join(const Model *model, Grown *tree, Segment before, const int32_t *chosen, int64_t newest, Levels *levels,
                 Batch *next)
{
    int64_t row = next->rows, begun = tree->count - tree->newest;
    for (int64_t i = 0; i < newest; i++) {
        const Candidate *own = &tree->all[chosen[i]];
        int64_t parent = place_among(tree->ran, tree->count, own->parent);
        int64_t above = tree->row + (parent < 0 ? 0 : parent - begun);
        memcpy(levels->inputs + (row + i) * model->hidden, levels->states + above * model->hidden,
               (size_t)model->hidden * 4);
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
    levels->segment[next->segments] = before;
    levels->growing[next->segments++] = tree;
    next->rows = next->wanted = row + newest;
}

static void offer_all(const Model *model, const Batch *latest, const Growth *growth, Levels *levels)
{
    for (int64_t s = 0; s < latest->segments; s++) {
        Grown *tree = levels->growing[s];
        tree->latest = tree->offered;
        for (int64_t i = 0; i < (tree->newest ? tree->newest : 1); i++)
            offer(growth, tree, tree->newest ? tree->ran[tree->count - tree->newest + i] : -1,
                  levels->logits + (tree->logits + i) * model->vocab, model->vocab);
    }
}

/* The next level of all trees that grow on. */
static Batch lay_out_next(const Model *model, const Batch *latest, const Growth *growth, Levels *levels)
{
    Batch next = *latest;
    double best[MOST_DRAFT];
    int32_t chosen[MOST_CHILDREN];
    next.rows = next.wanted = next.segments = 0;
    next.ids = levels->ids, next.inputs = levels->inputs, next.wanted_rows = levels->wanted;
    next.segment = levels->segment;
    for (int64_t s = 0; s < latest->segments; s++) {
        Grown *tree = levels->growing[s];
        double worst = worst_drafted(tree, growth->budgets[tree - levels->trees], best);
        int64_t newest = choose_newest(growth, tree, worst, chosen);
        if (newest) join(model, tree, latest->segment[s], chosen, newest, levels, &next);
    }
    return next;
}

static Levels make_levels(const Model *model, const Batch *first, const Growth *growth, char **memory)
{
    int64_t segments = first->segments, most = segments * growth->width, nodes = growth->width * growth->levels;
    int64_t rows = first->rows > most ? first->rows : most;
    int64_t sizes[] = {segments * (int64_t)sizeof(Grown), segments * 8, segments * (int64_t)sizeof(Segment), most * 8,
                       most * 4, most * model->hidden * 4, rows * model->hidden * 4,
                       (most > first->wanted ? most : first->wanted) * model->vocab * 4, (model->layers + 1) * 8,
                       segments * nodes * 8};
    int64_t all = 0, parts = sizeof sizes / sizeof *sizes;
    char *at[sizeof sizes / sizeof *sizes];
    for (int64_t i = 0; i < parts; i++) all += line(sizes[i]);
    *memory = at[0] = aligned_alloc(64, (size_t)all);
    for (int64_t i = 1; i < parts; i++) at[i] = at[i - 1] + line(sizes[i - 1]);
    Levels levels = {(Grown *)at[0], (Grown **)at[1], (Segment *)at[2], (int64_t *)at[3], (int32_t *)at[4],
                     (float *)at[5], (float *)at[6], (float *)at[7], (float **)at[8]};
    memset(levels.taps, 0, (size_t)(model->layers + 1) * 8);
    levels.taps[model->layers] = levels.states;
    for (int64_t s = 0; s < segments; s++) {
        int32_t *own = (int32_t *)at[9] + 2 * s * nodes;
        levels.trees[s] = (Grown){.all = growth->candidates + s * growth->room, .ran = own, .parents = own + nodes,
                                  .row = first->wanted_rows[s], .logits = s};
        levels.growing[s] = &levels.trees[s];
    }
    return levels;
}

/* `first` runs the text's rows, and wants the logits of each segment's last. */
static void grow(const Model *model, const Batch *first, const Growth *growth)
{
    char *memory;
    Levels levels = make_levels(model, first, growth, &memory);
    Batch batch = *first;
    batch.taps = levels.taps;
    batch.logits = levels.logits;
    for (int64_t level = 1; batch.segments; level++) {
        forward(model, &batch);
        offer_all(model, &batch, growth, &levels);
        if (level == growth->levels) break;
        batch = lay_out_next(model, &batch, growth, &levels);
    }
    for (int64_t s = 0; s < first->segments; s++) growth->counts[s] = levels.trees[s].offered;
    free(memory);
}

#endif
