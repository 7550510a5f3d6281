/* Mixtures of experts: the feed-forward of layers with experts, from the router to the hidden state (`run_experts`).
 *
 *     route      router logits of all rows; each row chooses its experts and their weights
 *     group      each row is copied once for each of its experts, so that the copies for one expert lie side by side
 *     gate, up   one product for each expert that has rows, then
 *     down       the same, so an expert's weights are read once however many rows have chosen it
 *     add        each row adds up its experts' outputs times their weights, in the order of the experts' numbers
 *
 * A row's experts and weights come from its own logits, so nothing in a row depends on the others.
 */
#ifndef PARLAY_EXPERTS_H
#define PARLAY_EXPERTS_H

#include "phases.h"
#include "rows.h"

/* Whether a layer's experts are read from a file when rows choose them (shelf.h). */
INLINE int is_shelved(const Pass *pass, const Layer *layer) { return pass->model->shelf && layer->experts; }

/* The forms in which a layer's router and experts read the normed rows. */
static int expert_forms(const Layer *layer)
{
    int wanted = format_of(&layer->router)->input;
    for (int64_t e = 0; e < experts_of(layer); e++)
        wanted |= format_of(&layer->expert[e].gate)->input | format_of(&layer->expert[e].up)->input;
    return wanted;
}

/* ------------------------------------------------------------------------------------------------- which rows run where */

/* Writes the numbers of the `chosen` largest logits, the largest first; of equal ones the lower number comes first. */
static void best_experts(const float *logits, int64_t experts, int64_t chosen, int32_t *best)
{
    int64_t kept = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (kept == chosen && !(logits[e] > logits[best[kept - 1]])) continue;
        int64_t at = kept < chosen ? kept++ : kept - 1;
        for (; at > 0 && logits[e] > logits[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = (int32_t)e;
    }
}

/* Sorts numbers, the smallest first. */
static void sort_rising(int32_t *numbers, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        int32_t own = numbers[i];
        int64_t at = i;
        for (; at > 0 && numbers[at - 1] > own; at--) numbers[at] = numbers[at - 1];
        numbers[at] = own;
    }
}

/* Chooses by logits. Weights are a softmax over the chosen experts (normalized), or over all. */
static void choose_by_softmax(const Layer *layer, const float *logits, int32_t *expert, float *weight)
{
    const int64_t chosen = layer->chosen;
    best_experts(logits, layer->experts, chosen, expert);
    float most = logits[expert[0]], total = 0;
    for (int64_t i = 0; i < (layer->normalized ? chosen : layer->experts); i++)
        total += __builtin_expf(logits[layer->normalized ? expert[i] : i] - most);
    sort_rising(expert, chosen);
    for (int64_t i = 0; i < chosen; i++) weight[i] = __builtin_expf(logits[expert[i]] - most) / total;
}

INLINE float sigmoid(float logit) { return 1.0f / (1.0f + __builtin_expf(-logit)); }

/* Closes all groups of experts but the best top_groups: their choice values become minus infinity. A group counts as
 * much as its best two experts together. */
static void close_groups(const Layer *layer, float *choice)
{
    const int64_t each = layer->experts / layer->groups;
    float sums[MOST_EXPERTS];
    int32_t best[MOST_EXPERTS];
    for (int64_t group = 0; group < layer->groups; group++) {
        int64_t two = each < 2 ? each : 2;
        best_experts(choice + group * each, each, two, best);
        sums[group] = choice[group * each + best[0]] + (two > 1 ? choice[group * each + best[1]] : 0);
    }
    best_experts(sums, layer->groups, layer->top_groups, best);
    for (int64_t i = 0; i < layer->top_groups; i++) sums[best[i]] = __builtin_inff();
    for (int64_t e = 0; e < layer->experts; e++)
        if (sums[e / each] < __builtin_inff()) choice[e] = -__builtin_inff();
}

