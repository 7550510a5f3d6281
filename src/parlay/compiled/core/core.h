/* The compiled decoder: plain data that the caller lays out, and the table of what one instruction set offers.
 *
 * Every number that leaves a forward comes out bit for bit the same whatever rows, keys and threads are beside it:
 * each sum runs in one order, over inputs of a product in order, over keys in path order.
 */
#ifndef PARLAY_CORE_H
#define PARLAY_CORE_H

#include <stdint.h>

#include "shelf.h"

#define PAGE 16 /* tokens of a page of the cache */

/* y = W x (* scale) (+ bias). Weights are packed in panels of `panel` outputs, the last filled up with zeros. */
typedef struct {
    const void *panels;
    const float *scale; /* per output, for int8 weights; else null */
    const float *bias;  /* per output, or null */
    int64_t in, out, kind; /* the number of their format: ggml's, as in GGUF files */
    const int32_t *order; /* [in] or null: input k is number order[k] of a row. Of formats of blocks alone */
} Linear;

/* How keys and values are cached: as plain numbers, or in blocks of 32 codes of eight bits with one scale, as ggml's
 * q8_0. Of plain numbers a page holds, for each head, PAGE keys in strips of LANES (strips.h), or PAGE rows of values. Of
 * blocks it holds PAGE keys in strips as of weights (codes.h), then PAGE rows of the codes of values, then their scales in
 * half precision, [head_dim / 32][PAGE]. */
enum { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_Q8_0 = 2 };

/* Of gates: x * sigmoid(x), its approximation of x * Phi(x) by tanh, and gpt-oss's: x * sigmoid(1.702 x) of what is at most
 * 7, times one more than what is at most 7 in size. */
