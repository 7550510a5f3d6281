/* What products have to know about a format of weights: one table entry each. */
#ifndef PARLAY_FORMATS_H
#define PARLAY_FORMATS_H

#include "quantise.h"

/* Numbers of formats, as in GGUF files. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, I8 = 24,
       IQ1_M = 29, BF16 = 30, MXFP4 = 39, Q4_Z128 = 62, Q4_Z = 63 /* both ours */, MOST_FORMATS = 64 };

/* In which forms rows enter products: bits, for weights that share their inputs may want different ones. */
enum { FLOATS = 1, BRAINS = 2 /* bfloat16 */, CODES = 4 /* blocks of eight bits */ };

#if LANES == 16
#define STRIP_ROWS 16 /* rows that are multiplied at a time: their sums fill half of the registers */
#else
#define STRIP_ROWS 4
#endif
#define EXACT_ROWS 8 /* of up to so many, and of multiples of four, as many are computed as there are */

/* Up to TILE rows of words times one panel, or up to half as many times two that lie `apart` bytes from each other. */
typedef void MultiplyWords(int64_t rows, int panels, const char *panel, int64_t apart, const uint32_t *x,
                           int64_t stride, int64_t words, vf (*sums)[TILE][BLOCKS]);

/* Up to STRIP_ROWS rows of blocks x [blocks][stride] times a panel. Sums of some rows more are written where there is no
 * code for their number, of what lies behind x. */
typedef void MultiplyBlocks(const char *panel, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows,
                            vf (*sums)[BLOCKS]);

typedef struct {
    int input;                                                                       /* the form it wants */
    int64_t (*panel_bytes)(int64_t in);
    int (*pack)(const uint8_t *rows, int64_t out, int64_t in, char *panels); /* stored rows to panels: all finite? */
    void (*read)(const char *panels, int64_t row, int64_t in, float *values);        /* one row as numbers */
    MultiplyWords *words;
    MultiplyBlocks *blocks;
} Format;

/* In a file of their own, which is compiled without contraction. */
extern const Format *const BLOCK_FORMATS[MOST_FORMATS] __attribute__((visibility("hidden")));
#define KEY_BYTES (LANES * (BLOCK + 2)) /* of a block of LANES cached keys, which are a strip as of Q8_0 weights */
/* Scores of up to STRIP_ROWS queries x [blocks][stride] and two strips of keys, as by MultiplyBlocks. */
void SCORE(const char *keys, int64_t apart, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows,
           vf (*sums)[BLOCKS]) __attribute__((visibility("hidden")));
void QUANTISE(const float *x, int64_t count, InputBlock *blocks, int64_t stride) __attribute__((visibility("hidden")));
/* Up to four rows x [blocks][stride] times one strip as of Q8_0 weights; more are written, as by MultiplyBlocks. */
void LOWER(const char *strip, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows, vf (*sums)[BLOCKS])
    __attribute__((visibility("hidden")));
#define RANKS 16                       /* that share a scale in each output */
#define RAISE_BYTES (PANEL * (RANKS + 4)) /* [strips][RANKS / 4][LANES] words of codes, above their values by 128, then scales */
/* Adds to a panel's outputs what `count` times so many ranks make, whose codes are in `lowered`. */
void RAISE(const char *up, const InputBlock *lowered, int64_t count, vf outputs[BLOCKS]) __attribute__((visibility("hidden")));

#endif
