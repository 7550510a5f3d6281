/* Multiplies quantised weights, in strips as in codes.h, with quantised rows (quantise.h): the counterpart of ggml's
 * vec_dot functions. formats.c compiles its functions for each format and some numbers of rows, and linear.h calls the result
 * through the table of formats. For each block and output, with q the codes of the row's block:
 *
 *     part = step * sum((code - zero) * q) + minimum * sum(q)        the first sum is in whole numbers: dots.h
 *     y   += part * scale of the row's block                         blocks in order, in float32
 *
 * A row gets the same bits whatever rows are beside it: sums within a block are exact, and the rest is the same operations
 * in the same order for any number of rows.
 */
#ifndef PARLAY_BLOCKS_H
#define PARLAY_BLOCKS_H

#include "dots.h"
#include "formats.h"

#define SHARE 8 /* blocks of 32 in one of ggml's super-blocks of 256, which share its scale and minimum */

/* How far ahead of their use weights are prefetched, in bytes; strips that are read at once share it. With AVX-512, several
 * rows take about as long to multiply as their weights to arrive: more bytes under way then save 2 to 3 percent. For one row,
 * which only memory limits, and for AVX2 they cost as much. */
INLINE int bytes_ahead(const int rows) { return LANES == 16 && rows >= 4 ? 10240 : 8192; }

