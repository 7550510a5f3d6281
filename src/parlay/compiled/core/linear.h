/* Matrix products y = W x of a batch's rows with packed weights: the counterpart of ggml's mul_mat.
 *
 * phases.h runs a `Product` on the pool's threads. Each piece of work is some panels of W times all rows, in two steps:
 * `multiply_panels` writes raw sums to memory of the thread, and `finish_panels` applies scale, bias and adapters and
 * writes the outputs where all threads see them. Nothing shared is written before the second step, so a piece may be
 * computed twice, but is committed once (pool.h). Weights are read from memory once, in order, for as many rows as the
 * registers hold sums of.
 *
 * A panel is PANEL neighbouring rows of W, that is PANEL outputs, interleaved so that one vector holds the weights of LANES
 * outputs for the same inputs. dense.h has the layout of plain numbers, codes.h that of quantised blocks:
 *
 *     W [out][in]:  panel 0 = outputs 0 .. PANEL - 1 | panel 1 = outputs PANEL .. 2 PANEL - 1 | ... | last: filled with zeros
 */
#ifndef PARLAY_LINEAR_H
#define PARLAY_LINEAR_H

#include "core.h"
#include "dense.h"
#include "likeliest.h"

/* The rows that products read, in every form that some weight format multiplies: float32, bfloat16, or blocks of 32
 * eight-bit codes with one scale (as ggml's q8_1). Only the forms that the products at hand want are filled in. */
typedef struct {
    float *floats;      /* [rows][stride] */
    uint16_t *bfloats;   /* the same */
    /* [stride / BLOCK][rows]: block b of all rows lies together, for a product goes through a panel block by block. */
    InputBlock *blocks;
    int64_t stride, rows; /* stride: numbers of a row, padded; rows: how many there is room for */
} Inputs;

/* What happens to a product's outputs. KEEP: they overwrite y. ADD: they are added to y, as at a residual connection.
 * GATE: of two matrices, gate and up, activation(gate) * up becomes the inputs of the next product, down. BEST: only the
 * place of each row's largest output is kept (likeliest.h). */
typedef enum { KEEP, ADD, GATE, BEST } Ending;

/* A product of the batch's rows with up to three matrices that read the same inputs: query, key and value, or gate and
 * up. A thread that the system has suspended may compute its piece after the phase has ended. So each thread has a copy
 * of this struct, and all that `multiply_panels` reads through it lives until `parlay_pool_rest`. */
typedef struct {
    /* The matrices, null after the last one. Their outputs lie side by side in a row of y. */
    const Linear *linear[3];
    Inputs x;
    Ending ending;
    float *y; /* [rows][stride], if the ending is KEEP or ADD */
    int64_t stride;
    /* For GATE: where the inputs of the next product go, in which
     * forms (FLOATS, BFLOATS, CODES), and by which activation. */
    const Inputs *gated;
    int wanted;
    int64_t activation;
    float cap; /* outputs y become cap * tanh(y / cap) (`bounded`); 0: they do not */
    /* LoRA: the rows' adapters as Batch has them, or null; and down(x) of each row and matrix, [rows][3][most_rank]. */
    const LowRank *const *adapters;
    const float *lowered;
    int64_t most_rank, first; /* first: the place of linear[0] in an adapter's table */
    int bfloats;               /* 1: the adapters' matrices are in bfloat16 */
    /* 1: `run_product` computes `lowered`, in a phase of its own. 0: whoever made the inputs has done so. */
    int lowers;
    uint64_t *likeliest; /* [rows]: the keys of BEST */
} Product;

/* One panel of one of a product's matrices. */
typedef struct {
    const Linear *linear;
    int64_t index;  /* among the matrix's panels */
    int64_t column; /* where its outputs begin in a row of y */
} Panel;

INLINE const Format *format_of(const Linear *linear) { return find_format(linear->kind); }

