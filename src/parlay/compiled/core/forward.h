/* One forward of the model: `forward` is what Python calls, through the table in kernels.c.
 *
 * A forward is one job of the thread pool. Every thread runs the same `run_forward`, layer by layer, and at each phase
 * (phases.h) takes its share of the work; a phase is a barrier. A sub-layer of a dense model takes these phases:
 *
 *     attention       query, key, value products | rotate, store keys and values | attention by tiles | out product
 *     feed-forward    gate and up products | down product
 *
 * The last product of a sub-layer adds to the hidden state, and the next sub-layer's norm follows it: `enter_next`. Where a
 * batch has few rows, the thread that ends a product takes the steps on rows behind it at once, without a phase of their own.
 *
 * Sub-layers are numbered: 2 * layer is a layer's attention, 2 * layer + 1 its feed-forward, and 2 * layers the head.
 */
#ifndef PARLAY_FORWARD_H
#define PARLAY_FORWARD_H

#include "experts.h"
#include "per_layer.h"
#include "tiles.h"

/* The forms in which some products side by side read their rows. */
static int forms(const Linear *const linear[3])
{
    int wanted = 0;
    for (int i = 0; i < 3 && linear[i]; i++) wanted |= format_of(linear[i])->input;
    return wanted;
}

/* The product of the normed rows with query, key and value, whose outputs go to space->qkv. Layers that read another
 * layer's keys have the query alone. */
static Product attention_inputs(const Pass *pass, int64_t layer)
{
    const Layer *own = &pass->model->layer[layer];
    float *qkv = pass->space->qkv + pass->batch->own * pass->space->qkv_stride;
    Product product = {{&own->query, &own->key, &own->value}, pass->space->normed, KEEP, qkv, pass->space->qkv_stride};
    if (own->reads_others) product.linear[1] = product.linear[2] = 0;
    return with_adapters(pass, product, layer, OF_QUERY);
}

/* The product of the normed rows with gate and up, whose results are the inputs of down. */
static Product gates(const Pass *pass, int64_t layer)
{
    const Layer *own = &pass->model->layer[layer];
    Product product = {.linear = {&own->gate, &own->up},
                       .x = pass->space->normed,
                       .ending = GATE,
                       .gated = &pass->space->gated,
                       .wanted = format_of(&own->down)->input | forms_of_adapters(pass->batch),
                       .activation = own->activation};
    return with_adapters(pass, product, layer, OF_GATE);
}

static int64_t sublayers(const Pass *pass) { return 2 * pass->model->layers; }

/* The first sub-layer from `from` on that the batch does not skip. */
static int64_t next_sublayer(const Pass *pass, int64_t from)
{
    while (from < sublayers(pass) && pass->batch->skip && pass->batch->skip[from]) from++;
    return from;
}

/* ----------------------------------------------------------------------------------------------- the steps of rows */

/* The address of a row of a layer's tap. */
INLINE void *tap_of(const Batch *batch, int64_t layer, int64_t row)
{
    return (char *)batch->taps[layer] + row * batch->tap_stride * (batch->tap_form == BFLOAT16 ? 2 : 4);
}

/* After the last layer: writes the last tap (the normed hidden states), and the inputs of the head for the rows whose
 * logits are wanted. */
static void norm_last(const Pass *pass, int64_t part, int64_t parts)
{
    const Model *model = pass->model;
    const Batch *batch = pass->batch;
    const Space *space = pass->space;
    float floor = (float)(model->hidden * model->eps);
    int tapped = batch->taps && batch->taps[model->layers];
    for (int64_t row = batch->rows * part / parts; tapped && row < batch->rows * (part + 1) / parts; row++)
        norm_row(space->hidden + row * model->hidden, model->hidden, floor, model->raw_tap ? 0 : model->final_norm,
                 (int)batch->tap_form, tap_of(batch, model->layers, row));
    int wanted = format_of(&model->head)->input;
    for (int64_t i = batch->wanted * part / parts; i < batch->wanted * (part + 1) / parts; i++)
        norm_input(model, space, model->final_norm, wanted, batch->wanted_rows[i], i,
                   model->head.order);
}

