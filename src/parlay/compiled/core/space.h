/* The scratch memory of one forward: what lies in it, how large it is, and how a batch's attention is cut into tiles. Python
 * asks `space_bytes` for the size and owns the memory (Batch.space); each forward lays it out anew with `lay_out`, whose
 * arrays follow each other, each rounded up to cache lines. The same function run from address null gives the size.
 */
#ifndef PARLAY_SPACE_H
#define PARLAY_SPACE_H

#include "attention.h"
#include "core.h"
#include "lanes.h"
#include "linear.h"

/* Rows on their way through the experts of a layer. Each row runs `runs` experts, and is copied once for each of them,
 * so that the copies for one expert lie side by side. */
typedef struct {
    float *logits;          /* [rows][router outputs] */
    float *weights;         /* [rows][runs]: of each expert's output */
    /* [rows][runs]: a row's experts in rising order, and where its copy for each is. */
    int32_t *expert, *place;
    int32_t *first;         /* [experts + 1]: where each expert's copies begin */
    Inputs gathered, gated; /* the copies: rows * runs of them */
    float *given;           /* [rows * runs][hidden]: outputs of the experts */
    const LowRank **adapters; /* [rows * runs]: as in Batch */
} Routed;

/* What layers have in common whose keys are in the same pages. */
typedef struct {
    Heads heads;
    int64_t kv_heads, queries_each; /* kv_heads: key heads; queries_each: queries of a tile, at most */
    Tile *tiles;
} Alike;

/* The wanted rows (those with logits), which may run alone from the last layer's attention on; see `keeps_wanted`. */
typedef struct {
    int32_t *place;           /* [rows]: a row's index among them; -1: it is none of them */
    int32_t *order;           /* [wanted]: 0, 1, 2 and so on */
    const LowRank **adapters; /* [wanted]: as a batch has them */
} Kept;

/* The arrays of a forward. Strides count words of 32 bits. */
typedef struct {
    float *hidden;    /* [rows][hidden]: the hidden states (residual stream) */
    /* Inputs of the products that read normed hidden states, and of the attention's out product. They have room for the
     * rows or for the wanted rows, whichever are more. */
    Inputs normed;
    Inputs gated; /* inputs of down */
    float *qkv;       /* [all rows][qkv_stride]: queries, keys and values of a row, one behind the other */
    Routed routed;    /* of models with experts */
    float *given;     /* [rows][hidden]: a sub-layer's output, where it is summed or normed before it is added */
    float *aside;     /* [rows][hidden]: the dense feed-forward's output in layers with experts besides */
    uint32_t *queries; /* [all rows][heads * query words]: rotated queries as scores read them */
    Alike alike[2];    /* of layers whose keys are in a segment's pages, and in its recent pages */
    /* per_layer: [rows][2][layers][per_layer], the numbers that layers read and their projection (per_layer.h). gates:
     * [rows][per_layer], of one layer. Vectors are read past the last row. */
    float *per_layer, *gates;
    Kept kept;
    float *parts, *joined; /* context parallelism: sums that ranks exchange, and those joined so far, see tiles.h */
    char *threads;    /* for each thread: its scores, sums and query blocks of a tile, and the slots of a path */
    int64_t qkv_stride, thread_bytes, bytes;
    int64_t rounds; /* rounds (tiles.h) for which `parts` has room */
} Space;

#define MOST_PARTS (1 << 20) /* how many numbers a rank exchanges at once; more, if one round alone has more */

/* AddressSanitizer cannot see the arrays in one piece of memory. In its builds GUARD bytes that nobody may touch lie
 * behind each. Addresses below FIRST_ADDRESS are none: they are counted from null, for the size. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GUARD 192 /* bytes */
#define FIRST_ADDRESS ((uintptr_t)1 << 40)
#else
#define GUARD 0
#endif

/* Rounds bytes up to whole cache lines, plus the guard. */
INLINE int64_t line(int64_t bytes) { return (bytes + 63) / 64 * 64 + GUARD; }

