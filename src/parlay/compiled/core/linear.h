/* Products of rows with packed weights: memory is read once, in order, for as many rows as there are registers. */
#ifndef PARLAY_LINEAR_H
#define PARLAY_LINEAR_H

#include "core.h"
#include "dense.h"

/* Rows that enter products, in the forms that these want. */
typedef struct {
    float *floats;      /* [rows][stride] */
    uint16_t *brains;   /* the same */
    InputBlock *blocks; /* [stride / BLOCK][rows] */
    int64_t stride, rows;
} Inputs;

/* What becomes of the outputs of a product: they are put, or added to what is there, or two products make activation(first)
 * * second, which enters a third. */
typedef enum { KEEP, ADD, GATE } Ending;

/* What a thread needs to compute sums is here or lives as long as the model, for it may come late to its piece. */
typedef struct {
    const Linear *linear[3]; /* side by side; null from some on */
    Inputs x;
    Ending ending;
    float *y; /* [rows][stride], but for GATE */
    int64_t stride;
    const Inputs *gated;
    int wanted; /* forms of it */
    int64_t activation;
    float cap; /* of what is put: see bounded; 0: none */
    const LowRank *const *adapters; /* as a batch has them, or null; and `lowered` as that has it */
    const float *lowered;
    int64_t most_rank, first; /* which of an adapter's products is the first of these */
    int brains;               /* whether adapters are in bfloat16 */
    int lowers;               /* whether it makes `lowered` itself; else it is there with the inputs */
} Product;

typedef struct {
    const Linear *linear;
    int64_t index;  /* among its panels */
    int64_t column; /* of the product's outputs: where it begins */
} Panel;

INLINE const Format *format_of(const Linear *linear) { return find_format(linear->kind); }

INLINE int64_t panels_of(const Linear *linear) { return (linear->out + PANEL - 1) / PANEL; }

static int64_t panels_of_product(const Product *product)
{
    int64_t count = 0;
    for (int i = 0; i < 3 && product->linear[i]; i++) count += panels_of(product->linear[i]);
    return count;
}

/* As many neighbouring panels stay together: two are faster, a gate and its up need each other, and gates must make up
 * whole blocks of the next product's inputs. */
static int64_t unit_of(const Product *product)
{
    return product->ending == GATE && PANEL < BLOCK ? 2 * BLOCK / PANEL : 2;
}

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

/* How many of so many rows a pass over a panel of blocks takes: about the same in each. Where there is no code for their
 * number, rows would be computed in vain, so passes are shorter. */
INLINE int64_t rows_of_pass(int64_t rows)
{
    int64_t passes = (rows + STRIP_ROWS - 1) / STRIP_ROWS, each = passes ? (rows + passes - 1) / passes : 1;
    return each > EXACT_ROWS && each % 4 ? (rows + 2 * passes - 1) / (2 * passes) : each;
}

/* One panel times all rows, in blocks, to out [rows][PANEL]. */
static void multiply_blocks(const Panel *panel, const Inputs *x, int64_t rows, float *out)
{
    const Format *format = format_of(panel->linear);
    int64_t blocks = (panel->linear->in + BLOCK - 1) / BLOCK;
    const int64_t each = rows_of_pass(rows);
    for (int64_t row = 0; row < rows; row += each) {
        int64_t count = rows - row < each ? rows - row : each;
        vf sums[STRIP_ROWS][BLOCKS];
        format->blocks(weights_of(panel), x->blocks + row, x->rows, blocks, count, sums);
        memcpy(out + row * PANEL, sums, (size_t)(count * PANEL) * 4);
    }
}