/* Norms rows from..to into the inputs of the sub-layer that runs next, and computes the first half of their adapters. */
static void norm_next(const Pass *pass, int64_t from, int64_t to)
{
    const Layer *own = &pass->model->layer[pass->next / 2];
    Product product = pass->next % 2 ? gates(pass, pass->next / 2) : attention_inputs(pass, pass->next / 2);
    const float *weight = pass->next % 2 ? own->feed_forward_norm : own->attention_norm;
    int experts = pass->next % 2 && own->experts && !own->experts_norm;
    int wanted = (experts ? expert_forms(own) : forms(product.linear)) | forms_of_adapters(pass->batch);
    const int32_t *order = experts ? 0 : order_of(product.linear);
    for (int64_t row = from; row < to; row++)
        if (pass->next == 0 && pass->model->beside_norm)
            norm_beside(pass->model, pass->batch, pass->space, wanted, row);
        else
            norm_input(pass->model, pass->space, weight, wanted, row, row, order);
    if (product.adapters) lower_rows(&product, pass->batch->lowered, from, to);
}

/* Whether the late rows join before the sub-layer that runs next (Batch.late). */
INLINE int join_next(const Pass *pass)
{
    return pass->rows < pass->batch->rows && pass->next >= 2 * pass->batch->join;
}

/* The step between two sub-layers: late rows join, hidden states that enter a tapped layer are copied to its tap, and
 * rows are normed for what runs next. */
static void enter_next(const Pass *pass, int64_t part, int64_t parts)
{
    const Batch *batch = pass->batch;
    int64_t rows = join_next(pass) ? batch->rows : pass->rows;
    int64_t from = rows * part / parts, to = rows * (part + 1) / parts, hidden = pass->model->hidden;
    for (int64_t row = from > pass->rows ? from : pass->rows; row < to; row++)
        join_row(pass->model, pass->space, &batch->joining[row - pass->rows], row);
    for (int64_t layer = (pass->here + 2) / 2; batch->taps && layer < pass->model->layers && 2 * layer <= pass->next; layer++)
        for (int64_t row = from; batch->taps[layer] && row < to; row++)
            norm_row(pass->space->hidden + row * hidden, hidden, 0, 0, (int)batch->tap_form, tap_of(batch, layer, row));
    if (pass->next < sublayers(pass))
        norm_next(pass, from, to);
    else
        norm_last(pass, part, parts);
}

/* The first step: embeddings become the hidden states. */
static void begin(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->batch->rows;
    embed(pass->model, pass->batch, pass->space, rows * part / parts, rows * (part + 1) / parts);
}

/* After a sub-layer whose outputs were set apart: norms them and adds them to the hidden state. */
static void add_outputs(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    const float *weight = pass->here % 2 ? layer->feed_forward_out_norm : layer->attention_out_norm;
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++) {
        add_normed(pass->model, pass->space, weight, row);
        if (pass->here % 2) end_layer(pass->model, pass->space, layer, row);
    }
}

/* Sums the sub-layer's outputs over ranks (tensor parallelism). One thread does this. */
static void sum_outputs(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    sum_over_ranks(pass->model->ranks, pass->space->given, pass->rows * pass->model->hidden);
}

static void sum_and_enter_next(const Pass *pass, int64_t part, int64_t parts)
{
    sum_outputs(pass, part, parts);
    add_outputs(pass, part, parts);
    enter_next(pass, part, parts);
}

/* Context parallelism: each rank has computed queries, keys and values of its own rows. Here all get those of all rows. */
static void gather_inputs(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    Ranks *context = pass->model->context;
    int64_t each = (pass->batch->all_rows + context->count - 1) / context->count;
    gather_over_ranks(context, pass->space->qkv, each * pass->space->qkv_stride);
}

