/* Products with weights in float32, float16 and bfloat16: their layout, their inner loop, and their entries in the table of
 * formats (formats.h).
 *
 * A panel is [words of in][PANEL] words of 32 bits, or of 16 bits for float16: word k of PANEL outputs lies together. A word
 * is one input's weight; of bfloat16 it is two neighbouring inputs' weights, as lanes.h says of inputs.
 *
 *     word 0    out 0 | out 1 | ... | out PANEL - 1
 *     word 1    out 0 | out 1 | ...
 */
#ifndef PARLAY_DENSE_H
#define PARLAY_DENSE_H

#include "formats.h"
#include "lanes.h"

#define AHEAD 3072 /* how far ahead of their use weights are prefetched, in bytes */

/* Loads words of weights; float16 is widened to float32. */
INLINE vu load_weights(const int kind, const char *at)
{
    return kind == F16 ? (vu)load_halves(at) : load_words(at);
}

/* Multiplies one panel, or two that lie `apart` bytes from each other, with `rows` rows x [rows][stride] of words.
 * `kind`, `rows` and `panels` are constants; all sums stay in registers. */
INLINE void multiply(const int kind, const int rows, const int panels, const char *panel, int64_t apart,
                     const uint32_t *x, int64_t stride, int64_t words, vf (*total)[DENSE_ROWS][STRIPS])
{
    const int64_t size = LANES * (kind == F16 ? 2 : 4);
    vf sums[DENSE_ROWS][2 * STRIPS] = {{{0}}};
    for (int64_t k = 0; k < words; k++) {
        vu weights[2 * STRIPS];
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int b = 0; b < STRIPS; b++) {
                const char *at = panel + p * apart + (k * STRIPS + b) * size;
                if (b * size % 64 == 0) __builtin_prefetch(at + AHEAD);
                weights[p * STRIPS + b] = load_weights(kind, at);
            }
        UNROLL for (int i = 0; i < rows; i++) {
            vu input = splat_word(x[i * stride + k]);
            UNROLL for (int b = 0; b < panels * STRIPS; b++)
                sums[i][b] = dot(kind == BF16, sums[i][b], weights[b], input);
        }
    }
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int b = 0; b < STRIPS; b++) total[p][i][b] = sums[i][p * STRIPS + b];
}

#define ROWS(COUNT, KIND)                                                                                            \
    if (COUNT <= DENSE_ROWS && rows <= COUNT) {                                                                      \
        if (panels == 1)                                                                                             \
            multiply(KIND, COUNT <= DENSE_ROWS ? COUNT : 1, 1, panel, apart, x, stride, words, sums);                \
        else                                                                                                         \
            multiply(KIND, COUNT <= DENSE_ROWS / 2 ? COUNT : 1, 2, panel, apart, x, stride, words, sums);            \
        return;                                                                                                      \
    }

/* Defines MultiplyWords for one kind. Numbers of rows without
 * code of their own are rounded up, so some rows more are read. */
#define MULTIPLY(NAME, KIND)                                                                                         \
    static void NAME(int64_t rows, int panels, const char *panel, int64_t apart, const uint32_t *x, int64_t stride,  \
                     int64_t words, vf (*sums)[DENSE_ROWS][STRIPS])                                                  \
    {                                                                                                                \
        ROWS(1, KIND)                                                                                                \
        ROWS(2, KIND)                                                                                                \
        ROWS(3, KIND)                                                                                                \
        ROWS(4, KIND)                                                                                                \
        ROWS(6, KIND)                                                                                                \
        ROWS(8, KIND)                                                                                                \
        ROWS(10, KIND)                                                                                               \
        ROWS(12, KIND)                                                                                               \
    }

MULTIPLY(multiply_f32, F32)
MULTIPLY(multiply_f16, F16)
MULTIPLY(multiply_bf16, BF16)

static int64_t bytes_f32(int64_t in) { return in * PANEL * 4; }
static int64_t bytes_f16(int64_t in) { return in * PANEL * 2; }
static int64_t bytes_bf16(int64_t in) { return (in + 1) / 2 * PANEL * 4; }

/* Packs rows of numbers of `size` bytes into panels whose words have `each` of them. `exponent`: the exponent's bits in
 * a number's upper 16. Returns 0 if a number is not finite. */
INLINE int pack_numbers(const int size, const int each, const uint16_t exponent, const uint8_t *rows, int64_t out,
                        int64_t in, char *panels)
{
    int finite = 1;
    int64_t words = (in + each - 1) / each, padded = (out + PANEL - 1) / PANEL * PANEL;
    memset(panels, 0, (size_t)(padded * words * each * size));
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            const uint8_t *from = rows + (o * in + i) * size;
            uint16_t high;
            memcpy(&high, from + size - 2, 2);
            finite &= (high & exponent) != exponent;
            memcpy(panels + (((o / PANEL * words + i / each) * PANEL + o % PANEL) * each + i % each) * size, from,
                   (size_t)size);
        }
    return finite;
}

static int pack_f32(const uint8_t *rows, int64_t out, int64_t in, char *to)
{
    return pack_numbers(4, 1, 0x7F80, rows, out, in, to);
}
static int pack_f16(const uint8_t *rows, int64_t out, int64_t in, char *to)
{
    return pack_numbers(2, 1, 0x7C00, rows, out, in, to);
}
static int pack_bf16(const uint8_t *rows, int64_t out, int64_t in, char *to)
{
    return pack_numbers(2, 2, 0x7F80, rows, out, in, to);
}

/* Reads one row of an embedding, which is not packed if it has plain numbers. */
static void read_f32(const char *rows, int64_t row, int64_t in, float *values)
{
    memcpy(values, rows + row * in * 4, (size_t)in * 4);
}

static void read_bf16(const char *rows, int64_t row, int64_t in, float *values)
{
    for (int64_t i = 0; i < in; i++) values[i] = widen(((const uint16_t *)rows)[row * in + i]);
}

static void read_f16(const char *rows, int64_t row, int64_t in, float *values)
{
    for (int64_t i = 0; i < in; i += LANES) {
        char few[2 * LANES] = {0};
        float part[LANES];
        int64_t count = in - i < LANES ? in - i : LANES;
        memcpy(few, rows + (row * in + i) * 2, (size_t)count * 2);
        store(part, load_halves(few));
        memcpy(values + i, part, (size_t)count * 4);
    }
}

static const Format PLAIN_F32 = {FLOATS, bytes_f32, pack_f32, read_f32, multiply_f32, 0};
static const Format PLAIN_F16 = {FLOATS, bytes_f16, pack_f16, read_f16, multiply_f16, 0};
static const Format PLAIN_BF16 = {BFLOATS, bytes_bf16, pack_bf16, read_bf16, multiply_bf16, 0};
static const Format *const PLAIN_FORMATS[MOST_FORMATS] = {[F32] = &PLAIN_F32, [F16] = &PLAIN_F16, [BF16] = &PLAIN_BF16};

/* The entry of a format, plain or in blocks; null for numbers that no format has. */
INLINE const Format *find_format(int64_t kind)
{
    if (kind < 0 || kind >= MOST_FORMATS) return 0;
    return PLAIN_FORMATS[kind] ? PLAIN_FORMATS[kind] : BLOCK_FORMATS[kind];
}

#endif
