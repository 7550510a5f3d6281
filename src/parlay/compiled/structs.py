"""The structs of core/core.h, stream.h and shelf.h for ctypes, and the table of functions that the library offers.

Fields have the same names in the same order as in C, unless a comment says otherwise; core.h says what they mean.
Whoever changes one changes the other. Pointers to arrays are mostly ``c_void_p``: they take the addresses of tensors.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int64, c_uint64, c_void_p


class Linear(Structure):
    _fields_ = [
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
        ("order", c_void_p),
    ]
    # In core.h these are `in`, a keyword of Python, and `out`.


class Expert(Structure):
    _fields_ = [(name, Linear) for name in ("gate", "up", "down")]


class LayerStruct(Structure):
    _fields_ = [
        *((name, Linear) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm")),
        *((name, c_void_p) for name in ("attention_out_norm", "feed_forward_out_norm")),
        *((name, c_void_p) for name in ("qk_norm", "value_norm", "rotations")),
        *((name, c_double) for name in ("scale", "score_cap")),
        *((name, c_int64) for name in ("window", "activation")),
        ("sinks", c_void_p),
        ("wide_norms", c_int64),
        ("router", Linear),
        ("expert", POINTER(Expert)),
        *((name, c_int64) for name in ("experts", "chosen", "shared", "normalized", "groups", "top_groups")),
        ("expert_scale", c_double),
        ("choice_bias", c_void_p),
        ("adapted", c_int64),
        *((name, c_void_p) for name in ("expert_scales", "router_norm", "experts_norm")),
        *((name, c_void_p) for name in ("dense_out_norm", "experts_out_norm")),
        *((name, c_int64) for name in ("place", "recent", "reads_others")),
        ("out_scale", c_double),
        *((name, Linear) for name in ("per_layer_gate", "per_layer_out")),
        ("per_layer_norm", c_void_p),
        ("streamed", c_int64),
    ]


class KeyHeads(Structure):
    _fields_ = [("count", c_int64), ("size", c_int64)]


EXCHANGE = CFUNCTYPE(c_int64, POINTER(c_float), c_int64)


class RanksStruct(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rank", "count", "part")),
        ("memory", c_void_p),
        ("patience", c_int64),
        ("sum", EXCHANGE),
        ("gather", EXCHANGE),
        *((name, c_int64) for name in ("round", "lost")),
    ]


class NgramsStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "embeddings")),
        *((name, c_int64) for name in ("count", "longest", "vocab")),
    ]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "ffn", "vocab")),
        ("keys", KeyHeads * 2),
        ("cached", c_int64),
        ("eps", c_double),
        ("embedding", Linear),
        ("layer", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("beside_norm", c_void_p),
        ("raw_tap", c_int64),
        ("head", Linear),
        *((name, c_double) for name in ("embedding_scale", "logit_cap")),
        *((name, POINTER(RanksStruct)) for name in ("ranks", "context")),
        *((name, c_int64) for name in ("span", "per_layer")),
        *((name, Linear) for name in ("per_layer_embedding", "per_layer_projection")),
        ("per_layer_norm", c_void_p),
        ("per_layer_scale", c_double),
        ("ngrams", POINTER(NgramsStruct)),
        ("stream", c_void_p),
        ("shelf", c_void_p),
    ]


class PrefixStruct(Structure):
    _fields_ = [("pages", c_void_p), ("pitch", c_int64), ("keys", c_int64)]


class SegmentStruct(Structure):
    _fields_ = [
        ("pages", c_void_p),
        *((name, c_int64) for name in ("pitch", "start", "pending", "nodes", "base", "begin")),
        ("parents", c_void_p),
        ("prefix", POINTER(PrefixStruct)),
        *((name, c_int64) for name in ("seers", "together", "block")),
        ("recent", c_void_p),
        *((name, c_int64) for name in ("recent_pitch", "hidden_from", "hidden_to")),
        *(
            (each, kind)
            for name in ("chosen", "votes")
            for each, kind in ((name, c_void_p), (f"{name}_pages", c_int64))
        ),
        ("tokens", c_void_p),
        ("places", c_void_p),
        ("placed", c_int64),
    ]


class Joining(Structure):
    _fields_ = [("anchor", c_int64), ("rank", c_int64), ("down", c_void_p), ("up", c_void_p)]


class LowRank(Structure):
    _fields_ = [("rank", c_int64), ("codes", c_int64), ("down", c_void_p), ("up", c_void_p)]


LAYER_PRODUCTS, EXPERT_PRODUCTS = 7, 3  # matrices of a layer, in the order of `LayerStruct`'s fields, and of an expert


class Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "segments", "wanted", "threads")),
        ("ids", c_void_p),
        ("inputs", c_void_p),
        ("segment", POINTER(SegmentStruct)),
        ("wanted_rows", c_void_p),
        ("skip", c_void_p),
        ("taps", c_void_p),
        *((name, c_int64) for name in ("tap_stride", "tap_form")),
        *((name, c_void_p) for name in ("logits", "likeliest", "space")),
        *((name, c_int64) for name in ("late", "late_segments", "join")),
        ("joining", POINTER(Joining)),
        ("adapters", c_void_p),
        ("lowered", c_void_p),
        *((name, c_int64) for name in ("most_rank", "bfloats", "codes", "all_rows", "own")),
    ]


class Sampling(Structure):
    _fields_ = [("temperature", c_float), ("top_k", c_int64), ("top_p", c_double), ("log_min_p", c_double)]


class GrowthStruct(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("levels", "width", "most", "embedded")),
        ("least", c_double),
        ("tokens", c_void_p),
        ("slots", c_int64),
        *((name, c_void_p) for name in ("tenants", "asking", "texts", "lengths", "budgets", "first", "features")),
        ("features_form", c_int64),
        *((name, c_void_p) for name in ("streams", "samplings", "ends", "ends_from")),
        *((name, c_void_p) for name in ("drafted", "parents", "chances", "ran", "counts", "memory", "stop")),
    ]


MOST_EXPERTS, MOST_CHOSEN = 1024, 64  # experts of a layer, and experts that a row runs; the shared one included
MOST_BEST = 256  # tokens that `noisy_best` can be asked for
MOST_DRAFT, MOST_CHILDREN = 1024, 64  # nodes of a draft that `grow` writes; rows of a level, and children of each row


def best_room(count: int) -> int:
    """How many ids `noisy_best` may write when it is asked for ``count``: all that rounding might put among these."""
    return 2 * count + 64


class Packing(Structure):
    _fields_ = [
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("rows", c_void_p),
        ("panels", c_void_p),
    ]


PANEL_BYTES = CFUNCTYPE(c_int64, c_int64, c_int64)
PACK = CFUNCTYPE(c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)
PACK_ALL = CFUNCTYPE(c_int64, POINTER(Packing), c_int64)
READ = CFUNCTYPE(None, POINTER(Linear), c_int64, c_void_p)
MULTIPLY = CFUNCTYPE(c_int64, POINTER(Linear), c_void_p, c_int64, c_void_p)
SPACE_BYTES = CFUNCTYPE(c_int64, POINTER(ModelStruct), *(c_int64,) * 6)
FORWARD = CFUNCTYPE(None, POINTER(ModelStruct), POINTER(Batch))
GROWTH_BYTES = CFUNCTYPE(c_int64, POINTER(ModelStruct), POINTER(Batch), POINTER(GrowthStruct))
GROW = CFUNCTYPE(None, POINTER(ModelStruct), POINTER(Batch), POINTER(GrowthStruct))
NOISY_BEST = CFUNCTYPE(c_int64, c_void_p, c_int64, c_float, c_uint64, c_int64, c_void_p)
DRAW = CFUNCTYPE(c_int64, c_void_p, c_int64, c_float, c_int64, c_double, c_double, c_uint64)
MOVE_ROW = CFUNCTYPE(None, c_void_p, *(c_int64,) * 6)
LEADING = CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, *(c_void_p,) * 3, c_int64)
OVER_RANKS = CFUNCTYPE(None, POINTER(RanksStruct), c_void_p, c_int64)
REST = CFUNCTYPE(None)


class StreamedLayer(Structure):
    _fields_ = [("offset", c_int64), ("bytes", c_int64), ("sum", c_uint64)]


class Streaming(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("file", "direct", "count", "patience")),
        ("layer", POINTER(StreamedLayer)),
        ("buffer", c_void_p * 2),
    ]


class Shelving(Structure):
    _fields_ = [
        ("source", Streaming),
        *((name, c_int64) for name in ("layers", "slots", "slot_bytes")),
        ("first", POINTER(c_int64)),
        ("expert", POINTER(POINTER(Expert))),
        ("slot", c_void_p),
    ]
    # In shelf.h `source` is `from`, a keyword of Python.


READ_THROUGH = CFUNCTYPE(c_double, c_void_p, c_int64, c_int64)
STREAM_BLOCK = 4096
"""Offsets, sizes and buffers of streamed layers are multiples of so many bytes."""
STREAM_ENDED, STREAM_DAMAGED, STREAM_STALLED = -1, -2, -3
STREAM_SUM = CFUNCTYPE(c_uint64, c_void_p, c_int64)
STREAM_READ = CFUNCTYPE(c_int64, POINTER(Streaming), c_int64, c_void_p)
STREAM_OPEN = CFUNCTYPE(c_void_p, POINTER(Streaming))
STREAM_OF = CFUNCTYPE(c_int64, c_void_p)
SHELF_OPEN = CFUNCTYPE(c_void_p, POINTER(Shelving))


class Core(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("panel", c_int64),
        ("panel_bytes", PANEL_BYTES),
        ("pack", PACK),
        ("pack_all", PACK_ALL),
        ("read", READ),
        ("multiply", MULTIPLY),
        ("space_bytes", SPACE_BYTES),
        ("forward", FORWARD),
        ("growth_bytes", GROWTH_BYTES),
        ("grow", GROW),
        ("noisy_best", NOISY_BEST),
        ("draw", DRAW),
        ("leading", LEADING),
        ("move_row", MOVE_ROW),
        ("sum_over_ranks", OVER_RANKS),
        ("gather_over_ranks", OVER_RANKS),
        ("read_through", READ_THROUGH),
        ("rest", REST),
        ("stream_sum", STREAM_SUM),
        ("stream_read", STREAM_READ),
        ("stream_open", STREAM_OPEN),
        ("stream_close", STREAM_OF),
        ("stream_fault", STREAM_OF),
        ("shelf_open", SHELF_OPEN),
        *((name, STREAM_OF) for name in ("shelf_close", "shelf_fault", "shelf_bytes")),
    ]