/* Takes `bytes` bytes for an array, and moves `at` behind them. If `at` began at null, it only counts. */
static char *take(char **at, int64_t bytes)
{
    char *taken = *at;
    *at += line(bytes);
#if defined(__SANITIZE_ADDRESS__)
    if ((uintptr_t)taken < FIRST_ADDRESS) return taken;
    ASAN_UNPOISON_MEMORY_REGION(taken, bytes);
    ASAN_POISON_MEMORY_REGION(taken + bytes, *at - taken - bytes);
#endif
    return taken;
}

/* The heads and the tile size of the layers with all keys (recent 0) or recent pages (1). */
static Alike alike_of(const Model *model, int recent)
{
    int64_t each = model->cached == CACHE_Q8_0 ? 4 : model->cached == CACHE_BF16 ? 2 : 1, dim = model->keys[recent].size;
    int64_t kv_heads = model->keys[recent].count, group = model->heads / kv_heads, rows = MOST_QUERIES / group;
    return (Alike){{(int)model->cached, group, dim, (dim + each - 1) / each}, kv_heads, (rows < 1 ? 1 : rows) * group, 0};
}

/* Whether these two kinds of layers have different heads. */
INLINE int differ(const Model *model)
{
    return model->keys[0].count != model->keys[1].count || model->keys[0].size != model->keys[1].size;
}

/* Whether the hidden state is multiplied by out_scale at the end of the layer's feed-forward. */
INLINE int is_scaled(const Layer *layer) { return layer->out_scale != 1 && !layer->per_layer_norm; }

/* Whether some sub-layer's output is written to `given` before it is added to the hidden state. */
INLINE int sets_outputs_apart(const Model *model)
{
    if (model->ranks || model->per_layer) return 1;
    for (int64_t i = 0; i < model->layers; i++) {
        const Layer *layer = &model->layer[i];
        if (layer->attention_out_norm || layer->feed_forward_out_norm || layer->experts_norm || is_scaled(layer)) return 1;
    }
    return 0;
}

/* Whether some layer has a dense feed-forward beside its experts. */
INLINE int runs_beside(const Model *model)
{
    for (int64_t i = 0; i < model->layers; i++)
        if (model->layer[i].experts_norm) return 1;
    return 0;
}

/* How many experts a layer has, and how many a row runs: the shared one included. */
INLINE int64_t experts_of(const Layer *layer) { return layer->experts + (layer->shared != NOT_SHARED); }
INLINE int64_t runs_of(const Layer *layer) { return layer->chosen + (layer->shared != NOT_SHARED); }

/* Inputs of products: some rows more than there are, because products may read these (STRIP_ROWS, DENSE_ROWS). */
static Inputs lay_out_inputs(int64_t rows, int64_t numbers, char **at)
{
    Inputs inputs = {.stride = up_to(numbers, 2 * BLOCK), .rows = rows};
    inputs.floats = (float *)take(at, (rows + DENSE_ROWS) * inputs.stride * 4);
    inputs.bfloats = (uint16_t *)take(at, (rows + DENSE_ROWS) * inputs.stride * 2);
    inputs.blocks = (InputBlock *)take(at, (inputs.stride / BLOCK * rows + STRIP_ROWS) * (int64_t)sizeof(InputBlock));
    return inputs;
}

/* The arrays of experts, as large as any layer needs. */
static Routed lay_out_routed(const Model *model, int64_t rows, char **at)
{
    Routed routed = {0};
    int64_t runs = 0, experts = 0, outputs = 0, inner = 0;
    for (int64_t i = 0; i < model->layers; i++) {
        const Layer *layer = &model->layer[i];
        if (!layer->experts) continue;
        runs = most_of(runs, runs_of(layer)), experts = most_of(experts, experts_of(layer));
        outputs = most_of(outputs, layer->router.out);
        for (int64_t e = 0; e < experts_of(layer); e++) inner = most_of(inner, layer->expert[e].gate.out);
    }
    if (!experts) return routed;
    routed.logits = (float *)take(at, rows * outputs * 4);
    routed.weights = (float *)take(at, rows * runs * 4);
    routed.expert = (int32_t *)take(at, rows * runs * 4);
    routed.place = (int32_t *)take(at, rows * runs * 4);
    routed.first = (int32_t *)take(at, (experts + 1) * 4);
    routed.gathered = lay_out_inputs(rows * runs, model->hidden, at);
    routed.gated = lay_out_inputs(rows * runs, inner, at);
    routed.given = (float *)take(at, rows * runs * model->hidden * 4);
    routed.adapters = (const LowRank **)take(at, rows * runs * (int64_t)sizeof(LowRank *));
    return routed;
}

