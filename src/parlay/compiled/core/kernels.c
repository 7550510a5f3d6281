/* Everything of the decoder that depends on the instruction set, in one compilation unit: build.py compiles this file once
 * for each set, with CORE as the name of its table of functions. The headers that it includes are the decoder:
 *
 *     structs       core.h       what Python lays out and calls: read this first
 *     vectors       lanes.h      what differs between instruction sets
 *     products      linear.h     a product of rows with up to three matrices; adapters.h: LoRA
 *                   dense.h      panels of plain numbers
 *                   formats.h    the table of weight formats. codes.h: the layout of quantised blocks, stored.h: packing,
 *                                blocks.h and dots.h: multiplying, quantise.h: inputs in eight bits
 *     attention     tiles.h      a batch's attention. attention.h: one tile, paths.h: which keys a row sees, strips.h and
 *                                values.h: inner loops, codes_of_keys.h: a cache in Q8_0
 *     forward       forward.h    the layers. phases.h: how threads share them, space.h: memory, rows.h: norms and RoPE,
 *                                experts.h, per_layer.h, ngrams.h: what some models have besides
 *     drafts        grow.h       trees that a draft head or a draft model grows
 *     sampling      draw.h       tokens from logits; noise.h: the sampler's noise
 *     ranks         ranks.h      processes that share a model
 *     prices        reading.h    how fast memory is read at present
 *
 * Compiled apart: formats.c (quantised products), pool.c (threads; system.h), stream.c and shelf.c (layers and experts that
 * are read from a file), choose.c (which instruction set runs).
 */
#include <stdlib.h>

#include "draw.h"
#include "grow.h"
#include "noise.h"
#include "reading.h"

#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)

static int64_t panel_bytes(int64_t kind, int64_t in)
{
    const Format *format = find_format(kind);
    return format ? format->panel_bytes(in) : 0;
}

static int64_t pack(int64_t kind, const void *rows, int64_t out, int64_t in, void *panels)
{
    return find_format(kind)->pack(rows, out, in, panels);
}

static int64_t pack_all(const Packing *all, int64_t count)
{
    int64_t damaged = -1;
    for (const Packing *one = all; one < all + count; one++)
        if (!pack(one->kind, one->rows, one->out, one->in, one->panels) && damaged < 0) damaged = one - all;
    return damaged;
}

static void read_row(const Linear *embedding, int64_t row, float *values)
{
    format_of(embedding)->read(embedding->panels, row, embedding->in, values);
}

/* Core.multiply: one product on the caller's thread. */
static int64_t multiply_alone(const Linear *linear, const float *x, int64_t rows, float *y)
{
    char *none = 0;
    lay_out_inputs(rows, linear->in, &none);
    int64_t all = panels_of(linear), bytes = none - (char *)0;
    char *space = aligned_alloc(64, (size_t)(bytes + line(all * rows * PANEL * 4))), *at = space;
    if (!space) return 0;
    memset(space, 0, (size_t)bytes);
    Inputs inputs = lay_out_inputs(rows, linear->in, &at);
    int wanted = format_of(linear)->input;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < linear->in; i++) put_one_input(&inputs, wanted, row, i, x[row * linear->in + i]);
        put_codes_of_row(&inputs, wanted, row, linear->in, linear->order);
    }
    Product product = {{linear}, inputs, KEEP, y, linear->out};
    multiply_panels(&product, rows, 0, all, (float *)at);
    finish_panels(&product, rows, 0, all, (const float *)at);
    free(space);
    return 1;
}

const Core CORE = {
    QUOTED(LABEL), PANEL, panel_bytes, pack, pack_all, read_row, multiply_alone, space_bytes, forward, growth_bytes,
    grow, noisy_best, draw, leading, move_row, sum_over_ranks, gather_over_ranks, read_through,
    parlay_pool_rest, parlay_stream_sum, parlay_stream_read, parlay_stream_open, parlay_stream_close, parlay_stream_fault,
    parlay_shelf_open, parlay_shelf_close, parlay_shelf_fault, parlay_shelf_bytes,
};