/* Loads LANES numbers in bfloat16. */
INLINE vf load_bfloats(const char *at)
{
    vh half;
    memcpy(&half, at, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

/* Whether blocks share numbers, as in K formats and in groups. */
INLINE int shares(const Form form) { return form.scales >= K_SCALE; }
/* Whether a block has one minimum for all its weights. */
INLINE int has_minimum(const Form form)
{
    return form.scales == HALF_AND_MINIMUM || form.scales == HALF_AND_ZERO || form.scales == K_MINIMUM ||
           form.scales == GROUP_AND_ZERO;
}
/* Whether each half of a block has a scale of its own. */
INLINE int has_halves(const Form form) { return form.scales == K_HALVES || form.scales == K_MINIMUMS; }
/* Whether blocks share a scale of their minimums, besides that of their scales. */
INLINE int shares_minimum(const Form form) { return form.scales == K_MINIMUM || form.scales == K_MINIMUMS; }

/* How many blocks share numbers. Groups are of four: with their shared numbers they fill whole cache lines. */
INLINE int share_of(const Form form) { return form.scales == GROUP_AND_ZERO ? 4 : SHARE; }

/* Bytes that a strip has for the shared numbers of one super-block or group, before the first of its blocks. */
INLINE int64_t shared_bytes(const Form form)
{
    return shares(form) ? LANES * (shares_minimum(form) || form.scales == GROUP_AND_ZERO ? 4 : 2) : 0;
}

/* Bytes of one block in a strip: codes and scales. */
INLINE int64_t block_bytes(const Form form)
{
    /* bytes for each output, in the order of Scales */
    static const int of_scales[] = {0, 2, 4, 2, 3, 1, 2, 2, 4, 0};
    return code_bytes(form.bits) + LANES * of_scales[form.scales];
}

INLINE int64_t strip_bytes(const Form form, int64_t blocks)
{
    return blocks * block_bytes(form) + blocks / share_of(form) * shared_bytes(form);
}

/* What the codes of one block are worth, for LANES outputs: a weight is step * (code - zero) + minimum. */
typedef struct {
    vf step[2]; /* of each half of the block; the second only where a format has halves */
    vf minimum; /* of the whole block */
} Worth;

/* Reads the scales of a block from `at`. `shared` is what `load_shared` has read for it. */
INLINE Worth worth(const Form form, const char *at, const vf shared[2])
{
    Worth w = {{{0}, {0}}, {0}};
    switch (form.scales) {
    case NO_SCALE: break;
    case HALF: w.step[0] = load_halves(at); break;
    case HALF_AND_MINIMUM: w.step[0] = load_halves(at), w.minimum = load_halves(at + 2 * LANES); break;
    case BFLOAT: w.step[0] = load_bfloats(at); break;
    case HALF_AND_ZERO: w.step[0] = load_halves(at), w.minimum = -(w.step[0] * load_small(at + 2 * LANES)); break;
    case GROUP_AND_ZERO: w.step[0] = shared[0], w.minimum = shared[1]; break;
    case K_SCALE: w.step[0] = shared[0] * load_small(at); break;
    case K_MINIMUM: w.step[0] = shared[0] * load_small(at), w.minimum = -(shared[1] * load_small(at + LANES)); break;
    case K_MINIMUMS:
    case K_HALVES: w.step[0] = shared[0] * load_small(at), w.step[1] = shared[0] * load_small(at + LANES); break;
    }
    return w;
}

/* With K_MINIMUMS (Q2_K): what is added to the weights of each half of a block; else unused. */
typedef struct {
    vf of[2];
} Minimums;

INLINE Minimums minimums(const Form form, const char *at, const vf shared[2])
{
    Minimums m = {{{0}, {0}}};
    if (form.scales != K_MINIMUMS) return m;
    for (int half = 0; half < 2; half++) m.of[half] = -(shared[1] * load_small(at + (2 + half) * LANES));
    return m;
}

/* One block of some strips, unpacked. */
typedef struct {
    Codes codes[STRIPS];
    Worth worths[STRIPS];
    Minimums lows[STRIPS];
} Unpacked;

/* Multiplies one block of `rows` rows with the same block of `strips` strips, and adds the results to sums[row][strip]. */
INLINE void add_blocks(const Form form, const int strips, const int rows, const Unpacked *now, const InputBlock *x,
                       vf (*sums)[STRIPS])
{
    const Worth *worths = now->worths;
    const Minimums *lows = now->lows;
    vf dots[MOST_AT_ONCE][STRIPS], parts[MOST_AT_ONCE][STRIPS];
    const int halves = has_halves(form) ? 2 : 1;
    UNROLL for (int half = 0; half < halves; half++) {
        dot_codes(form, strips, rows, now->codes, x, half * GROUPS / 2, halves == 1 ? GROUPS : (half + 1) * GROUPS / 2, dots);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int s = 0; s < strips; s++) {
                if (form.scales == NO_SCALE) parts[i][s] = dots[i][s];
                else if (half) parts[i][s] = multiply_add(dots[i][s], worths[s].step[1], parts[i][s]);
                else parts[i][s] = dots[i][s] * worths[s].step[0];
            }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) {
            vf part = parts[i][s];
            if (has_minimum(form)) part = multiply_add(worths[s].minimum, splat(x[i].sum), part);
            if (form.scales == K_MINIMUMS) {
                float second = (float)x[i].half[1] * (-1.0f / 32);
                part = multiply_add(lows[s].of[0], splat(x[i].sum - second), part);
                part = multiply_add(lows[s].of[1], splat(second), part);
            }
            sums[i][s] = multiply_add(part, splat(x[i].scale), sums[i][s]);
        }
}

/* Reads the numbers that the next blocks share. Returns where the first of these blocks begins. */
INLINE const char *load_shared(const Form form, const char *at, vf shared[2])
{
    shared[0] = load_halves(at);
    if (form.parts) shared[0] *= 1.0f / (float)form.parts;
    if (shares_minimum(form)) shared[1] = load_halves(at + LANES * 2);
    if (form.scales == GROUP_AND_ZERO) shared[1] = -(shared[0] * load_small(at + LANES * 2));
    return at + shared_bytes(form);
}

/* Strips that are read block by block; each lies `apart` bytes behind the one before. */
typedef struct {
    const char *begin, *at; /* of the first strip: where it begins, where its next block is */
    int64_t apart;
    vf shared[STRIPS][2];   /* the numbers that blocks share, of each strip */
} Reader;

/* Prefetches what strip `s` needs soon. Of two strips that are read side by side each is its own stream, so what comes
 * behind its end is the next panel's, which lies another strip further on. */
INLINE void prefetch_block(const Form form, const int strips, const int s, const int far, const Reader *from,
                           const char *block)
{
    const char *ahead = block + far / strips;
    if (strips > 1 && ahead >= from->begin + (s + 1) * from->apart) ahead += from->apart;
    UNROLL for (int byte = 0; byte < block_bytes(form); byte += 64) __builtin_prefetch(ahead + byte);
}

/* Unpacks block number `b` of `strips` strips, and prefetches what lies `far` bytes ahead. */
INLINE void unpack_next(const Form form, const int strips, const int far, int64_t b, Reader *from, Unpacked *to)
{
    const char *next = from->at;
    UNROLL for (int s = 0; s < strips; s++) {
        const char *block = from->at + s * from->apart;
        if (shares(form) && b % share_of(form) == 0) block = load_shared(form, block, from->shared[s]);
        prefetch_block(form, strips, s, far, from, block);
        unpack(form, block, &to->codes[s]);
        to->worths[s] = worth(form, block + code_bytes(form.bits), from->shared[s]);
        to->lows[s] = minimums(form, block + code_bytes(form.bits), from->shared[s]);
        if (s == 0) next = block + block_bytes(form);
        if (strips > 1) {
            CODES_TO_MEMORY(to->codes[s]);
            SCALES_TO_MEMORY(to->worths[s]);
            if (form.scales == K_MINIMUMS) SCALES_TO_MEMORY(to->lows[s]);
        }
    }
    from->at = next;
}

/* Multiplies `strips` strips with `rows` rows, at most FEW_ROWS; x is [blocks][stride]. All sums stay in registers. */
INLINE void multiply_few(const Form form, const int strips, const int rows, const char *at, int64_t apart,
                         const InputBlock *x, int64_t stride, int64_t blocks, vf (*total)[STRIPS])
{
    const int together = rows_together(rows);
    vf sums[FEW_ROWS][STRIPS];
    Reader from = {at, at, apart, {{{0}}}};
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) sums[i][s] = (vf){0};
    for (int64_t b = 0; b < blocks; b++, x += stride) {
        Unpacked now;
        unpack_next(form, strips, bytes_ahead(rows), b, &from, &now);
        UNROLL for (int i = 0; i < rows; i += together)
            add_blocks(form, strips, rows - i < together ? rows - i : together, &now, x + i, sums + i);
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) total[i][s] = sums[i][s];
}

