/* Mixtures of experts: each row runs those that its router's logits choose, and what they give is summed in the order of
 * their numbers. An expert's rows are gathered side by side and multiplied together, so its weights are read once however
 * many rows chose it. Nothing of a row depends on the others: its experts and their weights come from its own logits.
 */
#ifndef PARLAY_EXPERTS_H
#define PARLAY_EXPERTS_H

#include "phases.h"
#include "rows.h"

/* Whether a layer's experts are read from a file when rows choose them. */
INLINE int is_shelved(const Pass *pass, const Layer *layer) { return pass->model->shelf && layer->experts; }

/* In which forms a layer's router and experts want the rows that they share. */
static int expert_forms(const Layer *layer)
{
    int wanted = format_of(&layer->router)->input;
    for (int64_t e = 0; e < experts_of(layer); e++)
        wanted |= format_of(&layer->expert[e].gate)->input | format_of(&layer->expert[e].up)->input;
    return wanted;
}

/* ------------------------------------------------------------------------------------------------- which rows run where */

/* The places of the largest logits, best first; of equals the first. */
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

static void rise(int32_t *numbers, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        int32_t own = numbers[i];
        int64_t at = i;
        for (; at > 0 && numbers[at - 1] > own; at--) numbers[at] = numbers[at - 1];
        numbers[at] = own;
    }
}

static void choose_by_softmax(const Layer *layer, const float *logits, int32_t *expert, float *weight)
{
    const int64_t chosen = layer->chosen;
    best_experts(logits, layer->experts, chosen, expert);
    float most = logits[expert[0]], total = 0;
    for (int64_t i = 0; i < (layer->normalized ? chosen : layer->experts); i++)
        total += __builtin_expf(logits[layer->normalized ? expert[i] : i] - most);
    rise(expert, chosen);
    for (int64_t i = 0; i < chosen; i++) weight[i] = __builtin_expf(logits[expert[i]] - most) / total;
}

INLINE float sigmoid(float logit) { return 1.0f / (1.0f + __builtin_expf(-logit)); }

/* What is chosen by becomes minus infinity in all groups of experts but the best, by the sum of a group's best two. */
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

static void choose_by_sigmoid(const Layer *layer, const float *logits, int32_t *expert, float *weight)
{
    const int64_t chosen = layer->chosen;
    float choice[MOST_EXPERTS], total = 0;
    for (int64_t e = 0; e < layer->experts; e++) choice[e] = sigmoid(logits[e]) + layer->choice_bias[e];
    if (layer->top_groups < layer->groups) close_groups(layer, choice);
    best_experts(choice, layer->experts, chosen, expert);
    rise(expert, chosen);
    for (int64_t i = 0; i < chosen; i++) total += weight[i] = sigmoid(logits[expert[i]]);
    for (int64_t i = 0; layer->normalized && i < chosen; i++) weight[i] /= total + 1e-20f;
}

/* The experts of a row in rising order, the shared one last, and the weight of each. */
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

/* Where each row of each expert goes among the gathered ones: expert by expert, an expert's in their own order. */
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

/* Codes are made anew where an expert reads them in an `order` of its own. */
static void gather_row(const Inputs *from, int64_t row, const Inputs *to, int64_t place, int64_t numbers, int wanted,
                       const int32_t *order)
{
    if (wanted & FLOATS || order)
        memcpy(to->floats + place * to->stride, from->floats + row * from->stride, (size_t)numbers * 4);
    if (wanted & BRAINS)
        memcpy(to->brains + place * to->stride, from->brains + row * from->stride, (size_t)numbers * 2);
    if (order) {
        put_codes_of_row(to, wanted, place, numbers, order);
        return;
    }
    for (int64_t b = 0; wanted & CODES && b < (numbers + BLOCK - 1) / BLOCK; b++)
        to->blocks[b * to->rows + place] = from->blocks[b * from->rows + row];
}

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

/* Hidden states, normed for what comes next in a layer with a feed-forward beside experts. */
static void norm_for_experts(const Pass *pass, const float *norm, int wanted, int64_t part, int64_t parts)
{
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++)
        norm_input(pass->model, pass->space, norm, wanted, row, row, 0);
}

/* What a feed-forward beside experts gives is normed and put aside, and its rows are normed for the router. */
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

/* What experts give is normed, and what was put aside joins it. */
static void join_aside(const Pass *pass, const float *norm, int64_t row)
{
    int64_t hidden = pass->model->hidden;
    float *given = pass->space->given + row * hidden, *aside = pass->space->aside + row * hidden;
    norm_row(given, hidden, (float)(hidden * pass->model->eps), norm, 0, given);
    for (int64_t i = 0; i < hidden; i++) given[i] += aside[i];
}