/* Chooses by sigmoids of logits plus a bias; weights are the sigmoids alone (DeepSeek-V3). */
static void choose_by_sigmoid(const Layer *layer, const float *logits, int32_t *expert, float *weight)
{
    const int64_t chosen = layer->chosen;
    float choice[MOST_EXPERTS], total = 0;
    for (int64_t e = 0; e < layer->experts; e++) choice[e] = sigmoid(logits[e]) + layer->choice_bias[e];
    if (layer->top_groups < layer->groups) close_groups(layer, choice);
    best_experts(choice, layer->experts, chosen, expert);
    sort_rising(expert, chosen);
    for (int64_t i = 0; i < chosen; i++) total += weight[i] = sigmoid(logits[expert[i]]);
    for (int64_t i = 0; layer->normalized && i < chosen; i++) weight[i] /= total + 1e-20f;
}

/* Writes a row's experts, in rising order and the shared one last, and their weights. */
static void choose_row(const Layer *layer, const float *logits, int32_t *expert, float *weight)
{
    const int64_t chosen = layer->chosen;
    (layer->choice_bias ? choose_by_sigmoid : choose_by_softmax)(layer, logits, expert, weight);
    for (int64_t i = 0; i < chosen; i++) weight[i] *= (float)layer->expert_scale;
    for (int64_t i = 0; layer->expert_scales && i < chosen; i++) weight[i] *= layer->expert_scales[expert[i]];
    if (!layer->shared) return;
    expert[chosen] = (int32_t)layer->experts;
    weight[chosen] = layer->shared == GATED ? sigmoid(logits[layer->experts]) : 1.0f;
}

