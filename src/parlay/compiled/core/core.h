/* The interface between Python and the decoder in C: the structs of a model and of a batch, and the table of functions.
 *
 * Python lays the structs out with ctypes (structs.py has the same fields in the same order), fills in a `Model` once
 * (models/compiled/weights.py) and a `Batch` for each forward (models/compiled/layout.py), and calls the functions of
 * `Core`. There is one Core for each instruction set; choose.c picks the widest that the processor has.
 *
 * Every number that leaves a forward has the same bits whatever rows, keys and threads are beside it: each sum is taken in
 * one order, over a product's inputs in order, over keys in the order of their positions.
 *
 * In comments [rows][hidden] is the shape of an array, its last index running fastest. "Or null" says that a pointer may be.
 */
#ifndef PARLAY_CORE_H
#define PARLAY_CORE_H

#include <stdint.h>

#include "shelf.h"

#define PAGE 16 /* tokens of a page of the KV cache */

/* A matrix of the model: y = W x, then times `scale` and plus `bias`, if it has them. W [out][in] is packed in panels
 * (linear.h), the last one filled up with zeros. */
typedef struct {
    const void *panels;
    const float *scale; /* [out], for weights in int8; else null */
    const float *bias;  /* [out] or null */
    int64_t in, out, kind; /* kind: the number of the weights' format, as in formats.h */
    /* [in] or null: input k of W is number order[k] of a row (GPTQ's act-order); only for block formats. */
    const int32_t *order;
} Linear;

/* How keys and values are cached: as plain numbers, or as ggml's q8_0, in blocks of 32 codes of eight bits with a scale.
 *
 * A page has, for each layer of its kind, the keys of all key heads, then the values of all. For PAGE tokens of one head:
 *   keys      PAGE / LANES strips of LANES keys; a strip has word k of all its keys side by side, then word k + 1, ...
 *             (strips.h). In Q8_0 it is laid out like a strip of Q8_0 weights (codes.h).
 *   values    PAGE rows, a row for each token. In Q8_0 the rows of codes, then the scales in half precision,
 *             [head_dim / 32][PAGE].
 */
enum { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_Q8_0 = 2 };

/* Activations of gates. SILU: x * sigmoid(x). GELU_TANH: the approximation of x * Phi(x) by tanh. CLAMPED_SWIGLU,
 * gpt-oss's: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (1 + up), with up held between -7 and 7. */