enum { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

#define MOST_EXPERTS 1024 /* of a layer, with the shared one */
#define MOST_CHOSEN 64    /* by a row, with the shared one */

/* A gated feed-forward of a mixture. */
typedef struct Expert {
    Linear gate, up, down;
} Expert;

/* Whether an expert runs for every row, and is multiplied by the sigmoid of a logit of its own, the router's last. */
enum { NOT_SHARED = 0, SHARED = 1, GATED = 2 };

typedef struct {
    Linear query, key, value, out, gate, up, down;
    const float *attention_norm, *feed_forward_norm;         /* [hidden] or null: of what sub-layers read */
    const float *attention_out_norm, *feed_forward_out_norm; /* [hidden] or null: of what they give, before it is added */
    const float *qk_norm;    /* [heads + key heads][their size], or null */
    const float *value_norm; /* [their size], or null */
    const float *rotations;  /* [positions][2][their size / 2]: cosines, sines */
    double scale;       /* queries are multiplied by it */
    double score_cap;   /* a score s becomes cap * tanh(s / cap); 0: stays as it is */
    int64_t window;     /* a row sees the last so many keys of its path; 0: all */
    int64_t activation; /* of gates */
    const float *sinks;   /* [heads] or null: scores of keys without a value */
    int64_t wide_norms;   /* 1: qk_norm norms all heads of queries together, and all of keys */
    Linear router;        /* logits of experts, which take the place of gate, up and down */
    const Expert *expert; /* [experts], then the shared one */
    int64_t experts, chosen, shared; /* experts: 0 where there are none; those that a row chooses */
    int64_t normalized;   /* 1: the weights of a row's experts add up to one */
    int64_t groups, top_groups; /* of experts; those that a row may choose from, where there is a choice_bias */
    double expert_scale;  /* the weights of a row's experts are multiplied by it */
    const float *choice_bias; /* [experts] or null: weights are sigmoids, and with these beside them chosen by */
    int64_t adapted; /* where the layer's experts begin in an adapter's table, each with EXPERT_PRODUCTS places */
    const float *expert_scales; /* [experts] or null: of the weight of each */
    const float *router_norm, *experts_norm; /* [hidden]: of what router and experts read where gate, up and down run
                                              * besides; else null, and they read what feed_forward_norm makes */
    const float *dense_out_norm, *experts_out_norm; /* [hidden]: of what these give before it is added up, and null */
    int64_t place, recent; /* its number among the layers that share pages; 1: its keys are in a segment's recent pages */
    int64_t reads_others;  /* 1: its keys and values are those that an earlier layer has put at `place` */
    double out_scale;      /* the hidden state that leaves it is multiplied by it */
    Linear per_layer_gate, per_layer_out; /* of what it adds last, see Model: from the hidden state, and to it */
    const float *per_layer_norm;          /* [hidden]: of that before it is added; null: it adds nothing */
    int64_t streamed;      /* 1 + its number among the layers that the model's stream reads; 0: it is in memory */
} Layer;

/* Key heads of layers whose keys share pages: how many, and the numbers of one, which query heads have, too. */
typedef struct {
    int64_t count, size;
} KeyHeads;

/* Processes that run the layers of a model together. `memory` is shared: a line that holds 1 + the number of a rank that is
 * lost, or 0; a line for each rank with the last round that it has written; parts [2][count][part]. Or, where it is null,
 * the two functions exchange numbers elsewhere; they return 0, or 1 + the number of a rank that is lost. See ranks.h. */
typedef struct {
    int64_t rank, count, part; /* this rank, of how many; numbers of a part */
    char *memory;
    int64_t patience; /* nanoseconds that a rank waits for another one's part */
    int64_t (*sum)(float *numbers, int64_t count);
    int64_t (*gather)(float *numbers, int64_t count);
    int64_t round, lost;
} Ranks;

/* Embeddings of frequent n-grams, in bfloat16, [count][hidden]. Keys rise. That of an n-gram is node * vocab + its first
 * token, where the node stands for its other tokens: below vocab it is a token, else vocab + the place of an n-gram. */
typedef struct {
    const int64_t *keys;
    const uint16_t *embeddings;
    int64_t count, longest, vocab; /* longest: tokens of an n-gram, at most */
} Ngrams;

typedef struct {
    int64_t layers, hidden, heads, ffn, vocab; /* ffn: inner numbers of the layer that has most */
    KeyHeads keys[2]; /* of the layers that see all keys, and of those whose keys are in recent pages */
    int64_t cached; /* CACHE_F32, CACHE_BF16, or CACHE_Q8_0, for heads of whole blocks */
    double eps;
    Linear embedding; /* of its panels only single rows are read; plain numbers lie in rows instead, [vocab][hidden] */
    const Layer *layer;
    const float *final_norm; /* [hidden] */
    const float *beside_norm; /* [hidden] or null. A norm: the first layer's attention reads each row's embedding, normed
                               * by it, before the normed hidden state. Its products read 2 * hidden numbers then. */
    int64_t raw_tap; /* 1: the last tap holds what leaves the last layer, before the norm */
    Linear head;
    double embedding_scale; /* embeddings are multiplied by it */
    double logit_cap;       /* a logit x becomes cap * tanh(x / cap); 0: stays as it is */
    Ranks *ranks;   /* that have some heads and units of each layer each: what a sub-layer gives is their sum. Or null */
    Ranks *context; /* that have some spans of each text's keys and values each: see tiles.h. Or null */
    int64_t span;   /* keys, a multiple of STRIP (strips.h): attention sums up each span of a path by itself */
    int64_t per_layer; /* numbers of a row that each layer reads besides the hidden state, 0: none. They are the sum of the
                        * embedding [layers][per_layer] of its id, times a scale, and of a product with what enters the
                        * first layer, normed. A layer multiplies them by the activation of its gate. */
    Linear per_layer_embedding, per_layer_projection; /* the first as `embedding` */
    const float *per_layer_norm; /* [per_layer] */
    double per_layer_scale;
    const Ngrams *ngrams; /* or null. What is added to the embedding of a row's token: that of the longest n-gram there */
    Stream *stream; /* or null: all layers are in memory */
    Shelf *shelf;   /* or null: all experts are */
} Model;

/* Keys and values that have no position, in pages as a sequence's. */
typedef struct {
    char *const *pages;
    int64_t pitch, keys;
} Prefix;

/* Rows of one sequence: `pending` tokens, then the nodes of a tree below the last of them. Those before `base` ran
 * before and are only read; the others run, row i as row begin + i of the batch. The last `seers` see a prefix, too.
 * The last `together` are chains, each below another row: a row sees all that the last of its chain sees. With a `block`
 * above 0 each row sees its whole block, which begins at a multiple of `block`; then all rows are pending. */
typedef struct {
    char *const *pages; /* of PAGE tokens each; row i of the segment is token start + i of its sequence. Null: a page that
                         * another rank has */
    int64_t pitch;      /* bytes from one head's PAGE rows to the next in a page: [layers][2][key heads] of them */
    int64_t start, pending, nodes, base, begin;
    const int32_t *parents; /* per node; -1: the last pending row */
    const Prefix *prefix;
    int64_t seers, together, block;
    char *const *recent; /* pages of the layers that see the last keys alone, or null. Keys behind all windows may be zeros. */
    int64_t recent_pitch;
    int64_t hidden_from, hidden_to; /* committed tokens that no row sees; multiples of KEYS (strips.h) */
    const int32_t *chosen; /* [layers][heads of keys[0]][chosen_pages] or null: pages of these that rows see, after all */
    int64_t chosen_pages;
    float *votes; /* [layers][heads of keys[0]][rows that run][votes_pages] or null: of the attention that a row pays, summed
                   * over the queries of a head, what each of the first pages gets. Both: not where a layer has a window */
    int64_t votes_pages; /* all of them before the first row that runs */
    const int64_t *tokens; /* of its rows, those before `base` too; and before these `longest` - 1 of the text, or -1. Only
                            * for models with n-grams */
    const int64_t *places; /* positions by which the last `placed` rows turn, in place of those on their path */
    int64_t placed;
} Segment;

/* A row that begins within the model: what the batch's inputs say of it, and x + up(down(x)) of the anchor's state x. */
typedef struct {
    int64_t anchor, rank;
    const float *down, *up; /* [rank][hidden] each */
} Joining;

/* What an adapter adds to a product of a layer: up(down(x)) (Hu et al. 2021). Rank 0: nothing. */
typedef struct {
    int64_t rank, codes; /* 1: in eight bits, for inputs in blocks: strips as of Q8_0, and what RAISE reads (formats.h) */
    const void *down; /* [rank / LANES, rounded up][words of in][LANES]: words of 32 bits as of inputs, see lanes.h */
    const void *up;   /* [panels of outputs][words of rank][panel] */
} LowRank;

enum { OF_QUERY, OF_OUT = 3, OF_GATE, OF_DOWN = 6, LAYER_PRODUCTS }; /* of a layer, in the order in which Layer has them */
#define EXPERT_PRODUCTS (LAYER_PRODUCTS - OF_GATE) /* of an expert, in the order in which Expert has them */

typedef struct {
    int64_t rows, segments, wanted, threads;
    const int64_t *ids;
    const float *inputs; /* [rows][hidden], read in place of the embeddings of ids; or null */
    const Segment *segment;
    const int32_t *wanted_rows;
    const uint8_t *skip; /* [2 * layers]: attention and feed-forward of each layer, or null */
    float *const *taps;  /* [layers + 1][rows][hidden] or null each: what enters a layer; last, what the head reads */
    float *logits;       /* [wanted][vocab], or null: nobody reads them */
    char *space;         /* `space_bytes` of them or more, 64-byte aligned */
    int64_t late, late_segments, join; /* so many last rows, those of the last segments, run from layer `join` on */
    const Joining *joining;            /* per such row */
    const LowRank *const *adapters; /* [rows] or null: each row's, or null: [layers][LAYER_PRODUCTS], then its experts' */
    float *lowered;                 /* [rows, times experts of a row][3][most_rank]: room for what their first halves make */
    int64_t most_rank; /* of the rows' adapters, rounded up to whole vectors and to RANKS */
    int64_t brains;    /* 1: adapters have numbers in bfloat16, two neighbours to a word; 0: in float32 */
    int64_t codes;     /* 1: the matrices of all these adapters have eight bits */
    int64_t all_rows, own; /* 0: all rows run here. Else segments say where the rows of all ranks that share texts lie, and
                            * each runs as many, in turn, `rows` of them here; `own` is the first of these */
} Batch;

#define MOST_CHILDREN 64
#define MOST_DRAFT 1024

/* How a request draws its tokens; see draw.h. Temperature 0: the likeliest. */
typedef struct {
    float temperature;
    int64_t top_k;           /* 0: all */
    double top_p, log_min_p; /* 1 and -INFINITY: all */
} Sampling;

/* How trees grow: `width` rows of a level and children of a row, MOST_CHILDREN at most. Of the tokens that may join the
 * draft of a segment those with the likeliest paths are written, a parent before its children. */
typedef struct {
    int64_t levels, width, most; /* most: nodes that there is room for in each draft */
    int64_t embedded; /* 1: rows below the text read the embeddings of their tokens, as in a draft model, and there are no
                       * more than the draft may have nodes; 0: the hidden states that left the row above, as in a head */
    double least;                /* no path below this chance is offered */
    const int64_t *tokens;       /* [vocab]: the target's token of each output */
    const int64_t *budgets;      /* [segments]: nodes of each draft, `most` at most, and that MOST_DRAFT at most */
    const Linear *first;         /* makes the inputs of the first rows, or null: the batch has them */
    const float *features;       /* [rows][in] that this product reads */
    const uint64_t *streams;     /* [segments][levels]: of the noise at the places of each level's tokens, see noise.h */
    const Sampling *samplings;   /* [segments] */
    const int64_t *ends;         /* tokens that end texts, below which nothing grows: those of each segment in turn */
    const int64_t *ends_from;    /* [segments + 1]: where those of each begin */
    int64_t *drafted;            /* [segments][most]: tokens */
    int64_t *parents;            /* [segments][most]: places in the draft, -1 for the root */
    double *chances;             /* [segments][most]: of a token below its parent */
    int64_t *ran;                /* [segments][most]: which of the rows below the text a node was, -1: it did not run */
    int64_t *counts;             /* [segments]: nodes */
    char *memory;                /* `growth_bytes` of them, 64-byte aligned; it lives until no thread reads it, see rest */
    const int32_t *stop;         /* not null: grow beside forwards, and no further level once this is not 0 */
} Growth;

/* Stored rows [out][in] that are to be packed. */
typedef struct {
    int64_t kind, out, in;
    const void *rows;
    void *panels;
} Packing;

typedef struct {
    const char *name;
    int64_t panel;
    int64_t (*panel_bytes)(int64_t kind, int64_t in); /* 0: a format that is not known */
    /* Whether all its numbers, or the scales of its blocks, are finite. */
    int64_t (*pack)(int64_t kind, const void *rows, int64_t out, int64_t in, void *panels);
    int64_t (*pack_all)(const Packing *, int64_t count); /* Returns the first one that is not finite, or -1. */
    void (*read)(const Linear *embedding, int64_t row, float *values);
    /* A product alone: x [rows][in], y [rows][out]. 0: there is no memory for it. */
    int64_t (*multiply)(const Linear *, const float *x, int64_t rows, float *y);
    /* all_rows: as Batch has them, or as many as rows. */
    int64_t (*space_bytes)(const Model *, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                           int64_t segments, int64_t threads);
    void (*forward)(const Model *, const Batch *);
    int64_t (*growth_bytes)(const Model *, const Batch *, const Growth *);
    void (*grow)(const Model *, const Batch *, const Growth *); /* its batch needs no space of its own */
    int64_t (*noisy_best)(const float *logits, int64_t size, float temperature, uint64_t state, int64_t count,
                          int64_t *ids); /* noise.h */
    int64_t (*draw)(const float *logits, int64_t size, float temperature, int64_t top_k, double top_p, double log_min_p,
                    uint64_t state); /* draw.h */
    void (*leading)(float *logits, int64_t rows, int64_t size, const int32_t *barred, int64_t bars, int64_t width,
                    int32_t *ids, float *chances, int32_t *counts); /* draw.h */
    void (*sum_over_ranks)(Ranks *, float *numbers, int64_t count); /* as a forward does it, for other decoders */
    void (*gather_over_ranks)(Ranks *, float *numbers, int64_t each);
    void (*rest)(void); /* returns when no thread reads what forwards were given */
    uint64_t (*stream_sum)(const char *bytes, int64_t count); /* stream.h */
    int64_t (*stream_read)(const Streaming *, int64_t number, char *to);
    Stream *(*stream_open)(const Streaming *);
    int64_t (*stream_close)(Stream *);
    int64_t (*stream_fault)(const Stream *);
    Shelf *(*shelf_open)(const Shelving *); /* shelf.h */
    int64_t (*shelf_close)(Shelf *);
    int64_t (*shelf_fault)(const Shelf *);
    int64_t (*shelf_bytes)(Shelf *);
} Core;

#endif
