/* Which keys a row sees: the attention mask, computed from the tree in place of a matrix.
 *
 * A row's path is the keys from the beginning of its text down to itself, numbered by position: for a pending row all tokens
 * up to it, for a node of a draft all pending rows and the nodes above it. Where some rows see each other (rows of a block,
 * or of a chain that is `together`), they share the path of the last one. Of its path a row sees positions first_of ..
 * limit_of - 1: all, or the last ones of a sliding window.
 *
 * A slot is a token's place in the pages of its sequence: page slot / PAGE, row slot % PAGE. For tokens of the text slot
 * and position are the same. Nodes take consecutive slots behind the text, whatever their depth:
 *
 *     slots     0 ... start + pending - 1 | one slot for each node, in the order of the draft
 *     path      0 ... start + pending - 1 | the slots of the nodes from the root down: `path_slots`
 */
#ifndef PARLAY_PATHS_H
#define PARLAY_PATHS_H

#include "core.h"
#include "lanes.h"

INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* A piece of attention: the queries of rows from..to of one segment for
 * one key head. Nodes of a tree are in tiles apart from pending rows. */
typedef struct {
    int32_t segment, head, from, to;
} Tile;

/* The segment, with its recent pages in place of the others where the layer's keys are in these. */
INLINE Segment in_pages_of(const Layer *layer, const Segment *segment)
{
    Segment own = *segment;
    if (layer->recent) own.pages = segment->recent, own.pitch = segment->recent_pitch;
    return own;
}

/* The address of a slot's row of `bytes`, among rows that begin `part` bytes into each page. */
INLINE char *row_at(const Segment *segment, int64_t part, int64_t slot, int64_t bytes)
{
    return segment->pages[(uint64_t)slot / PAGE] + part + (uint64_t)slot % PAGE * bytes;
}

/* How many nodes a path has down to this one. */
INLINE int64_t depth_of(const Segment *segment, int64_t node)
{
    int64_t depth = 0;
    for (; node >= 0; node = segment->parents[node]) depth++;
    return depth;
}

/* A row's position: how many keys come before its own on its path. */
INLINE int64_t position_of(const Segment *segment, int64_t row)
{
    if (row < segment->pending) return segment->start + row;
    return segment->start + segment->pending - 1 + depth_of(segment, row - segment->pending);
}

/* The position that RoPE gives a row: that on its path, or one of Segment's `places`. */
INLINE int64_t turn_of(const Segment *segment, int64_t row)
{
    int64_t first = segment->pending + segment->nodes - segment->placed;
    return row < first ? position_of(segment, row) : segment->places[row - first];
}

/* The row whose path this row sees: itself, or the last one of its block or chain. */
INLINE int64_t last_seen(const Segment *segment, int64_t row)
{
    int64_t rows = segment->pending + segment->nodes;
    if (row >= rows - segment->together) {
        if (!segment->nodes) return rows - 1;
        while (row + 1 < rows && segment->parents[row + 1 - segment->pending] == row - segment->pending) row++;
        return row;
    }
    if (!segment->block) return row;
    int64_t position = segment->start + row, last = row + segment->block - 1 - position % segment->block;
    return last < rows ? last : rows - 1;
}

/* One more than the position of the last key that a row sees. */
INLINE int64_t limit_of(const Segment *segment, int64_t row) { return position_of(segment, last_seen(segment, row)) + 1; }

/* The position of the first key that a row sees. */
INLINE int64_t first_of(const Segment *segment, int64_t window, int64_t row)
{
    int64_t first = position_of(segment, row) + 1 - window;
    return window && first > 0 ? first : 0;
}

/* Whether no row sees a block of KEYS keys. Hidden keys are whole blocks. */
INLINE int is_hidden(const Segment *segment, int64_t block)
{
    return block >= segment->hidden_from && block < segment->hidden_to;
}

/* Writes the slots of the keys at positions from..limit - 1 of a row's path to `slots`. */
static void path_slots(const Segment *segment, int64_t row, int64_t from, int64_t limit, int64_t *slots)
{
    int64_t base = segment->start + segment->pending, node = last_seen(segment, row) - segment->pending;
    for (int64_t p = limit - 1; p >= from; p--) {
        slots[p - from] = p < base ? p : base + node;
        if (p >= base) node = segment->parents[node];
    }
}

/* The first row of a tile that sees the segment's prefix; the tile's end, if none does. */
INLINE int64_t first_seer(const Segment *segment, const Tile *tile)
{
    int64_t first = segment->pending + segment->nodes - (segment->prefix ? segment->seers : 0);
    return first < tile->from ? tile->from : first > tile->to ? tile->to : first;
}

/* The first key that some row of a tile sees, rounded down to a multiple of `step`; 0 without a window. `to` if later. */
static int64_t shared_from(const Segment *segment, const Tile *tile, int64_t window, int64_t step, int64_t to)
{
    int64_t from = to;
    for (int64_t row = tile->from; window && row < tile->to; row++) {
        int64_t first = first_of(segment, window, row);
        from = first < from ? first : from;
    }
    return window ? from / step * step : 0;
}

/* Where the keys end that the rows of a tile read from the same slots. Nodes share the text, but only whole vectors of
 * it; pending rows share all that the last one sees. */
static int64_t shared_to(const Segment *segment, const Tile *tile, int nodes)
{
    return nodes ? (segment->start + segment->pending) / LANES * LANES : limit_of(segment, tile->to - 1);
}

#endif
