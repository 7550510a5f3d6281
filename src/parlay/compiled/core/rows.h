/* What a forward does row by row between products: embeddings, norms, RoPE, and storing new keys and values in the
 * cache. forward.h calls these functions in steps (phases.h), which share the rows out. */
#ifndef PARLAY_ROWS_H
#define PARLAY_ROWS_H

#include "ngrams.h"
#include "space.h"

/* RMS norm: x / sqrt(|x|^2 + floor) * weight, as float32 or bfloat16; x itself if weight is null. The loader has multiplied
 * weights by sqrt(size), and floor is size * eps, so this is x / sqrt(mean(x^2) + eps) times the model's weight.
 */
INLINE void norm_row(const float *x, int64_t size, float floor, const float *weight, int bf16, void *out)
{
    int64_t whole = size / LANES * LANES;
    if (!weight) {
        for (int64_t i = 0; i < whole; i += LANES) store_as(bf16, out, i, load(x + i));
        for (int64_t i = whole; i < size; i++) store_one(bf16, out, i, x[i]);
        return;
    }
    vf squares = {0};
    float rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    for (int64_t i = whole; i < size; i++) rest += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf(sum(squares) + rest + floor);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf value = load(x + i) * scale;
        store_as(bf16, out, i, value * load(weight + i));
    }
    for (int64_t i = whole; i < size; i++) store_one(bf16, out, i, x[i] * scale * weight[i]);
}

/* Norms the `hidden` numbers at x into row `to` of the inputs, from place `at` on, in the wanted forms; codes not yet. */
INLINE void put_normed(const Model *model, const Inputs *inputs, const float *x, const float *weight, int wanted,
                       int64_t to, int64_t at)
{
    float floor = (float)(model->hidden * model->eps);
    if (wanted & BFLOATS) norm_row(x, model->hidden, floor, weight, 1, inputs->bfloats + to * inputs->stride + at);
    if (wanted & (FLOATS | CODES))
        norm_row(x, model->hidden, floor, weight, 0, inputs->floats + to * inputs->stride + at);
}

/* Norms a row of the hidden states into row `to` of the inputs, codes included; these in the `order` of the products. */
INLINE void norm_input(const Model *model, const Space *space, const float *weight, int wanted, int64_t row, int64_t to,
                       const int32_t *order)
{
    put_normed(model, &space->normed, space->hidden + row * model->hidden, weight, wanted, to, 0);
    put_codes_of_row(&space->normed, wanted, to, model->hidden, order);
}

/* The inputs of the first layer's attention in models with a beside_norm: the embedding of the row's token, then the
 * hidden state, each normed. */
static void norm_beside(const Model *model, const Batch *batch, const Space *space, int wanted, int64_t row)
{
    const Inputs *inputs = &space->normed;
    /* This array is always there; the embedding is normed in place. */
    float *embedded = inputs->floats + row * inputs->stride;
    format_of(&model->embedding)->read(model->embedding.panels, batch->ids[row], model->hidden, embedded);
    put_normed(model, inputs, embedded, model->beside_norm, wanted, row, 0);
    put_normed(model, inputs, space->hidden + row * model->hidden, model->layer[0].attention_norm, wanted, row,
               model->hidden);
    put_codes(inputs, wanted, row, 0, 2 * model->hidden);
}

/* Fills in the hidden states of rows from..to: their tokens' embeddings, or Batch.inputs. */
static void embed(const Model *model, const Batch *batch, const Space *space, int64_t from, int64_t to)
{
    const Linear *embedding = &model->embedding;
    for (int64_t row = from; row < to; row++) {
        float *out = space->hidden + row * model->hidden;
        if (batch->inputs) {
            memcpy(out, batch->inputs + row * model->hidden, (size_t)model->hidden * 4);
            continue;
        }
        format_of(embedding)->read(embedding->panels, batch->ids[row], model->hidden, out);
        if (model->embedding_scale != 1)
            for (int64_t i = 0; i < model->hidden; i++) out[i] *= (float)model->embedding_scale;
    }
    if (model->ngrams && !batch->inputs) add_ngrams(model->ngrams, batch, space->hidden, model->hidden, from, to);
}

