/* The block formats of weights. build.py compiles this file once for each instruction set, with
 * -ffp-contract=off: where a compiler may turn a * b + c into one operation, the number of roundings
 * would differ from place to place, and with it the bits of the results. To add a format, add a line
 * to the table below, a case to `take` in stored.h, and its number in formats.h. */
#include "formats.h"
#include "stored.h"

void QUANTISE(const float *x, int64_t count, InputBlock *blocks, int64_t stride)
{
    for (int64_t i = 0; i < count; i += BLOCK, blocks += stride)
        quantise_block(x + i, count - i < BLOCK ? count - i : BLOCK, blocks);
}

#define ROWS(FORM, COUNT)                                                                                            \
    if (COUNT <= FEW_ROWS && rows == COUNT) {                                                                        \
        multiply_few_of_panel(FORM, COUNT <= FEW_ROWS ? COUNT : 1, panel, apart, x, stride, blocks, sums);           \
        return;                                                                                                      \
    }
#define EACH_ROWS(FORM)                                                                                              \
    ROWS(FORM, 1) ROWS(FORM, 2) ROWS(FORM, 3) ROWS(FORM, 4) ROWS(FORM, 5) ROWS(FORM, 6) ROWS(FORM, 7) ROWS(FORM, 8)  \
    ROWS(FORM, 9) ROWS(FORM, 10) ROWS(FORM, 11) ROWS(FORM, 12) ROWS(FORM, 13) ROWS(FORM, 14) ROWS(FORM, 15)          \
    ROWS(FORM, 16)                                                                                                   \
    multiply_many_of_panel(FORM, panel, apart, x, stride, blocks, rows, sums);