/* How many numbers ranks exchange for one query: the mixed values, the largest score, the sum of weights. */
INLINE int64_t part_numbers(const Model *model) { return up_to(model->keys[0].size, LANES) + 2; }

/* How many rounds `keys` keys take: a round is one span of each rank (tiles.h). */
INLINE int64_t rounds_of(const Model *model, int64_t keys)
{
    return model->context ? (keys + model->span * model->context->count - 1) / (model->span * model->context->count) : 0;
}

/* Context parallelism: room for as many rounds as MOST_PARTS numbers allow, at least one. */
static void lay_out_parts(const Model *model, int64_t rows, int64_t longest, Space *space, char **at)
{
    if (!model->context) return; /* there may be no rows at all */
    int64_t numbers = rows * model->heads * part_numbers(model);
    space->rounds = least_of(rounds_of(model, longest), most_of(1, MOST_PARTS / numbers));
    space->parts = (float *)take(at, model->context->count * space->rounds * numbers * 4);
    space->joined = (float *)take(at, numbers * 4);
}

/* Bytes of the sums of a tile's queries; a thread has two of them: over a span, and over all. */
INLINE int64_t sums_bytes(const Alike *alike)
{
    return line(alike->queries_each * width_of(&alike->heads) * 4) + 2 * line(alike->queries_each * 4);
}

/* A thread's sums over a span (which 0) or over all (which 1). */
INLINE Sums sums_of_thread(const Space *space, const Alike *alike, int64_t thread, int which)
{
    char *at = space->threads + thread * space->thread_bytes + line(alike->queries_each * COLUMNS * 4);
    float *mixed = (float *)(at + which * sums_bytes(alike)), *most = mixed + line(alike->queries_each * width_of(&alike->heads) * 4) / 4;
    return (Sums){mixed, most, most + line(alike->queries_each * 4) / 4};
}

/* Bytes of a tile's queries in blocks; 0 unless the cache is in Q8_0. */
INLINE int64_t tile_blocks_bytes(const Alike *alike)
{
    if (!in_blocks(&alike->heads)) return 0;
    return line((alike->queries_each * blocks_of(&alike->heads) + STRIP_ROWS) * (int64_t)sizeof(InputBlock));
}

/* Bytes that a thread needs for a tile, without the slots of a path: scores, both sums, query blocks. */
INLINE int64_t tile_bytes(const Alike *alike)
{
    return line(alike->queries_each * COLUMNS * 4) + 2 * sums_bytes(alike) + tile_blocks_bytes(alike);
}

/* The most tiles for one key head: those of all rows, and behind them those of the wanted rows (Kept). */
INLINE int64_t tiles_each(int64_t rows, int64_t segments) { return 2 * (rows + segments); }

/* The same of all key heads. */
INLINE int64_t tiles_of(const Model *model, int64_t rows, int64_t segments)
{
    return tiles_each(rows, segments) * (model->keys[0].count + (differ(model) ? model->keys[1].count : 0));
}

/* Says where the tiles of both kinds of layers lie. */
static void lay_tiles(const Model *model, int64_t rows, int64_t segments, Space *space, Tile *tiles)
{
    space->alike[0].tiles = tiles;
    space->alike[1].tiles = tiles + (differ(model) ? tiles_each(rows, segments) * model->keys[0].count : 0);
}