/* Starts a late row: adds the anchor's x + up(down(x)) to its input, which is in the hidden states already (Joining). */
INLINE void join_row(const Model *model, const Space *space, const Joining *joining, int64_t row)
{
    const float *x = space->hidden + joining->anchor * model->hidden;
    float *out = space->hidden + row * model->hidden;
    int64_t whole = model->hidden / LANES * LANES;
    for (int64_t i = 0; i < model->hidden; i++) out[i] += x[i];
    for (int64_t r = 0; r < joining->rank; r++) {
        const float *down = joining->down + r * model->hidden, *up = joining->up + r * model->hidden;
        vf products = {0};
        float low = 0;
        for (int64_t i = 0; i < whole; i += LANES) products += load(down + i) * load(x + i);
        for (int64_t i = whole; i < model->hidden; i++) low += down[i] * x[i];
        low += sum(products);
        for (int64_t i = 0; i < model->hidden; i++) out[i] += up[i] * low;
    }
}

/* Norms a sub-layer's output and adds it to the hidden state; without a norm if weight is null. */
INLINE void add_normed(const Model *model, const Space *space, const float *weight, int64_t row)
{
    float *given = space->given + row * model->hidden, *out = space->hidden + row * model->hidden;
    norm_row(given, model->hidden, (float)(model->hidden * model->eps), weight, 0, given);
    for (int64_t i = 0; i < model->hidden; i++) out[i] += given[i];
}

/* Multiplies a row's hidden state by `scale`. */
INLINE void scale_hidden(const Model *model, const Space *space, double scale, int64_t row)
{
    float *out = space->hidden + row * model->hidden;
    for (int64_t i = 0; scale != 1 && i < model->hidden; i++) out[i] *= (float)scale;
}

/* Ends a layer after its feed-forward, unless the layer has a per-layer step, which ends it then. */
INLINE void end_layer(const Model *model, const Space *space, const Layer *layer, int64_t row)
{
    if (is_scaled(layer)) scale_hidden(model, space, layer->out_scale, row);
}

/* RoPE in NeoX's order: rotates pairs (i, i + half) of a head by the
 * row's cosines and sines (Su et al. 2021), and multiplies by `scale`. */
INLINE void rotate(const float *x, const float *rotations, int64_t half, float scale, int form, void *out)
{
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), cosine = load(rotations + i), sine = load(rotations + half + i);
        store_as(form, out, i, (a * cosine - b * sine) * scale);
        store_as(form, out, half + i, (b * cosine + a * sine) * scale);
    }
    for (; i < half; i++) {
        store_one(form, out, i, (x[i] * rotations[i] - x[half + i] * rotations[half + i]) * scale);
        store_one(form, out, half + i, (x[half + i] * rotations[i] + x[i] * rotations[half + i]) * scale);
    }
}

/* The byte offset in a page of one head's keys (which 0) or values
 * (1). `place`: the layer's among those in the same pages. */
INLINE int64_t part_of(int64_t kv_heads, int64_t pitch, int64_t place, int64_t which, int64_t head)
{
    return ((place * 2 + which) * kv_heads + head) * pitch;
}

/* Stores a row's key (which 0, rotated already) or value (1) of one head in its slot, in the form of the cache. */
static void store_row(const Alike *alike, const Segment *segment, int64_t place, int64_t which, int64_t head, int64_t slot,
                      const float *x)
{
    const Heads *heads = &alike->heads;
    const int64_t dim = heads->head_dim, part = part_of(alike->kv_heads, segment->pitch, place, which, head);
    const int form = heads->cached;
    if (!segment->pages[(uint64_t)slot / PAGE]) return;
    if (form == CACHE_Q8_0) {
        InputBlock blocks[LONGEST_HEAD / BLOCK];
        QUANTISE(x, dim, blocks, 1);
        (which ? store_value : store_key)(segment, part, slot, blocks, dim / BLOCK);
        return;
    }
    uint32_t words[LONGEST_HEAD], *out = which ? (uint32_t *)row_at(segment, part, slot, row_bytes(heads)) : words;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store_as(form, out, i, load(x + i));
    for (; i < dim; i++) store_one(form, out, i, x[i]);
    uint32_t *strip = (uint32_t *)strip_at(segment, part, strip_bytes_of(heads), slot) + slot % LANES;
    for (int64_t k = 0; !which && k < heads->words; k++) strip[k * LANES] = words[k];
}