/* One panel, or two of the same format and length, times all rows, to out [panels][rows][PANEL]. */
static void multiply_words(const Panel *panel, int panels, const Inputs *x, int64_t rows, float *out)
{
    const Format *format = format_of(panel->linear);
    int64_t passes = (rows + TILE - 1) / TILE, each = passes ? (rows + passes - 1) / passes : 1;
    int64_t pair = format->input == BRAINS ? 2 : 1, words = (panel->linear->in + pair - 1) / pair;
    const uint32_t *inputs = pair == 2 ? (const uint32_t *)x->brains : (const uint32_t *)x->floats;
    int64_t apart = panels == 2 ? weights_of(panel + 1) - weights_of(panel) : 0;
    for (int64_t row = 0; row < rows; row += each) {
        int64_t count = rows - row < each ? rows - row : each, stride = x->stride / pair;
        vf sums[2][TILE][BLOCKS];
        format->words(count, panels, weights_of(panel), apart, inputs + row * stride, stride, words, sums);
        for (int p = 0; p < panels; p++)
            memcpy(out + (p * rows + row) * PANEL, sums[p], (size_t)(count * PANEL) * 4);
    }
}

/* `count` panels from `first` on for all rows, as they come out of the sums: `out` is [count][rows][PANEL]. Two panels
 * at a time where few rows leave registers free. */
static void multiply_panels(const Product *product, int64_t rows, int64_t first, int64_t count, float *out)
{
    for (int64_t i = 0, panels; i < count; i += panels, out += panels * rows * PANEL) {
        Panel panel[2] = {panel_at(product, first + i), panel_at(product, first + (i + 1 < count ? i + 1 : i))};
        const Linear *one = panel[0].linear, *other = panel[1].linear;
        panels = 1;
        if (format_of(one)->blocks)
            multiply_blocks(panel, &product->x, rows, out);
        else {
            panels = rows <= TILE / 2 && i + 1 < count && one->kind == other->kind && one->in == other->in ? 2 : 1;
            multiply_words(panel, (int)panels, &product->x, rows, out);
        }
    }
}

INLINE void add_words(const int bf16, const char *up, const uint32_t *lowered, int64_t words, vf outputs[BLOCKS])
{
    for (int64_t r = 0; r < words; r++) {
        const char *at = up + r * PANEL * 4;
        const vu low = splat_word(lowered[r]);
        for (int64_t b = 0; b < PANEL * 4; b += 64) __builtin_prefetch(at + words * PANEL * 4 + b); /* of the next panel */
        UNROLL for (int b = 0; b < BLOCKS; b++)
            outputs[b] = dot(bf16, outputs[b], load_words(at + b * LANES * 4), low);
    }
}

/* The second half of what a row's adapter adds, in order of its ranks. */
INLINE void add_adapter(const Product *to, const Panel *panel, int64_t row, vf outputs[BLOCKS])
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
    const int64_t words = to->brains ? (own->rank + 1) / 2 : own->rank;
    const char *up = (const char *)own->up + panel->index * words * PANEL * 4;
    if (to->brains)
        add_words(1, up, lowered, words, outputs);
    else
        add_words(0, up, lowered, words, outputs);
}

INLINE void load_outputs(const Product *to, const Panel *panel, int64_t row, const float *sums, vf outputs[BLOCKS])
{
    const Linear *linear = panel->linear;
    UNROLL for (int b = 0; b < BLOCKS; b++) {
        outputs[b] = load(sums + b * LANES);
        if (linear->scale) outputs[b] *= load(linear->scale + panel->index * PANEL + b * LANES);
        if (linear->bias) outputs[b] += load(linear->bias + panel->index * PANEL + b * LANES);
    }
    add_adapter(to, panel, row, outputs);
}

INLINE void put_outputs(const Product *to, const Panel *panel, int64_t row, const vf outputs[BLOCKS])
{
    float *y = to->y + row * to->stride + panel->column;
    int64_t left = panel->linear->out - panel->index * PANEL;
    if (left >= PANEL && to->cap == 0) {
        UNROLL for (int b = 0; b < BLOCKS; b++)
            store(y + b * LANES, to->ending == ADD ? load(y + b * LANES) + outputs[b] : outputs[b]);
    } else {
        float last[PANEL];
        if (left > PANEL) left = PANEL;
        for (int b = 0; b < BLOCKS; b++) store(last + b * LANES, to->cap == 0 ? outputs[b] : bounded(outputs[b], to->cap));
        for (int64_t i = 0; i < left; i++) y[i] = to->ending == ADD ? y[i] + last[i] : last[i];
    }
}