INLINE int64_t panels_of(const Linear *linear) { return (linear->out + PANEL - 1) / PANEL; }

/* The panels of all matrices of a product. */
static int64_t panels_of_product(const Product *product)
{
    int64_t count = 0;
    for (int i = 0; i < 3 && product->linear[i]; i++) count += panels_of(product->linear[i]);
    return count;
}

/* How many neighbouring panels stay in one piece of work. Two are faster than one. GATE needs a gate panel and its up
 * panel together, and enough of them to fill whole blocks of the next product's inputs, whose codes share a scale. */
static int64_t unit_of(const Product *product)
{
    return product->ending == GATE && PANEL < BLOCK ? 2 * BLOCK / PANEL : 2;
}

/* Panel number `index` of a product: the matrices' panels in turn, but for GATE a gate panel and an up panel alternate. */
static Panel panel_at(const Product *product, int64_t index)
{
    if (product->ending == GATE) return (Panel){product->linear[index % 2], index / 2, index / 2 * PANEL};
    int64_t column = 0;
    int i = 0;
    for (; index >= panels_of(product->linear[i]); i++) {
        index -= panels_of(product->linear[i]);
        column += product->linear[i]->out;
    }
    return (Panel){product->linear[i], index, column + index * PANEL};
}

INLINE const char *weights_of(const Panel *panel)
{
    return (const char *)panel->linear->panels + panel->index * format_of(panel->linear)->panel_bytes(panel->linear->in);
}

/* How many rows one pass over a panel of blocks takes: STRIP_ROWS at most, and about the same number in each pass, in
 * fours, which go together. */
INLINE int64_t rows_of_pass(int64_t rows)
{
    int64_t passes = (rows + STRIP_ROWS - 1) / STRIP_ROWS;
    return passes > 1 ? (rows + 4 * passes - 1) / (4 * passes) * 4 : rows;
}

/* Multiplies one panel of a block format with all rows, to out [rows][PANEL]. */
static void multiply_blocks(const Panel *panel, const Inputs *x, int64_t rows, float *out)
{
    const Format *format = format_of(panel->linear);
    int64_t blocks = (panel->linear->in + BLOCK - 1) / BLOCK;
    const int64_t each = rows_of_pass(rows);
    for (int64_t row = 0; row < rows; row += each) {
        int64_t count = rows - row < each ? rows - row : each;
        format->blocks(weights_of(panel), x->blocks + row, x->rows, blocks, count, (vf(*)[STRIPS])(out + row * PANEL));
    }
}

/* Multiplies one panel of plain numbers, or two of the same format
 * and length, with all rows, to out [panels][rows][PANEL]. */
static void multiply_words(const Panel *panel, int panels, const Inputs *x, int64_t rows, float *out)
{
    const Format *format = format_of(panel->linear);
    int64_t passes = (rows + DENSE_ROWS - 1) / DENSE_ROWS, each = passes ? (rows + passes - 1) / passes : 1;
    int64_t pair = format->input == BFLOATS ? 2 : 1, words = (panel->linear->in + pair - 1) / pair;
    const uint32_t *inputs = pair == 2 ? (const uint32_t *)x->bfloats : (const uint32_t *)x->floats;
    int64_t apart = panels == 2 ? weights_of(panel + 1) - weights_of(panel) : 0;
    for (int64_t row = 0; row < rows; row += each) {
        int64_t count = rows - row < each ? rows - row : each, stride = x->stride / pair;
        vf sums[2][DENSE_ROWS][STRIPS];
        format->words(count, panels, weights_of(panel), apart, inputs + row * stride, stride, words, sums);
        for (int p = 0; p < panels; p++)
            memcpy(out + (p * rows + row) * PANEL, sums[p], (size_t)(count * PANEL) * 4);
    }
}

/* Multiplies `count` panels from `first` on with all rows. `out` [count][rows][PANEL] gets raw sums, before scale and
 * bias. Two panels of plain numbers go together where rows are so few that the registers hold the sums of both. */