/* Norms and rotates queries and keys, and stores keys and values in the cache. */
static void prepare_attention(const Pass *pass, int64_t part, int64_t parts)
{
    int64_t rows = pass->batch->all_rows ? pass->batch->all_rows : pass->rows;
    prepare(pass->model, pass->batch, pass->space, pass->here / 2, rows * part / parts, rows * (part + 1) / parts);
}

/* ---------------------------------------------------------------------------------------------------- the sub-layers */

/* Whether the attention that runs is the last one with keys and values of its own. */
static int has_last_keys(const Pass *pass)
{
    int64_t last = pass->model->layers - 1;
    while (pass->model->layer[last].reads_others) last--;
    return pass->here == 2 * last;
}

/* Whether this is the last layer with keys and values of its own, and nobody wants logits or the last tap. Then its
 * keys and values are stored and the forward ends: as for all pieces of a long prompt but the last, or when a draft
 * head of one layer reads a text before it drafts. */
static int leaves_keys_alone(const Pass *pass)
{
    const Batch *batch = pass->batch;
    return !batch->wanted && !(batch->taps && batch->taps[pass->model->layers]) && has_last_keys(pass);
}

/* Moves the hidden states of the wanted rows (those with logits, in rising order) to the front. */
static void gather_kept(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    const int64_t hidden = pass->model->hidden;
    float *states = pass->space->hidden;
    for (int64_t i = 0; i < pass->batch->wanted; i++)
        memmove(states + i * hidden, states + pass->batch->wanted_rows[i] * hidden, (size_t)hidden * 4);
}

/* Continues with the wanted rows alone, now that the last layer has stored the keys and values of all rows. */
static int keep_wanted(Pass *pass)
{
    if (!run_once(pass, gather_kept)) return 0;
    const int recent = (int)pass->model->layer[pass->here / 2].recent;
    pass->first_tile = pass->tiles[recent], pass->tiles[recent] = pass->kept_tiles;
    pass->batch = pass->kept, pass->rows = pass->kept->rows, pass->place = pass->space->kept.place;
    return 1;
}

/* The last product of a sub-layer (out or down), then the step `next`. Mostly its outputs
 * are added to the hidden state right away. Where they are normed first, summed over
 * ranks or scaled, they are written to space->given, and `add_outputs` adds them. */
static int run_last(const Pass *pass, const Linear *last, Inputs x, const float *norm, Step *next)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    int apart = norm || pass->model->ranks || (pass->here % 2 && is_scaled(layer));
    Product product = {{last}, x, apart ? KEEP : ADD, apart ? pass->space->given : pass->space->hidden, pass->model->hidden};
    product = with_adapters(pass, product, pass->here / 2, pass->here % 2 ? OF_DOWN : OF_OUT);
    product.lowers = 1;
    if (pass->model->ranks && has_few_rows(pass) && next == enter_next) return run_product(pass, product, pass->rows, sum_and_enter_next);
    if (pass->model->ranks)
        return run_product(pass, product, pass->rows, 0) && run_once(pass, sum_outputs) && run_rows(pass, add_outputs) &&
               run_rows(pass, next);
    return apart ? run_product(pass, product, pass->rows, add_outputs) && run_rows(pass, next)
                 : run_product(pass, product, pass->rows, next);
}

/* Computes queries, keys and values, and stores the keys and values in the cache. Without `queries`, these are left out. */
static int run_inputs(const Pass *pass, int64_t rows, int queries)
{
    Product product = attention_inputs(pass, pass->here / 2);
    if (!queries && !product.adapters && product.linear[1]) {
        product.y += product.linear[0]->out;
        product.linear[0] = product.linear[1], product.linear[1] = product.linear[2], product.linear[2] = 0;
    }
    if (!pass->batch->all_rows) return run_product(pass, product, rows, prepare_attention);
    return run_product(pass, product, rows, 0) && run_once(pass, gather_inputs) && run_rows(pass, prepare_attention);
}