/* Defines the table entry NAME: its functions are those of blocks.h and stored.h, compiled for the constant Form. */
#define FORMAT(NAME, KIND, ...)                                                                                      \
    static int64_t bytes_##NAME(int64_t in)                                                                          \
    {                                                                                                                \
        return STRIPS * strip_bytes((Form){__VA_ARGS__}, (in + BLOCK - 1) / BLOCK);                                  \
    }                                                                                                                \
    static int pack_##NAME(const uint8_t *rows, int64_t out, int64_t in, char *strips)                               \
    {                                                                                                                \
        return pack_rows(KIND, (Form){__VA_ARGS__}, rows, out, in, strips);                                          \
    }                                                                                                                \
    static void read_##NAME(const char *strips, int64_t row, int64_t in, float *values)                              \
    {                                                                                                                \
        read_row((Form){__VA_ARGS__}, strips, row, in, values);                                                      \
    }                                                                                                                \
    static void multiply_##NAME(const char *panel, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows, \
                                vf (*sums)[STRIPS])                                                                  \
    {                                                                                                                \
        const Form form = {__VA_ARGS__};                                                                             \
        const int64_t apart = strip_bytes(form, blocks);                                                             \
        EACH_ROWS(form)                                                                                              \
    }                                                                                                                \
    static const Format NAME = {CODES, bytes_##NAME, pack_##NAME, read_##NAME, 0, multiply_##NAME};

/*     name    number  bits zero table scales parts */
FORMAT(q4_0,   Q4_0,   4,   8,   0,    HALF)
FORMAT(q4_1,   Q4_1,   4,   0,   0,    HALF_AND_MINIMUM)
FORMAT(q4_z,   Q4_Z,   4,   0,   0,    HALF_AND_ZERO)
FORMAT(q4_z128, Q4_Z128, 4, 0,   0,    GROUP_AND_ZERO)
FORMAT(q5_0,   Q5_0,   5,   16,  0,    HALF)
FORMAT(q5_1,   Q5_1,   5,   0,   0,    HALF_AND_MINIMUM)
FORMAT(q8_0,   Q8_0,   8,   128, 0,    HALF)
FORMAT(q2_k,   Q2_K,   2,   0,   0,    K_MINIMUMS)
FORMAT(q3_k,   Q3_K,   3,   4,   0,    K_HALVES)
FORMAT(q4_k,   Q4_K,   4,   0,   0,    K_MINIMUM)
FORMAT(q5_k,   Q5_K,   5,   0,   0,    K_MINIMUM)
FORMAT(q6_k,   Q6_K,   6,   32,  0,    K_HALVES)
FORMAT(iq3_xxs, IQ3_XXS, 4, 128, 3,    K_HALVES, 4)
FORMAT(iq3_s,  IQ3_S,  4,   128, 4,    K_HALVES)
FORMAT(iq2,    IQ2_S,  3,   128, 5,    K_HALVES, 8)
FORMAT(iq1,    IQ1_S,  3,   128, 6,    K_HALVES, 8)
FORMAT(iq4_nl, IQ4_NL, 4,   128, 1,    HALF)
FORMAT(iq4_xs, IQ4_XS, 4,   128, 1,    K_SCALE)
FORMAT(mxfp4,  MXFP4,  4,   128, 2,    BFLOAT)
FORMAT(i8,     I8,     8,   128, 0,    NO_SCALE)

void SCORE(const char *keys, int64_t apart, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows,
           vf (*sums)[STRIPS])
{
    const Form form = {8, 128, 0, HALF};
    const char *panel = keys;
    EACH_ROWS(form)
}

void LOWER(const char *strip, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows, vf (*sums)[STRIPS])
{
    const Form form = {8, 128, 0, HALF};
    if (rows == 1) multiply_few(form, 1, 1, strip, 0, x, stride, blocks, sums);
    else if (rows == 2) multiply_few(form, 1, 2, strip, 0, x, stride, blocks, sums);
    else if (rows == 3) multiply_few(form, 1, 3, strip, 0, x, stride, blocks, sums);
    else multiply_few(form, 1, 4, strip, 0, x, stride, blocks, sums);
}

/* Sums of 16 ranks, half of a block of `lowered` from group `from` on, times one strip of `up`. */
INLINE vf raise_half(const Form form, const char *at, const InputBlock *lowered, const int from)
{
    Codes codes;
    vf dots[ROWS_AT_ONCE][STRIPS];
    UNROLL for (int g = 0; g < GROUPS / 2; g++) codes.of[from + g] = load_bits(at + g * LANES * 4);
    dot_codes(form, 1, 1, &codes, lowered, from, from + GROUPS / 2, dots);
    return dots[0][0];
}

void RAISE(const char *up, const InputBlock *lowered, int64_t count, vf outputs[STRIPS])
{
    const Form form = {8, 128, 0, HALF};
    for (int64_t half = 0; half < count; half++, up += RAISE_BYTES) {
        const InputBlock *x = lowered + half / 2;
        for (int64_t b = 0; b < RAISE_BYTES; b += 64) __builtin_prefetch(up + count * RAISE_BYTES + b); /* of the next panel */
        UNROLL for (int s = 0; s < STRIPS; s++) {
            const char *at = up + s * RANKS * LANES;
            vf sum = half % 2 ? raise_half(form, at, x, GROUPS / 2) : raise_half(form, at, x, 0);
            outputs[s] = multiply_add(sum * load(up + RANKS * PANEL + s * LANES * 4), splat(x->scale), outputs[s]);
        }
    }
}

const Format *const BLOCK_FORMATS[MOST_FORMATS] = {
    [Q4_0] = &q4_0, [Q4_1] = &q4_1, [Q5_0] = &q5_0, [Q5_1] = &q5_1,     [Q8_0] = &q8_0,     [Q4_K] = &q4_k,
    [Q5_K] = &q5_k, [Q6_K] = &q6_k, [I8] = &i8,     [IQ4_NL] = &iq4_nl, [IQ4_XS] = &iq4_xs, [MXFP4] = &mxfp4,
    [Q2_K] = &q2_k, [Q3_K] = &q3_k, [IQ3_XXS] = &iq3_xxs, [IQ3_S] = &iq3_s, [IQ2_XXS] = &iq2, [IQ2_XS] = &iq2,
    [IQ2_S] = &iq2, [IQ1_S] = &iq1, [IQ1_M] = &iq1,   [Q4_Z] = &q4_z, [Q4_Z128] = &q4_z128,
};
