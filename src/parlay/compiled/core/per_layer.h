/* Per-layer embeddings (Gemma 3n, Gemma 4): each row has `per_layer` numbers of its own for every layer, made before the first
 * layer (`run_per_layer_inputs`). At its end a layer adds norm(out(activation(gate(hidden)) * its numbers)) to the hidden
 * state (`run_per_layer`).
 */
#ifndef PARLAY_PER_LAYER_H
#define PARLAY_PER_LAYER_H

#include "phases.h"
#include "rows.h"

INLINE int64_t per_layer_numbers(const Model *model) { return model->layers * model->per_layer; }

/* Writes the hidden states, without a norm, as inputs of a product. */
static void enter_product(const Pass *pass, const Linear *linear, int64_t rows, int64_t part, int64_t parts)
{
    int wanted = format_of(linear)->input;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        norm_input(pass->model, pass->space, 0, wanted, row, row, linear->order);
}

static void enter_projection(const Pass *pass, int64_t part, int64_t parts)
{
    enter_product(pass, &pass->model->per_layer_projection, pass->batch->rows, part, parts);
}

/* Makes each row's numbers: its token's embedding times per_layer_scale, plus the projection, normed layer by layer. */
static void mix_embeddings(const Pass *pass, int64_t part, int64_t parts)
{
    const Model *model = pass->model;
    const Linear *embedding = &model->per_layer_embedding;
    int64_t rows = pass->batch->rows, numbers = per_layer_numbers(model), each = model->per_layer;
    float floor = (float)((double)each * model->eps * (double)model->hidden), scale = (float)model->per_layer_scale;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
        float *own = pass->space->per_layer + row * 2 * numbers, *projected = own + numbers;
        format_of(embedding)->read(embedding->panels, pass->batch->ids[row], numbers, own);
        for (int64_t layer = 0; layer < model->layers; layer++)
            norm_row(projected + layer * each, each, floor, model->per_layer_norm, 0, projected + layer * each);
        for (int64_t i = 0; i < numbers; i++) own[i] = own[i] * scale + projected[i];
    }
}

/* Makes all rows' numbers for all layers, before the first layer. The model divides the projection by sqrt(hidden);
 * here the norm's epsilon is multiplied by `hidden` instead, which gives the same. */
static int run_per_layer_inputs(const Pass *pass)
{
    int64_t numbers = per_layer_numbers(pass->model);
    Product product = {
        {&pass->model->per_layer_projection}, pass->space->normed, KEEP, pass->space->per_layer + numbers, 2 * numbers};
    return run_rows(pass, enter_projection) && run_product(pass, product, pass->batch->rows, mix_embeddings);
}

/* Writes the hidden states as inputs of the layer's gate. */
static void enter_gate(const Pass *pass, int64_t part, int64_t parts)
{
    enter_product(pass, &pass->model->layer[pass->here / 2].per_layer_gate, pass->rows, part, parts);
}

/* Writes activation(gate) times the layer's numbers as inputs of its out product. */
static void open_gates(const Pass *pass, int64_t part, int64_t parts)
{
    const Model *model = pass->model;
    const Layer *layer = &model->layer[pass->here / 2];
    const Inputs *inputs = &pass->space->gated;
    int wanted = format_of(&layer->per_layer_out)->input;
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++) {
        const float *gates = pass->space->gates + row * model->per_layer;
        const float *numbers = pass->space->per_layer + row * 2 * per_layer_numbers(model) + pass->here / 2 * model->per_layer;
        for (int64_t i = 0; i < model->per_layer; i += LANES) {
            vf value = gate_up(layer->activation, load(gates + i), load(numbers + i));
            if (i + LANES <= model->per_layer)
                put_input(inputs, wanted, row, i, value);
            else
                for (int64_t k = i; k < model->per_layer; k++) put_one_input(inputs, wanted, row, k, value[k - i]);
        }
        put_codes_of_row(inputs, wanted, row, model->per_layer, layer->per_layer_out.order);
    }
}

/* Norms what the step gives and adds it to the hidden state, which then leaves the layer. */
static void add_last(const Pass *pass, int64_t part, int64_t parts)
{
    const Layer *layer = &pass->model->layer[pass->here / 2];
    for (int64_t row = pass->rows * part / parts; row < pass->rows * (part + 1) / parts; row++) {
        add_normed(pass->model, pass->space, layer->per_layer_norm, row);
        scale_hidden(pass->model, pass->space, layer->out_scale, row);
    }
}

/* The last step of a layer, from the gate's inputs to the hidden state. */
static int run_per_layer(const Pass *pass)
{
    const Model *model = pass->model;
    const Layer *layer = &model->layer[pass->here / 2];
    Product gate = {{&layer->per_layer_gate}, pass->space->normed, KEEP, pass->space->gates, model->per_layer};
    Product out = {{&layer->per_layer_out}, pass->space->gated, KEEP, pass->space->given, model->hidden};
    return run_product(pass, gate, pass->rows, open_gates) && run_product(pass, out, pass->rows, add_last);
}

#endif