/* Finds the place of every copy: expert by expert, rows of one expert in their own order. One thread does this. */
static void group_rows(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Routed *routed = &pass->space->routed;
    int64_t choices = pass->rows * runs_of(layer), experts = experts_of(layer);
    (void)parts;
    if (part) return;
    memset(routed->first, 0, (size_t)(experts + 1) * sizeof *routed->first);
    for (int64_t i = 0; i < choices; i++) routed->first[routed->expert[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) routed->first[e + 1] += routed->first[e];
    for (int64_t i = 0; i < choices; i++) routed->place[i] = routed->first[routed->expert[i]]++;
    for (int64_t e = experts; e > 0; e--) routed->first[e] = routed->first[e - 1];
    routed->first[0] = 0;
}

/* Copies a row's inputs to a place among the copies. If the expert
 * reads codes in an order of its own, they are quantised anew. */
static void gather_row(const Inputs *from, int64_t row, const Inputs *to, int64_t place, int64_t numbers, int wanted,
                       const int32_t *order)
{
    if (wanted & FLOATS || order)
        memcpy(to->floats + place * to->stride, from->floats + row * from->stride, (size_t)numbers * 4);
    if (wanted & BFLOATS)
        memcpy(to->bfloats + place * to->stride, from->bfloats + row * from->stride, (size_t)numbers * 2);
    if (order) {
        put_codes_of_row(to, wanted, place, numbers, order);
        return;
    }
    for (int64_t b = 0; wanted & CODES && b < (numbers + BLOCK - 1) / BLOCK; b++)
        to->blocks[b * to->rows + place] = from->blocks[b * from->rows + row];
}

/* Copies rows to the places that `group_rows` has found. */
static void gather_rows(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Space *space = pass->space;
    int64_t each = runs_of(layer);
    const LowRank *const *adapters = pass->batch->adapters;
    int wanted = expert_forms(layer) | forms_of_adapters(pass->batch);
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        for (int64_t i = row * each; i < (row + 1) * each; i++) {
            const Expert *expert = &layer->expert[space->routed.expert[i]];
            if (adapters) space->routed.adapters[space->routed.place[i]] = adapters[row];
            gather_row(&space->normed, row, &space->routed.gathered, space->routed.place[i], pass->model->hidden, wanted,
                       order_of((const Linear *const[3]){&expert->gate, &expert->up}));
        }
}

/* Norms the hidden states for the router or the experts, in layers with a dense feed-forward besides. */
static void norm_for_experts(const Pass *pass, const float *norm, int wanted, int64_t part, int64_t parts)
{
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        norm_input(pass->model, pass->space, norm, wanted, row, row, 0);
}

/* After the dense feed-forward of such a layer: norms its output and puts it aside, then norms the rows for the router. */
static void put_aside(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Space *space = pass->space;
    int64_t hidden = pass->model->hidden;
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        norm_row(space->given + row * hidden, hidden, (float)(hidden * pass->model->eps), layer->dense_out_norm, 0,
                 space->aside + row * hidden);
    norm_for_experts(pass, layer->router_norm, format_of(&layer->router)->input, part, parts);
}

/* Norms the experts' output of a row, and adds what the dense feed-forward gave. */
static void join_aside(const Pass *pass, const float *norm, int64_t row)
{
    int64_t hidden = pass->model->hidden;
    float *given = pass->space->given + row * hidden, *aside = pass->space->aside + row * hidden;
    norm_row(given, hidden, (float)(hidden * pass->model->eps), norm, 0, given);
    for (int64_t i = 0; i < hidden; i++) given[i] += aside[i];
}

/* The step after the router's product: rows choose experts. If
 * rows are few, the same thread groups and copies them, too. */
static void route_rows(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Routed *routed = &pass->space->routed;
    int64_t each = runs_of(layer);
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        choose_row(layer, routed->logits + row * layer->router.out, routed->expert + row * each, routed->weights + row * each);
    int wanted = expert_forms(layer) | forms_of_adapters(pass->batch);
    if (layer->experts_norm) norm_for_experts(pass, layer->experts_norm, wanted, part, parts);
    if (!has_few_rows(pass)) return;
    group_rows(pass, 0, 1);
    gather_rows(pass, 0, 1);
}

/* --------------------------------------------------------------------------------------------------- their two products */

/* A phase that computes one product of every expert that has rows: gate and up, or
 * down (leads_out). Each thread has a copy, which a late thread may still read when
 * the next layer's rows are grouped. Pieces are numbered expert by expert. */
typedef struct {
    const Layer *layer;
    Inputs x, gated;
    float *given;
    const LowRank *const *adapters; /* of the copies, or null */
    float *lowered;
    int64_t most_rank, bfloats, forms;
    int64_t hidden, leads_out, active; /* leads_out: 1: down. active: experts that have rows */
    int64_t each, pieces; /* panels of a piece, and pieces of each expert */
    int64_t shares;       /* how many parts an expert's rows are cut into, for what adapters add */
    int32_t expert[MOST_EXPERTS], first[MOST_EXPERTS + 1];
} ExpertsTask;

/* The inputs from row `row` on. */
INLINE Inputs inputs_from(const Inputs *all, int64_t row)
{
    return (Inputs){all->floats + row * all->stride, all->bfloats + row * all->stride, all->blocks + row, all->stride, all->rows};
}

INLINE int64_t rows_of_expert(const ExpertsTask *task, int64_t active)
{
    return task->first[task->expert[active] + 1] - task->first[task->expert[active]];
}

/* Adds the rows' adapters to an expert's product. `first`: the first of its copies. */
static Product with_adapters_of(const ExpertsTask *task, Product product, int64_t expert, int64_t first)
{
    if (!task->adapters) return product;
    product.adapters = task->adapters + first;
    product.lowered = task->lowered + first * 3 * task->most_rank, product.most_rank = task->most_rank;
    product.bfloats = (int)task->bfloats;
    product.first = task->layer->adapted + expert * EXPERT_PRODUCTS + (task->leads_out ? OF_DOWN - OF_GATE : 0);
    return product;
}

/* The product of active expert number `active` with its rows.
 * `gated` is memory for the view that the product points to. */
static Product product_of(const ExpertsTask *task, int64_t active, Inputs *gated)
{
    const int64_t expert = task->expert[active], first = task->first[expert];
    const Expert *own = &task->layer->expert[expert];
    *gated = inputs_from(&task->gated, first);
    Product leads_out = {{&own->down}, *gated, KEEP, task->given + first * task->hidden, task->hidden};
    Product leads_in = {.linear = {&own->gate, &own->up},
                        .x = inputs_from(&task->x, first),
                        .ending = GATE,
                        .gated = gated,
                        .wanted = format_of(&own->down)->input | (int)task->forms,
                        .activation = task->layer->activation};
    return with_adapters_of(task, task->leads_out ? leads_out : leads_in, expert, first);
}

/* How many panels a piece has, from `first` on; 0 or fewer if the expert has fewer pieces. */
static int64_t panels_of_expert(const ExpertsTask *task, const Product *product, int64_t piece, int64_t *first)
{
    int64_t left = panels_of_product(product) - (*first = piece % task->pieces * task->each);
    return left < task->each ? left : task->each;
}

/* Computes a piece of an expert's product, to raw sums in the thread's own memory; `commit_expert` finishes it. */
static void compute_expert(const void *own, int64_t piece, Member *me)
{
    const ExpertsTask *task = own;
    Inputs gated;
    Product product = product_of(task, piece / task->pieces, &gated);
    int64_t rows = rows_of_expert(task, piece / task->pieces), first, count = panels_of_expert(task, &product, piece, &first);
    float *sums = (float *)parlay_pool_private(me, (size_t)(task->each * PANEL * rows) * 4);
    if (count > 0) multiply_panels(&product, rows, first, count, sums);
}

static void commit_expert(const void *own, int64_t piece, Member *me)
{
    const ExpertsTask *task = own;
    Inputs gated;
    Product product = product_of(task, piece / task->pieces, &gated);
    int64_t rows = rows_of_expert(task, piece / task->pieces), first, count = panels_of_expert(task, &product, piece, &first);
    if (count > 0) finish_panels(&product, rows, first, count, (const float *)me->private);
}

/* Computes down(x) of the adapters for some rows of one expert. */
static void commit_lowered_of_expert(const void *own, int64_t piece, Member *me)
{
    const ExpertsTask *task = own;
    Inputs gated;
    const int64_t active = piece / task->shares, share = piece % task->shares, rows = rows_of_expert(task, active);
    Product product = product_of(task, active, &gated);
    (void)me;
    lower_rows(&product, (float *)product.lowered, rows * share / task->shares, rows * (share + 1) / task->shares);
}

/* Cuts the experts' products into pieces, all alike: sized for the largest product and the most rows, by the rules of
 * `panels_of_piece` in phases.h. */
static void cut_experts(ExpertsTask *task, int64_t threads)
{
    int64_t panels = 1, rows = 1, in = 1, unit = 2;
    for (int64_t i = 0; i < task->active; i++) {
        Inputs gated;
        Product product = product_of(task, i, &gated);
        int64_t own = panels_of_product(&product);
        panels = own > panels ? own : panels;
        rows = rows_of_expert(task, i) > rows ? rows_of_expert(task, i) : rows;
        in = product.linear[0]->in, unit = unit_of(&product);
    }
    int64_t each = panels * task->active / threads / PIECES, few = LEAST_WEIGHTS / (PANEL * in);
    int64_t most = MOST_RESULTS / (PANEL * rows), least = 2 * panels * task->active / MOST_PIECES + 1;
    if (each < few) each = few;
    if (each > most) each = most;
    if (each < least) each = least;
    task->each = (each + unit - 1) / unit * unit;
    task->pieces = (panels + task->each - 1) / task->each;
    task->shares = least_of(most_of(rows / LOWERED_TOGETHER, 1), most_of(4 * threads / most_of(task->active, 1), 1));
}

/* Lists the experts that have rows, in rising order, and returns how many there are. */
static int64_t active_experts(const Layer *layer, const int32_t *first, int32_t *experts)
{
    int64_t count = 0;
    for (int64_t e = 0; e < experts_of(layer); e++)
        if (first[e + 1] > first[e]) experts[count++] = (int32_t)e;
    return count;
}

/* Lists the experts whose turn it is where they are read from a file. */
static int64_t shelved_experts(const Pass *pass, const Layer *layer, int32_t *experts)
{
    int64_t count = parlay_shelf_group(pass->model->shelf, experts);
    for (int64_t i = 0; i < count; i++)
        if (experts[i] >= experts_of(layer)) return 0; /* this thread is late: the group is another layer's */
    return count;
}

/* Computes one product of all experts that have rows, or of those that the shelf has just made available. */
static int run_products_of_experts(const Pass *pass, int64_t leads_out)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Routed *routed = &pass->space->routed;
    ExpertsTask task = {.layer = layer, .x = routed->gathered, .gated = routed->gated, .given = routed->given,
                        .adapters = pass->batch->adapters ? routed->adapters : 0, .lowered = pass->batch->lowered,
                        .most_rank = pass->batch->most_rank, .bfloats = pass->batch->bfloats,
                        .forms = forms_of_adapters(pass->batch), .hidden = pass->model->hidden, .leads_out = leads_out};
    memcpy(task.first, routed->first, (size_t)(experts_of(layer) + 1) * sizeof *task.first);
    task.active = is_shelved(pass, layer) ? shelved_experts(pass, layer, task.expert)
                                          : active_experts(layer, task.first, task.expert);
    cut_experts(&task, pass->me->count);
    Phase lower = {.pieces = task.active * task.shares, .commit = commit_lowered_of_expert, .task = &task};
    if (task.adapters && !parlay_pool_phase(pass->me, &lower)) return 0;
    Phase phase = {.pieces = task.active * task.pieces,
                   .compute = compute_expert,
                   .commit = commit_expert,
                   .task = &task,
                   .detached = 1};
    return parlay_pool_phase(pass->me, &phase);
}