/* From the router's logits on; one thread does the rest, too, where there are few rows. */
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

/* One product of every expert that has rows, with them: gates and ups, or what leads out. Each thread has a copy, for one
 * that is late may still read it when the next layer's rows are grouped. */
typedef struct {
    const Layer *layer;
    Inputs x, gated;
    float *given;
    const LowRank *const *adapters; /* of the gathered rows, or null */
    float *lowered;
    int64_t most_rank, brains, forms;
    int64_t hidden, leads_out, active;
    int64_t each, pieces; /* panels of a piece, and pieces of an expert */
    int64_t shares;       /* of an expert's rows, for what adapters add to them */
    int32_t expert[MOST_EXPERTS], first[MOST_EXPERTS + 1];
} ExpertsTask;

INLINE Inputs inputs_from(const Inputs *all, int64_t row)
{
    return (Inputs){all->floats + row * all->stride, all->brains + row * all->stride, all->blocks + row, all->stride, all->rows};
}

INLINE int64_t rows_of_expert(const ExpertsTask *task, int64_t active)
{
    return task->first[task->expert[active] + 1] - task->first[task->expert[active]];
}

/* An expert's product with what adapters add to its rows, which begin at `first`. */
static Product with_adapters_of(const ExpertsTask *task, Product product, int64_t expert, int64_t first)
{
    if (!task->adapters) return product;
    product.adapters = task->adapters + first;
    product.lowered = task->lowered + first * 3 * task->most_rank, product.most_rank = task->most_rank;
    product.brains = (int)task->brains;
    product.first = task->layer->adapted + expert * EXPERT_PRODUCTS + (task->leads_out ? OF_DOWN - OF_GATE : 0);
    return product;
}

/* `gated` is where the product's view of what it gates is put. */
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

/* Panels of a piece: from the first one on, none where the expert has fewer. */
static int64_t panels_of_expert(const ExpertsTask *task, const Product *product, int64_t piece, int64_t *first)
{
    int64_t left = panels_of_product(product) - (*first = piece % task->pieces * task->each);
    return left < task->each ? left : task->each;
}

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

/* The first halves of what adapters add to some rows of one expert. */
static void commit_lowered_of_expert(const void *own, int64_t piece, Member *me)
{
    const ExpertsTask *task = own;
    Inputs gated;
    const int64_t active = piece / task->shares, share = piece % task->shares, rows = rows_of_expert(task, active);
    Product product = product_of(task, active, &gated);
    (void)me;
    lower_rows(&product, (float *)product.lowered, rows * share / task->shares, rows * (share + 1) / task->shares);
}

/* Cuts the products into pieces, as `panels_of_piece` does for one. */
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

/* Experts that have rows, in rising order; how many. */
static int64_t active_experts(const Layer *layer, const int32_t *first, int32_t *experts)
{
    int64_t count = 0;
    for (int64_t e = 0; e < experts_of(layer); e++)
        if (first[e + 1] > first[e]) experts[count++] = (int32_t)e;
    return count;
}

/* Those of a layer's shelf that can be computed now. */
static int64_t shelved_experts(const Pass *pass, const Layer *layer, int32_t *experts)
{
    int64_t count = parlay_shelf_group(pass->model->shelf, experts);
    for (int64_t i = 0; i < count; i++)
        if (experts[i] >= experts_of(layer)) return 0; /* this thread is late: the group is another layer's */
    return count;
}

/* Of all experts that have rows, or of those that their layer's shelf has given. */
static int run_products_of_experts(const Pass *pass, int64_t leads_out)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const Routed *routed = &pass->space->routed;
    ExpertsTask task = {.layer = layer, .x = routed->gathered, .gated = routed->gated, .given = routed->given,
                        .adapters = pass->batch->adapters ? routed->adapters : 0, .lowered = pass->batch->lowered,
                        .most_rank = pass->batch->most_rank, .brains = pass->batch->brains,
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

static void want_experts(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    int32_t experts[MOST_EXPERTS];
    (void)part, (void)parts;
    parlay_shelf_want(pass->model->shelf, pass->here / 2, experts,
                      active_experts(layer, pass->space->routed.first, experts));
}

static void take_experts(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    parlay_shelf_take(pass->model->shelf);
}

/* Both products of a layer's experts: of all at once, or group by group as their shelf gives them. 0: the job has ended
 * meanwhile, or an expert can't be had. */
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

/* What a row's experts give, each times its weight, in rising order: added to the hidden state, or put where it is normed
 * or summed over ranks. */
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

/* A feed-forward of experts, up to the hidden state. */
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