INLINE void put_input(const Inputs *inputs, int wanted, int64_t row, int64_t index, vf value)
{
    if (wanted & (FLOATS | CODES)) store(inputs->floats + row * inputs->stride + index, value);
    if (wanted & BRAINS) store_as(1, inputs->brains + row * inputs->stride, index, value);
}

INLINE void put_one_input(const Inputs *inputs, int wanted, int64_t row, int64_t index, float value)
{
    if (wanted & (FLOATS | CODES)) inputs->floats[row * inputs->stride + index] = value;
    if (wanted & BRAINS) inputs->brains[row * inputs->stride + index] = round_one(value);
}

/* Numbers `from` on, at the beginning of a block, of those that a row has put; behind its end there are zeros. */
INLINE void put_codes(const Inputs *inputs, int wanted, int64_t row, int64_t from, int64_t count)
{
    if (wanted & CODES)
        QUANTISE(inputs->floats + row * inputs->stride + from, count, inputs->blocks + from / BLOCK * inputs->rows + row,
                 inputs->rows);
}

/* The order in which side by side products read the numbers of a row: one for all. */
INLINE const int32_t *order_of(const Linear *const linear[3])
{
    const int32_t *order = 0;
    for (int i = 0; i < 3 && linear[i] && !order; i++) order = linear[i]->order;
    return order;
}

/* The codes of all numbers that a row has put, in the order in which products read them; null: as they are. */
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

/* silu: x / (1 + exp(-x)). The approximation of gelu has 2 sqrt(2 / pi) (x + 0.044715 x^3) in the place of that x. */
INLINE vf activate(int64_t activation, vf x)
{
    vf inner = activation == GELU_TANH ? (x + x * x * x * 0.044715f) * 1.59576912f : x;
    return x / (1.0f + exponential(choose(inner < -87.0f, splat(87.0f), -inner)));
}

/* What a gate and its up make together. */
INLINE vf gate_up(int64_t activation, vf gate, vf up)
{
    if (activation != CLAMPED_SWIGLU) return activate(activation, gate) * up;
    const vf most = splat(7.0f);
    vf x = choose(gate > most, most, gate), inner = x * 1.702f;
    up = choose(up > most, most, choose(up < -most, -most, up));
    return x / (1.0f + exponential(choose(inner < -87.0f, splat(87.0f), -inner))) * (up + 1.0f);
}

/* Gates and their ups, then the codes of what they make: `count` panels are whole units. */
static void finish_gates(const Product *to, int64_t rows, int64_t first, int64_t count, const float *sums)
{
    for (int64_t i = 0; i < count; i += 2) {
        Panel gate = panel_at(to, first + i), up = panel_at(to, first + i + 1);
        for (int64_t row = 0; row < rows; row++) {
            vf gates[BLOCKS], ups[BLOCKS];
            load_outputs(to, &gate, row, sums + (i * rows + row) * PANEL, gates);
            load_outputs(to, &up, row, sums + ((i + 1) * rows + row) * PANEL, ups);
            UNROLL for (int b = 0; b < BLOCKS; b++)
                put_input(to->gated, to->wanted, row, gate.column + b * LANES,
                          gate_up(to->activation, gates[b], ups[b]));
        }
    }
    for (int64_t row = 0; row < rows; row++)
        put_codes(to->gated, to->wanted, row, panel_at(to, first).column, count / 2 * PANEL);
}

/* What `multiply_panels` left in `sums`, to where the product's outputs go. */
static void finish_panels(const Product *to, int64_t rows, int64_t first, int64_t count, const float *sums)
{
    if (to->ending == GATE) {
        finish_gates(to, rows, first, count, sums);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        Panel panel = panel_at(to, first + i);
        for (int64_t row = 0; row < rows; row++, sums += PANEL) {
            vf outputs[BLOCKS];
            load_outputs(to, &panel, row, sums, outputs);
            put_outputs(to, &panel, row, outputs);
        }
    }
}

#endif