static void multiply_panels(const Product *product, int64_t rows, int64_t first, int64_t count, float *out)
{
    for (int64_t i = 0, panels; i < count; i += panels, out += panels * rows * PANEL) {
        Panel panel[2] = {panel_at(product, first + i), panel_at(product, first + (i + 1 < count ? i + 1 : i))};
        const Linear *one = panel[0].linear, *other = panel[1].linear;
        panels = 1;
        if (format_of(one)->blocks)
            multiply_blocks(panel, &product->x, rows, out);
        else {
            panels = rows <= DENSE_ROWS / 2 && i + 1 < count && one->kind == other->kind && one->in == other->in ? 2 : 1;
            multiply_words(panel, (int)panels, &product->x, rows, out);
        }
    }
}

/* Adds up(lowered) to one panel of a row's outputs, with the adapter's matrix in float32 or bfloat16. */
INLINE void add_words(const int bf16, const char *up, const uint32_t *lowered, int64_t words, vf outputs[STRIPS])
{
    for (int64_t r = 0; r < words; r++) {
        const char *at = up + r * PANEL * 4;
        const vu low = splat_word(lowered[r]);
        for (int64_t b = 0; b < PANEL * 4; b += 64) __builtin_prefetch(at + words * PANEL * 4 + b); /* the next panel */
        UNROLL for (int b = 0; b < STRIPS; b++)
            outputs[b] = dot(bf16, outputs[b], load_words(at + b * LANES * 4), low);
    }
}

/* Adds up(down(x)) to one panel of a row's outputs, if the row has an adapter; down(x) is in `lowered` (adapters.h).
 * Ranks are summed in order, so that the bits are always the same. */
INLINE void add_adapter(const Product *to, const Panel *panel, int64_t row, vf outputs[STRIPS])
{
    const LowRank *own = to->adapters ? to->adapters[row] : 0;
    if (!own) return;
    int64_t which = 0;
    while (to->linear[which] != panel->linear) which++;
    own += to->first + which;
    const uint32_t *lowered = (const uint32_t *)(to->lowered + (row * 3 + which) * to->most_rank);
    if (own->codes) {
        const int64_t count = (own->rank + RANKS - 1) / RANKS;
        RAISE((const char *)own->up + panel->index * count * RAISE_BYTES, (const InputBlock *)lowered, count, outputs);
        return;
    }
    const int64_t words = to->bfloats ? (own->rank + 1) / 2 : own->rank;
    const char *up = (const char *)own->up + panel->index * words * PANEL * 4;
    if (to->bfloats)
        add_words(1, up, lowered, words, outputs);
    else
        add_words(0, up, lowered, words, outputs);
}

/* Loads a row's raw sums of one panel, and applies scale, bias and the row's adapter. */
INLINE void load_outputs(const Product *to, const Panel *panel, int64_t row, const float *sums, vf outputs[STRIPS])
{
    const Linear *linear = panel->linear;
    UNROLL for (int b = 0; b < STRIPS; b++) {
        outputs[b] = load(sums + b * LANES);
        if (linear->scale) outputs[b] *= load(linear->scale + panel->index * PANEL + b * LANES);
        if (linear->bias) outputs[b] += load(linear->bias + panel->index * PANEL + b * LANES);
    }
    add_adapter(to, panel, row, outputs);
}

/* Writes or adds one panel of a row's outputs to y, without the zeros that fill up the last panel. */
INLINE void put_outputs(const Product *to, const Panel *panel, int64_t row, const vf outputs[STRIPS])
{
    float *y = to->y + row * to->stride + panel->column;
    int64_t left = panel->linear->out - panel->index * PANEL;
    if (left >= PANEL && to->cap == 0) {
        UNROLL for (int b = 0; b < STRIPS; b++)
            store(y + b * LANES, to->ending == ADD ? load(y + b * LANES) + outputs[b] : outputs[b]);
    } else {
        float last[PANEL];
        if (left > PANEL) left = PANEL;
        for (int b = 0; b < STRIPS; b++) store(last + b * LANES, to->cap == 0 ? outputs[b] : bounded(outputs[b], to->cap));
        for (int64_t i = 0; i < left; i++) y[i] = to->ending == ADD ? y[i] + last[i] : last[i];
    }
}