/* The attention of a layer, from the normed rows to the hidden state. */
static int run_attention(Pass *pass)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    return run_inputs(pass, pass->rows, 1) && (!pass->kept || !has_last_keys(pass) || keep_wanted(pass)) && attend(pass) &&
           run_last(pass, &layer->out, pass->space->normed, layer->attention_out_norm, enter_next);
}

/* In a layer with both a dense feed-forward and experts: runs the dense one, up to the inputs of the router. */
static int run_beside(const Pass *pass)
{
    const Linear *down = &pass->model->layer[pass->here / 2].down;
    Product product = {{down}, pass->space->gated, KEEP, pass->space->given, pass->model->hidden};
    product = with_adapters(pass, product, pass->here / 2, OF_DOWN);
    product.lowers = 1;
    return run_product(pass, gates(pass, pass->here / 2), pass->rows, 0) &&
           run_product(pass, product, pass->rows, put_aside);
}

/* The feed-forward of a layer, dense or of experts, and its per-layer step, up to the hidden state. */
static int run_feed_forward(const Pass *pass)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    Step *next = layer->per_layer_norm ? enter_gate : enter_next;
    int goes_on;
    if (layer->experts)
        goes_on = (!layer->experts_norm || run_beside(pass)) && run_experts(pass) &&
                  (!pass->model->ranks || (run_once(pass, sum_outputs) && run_rows(pass, add_outputs))) &&
                  run_rows(pass, next);
    else
        goes_on = run_product(pass, gates(pass, pass->here / 2), pass->rows, 0) &&
                  run_last(pass, &layer->down, pass->space->gated, layer->feed_forward_out_norm, next);
    return goes_on && (!layer->per_layer_norm || (run_per_layer(pass) && run_rows(pass, enter_next)));
}

/* Where layers are read from a file: one thread waits until the next layer is in memory. */
static void enter_layer(const Pass *pass, int64_t part, int64_t parts)
{
    (void)part, (void)parts;
    parlay_stream_enter(pass->model->stream, pass->model->layer[pass->next / 2].streamed - 1);
}

/* Where layers are read from a file: makes sure that the next layer is in
 * memory. 0: it can't be read, and all threads end the forward here. */
static int reach_layer(Pass *pass)
{
    if (!pass->model->stream || (pass->here >= 0 && pass->here / 2 == pass->next / 2)) return 1;
    pass->entered++;
    return run_once(pass, enter_layer) && !parlay_stream_ends(pass->model->stream, pass->entered);
}

/* The whole forward, as each thread runs it. 0: the job has ended meanwhile, because this thread was late and others
 * did its work; or a layer can't be read. */
static int run_forward(Pass pass)
{
    pass.here = -1;
    pass.next = next_sublayer(&pass, 0);
    int goes_on = run_rows(&pass, begin) && (!pass.model->per_layer || run_per_layer_inputs(&pass)) && run_rows(&pass, enter_next);
    while (goes_on && pass.next < sublayers(&pass)) {
        if (join_next(&pass)) {
            pass.rows = pass.batch->rows;
            memcpy(pass.tiles, pass.all_tiles, sizeof pass.tiles);
        }
        if (!reach_layer(&pass)) return 0;
        pass.here = pass.next;
        pass.next = next_sublayer(&pass, pass.here + 1);
        if (leaves_keys_alone(&pass)) return run_inputs(&pass, pass.batch->rows, 0);
        goes_on = pass.here % 2 ? run_feed_forward(&pass) : run_attention(&pass);
    }
    const Batch *batch = pass.batch;
    if (!goes_on || !batch->wanted || !(batch->logits || batch->likeliest)) return goes_on;
    Product head = {{&pass.model->head}, pass.space->normed, batch->likeliest ? BEST : KEEP, batch->logits, pass.model->vocab};
    head.likeliest = batch->likeliest;
    head.cap = (float)pass.model->logit_cap;
    return run_product(&pass, head, pass.batch->wanted, 0);
}