/* Tells the shelf which experts the rows have chosen. One thread does this, and the next step. */
static void want_experts(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    int32_t experts[MOST_EXPERTS];
    (void)part, (void)parts;
    parlay_shelf_want(pass->model->shelf, pass->here / 2, experts,
                      active_experts(layer, pass->space->routed.first, experts));
}

/* Waits until the shelf's next group of experts is in memory. */
static void take_experts(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    parlay_shelf_take(pass->model->shelf);
}

/* Computes both products of a layer's experts, of all at once, or group by group as the shelf makes them available. 0:
 * the job has ended meanwhile, or an expert can't be read. */
static int run_chosen_experts(const Pass *pass)
{
    const int64_t layer = pass->here / 2;
    Shelf *shelf = pass->model->shelf;
    if (!is_shelved(pass, &pass->model->layer[layer])) return run_products_of_experts(pass, 0) && run_products_of_experts(pass, 1);
    if (!run_once(pass, want_experts)) return 0;
    for (int64_t group = 0, count = parlay_shelf_groups(shelf, layer); group < count; group++)
        if (!run_once(pass, take_experts) || parlay_shelf_ends(shelf, layer, group) || !run_products_of_experts(pass, 0) ||
            !run_products_of_experts(pass, 1))
            return 0;
    return 1;
}