/* Adds one block's results to the sums of any number of rows, which stay in memory (the first-level cache). Inputs of the
 * next block are fetched: of many rows they lie where the processor does not expect them. */
INLINE void add_many(const Form form, const int strips, const Unpacked *now, const InputBlock *x, int64_t stride,
                     int64_t rows, vf (*restrict sums)[STRIPS])
{
    int64_t i = 0;
    _Pragma("GCC unroll 1") for (; i + ROWS_AT_ONCE <= rows; i += ROWS_AT_ONCE) {
        const char *next = (const char *)(x + stride + i);
        UNROLL for (int byte = 0; byte < ROWS_AT_ONCE * (int)sizeof *x; byte += 64) __builtin_prefetch(next + byte);
        add_blocks(form, strips, ROWS_AT_ONCE, now, x + i, sums + i);
        __asm__("" : : : "memory"); /* the sums stay there */
    }
#if ROWS_AT_ONCE == 4
    switch (rows - i) {
    case 1: add_blocks(form, strips, 1, now, x + i, sums + i); break;
    case 2: add_blocks(form, strips, 2, now, x + i, sums + i); break;
    case 3: add_blocks(form, strips, 3, now, x + i, sums + i); break;
    }
#endif
}

/* Multiplies `strips` strips with any number of rows. Codes are unpacked once for all of them. */
INLINE void multiply_many(const Form form, const int strips, const char *at, int64_t apart, const InputBlock *x,
                          int64_t stride, int64_t blocks, int64_t rows, vf (*restrict sums)[STRIPS])
{
    Reader from = {at, at, apart, {{{0}}}};
    for (int64_t i = 0; i < rows; i++)
        UNROLL for (int s = 0; s < strips; s++) sums[i][s] = (vf){0};
    for (int64_t b = 0; b < blocks; b++, x += stride) {
        Unpacked now;
        unpack_next(form, strips, bytes_ahead(STRIP_ROWS), b, &from, &now);
        add_many(form, strips, &now, x, stride, rows, sums);
    }
}

/* Multiplies a panel, whose strips lie `apart` bytes from each other, with `rows` rows, at most FEW_ROWS. A single row goes
 * strip by strip: it has nothing to share between them but its own few inputs. */
INLINE void multiply_few_of_panel(const Form form, const int rows, const char *panel, int64_t apart, const InputBlock *x,
                                  int64_t stride, int64_t blocks, vf (*sums)[STRIPS])
{
    const int strips = rows > 1 ? STRIPS_OF_FEW : 1;
    for (int s = 0; s < STRIPS; s += strips)
        multiply_few(form, strips, rows, panel + s * apart, apart, x, stride, blocks, (vf(*)[STRIPS])&sums[0][s]);
}

/* The same with any number of rows. */
INLINE void multiply_many_of_panel(const Form form, const char *panel, int64_t apart, const InputBlock *x, int64_t stride,
                                   int64_t blocks, int64_t rows, vf (*restrict sums)[STRIPS])
{
    for (int s = 0; s < STRIPS; s += STRIPS_OF_MANY)
        multiply_many(form, STRIPS_OF_MANY, panel + s * apart, apart, x, stride, blocks, rows, (vf(*)[STRIPS])&sums[0][s]);
}
#endif
