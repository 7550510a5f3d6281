/* Which keys a row sees.
 *
 * Its path, in order: committed tokens and pending rows up to itself, or all of these and then the nodes from the root
 * down to itself; of rows that see each other, as those of a block may, all have the path of the last. Of that path it sees the keys before
 * `limit_of`, from `first_of` on.
 */
#ifndef PARLAY_PATHS_H
#define PARLAY_PATHS_H

#include "core.h"
#include "lanes.h"

INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Rows from..to of one segment, for one key/value head. Nodes of a branching tree are tiles of their own. */
typedef struct {
    int32_t segment, head, from, to;
} Tile;

/* The segment with the pages that a layer's keys are in. */
INLINE Segment in_pages_of(const Layer *layer, const Segment *segment)
{
    Segment own = *segment;
    if (layer->recent) own.pages = segment->recent, own.pitch = segment->recent_pitch;
    return own;
}

/* A slot's row among those that begin at `part` of each page. */
INLINE char *row_at(const Segment *segment, int64_t part, int64_t slot, int64_t bytes)
{
    return segment->pages[(uint64_t)slot / PAGE] + part + (uint64_t)slot % PAGE * bytes;
}

INLINE int64_t depth_of(const Segment *segment, int64_t node)
{
    int64_t depth = 0;
    for (; node >= 0; node = segment->parents[node]) depth++;
    return depth;
}

/* Position of a row: how many keys come before its own. */
INLINE int64_t position_of(const Segment *segment, int64_t row)
{
    if (row < segment->pending) return segment->start + row;
    return segment->start + segment->pending - 1 + depth_of(segment, row - segment->pending);
}

/* The position by which a row turns. */
INLINE int64_t turn_of(const Segment *segment, int64_t row)
{
    int64_t first = segment->pending + segment->nodes - segment->placed;
    return row < first ? position_of(segment, row) : segment->places[row - first];
}

/* The row whose path this row sees. */
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

/* Whether no row sees a block of keys, which are all hidden or none. */
INLINE int is_hidden(const Segment *segment, int64_t block)
{
    return block >= segment->hidden_from && block < segment->hidden_to;
}

/* Slots of the keys at positions from..limit of the path that a row sees, `from` on. */
static void path_slots(const Segment *segment, int64_t row, int64_t from, int64_t limit, int64_t *slots)
{
    int64_t base = segment->start + segment->pending, node = last_seen(segment, row) - segment->pending;
    for (int64_t p = limit - 1; p >= from; p--) {
        slots[p - from] = p < base ? p : base + node;
        if (p >= base) node = segment->parents[node];
    }
}

/* The first row of a tile that sees the segment's prefix. */
INLINE int64_t first_seer(const Segment *segment, const Tile *tile)
{
    int64_t first = segment->pending + segment->nodes - (segment->prefix ? segment->seers : 0);
    return first < tile->from ? tile->from : first > tile->to ? tile->to : first;
}

/* Where the keys that a tile's rows see alike begin and end. A window's begin at a multiple of `step`. */
static int64_t shared_from(const Segment *segment, const Tile *tile, int64_t window, int64_t step, int64_t to)
{
    int64_t from = to;
    for (int64_t row = tile->from; window && row < tile->to; row++) {
        int64_t first = first_of(segment, window, row);
        from = first < from ? first : from;
    }
    return window ? from / step * step : 0;
}

static int64_t shared_to(const Segment *segment, const Tile *tile, int nodes)
{
    return nodes ? (segment->start + segment->pending) / LANES * LANES : limit_of(segment, tile->to - 1);
}

#endif