/* Adds up a row's experts' outputs times their weights, in rising order, into the hidden state, or into `given` where
 * the sum is normed or summed over ranks first. */
static void add_experts(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Routed *routed = &pass->space->routed;
    int64_t each = runs_of(layer), hidden = pass->model->hidden;
    int apart = layer->feed_forward_out_norm || layer->experts_norm || is_scaled(layer) || pass->model->ranks;
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++) {
        const int32_t *places = routed->place + row * each;
        const float *weights = routed->weights + row * each;
        float *out = (apart ? pass->space->given : pass->space->hidden) + row * hidden;
        for (int64_t i = 0; i < hidden; i++) {
            float sum = 0;
            for (int64_t c = 0; c < each; c++) sum += weights[c] * routed->given[places[c] * hidden + i];
            out[i] = apart ? sum : out[i] + sum;
        }
        if (!apart || pass->model->ranks) continue;
        if (layer->experts_norm) join_aside(pass, layer->experts_out_norm, row);
        add_normed(pass->model, pass->space, layer->feed_forward_out_norm, row);
        end_layer(pass->model, pass->space, layer, row);
    }
}

/* Runs a layer's experts, from the router to the hidden state. */
static int run_experts(const Pass *pass)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Space *space = pass->space;
    Product router = {{&layer->router}, space->normed, KEEP, space->routed.logits, layer->router.out};
    if (!run_product(pass, router, pass->rows, route_rows)) return 0;
    if (!has_few_rows(pass) && !(run_rows(pass, group_rows) && run_rows(pass, gather_rows))) return 0;
    return run_chosen_experts(pass) && run_rows(pass, add_experts);
}

#endif