/* Norms and rotates a row's queries and keys, norms its values, and stores keys and values in the cache. */
static void prepare_row(const Model *model, const Segment *segment, const Space *space, int64_t layer, int64_t row)
{
    const Layer *own = &model->layer[layer];
    const Alike *alike = &space->alike[own->recent];
    const int64_t dim = alike->heads.head_dim, heads = model->heads, words = words_of_query(&alike->heads);
    const int64_t slot = segment->start + row, flat = segment->begin + row, keys = own->reads_others ? 0 : alike->kv_heads;
    const float *norms = own->qk_norm, *rotations = own->rotations + turn_of(segment, row) * dim;
    const float floor = (float)(dim * model->eps);
    float *x = space->qkv + flat * space->qkv_stride, turned[LONGEST_HEAD];
    if (norms && own->wide_norms) {
        norm_row(x, heads * dim, (float)(heads * dim * model->eps), norms, 0, x);
        norm_row(x + heads * dim, keys * dim, (float)(keys * dim * model->eps), norms + heads * dim, 0, x + heads * dim);
        norms = 0;
    }
    for (int64_t head = 0; head < heads + keys; head++, x += dim) {
        uint32_t *query = space->queries + (flat * heads + head) * words;
        const int blocks = model->cached == CACHE_Q8_0, is_query = head < heads;
        if (norms) norm_row(x, dim, floor, norms + head * dim, 0, x);
        rotate(x, rotations, dim / 2, is_query ? (float)own->scale : 1.0f,
               is_query && !blocks ? form_of((int)model->cached) : FLOAT32, is_query && !blocks ? (void *)query : turned);
        if (blocks) spread(turned, dim);
        if (!is_query)
            store_row(alike, segment, own->place, 0, head - heads, slot, turned);
        else if (blocks)
            QUANTISE(turned, dim, (InputBlock *)query, 1);
    }
    for (int64_t head = 0; head < keys; head++, x += dim) {
        if (own->value_norm) norm_row(x, dim, floor, own->value_norm, 0, x);
        store_row(alike, segment, own->place, 1, head, slot, x);
    }
}

/* The same for rows from..to of the batch. */
static void prepare(const Model *model, const Batch *batch, const Space *space, int64_t layer, int64_t from, int64_t to)
{
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment segment = in_pages_of(&model->layer[layer], &batch->segment[s]);
        int64_t first = segment.begin + segment.base, end = segment.begin + segment.pending + segment.nodes;
        for (int64_t row = from > first ? from : first; row < (to < end ? to : end); row++)
            prepare_row(model, &segment, space, layer, row - segment.begin);
    }
}

/* Copies a token's keys and values, which are not in blocks, to another slot of its text, in all layers of the pages. A key
 * or value of a head is `words` words of 32 bits. */
static void move_row(char *const *pages, int64_t pitch, int64_t layers, int64_t heads, int64_t words, int64_t from, int64_t to)
{
    const int64_t bytes = 4 * words;
    for (int64_t part = 0; part < 2 * layers * heads; part++) {
        const char *source = pages[from / PAGE] + part * pitch;
        char *target = pages[to / PAGE] + part * pitch;
        if (part / heads % 2) { /* values lie token by token */
            memcpy(target + to % PAGE * bytes, source + from % PAGE * bytes, (size_t)bytes);
            continue;
        }
        const char *x = source + from % PAGE / LANES * LANES * bytes + from % LANES * 4;
        char *y = target + to % PAGE / LANES * LANES * bytes + to % LANES * 4;
        for (int64_t k = 0; k < words; k++) memcpy(y + k * LANES * 4, x + k * LANES * 4, 4);
    }
}

#endif
