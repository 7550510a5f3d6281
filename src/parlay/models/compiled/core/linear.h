/* Products of rows with packed weights: memory is read once, in order, for every TILE rows out of the nearest cache. */
#ifndef PARLAY_LINEAR_H
#define PARLAY_LINEAR_H

#include "core.h"
#include "lanes.h"

#define AHEAD 3072 /* bytes of weights fetched before they are needed */

typedef struct {
    vf rows[TILE][BLOCKS];
} Sums; /* of one panel */

INLINE int64_t weight_bytes(int kind, int bf16) { return kind == WEIGHT_I8 ? (bf16 ? 2 : 1) : 4; } /* of a word */

/* `panels` neighbouring panels, `apart` bytes from each other, times `rows` rows of `words` words each, `stride` words
 * apart. */
INLINE void multiply(const int kind, const int bf16, const int rows, const int panels, const char *panel, int64_t apart,
                     const uint32_t *x, int64_t stride, int64_t words, Sums *total)
{
    const int64_t size = LANES * weight_bytes(kind, bf16);
    vf sums[TILE][2 * BLOCKS] = {{{0}}};
    for (int64_t k = 0; k < words; k++) {
        vu weights[2 * BLOCKS];
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int b = 0; b < BLOCKS; b++) {
                const char *at = panel + p * apart + (k * BLOCKS + b) * size;
                if (b * size % 64 == 0) __builtin_prefetch(at + AHEAD);
                weights[p * BLOCKS + b] = kind == WEIGHT_I8 ? expand(bf16, (const int8_t *)at) : load_words(at);
            }
        UNROLL for (int i = 0; i < rows; i++) {
            vu input = splat_word(x[i * stride + k]);
            UNROLL for (int b = 0; b < panels * BLOCKS; b++) sums[i][b] = dot(bf16, sums[i][b], weights[b], input);
        }
    }
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int b = 0; b < BLOCKS; b++) total[p].rows[i][b] = sums[i][p * BLOCKS + b];
}

#define ROWS(COUNT, KIND, BF16)                                                                                      \
    if (COUNT <= TILE && rows <= COUNT) {                                                                            \
        if (panels == 1)                                                                                             \
            multiply(KIND, BF16, COUNT <= TILE ? COUNT : 1, 1, panel, apart, x, stride, words, total);               \
        else                                                                                                         \
            multiply(KIND, BF16, COUNT <= TILE / 2 ? COUNT : 1, 2, panel, apart, x, stride, words, total);           \
        return;                                                                                                      \
    }

/* Up to TILE rows, of two panels up to half as many; some rows more are read where there is no code for their number. */
#define MULTIPLY(NAME, KIND, BF16)                                                                                   \
    static void NAME(int64_t rows, int panels, const char *panel, int64_t apart, const uint32_t *x, int64_t stride,  \
                     int64_t words, Sums *total)                                                                     \
    {                                                                                                                \
        ROWS(1, KIND, BF16)                                                                                          \
        ROWS(2, KIND, BF16)                                                                                          \
        ROWS(3, KIND, BF16)                                                                                          \
        ROWS(4, KIND, BF16)                                                                                          \
        ROWS(6, KIND, BF16)                                                                                          \
        ROWS(8, KIND, BF16)                                                                                          \
        ROWS(10, KIND, BF16)                                                                                         \
        ROWS(12, KIND, BF16)                                                                                         \
    }

MULTIPLY(multiply_f32, WEIGHT_F32, 0)
MULTIPLY(multiply_bf16, WEIGHT_BF16, 1)
MULTIPLY(multiply_i8_f32, WEIGHT_I8, 0)
MULTIPLY(multiply_i8_bf16, WEIGHT_I8, 1)

/* What becomes of the outputs of a product. */
typedef enum { KEEP, ADD, GATE } Ending;

/* The shared input of a product, with TILE rows more than count, and where its outputs go: float32 rows, or for GATE rows of the activation type. */
typedef struct {
    const uint32_t *x;
    int64_t x_stride, rows;
    void *y;
    int64_t y_stride;
    Ending ending;
} Product;