static void run(const void *context, Member *me)
{
    Pass pass = *(const Pass *)context; /* each thread has a copy, for it may be in another phase than the rest */
    pass.me = me;
    run_forward(pass);
}

/* How many keys the longest sequence has, its new rows included. */
static int64_t longest_of(const Batch *batch)
{
    int64_t longest = 1;
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment *segment = &batch->segment[s];
        int64_t end = segment->start + segment->pending + segment->nodes;
        longest = end > longest ? end : longest;
    }
    return longest;
}

/* What each thread starts from: the batch, and its attention cut into tiles, which are written to the space. */
static Pass pass_of(const Model *model, const Batch *batch, const Space *space)
{
    Batch early = *batch;
    early.segments -= batch->late_segments;
    Pass pass = {.model = model, .batch = batch, .space = space, .rows = batch->rows - batch->late};
    /* Layers with all keys and with recent pages share tiles where their heads are the same. */
    for (int i = 0; i < 2; i++) {
        pass.tiles[i] = i && !differ(model) ? pass.tiles[0] : cut_tiles(&early, &space->alike[i], 0, 0);
        pass.all_tiles[i] = i && !differ(model) ? pass.all_tiles[0] : cut_tiles(batch, &space->alike[i], 0, 0);
    }
    pass.all_rounds = rounds_of(model, longest_of(batch));
    return pass;
}

/* Whether rows whose logits nobody wants stop once the last layer has stored their keys and values; of a prompt, that
 * is all rows but the last. So it is only if no later layer, tap or vote reads what these rows would compute. */
static int keeps_wanted(const Model *model, const Batch *batch)
{
    if (!batch->wanted || batch->wanted >= batch->rows) return 0;
    if (batch->late || batch->all_rows || batch->skip || model->context || model->per_layer) return 0;
    if (!model->layers || model->layer[model->layers - 1].reads_others) return 0; /* a rank may have no layer */
    if (batch->taps && batch->taps[model->layers]) return 0;
    for (int64_t s = 0; s < batch->segments; s++)
        if (batch->segment[s].votes) return 0;
    for (int64_t i = 1; i < batch->wanted; i++)
        if (batch->wanted_rows[i] <= batch->wanted_rows[i - 1]) return 0;
    return 1;
}

/* Makes a batch of the wanted rows alone, and cuts their tiles. Its segments still number all rows. */
static void lay_out_kept(Pass *pass, Batch *kept)
{
    const Batch *batch = pass->batch;
    const Kept *space = &pass->space->kept;
    const int recent = (int)pass->model->layer[pass->model->layers - 1].recent;
    memset(space->place, 0xff, (size_t)batch->rows * 4);
    for (int64_t i = 0; i < batch->wanted; i++) {
        space->place[batch->wanted_rows[i]] = space->order[i] = (int32_t)i;
        if (batch->adapters) space->adapters[i] = batch->adapters[batch->wanted_rows[i]];
    }
    *kept = *batch;
    kept->rows = batch->wanted, kept->wanted_rows = space->order, kept->taps = 0;
    if (batch->adapters) kept->adapters = space->adapters;
    pass->kept = kept;
    pass->kept_tiles = cut_tiles(batch, &pass->space->alike[recent], space->place, pass->tiles[recent]);
}

/* Runs one forward on the pool, and returns when its results are there. */
static void forward(const Model *model, const Batch *batch)
{
    Batch kept;
    Space space = lay_out(model, batch->rows, all_rows_of(batch), batch->wanted, longest_of(batch), batch->segments,
                          batch->threads, batch->space);
    Pass pass = pass_of(model, batch, &space);
    if (keeps_wanted(model, batch)) lay_out_kept(&pass, &kept);
    if (model->stream) parlay_stream_begin(model->stream);
    if (model->shelf) parlay_shelf_begin(model->shelf);
    parlay_pool_run(DECODING, batch->threads, run, &pass);
    if (model->stream) parlay_stream_enter(model->stream, -1);
    if (model->shelf) parlay_shelf_end(model->shelf);
}

#endif
