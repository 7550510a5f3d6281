/* The table of weight formats, as ggml's type traits: for each format, how stored rows are packed into panels, how a
 * single row is read back, and which function multiplies a panel. dense.h fills in the entries of plain numbers;
 * formats.c has those of block formats. */
#ifndef PARLAY_FORMATS_H
#define PARLAY_FORMATS_H

#include "quantise.h"

/* ggml's numbers of tensor types, as in GGUF files. The last two are Parlay's own and in no file: see HALF_AND_ZERO and
 * GROUP_AND_ZERO in codes.h. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, I8 = 24,
       IQ1_M = 29, BF16 = 30, MXFP4 = 39, Q4_Z128 = 62, Q4_Z = 63 /* Parlay's own */, MOST_FORMATS = 64 };

/* The forms in which products read the rows. They are bits, because
 * weights that share their inputs may read different forms. */
enum { FLOATS = 1, BFLOATS = 2 /* bfloat16 */, CODES = 4 /* InputBlock: 32 codes of eight bits */ };

/* Each number of rows of blocks up to FEW_ROWS has code of its own, whose sums are in registers. */
#if LANES == 16
#define FEW_ROWS 16
#else
#define FEW_ROWS 4
#endif
/* Rows of blocks that go over a panel together at most, so that codes are unpacked once for all of them: their sums and
 * inputs of one block stay in the first-level cache. */
#define STRIP_ROWS 64

/* Multiplies up to DENSE_ROWS rows of plain numbers with one panel, or up to half as many with two that lie `apart` bytes
 * from each other. x is [rows][stride] words of 32 bits, see lanes.h; `words` of each row count. */
typedef void MultiplyWords(int64_t rows, int panels, const char *panel, int64_t apart, const uint32_t *x,
                           int64_t stride, int64_t words, vf (*sums)[DENSE_ROWS][STRIPS]);

/* Multiplies up to STRIP_ROWS rows of blocks, x [blocks][stride], with a panel. It may read up to three rows more. */
typedef void MultiplyBlocks(const char *panel, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows,
                            vf (*sums)[STRIPS]);

/* The entry of a format. Formats of plain numbers have `words`, block formats have `blocks`; the other one is null. */
typedef struct {
    int input;                                                                       /* the form in which it reads rows */
    int64_t (*panel_bytes)(int64_t in);
    /* Stored rows to panels; 0: a number or scale is not finite. */
    int (*pack)(const uint8_t *rows, int64_t out, int64_t in, char *panels);
    /* One row (of an embedding) as floats. */
    void (*read)(const char *panels, int64_t row, int64_t in, float *values);
    MultiplyWords *words;
    MultiplyBlocks *blocks;
} Format;

/* What follows is compiled in formats.c, without contraction of a * b + c; build.py gives the names in capitals a
 * prefix for each instruction set. BLOCK_FORMATS is null for numbers that no block format has. */
extern const Format *const BLOCK_FORMATS[MOST_FORMATS] __attribute__((visibility("hidden")));
/* Bytes of one block of LANES keys in a Q8_0 cache, which are stored like a strip of Q8_0 weights. */
#define KEY_BYTES (LANES * (BLOCK + 2))
/* Scores of up to STRIP_ROWS queries x [blocks][stride] with two strips of keys, `apart` bytes from each other. */
void SCORE(const char *keys, int64_t apart, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows,
           vf (*sums)[STRIPS]) __attribute__((visibility("hidden")));
/* Quantises x [count] to blocks, of which each lies `stride` blocks behind the one before; see quantise.h. */
void QUANTISE(const float *x, int64_t count, InputBlock *blocks, int64_t stride) __attribute__((visibility("hidden")));
/* The first half of an adapter in eight bits, down(x): up to four rows x [blocks][stride] times one strip, stored like
 * Q8_0 weights. */
void LOWER(const char *strip, const InputBlock *x, int64_t stride, int64_t blocks, int64_t rows, vf (*sums)[STRIPS])
    __attribute__((visibility("hidden")));
#define RANKS 16                       /* ranks of an adapter's matrix `up` that share one scale for each output */
/* Bytes of RANKS ranks of a panel: [strips][RANKS / 4][LANES]
 * words of four codes, 128 above their values; then the scales. */
#define RAISE_BYTES (PANEL * (RANKS + 4))
/* The second half of an adapter in eight bits: adds up(lowered) to one panel of a row's outputs, where `count` times
 * RANKS ranks are in `lowered`, two times RANKS to a block. */
void RAISE(const char *up, const InputBlock *lowered, int64_t count, vf outputs[STRIPS]) __attribute__((visibility("hidden")));

#endif