/* Writes LANES inputs of a row from place `index` on, in the
 * wanted forms. Codes are made of the floats later: `put_codes`. */
INLINE void put_input(const Inputs *inputs, int wanted, int64_t row, int64_t index, vf value)
{
    if (wanted & (FLOATS | CODES)) store(inputs->floats + row * inputs->stride + index, value);
    if (wanted & BFLOATS) store_as(1, inputs->bfloats + row * inputs->stride, index, value);
}

/* The same for a single input. */
INLINE void put_one_input(const Inputs *inputs, int wanted, int64_t row, int64_t index, float value)
{
    if (wanted & (FLOATS | CODES)) inputs->floats[row * inputs->stride + index] = value;
    if (wanted & BFLOATS) inputs->bfloats[row * inputs->stride + index] = round_one(value);
}

/* Quantises `count` of a row's floats from `from` on, where a block begins. Zeros fill up the last block. */
INLINE void put_codes(const Inputs *inputs, int wanted, int64_t row, int64_t from, int64_t count)
{
    if (wanted & CODES)
        QUANTISE(inputs->floats + row * inputs->stride + from, count, inputs->blocks + from / BLOCK * inputs->rows + row,
                 inputs->rows);
}

/* The order in which products side by side read the numbers of a
 * row, which is the same for all of them (`Linear.order`). */
INLINE const int32_t *order_of(const Linear *const linear[3])
{
    const int32_t *order = 0;
    for (int i = 0; i < 3 && linear[i] && !order; i++) order = linear[i]->order;
    return order;
}

/* Quantises all floats of a row, in the given order; null: as they lie. */
INLINE void put_codes_of_row(const Inputs *inputs, int wanted, int64_t row, int64_t count, const int32_t *order)
{
    if (!order) {
        put_codes(inputs, wanted, row, 0, count);
        return;
    }
    const float *x = inputs->floats + row * inputs->stride;
    for (int64_t from = 0; from < count; from += BLOCK) {
        float some[BLOCK];
        int64_t left = count - from < BLOCK ? count - from : BLOCK;
        for (int64_t i = 0; i < left; i++) some[i] = x[order[from + i]];
        QUANTISE(some, left, inputs->blocks + from / BLOCK * inputs->rows + row, inputs->rows);
    }
}

/* silu(x) = x / (1 + exp(-x)). GELU's approximation by tanh is x
 * / (1 + exp(-z)) with z = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf activate(int64_t activation, vf x)
{
    vf inner = activation == GELU_TANH ? (x + x * x * x * 0.044715f) * 1.59576912f : x;
    return x / (1.0f + exponential(choose(inner < -87.0f, splat(87.0f), -inner)));
}

/* activation(gate) * up. CLAMPED_SWIGLU is gpt-oss's: see `SILU` in core.h. */
INLINE vf gate_up(int64_t activation, vf gate, vf up)
{
    if (activation != CLAMPED_SWIGLU) return activate(activation, gate) * up;
    const vf most = splat(7.0f);
    vf x = choose(gate > most, most, gate), inner = x * 1.702f;
    up = choose(up > most, most, choose(up < -most, -most, up));
    return x / (1.0f + exponential(choose(inner < -87.0f, splat(87.0f), -inner))) * (up + 1.0f);
}