/* Lays the arrays out from `at` on. `longest`: keys of the longest sequence, its new rows included. */
static Space lay_out(const Model *model, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                     int64_t segments, int64_t threads, char *at)
{
    int64_t read = model->hidden * (model->beside_norm ? 2 : 1); /* inputs of the query, key and value products */
    Space s;
    char *start = at;
    int64_t words = 0, dim = 0;
    s.qkv_stride = s.thread_bytes = 0;
    for (int i = 0; i < 2; i++) {
        s.alike[i] = alike_of(model, i);
        const KeyHeads *keys = &model->keys[i];
        s.qkv_stride = most_of(s.qkv_stride, (model->heads + 2 * keys->count) * keys->size);
        s.thread_bytes = most_of(s.thread_bytes, tile_bytes(&s.alike[i]) + line(longest * 8));
        words = most_of(words, words_of_query(&s.alike[i].heads)), dim = most_of(dim, keys->size);
    }
    s.hidden = (float *)take(&at, rows * model->hidden * 4);
    s.normed = lay_out_inputs(rows > wanted ? rows : wanted, most_of(model->heads * dim, read), &at);
    s.gated = lay_out_inputs(rows, most_of(model->ffn, model->per_layer), &at);
    s.routed = lay_out_routed(model, rows, &at);
    s.qkv = (float *)take(&at, up_to(all_rows, model->context ? model->context->count : 1) * s.qkv_stride * 4);
    s.given = (float *)take(&at, sets_outputs_apart(model) ? rows * model->hidden * 4 : 0);
    s.aside = (float *)take(&at, runs_beside(model) ? rows * model->hidden * 4 : 0);
    s.queries = (uint32_t *)take(&at, all_rows * model->heads * words * 4);
    s.per_layer = (float *)take(&at, (rows * 2 * model->layers * model->per_layer + LANES) * 4);
    s.gates = (float *)take(&at, (rows * model->per_layer + LANES) * 4);
    s.kept.place = (int32_t *)take(&at, rows * 4), s.kept.order = (int32_t *)take(&at, wanted * 4);
    s.kept.adapters = (const LowRank **)take(&at, wanted * (int64_t)sizeof(LowRank *));
    lay_out_parts(model, all_rows, longest, &s, &at);
    lay_tiles(model, all_rows, segments, &s, (Tile *)take(&at, tiles_of(model, all_rows, segments) * (int64_t)sizeof(Tile)));
    s.threads = take(&at, threads * s.thread_bytes);
    s.bytes = at - start;
    return s;
}

/* The bytes that every forward needs at most whose rows, wanted rows, segments and threads are no more than these, and
 * whose longest sequence has at most `longest` keys. */
static int64_t space_bytes(const Model *model, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                           int64_t segments, int64_t threads)
{
    return lay_out(model, rows, all_rows, wanted, longest, segments, threads, 0).bytes;
}

INLINE int64_t all_rows_of(const Batch *batch) { return batch->all_rows ? batch->all_rows : batch->rows; }

INLINE int is_kept(const int32_t *place, int64_t row) { return !place || place[row] >= 0; }

/* Cuts a batch's attention into tiles: for each segment and key head, runs of rows with `queries_each` queries at most.
 * Pending rows and nodes are in separate tiles. With `place` only rows that have one are in tiles. The first tile is
 * number `first`. Returns how many there are. */
static int64_t cut_tiles(const Batch *batch, const Alike *alike, const int32_t *place, int64_t first)
{
    int64_t count = 0, most = alike->queries_each / alike->heads.group;
    for (int64_t s = 0; s < batch->segments; s++) {
        const Segment *segment = &batch->segment[s];
        int64_t rows = segment->pending + segment->nodes;
        for (int64_t head = 0; head < alike->kv_heads; head++)
            for (int64_t from = segment->base, to; from < rows; from = to) {
                int64_t until = from < segment->pending ? segment->pending : rows;
                to = from + 1;
                if (!is_kept(place, segment->begin + from)) continue;
                while (to < until && to < from + most && is_kept(place, segment->begin + to)) to++;
                alike->tiles[first + count++] = (Tile){(int32_t)s, (int32_t)head, (int32_t)from, (int32_t)to};
            }
    }
    return count;
}

#endif