INLINE void finish(const Linear *linear, int bf16, const Product *to, int64_t row, int64_t column, vf sums[BLOCKS])
{
    if (linear->scale)
        UNROLL for (int b = 0; b < BLOCKS; b++) sums[b] *= load(linear->scale + column + b * LANES);
    if (linear->bias)
        UNROLL for (int b = 0; b < BLOCKS; b++) sums[b] += load(linear->bias + column + b * LANES);
    if (to->ending == GATE) { /* silu(gate) * up */
        char *y = (char *)to->y + row * to->y_stride * 4;
        UNROLL for (int b = 0; b < BLOCKS / 2; b++) {
            vf value = sums[b] / (1.0f + exponential(choose(sums[b] < -87.0f, splat(87.0f), -sums[b])));
            store_as(bf16, y, column / 2 + b * LANES, value * sums[b + BLOCKS / 2]);
        }
        return;
    }
    float *y = (float *)to->y + row * to->y_stride + column;
    if (column + PANEL <= linear->out) {
        UNROLL for (int b = 0; b < BLOCKS; b++)
            store(y + b * LANES, to->ending == ADD ? load(y + b * LANES) + sums[b] : sums[b]);
    } else {
        float last[PANEL];
        for (int b = 0; b < BLOCKS; b++) store(last + b * LANES, sums[b]);
        for (int64_t i = 0; i < linear->out - column; i++) y[i] = to->ending == ADD ? y[i] + last[i] : last[i];
    }
}

/* `count` panels from `first` on for all rows, as they come out of the sums: `out` is [count][rows][PANEL]. Two panels
 * at a time where few rows leave registers free. */
static void multiply_panels(const Linear *linear, int bf16, const Product *to, int64_t first, int64_t count, float *out)
{
    int kind = (int)linear->kind;
    int64_t words = bf16 ? (linear->in + 1) / 2 : linear->in, panel_bytes = words * PANEL * weight_bytes(kind, bf16);
    int64_t passes = (to->rows + TILE - 1) / TILE, each = passes ? (to->rows + passes - 1) / passes : 1;
    void (*tile)(int64_t, int, const char *, int64_t, const uint32_t *, int64_t, int64_t, Sums *) =
        kind == WEIGHT_I8 ? (bf16 ? multiply_i8_bf16 : multiply_i8_f32) : bf16 ? multiply_bf16 : multiply_f32;
    for (int64_t panel = 0, panels; panel < count; panel += panels) {
        const char *weights = (const char *)linear->panels + (first + panel) * panel_bytes;
        panels = to->rows <= TILE / 2 && panel + 1 < count ? 2 : 1;
        for (int64_t row = 0; row < to->rows; row += each) {
            int64_t rows = to->rows - row < each ? to->rows - row : each;
            Sums sums[2];
            tile(rows, (int)panels, weights, panel_bytes, to->x + row * to->x_stride, to->x_stride, words, sums);
            for (int64_t p = 0; p < panels; p++)
                memcpy(out + ((panel + p) * to->rows + row) * PANEL, sums[p].rows, (size_t)(rows * PANEL) * 4);
        }
    }
}

/* What `multiply_panels` left in `sums`, to where the product's outputs go. */
static void finish_panels(const Linear *linear, int bf16, const Product *to, int64_t first, int64_t count,
                          const float *sums)
{
    for (int64_t panel = first; panel < first + count; panel++)
        for (int64_t row = 0; row < to->rows; row++, sums += PANEL) {
            vf own[BLOCKS];
            for (int b = 0; b < BLOCKS; b++) own[b] = load(sums + b * LANES);
            finish(linear, bf16, to, row, panel * PANEL, own);
        }
}

/* weight [out][in] of numbers of `kind`, to panels; `pair`: inputs come two to a word. */
static void pack(int64_t kind, int64_t pair, const void *weight, int64_t out, int64_t in, void *panels)
{
    int64_t size = kind == WEIGHT_F32 ? 4 : kind == WEIGHT_BF16 ? 2 : 1, each = pair ? 2 : 1;
    int64_t words = (in + each - 1) / each, padded = (out + PANEL - 1) / PANEL * PANEL;
    memset(panels, 0, (size_t)(padded * words * each * size));
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            int64_t place = ((o / PANEL * words + i / each) * PANEL + o % PANEL) * each + i % each;
            memcpy((char *)panels + place * size, (const char *)weight + (o * in + i) * size, (size_t)size);
        }
}

#endif