/* Computes activation(gate) * up of one row, of pair number `pair` of a piece's gate and up panels. */
INLINE void gate_pair(const Product *to, int64_t rows, int64_t first, int64_t pair, int64_t row, const float *sums, float *at)
{
    const Panel gate = panel_at(to, first + 2 * pair), up = panel_at(to, first + 2 * pair + 1);
    vf gates[STRIPS], ups[STRIPS];
    load_outputs(to, &gate, row, sums + (2 * pair * rows + row) * PANEL, gates);
    load_outputs(to, &up, row, sums + ((2 * pair + 1) * rows + row) * PANEL, ups);
    UNROLL for (int b = 0; b < STRIPS; b++) store(at + b * LANES, gate_up(to->activation, gates[b], ups[b]));
}

/* Pairs of panels that `finish_gates` takes at once: whole blocks, and enough for QUANTISE to work on several side by side. */
enum { GATE_PAIRS = 8 };

/* Finishes `pairs` pairs of gate and up panels of one row, at most GATE_PAIRS, from pair number `pair` of a piece on. */
static void finish_row_of_gates(const Product *to, int64_t rows, int64_t first, int64_t pair, int64_t pairs, int64_t row,
                                const float *sums)
{
    float values[GATE_PAIRS * PANEL];
    const int64_t column = panel_at(to, first + 2 * pair).column, numbers = pairs * PANEL;
    for (int64_t p = 0; p < pairs; p++) gate_pair(to, rows, first, pair + p, row, sums, values + p * PANEL);
    if (to->wanted & ~CODES)
        for (int64_t i = 0; i < numbers; i += LANES)
            put_input(to->gated, to->wanted & ~CODES, row, column + i, load(values + i));
    if (to->wanted & CODES)
        QUANTISE(values, numbers, to->gated->blocks + column / BLOCK * to->gated->rows + row, to->gated->rows);
}

/* Finishes pairs of gate and up panels: writes activation(gate) * up as inputs of the next product. `count` panels are
 * whole units (see `unit_of`), so they fill whole blocks. Where only codes are wanted, nothing else is written: a prompt's
 * floats would go to memory and back. */
static void finish_gates(const Product *to, int64_t rows, int64_t first, int64_t count, const float *sums)
{
    for (int64_t pair = 0; pair < count / 2; pair += GATE_PAIRS) {
        const int64_t left = count / 2 - pair, pairs = left < GATE_PAIRS ? left : GATE_PAIRS;
        for (int64_t row = 0; row < rows; row++) finish_row_of_gates(to, rows, first, pair, pairs, row, sums);
    }
}

/* Finishes panels of which only each row's largest output is wanted. */
static void finish_best(const Product *to, int64_t rows, int64_t first, int64_t count, const float *sums)
{
    for (int64_t row = 0; row < rows; row++) {
        Leader best = no_leader();
        for (int64_t i = 0; i < count; i++) {
            const Panel panel = panel_at(to, first + i);
            vf outputs[STRIPS];
            load_outputs(to, &panel, row, sums + (i * rows + row) * PANEL, outputs);
            UNROLL for (int b = 0; b < STRIPS; b++) {
                if (to->cap != 0) outputs[b] = bounded(outputs[b], to->cap);
                best = better(best, outputs[b], panel.column + b * LANES, panel.linear->out);
            }
        }
        join_leader(&best, to->likeliest + row);
    }
}

/* Finishes what `multiply_panels` left in `sums`, and writes it to where the product's outputs go. */
static void finish_panels(const Product *to, int64_t rows, int64_t first, int64_t count, const float *sums)
{
    if (to->ending == GATE || to->ending == BEST) {
        (to->ending == GATE ? finish_gates : finish_best)(to, rows, first, count, sums);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        Panel panel = panel_at(to, first + i);
        for (int64_t row = 0; row < rows; row++, sums += PANEL) {
            vf outputs[STRIPS];
            load_outputs(to, &panel, row, sums, outputs);
            put_outputs(to, &panel, row, outputs);
        }
    }
}

#endif