enum { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

#define MOST_EXPERTS 1024 /* experts of a layer, the shared one included */
#define MOST_CHOSEN 64    /* experts that a row chooses, the shared one included */

/* One expert of a mixture: a gated feed-forward. */
typedef struct Expert {
    Linear gate, up, down;
} Expert;

/* A layer's shared expert, which runs for every row. SHARED: as it is.
 * GATED: times the sigmoid of a logit of its own, the router's last. */
enum { NOT_SHARED = 0, SHARED = 1, GATED = 2 };

/* One transformer layer: its matrices, norms and constants. Norms are RMS norms, whose weights the loader has multiplied
 * by the root of their number (see `norm_row` in rows.h). */
typedef struct {
    Linear query, key, value, out, gate, up, down;
    const float *attention_norm, *feed_forward_norm;         /* [hidden] or null: before the sub-layer */
    const float *attention_out_norm, *feed_forward_out_norm; /* [hidden] or null: after it, before the residual addition */
    const float *qk_norm;    /* [heads + key heads][head size] or null: of each head */
    const float *value_norm; /* [head size] or null */
    const float *rotations;  /* [positions][2][head size / 2]: RoPE's cosines, then its sines */
    double scale;       /* queries are multiplied by it, mostly 1 / sqrt(head size) */
    double score_cap;   /* scores s become cap * tanh(s / cap); 0: they do not */
    int64_t window;     /* sliding window: a row sees the last `window` keys of its path; 0: all */
    int64_t activation; /* one of SILU, ... */
    const float *sinks;   /* [heads] or null: attention sinks, the scores of a key without a value (gpt-oss) */
    int64_t wide_norms;   /* 1: qk_norm treats all query heads as one vector, and all key heads as another (OLMo 2) */
    Linear router;        /* of experts, which take the place of gate, up and down: see `experts` */
    const Expert *expert; /* the routed experts, then the shared one, if the layer has one */
    int64_t experts, chosen, shared; /* experts: 0 in a dense layer. chosen: experts of a row. shared: NOT_SHARED, ... */
    int64_t normalized;   /* 1: the weights of a row's experts are divided by their sum */
    /* With a choice_bias: groups of experts, and how many of them a row may choose experts from. */
    int64_t groups, top_groups;
    double expert_scale;  /* all weights of experts are multiplied by it */
    /* [experts] or null. With it weights are sigmoids of logits,
     * and experts are chosen by weight plus bias (DeepSeek-V3). */
    const float *choice_bias;
    /* Where the layer's experts begin in an adapter's table of LowRank; each has EXPERT_PRODUCTS entries. */
    int64_t adapted;
    const float *expert_scales; /* [experts] or null: each expert's weight is multiplied by it */
    /* For layers in which gate, up and down run beside the experts (Gemma 4), else null: the norms [hidden] of what
     * router and experts read. Without them both read what feed_forward_norm gives. */
    const float *router_norm, *experts_norm;
    /* In these layers, too: the norms [hidden] of the outputs of down and of the experts, before both are added up. */
    const float *dense_out_norm, *experts_out_norm;
    /* place: the layer's number among those whose keys are in the
     * same pages. recent: 1: these are Segment's recent pages. */
    int64_t place, recent;
    /* 1: it has no keys and values of its own, and reads those that an earlier layer has at `place`. */
    int64_t reads_others;
    double out_scale;      /* the hidden state that leaves the layer is multiplied by it */
    /* The layer's last step, see per_layer in Model: the product
     * with the hidden state, and the one that leads back to it. */
    Linear per_layer_gate, per_layer_out;
    const float *per_layer_norm;          /* [hidden]: of what this step adds; null: the layer has no such step */
    int64_t streamed;      /* 1 + its number among the layers that are read from a file (stream.h); 0: it is in memory */
} Layer;

/* The KV heads of layers whose keys are in the same pages: how
 * many, and the numbers of one head, of keys and of queries. */
typedef struct {
    int64_t count, size;
} KeyHeads;

/* Processes ("ranks") that run one model together, and how they exchange numbers; see ranks.h. Either `memory` is
 * shared between them: a cache line with 1 + the number of a rank that is lost, minus that if the rank itself has said
 * that it ends, or 0; a line for each rank with the last round that it has written; then the parts, [2][count][part].
 * Or memory is null, and the functions `sum` and `gather` exchange numbers, over a network for instance. These return
 * 0, or 1 + the number of a lost rank. */
typedef struct {
    int64_t rank, count, part; /* this process is number `rank` of `count`; part: the numbers of one exchange */
    char *memory;
    int64_t patience; /* how many nanoseconds a rank waits for another one */
    int64_t (*sum)(float *numbers, int64_t count);
    int64_t (*gather)(float *numbers, int64_t count);
    int64_t round, lost; /* exchanges so far; the lost rank, as in `memory` */
} Ranks;

/* Embeddings of frequent n-grams (ngrams.h), in bfloat16, [count][hidden]; `keys` are sorted. The key of an n-gram is
 * node * vocab + its first token, where `node` stands for the tokens after that: the token itself if it is one, else
 * vocab + the index of their n-gram. */
typedef struct {
    const int64_t *keys;
    const uint16_t *embeddings;
    int64_t count, longest, vocab; /* longest: tokens of the longest n-gram */
} Ngrams;

/* A decoder, as it lies in memory. Nothing here changes during a
 * forward, but for the states of ranks, stream and shelf. */
typedef struct {
    /* hidden: numbers of the hidden state. heads: query heads. ffn: the widest feed-forward. */
    int64_t layers, hidden, heads, ffn, vocab;
    KeyHeads keys[2]; /* of layers whose keys are in a segment's pages, and of those whose keys are in its recent pages */
    int64_t cached; /* CACHE_F32, ...; CACHE_Q8_0 only where the head size is whole blocks */
    double eps;
    /* Only single rows are read. Block formats are packed; plain numbers lie as rows, [vocab][hidden]. */
    Linear embedding;
    const Layer *layer;
    const float *final_norm; /* [hidden]: before the head */
    /* [hidden] or null. With it (heads such as EAGLE-3) the first layer's attention reads 2 * hidden numbers: each
     * row's embedding, normed by it, then the normed hidden state. */
    const float *beside_norm;
    int64_t raw_tap; /* 1: Batch's last tap is what leaves the last layer, 0: the same after the final norm */
    Linear head; /* the LM head */
    double embedding_scale; /* embeddings are multiplied by it */
    double logit_cap;       /* logits x become cap * tanh(x / cap); 0: they do not */
    /* Tensor parallelism: each rank has some heads and some of the
     * feed-forward, and sub-layers' outputs are summed; or null. */
    Ranks *ranks;
    Ranks *context; /* context parallelism: each rank has some spans of every text's KV cache, see tiles.h; or null */
    /* Keys of a span, a multiple of COLUMNS_AT_ONCE (strips.h). Attention sums up each span of a row's path by itself,
     * then joins the spans in order, so that ranks may share the spans out without changing a bit. */
    int64_t span;
    /* Per-layer embeddings (Gemma 3n): how many numbers of its own each row has for each layer, 0: none. They are the
     * row of the embedding [layers][per_layer] of its token, times per_layer_scale, plus the normed product of the
     * first hidden state with per_layer_projection. per_layer.h says what layers do with them. */
    int64_t per_layer;
    Linear per_layer_embedding, per_layer_projection; /* the first is stored as `embedding` is */
    const float *per_layer_norm; /* [per_layer] */
    double per_layer_scale;
    /* Or null. To the embedding of a row's token it adds that of the longest known n-gram that ends there. */
    const Ngrams *ngrams;
    Stream *stream; /* reads layers from a file (stream.h); or null: all are in memory */
    Shelf *shelf;   /* reads experts from a file (shelf.h); or null: all are in memory */
} Model;

/* Keys and values before a text that have no position (a trained prefix), in pages laid out as a sequence's. */
typedef struct {
    char *const *pages;
    int64_t pitch, keys;
} Prefix;

/* Rows of one sequence in a batch: `pending` tokens of its text, then `nodes` of a draft tree whose root is the last of
 * these. Row i is token start + i of the sequence, and its key and value go to that slot of the pages:
 *
 *     keys in the cache         rows of the segment
 *     [0 ............ start)    [0 ..... base) [base ..... pending) [pending ........ pending + nodes)
 *     earlier forwards          run before     pending tokens       nodes of the tree (base may lie in here too)
 *
 * Rows before `base` ran in an earlier forward, and their keys are only read. The others run now, row i as row begin + i
 * of the batch.
 *
 * Who sees what (paths.h): a pending row sees all tokens up to itself, a node all of these and the nodes above it. The last
 * `seers` rows see the prefix, too. The last `together` rows are chains, each below another row, of which every row sees all
 * that the last one of its chain sees. With `block` above 0 there are no nodes, and each row sees all of the block it is in;
 * blocks begin at multiples of `block`.
 */
typedef struct {
    /* Pages of the KV cache, of PAGE tokens each. Null: another rank has the page. */
    char *const *pages;
    int64_t pitch;      /* bytes of one head's keys, or values, in a page; a page is [layers][2][key heads][pitch bytes] */
    int64_t start, pending, nodes, base, begin;
    const int32_t *parents; /* [nodes]: each node's parent; -1: the last pending row */
    const Prefix *prefix;
    int64_t seers, together, block;
    /* The pages of layers with a sliding window (`Layer.recent`),
     * or null. Keys that no window reaches any more may be zeros. */
    char *const *recent;
    int64_t recent_pitch;
    int64_t hidden_from, hidden_to; /* tokens that no row sees, from..to; multiples of KEYS (strips.h) */
    /* [layers][heads of keys[0]][chosen_pages] or null: numbers of hidden pages that rows see after all. */
    const int32_t *chosen;
    int64_t chosen_pages;
    /* [layers][heads of keys[0]][rows that run][votes_pages] or null: gets the
     * attention that each row pays to each of the first pages, summed over the query
     * heads of a key head. Neither `chosen` nor `votes` is for layers with a window. */
    float *votes;
    int64_t votes_pages; /* the first `votes_pages` pages, which end before the first row that runs */
    /* Only for models with n-gram embeddings: the token of each row, those before `base` too. In front of it lie the
     * `longest` - 1 tokens before the first row, -1 where the text is shorter. */
    const int64_t *tokens;
    /* The positions for RoPE of the last `placed` rows. All others take the position on their path. */
    const int64_t *places;
    int64_t placed;
} Segment;

/* A row that starts in the middle of the model, at Batch's layer `join`. Its hidden state is its input plus x +
 * up(down(x)), where x is the hidden state of row `anchor` there. */
typedef struct {
    int64_t anchor, rank;
    const float *down, *up; /* [rank][hidden] each */
} Joining;

/* What a LoRA adapter adds to one product: up(down(x)) (Hu et al. 2021). Rank 0: nothing. */
typedef struct {
    int64_t rank, codes; /* codes: 1: both matrices are in eight bits, as LOWER and RAISE (formats.h) read them */
    /* Strips of LANES ranks: [rank / LANES, rounded up][words of in][LANES], in words of 32 bits as in lanes.h. */
    const void *down;
    const void *up;   /* [panels of outputs][words of rank][PANEL] */
} LowRank;

/* The order of Layer's matrices in an adapter's table. */
enum { OF_QUERY, OF_OUT = 3, OF_GATE, OF_DOWN = 6, LAYER_PRODUCTS };
#define EXPERT_PRODUCTS (LAYER_PRODUCTS - OF_GATE) /* gate, up and down, as in Expert */

/* One forward: which rows run, for which sequences, and where the results go. */
typedef struct {
    int64_t rows, segments, wanted, threads; /* wanted: rows whose logits are wanted */
    const int64_t *ids; /* [rows]: tokens */
    const float *inputs; /* [rows][hidden] or null: read in place of the tokens' embeddings */
    const Segment *segment; /* [segments] */
    const int32_t *wanted_rows; /* [wanted] */
    const uint8_t *skip; /* [2 * layers] or null: 1 skips the attention (2 i) or the feed-forward (2 i + 1) of layer i */
    /* [layers + 1] or null: each [rows][hidden] or null. They get the hidden states that enter each layer; the last
     * one, what the head reads. */
    void *const *taps;
    int64_t tap_stride, tap_form; /* how many numbers apart a tap's rows are, and whether they are FLOAT32 or BFLOAT16 */
    float *logits;       /* [wanted][vocab], or null: nobody reads them */
    uint64_t *likeliest; /* [wanted] or null: it gets the keys of the likeliest tokens (likeliest.h), and logits nothing */
    char *space;         /* scratch memory, of `space_bytes` or more, aligned to 64 */
    /* The last `late` rows, which are those of the last `late_segments` segments, start at layer `join`. */
    int64_t late, late_segments, join;
    const Joining *joining;            /* [late] */
    /* [rows] or null: each row's adapter, or null. An adapter is a table: [layers][LAYER_PRODUCTS], then the experts'. */
    const LowRank *const *adapters;
    /* Scratch memory for down(x) of each row: [rows, times experts of a row][3][most_rank]. */
    float *lowered;
    int64_t most_rank; /* the largest rank of the adapters, rounded up to whole vectors and to RANKS */
    int64_t bfloats;    /* 1: the adapters are in bfloat16, two neighbours to a word; 0: in float32 */
    int64_t codes;     /* 1: all adapters of the batch are in eight bits */
    /* Under context parallelism: the rows of all ranks together, whose places the segments give. Each rank runs an
     * equal share in turn, `rows` of them here, the first of which is row `own`. 0: all rows run here. */
    int64_t all_rows, own;
} Batch;

/* How wide a level of a tree and how large a draft may be in `Growth`. */
#define MOST_CHILDREN 64
#define MOST_DRAFT 1024

/* How a request draws its tokens; see draw.h. Temperature 0 takes the likeliest. */
typedef struct {
    float temperature;
    int64_t top_k;           /* 0: no limit */
    double top_p, log_min_p; /* top_p 1 and log_min_p -INFINITY: no limit */
} Sampling;

/* How draft trees grow, one for each segment, level by level (grow.h). `width` limits the rows of a level and the children
 * of each row, MOST_CHILDREN at most. Of all tokens that were offered, those with the likeliest paths become the draft, a
 * parent before its children.
 */
typedef struct {
    int64_t levels, width, most; /* most: nodes that each segment's results have room for */
    /* 1: rows of the tree read the embeddings of their tokens, as in a draft model, and a tree runs no more rows than
     * its draft may have nodes. 0: they read the hidden states that left the row above, as in a draft head (EAGLE). */
    int64_t embedded;
    double least;                /* tokens whose path is less likely are not offered */
    const int64_t *tokens;       /* [vocab]: the target's token for each output of the head */
    /* The head's last outputs are slots for tokens of single tenants: a text drafts none of another tenant's. */
    int64_t slots;
    const int64_t *tenants;      /* [slots]: whose token a slot has; 0: everybody's */
    const int64_t *asking;       /* [segments]: the tenant of each text */
    /* The tokens of each text, by whose copies its draft grows (copies.h), and how many; 0: it has no copies. */
    const int32_t *const *texts;
    const int64_t *lengths;
    const int64_t *budgets;      /* [segments]: the most nodes of each draft; `most` and MOST_DRAFT at most */
    const Linear *first;         /* computes the first rows' inputs from `features`; or null: the batch has the inputs */
    const void *const *features; /* [rows]: each [in of first] */
    int64_t features_form;       /* FLOAT32 or BFLOAT16 */
    const uint64_t *streams;     /* [segments][levels]: the streams of the sampler's noise at each level, see noise.h */
    const Sampling *samplings;   /* [segments] */
    /* Tokens that end a text, below which nothing grows: those of each segment in turn. */
    const int64_t *ends;
    const int64_t *ends_from;    /* [segments + 1]: where each segment's begin */
    int64_t *drafted;            /* results, [segments][most]: tokens */
    int64_t *parents;            /* [segments][most]: index of the parent in the draft, -1 for the root */
    double *chances;             /* [segments][most]: probability of a token, given its parent */
    int64_t *ran;                /* [segments][most]: which row below the text the node was; -1: it did not run */
    int64_t *counts;             /* [segments]: nodes of the draft */
    char *memory;                /* scratch memory, `growth_bytes` of it, aligned to 64; free it only after `rest` */
    /* Not null: runs beside forwards, in the second pool, and begins no level once this is not 0. */
    const int32_t *stop;
} Growth;

/* A matrix that `pack_all` packs: rows [out][in] as a file stores them, to panels. */
typedef struct {
    int64_t kind, out, in;
    const void *rows;
    void *panels;
} Packing;

/* The functions that one instruction set offers. */
typedef struct {
    const char *name;
    int64_t panel; /* outputs of a panel */
    int64_t (*panel_bytes)(int64_t kind, int64_t in); /* 0: the format is not known */
    /* 0: a number, or a block's scale, is not finite. */
    int64_t (*pack)(int64_t kind, const void *rows, int64_t out, int64_t in, void *panels);
    int64_t (*pack_all)(const Packing *, int64_t count); /* returns the first one that is not finite, or -1 */
    void (*read)(const Linear *embedding, int64_t row, float *values);
    /* One product: x [rows][in], y [rows][out]. 0: there is no memory for it. */
    int64_t (*multiply)(const Linear *, const float *x, int64_t rows, float *y);
    /* all_rows: as in Batch, or the same as rows. */
    int64_t (*space_bytes)(const Model *, int64_t rows, int64_t all_rows, int64_t wanted, int64_t longest,
                           int64_t segments, int64_t threads);
    void (*forward)(const Model *, const Batch *);
    int64_t (*growth_bytes)(const Model *, const Batch *, const Growth *);
    void (*grow)(const Model *, const Batch *, const Growth *); /* the batch needs no `space` */
    int64_t (*noisy_best)(const float *logits, int64_t size, float temperature, uint64_t state, int64_t count,
                          int64_t *ids); /* noise.h */
    int64_t (*draw)(const float *logits, int64_t size, float temperature, int64_t top_k, double top_p, double log_min_p,
                    uint64_t state); /* draw.h */
    void (*leading)(float *logits, int64_t rows, int64_t size, const int32_t *barred, int64_t bars, int64_t width,
                    int32_t *ids, float *chances, int32_t *counts, int64_t threads); /* draw.h */
    void (*move_row)(char *const *pages, int64_t pitch, int64_t layers, int64_t heads, int64_t words, int64_t from,
                     int64_t to); /* rows.h */
    void (*sum_over_ranks)(Ranks *, float *numbers, int64_t count); /* as a forward does it, for decoders in Python */
    void (*gather_over_ranks)(Ranks *, float *numbers, int64_t each);
    double (*read_through)(const void *at, int64_t bytes, int64_t threads); /* reading.h */
    void (*rest)(void); /* returns when no thread reads any more what forwards were given */
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
