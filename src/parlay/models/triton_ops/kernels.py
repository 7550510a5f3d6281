"""Triton kernels of attention over pages. Importing this module needs Triton.

A program computes the query heads of one key head of one row over one span of ``SPAN`` keys, in blocks of ``KEYS``.
Spans and blocks begin at fixed positions of the row's own path, and all products have the same shape, so a row's sums
depend neither on the number of other rows nor on where a tree's nodes are stored. Spans keep a GPU busy when a long
text has few rows (Flash-Decoding, Dao et al. 2023). A second kernel combines their partial results in text order,
without atomics.

Kernels are not recompiled for other numbers or alignments, so the trial tests the kernels that are used.

Shapes: T rows, G query heads of a key head, padded to GP; D numbers of a head, padded to DP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OWN = tl.constexpr(0)
BOUND = tl.constexpr(1)
HIDDEN = tl.constexpr(2)
PATH_FROM = tl.constexpr(4)
PATH = tl.constexpr(5)
PAGES = tl.constexpr(6)
SLOT = tl.constexpr(8)
PITCH = tl.constexpr(9)
FIELDS = tl.constexpr(11)
"""Fields of a row, as in `parlay.models.triton_ops.row_table`."""

FACTORS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""The types in which matrix units multiply numbers of these dtypes."""


@triton.jit(do_not_specialize=["recent", "place"], do_not_specialize_on_alignment=["fields", "lists"])
def store(
    new,
    fields,
    lists,
    recent,
    place,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write the key and value of one head of one row of ``new`` ``[T, 2, HEADS, D]`` to the row's slot.

    ``recent`` is 1 for layers with recent pages, 0 for the others.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = fields + row * FIELDS
    slot, pitch = tl.load(own + SLOT), tl.load(own + PITCH + recent)
    address = tl.load(lists + tl.load(own + PAGES + recent) + slot // PAGE)
    d = tl.arange(0, DP)
    to = address.to(new.dtype) + (place * 2 * HEADS + head) * pitch + slot % PAGE * D + d
    source = new + (row * 2 * HEADS + head) * D + d
    tl.store(to, tl.load(source, mask=d < D), mask=d < D)
    tl.store(to + HEADS * pitch, tl.load(source + HEADS * D, mask=d < D), mask=d < D)


@triton.jit(
    do_not_specialize=["recent", "place", "window", "spans"],
    do_not_specialize_on_alignment=["peaks", "sums", "fields", "lists"],
)
def attend(
    queries,
    mixed,
    peaks,
    sums,
    fields,
    lists,
    recent,
    place,
    window,
    spans,
    cap,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    CAPPED: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum the values of one span of keys for ``queries`` ``[T, HEADS * G, D]``, which include the scale.

    Writes sums of values ``mixed`` ``[T, HEADS, spans, GP, D]`` relative to the largest scores ``peaks``, and sums of
    weights ``sums``, both ``[T, HEADS, spans, GP]``. ``window`` is the number of keys that a row sees, or 0 for all. A
    token's keys and values begin at a multiple of ``ALIGNED`` bytes. Matrix units multiply numbers of type ``FACTORS``.
    With ``WIDE`` float64 is computed by sums, as matrix units may not support it.
    """
    row, head, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own = fields + row * FIELDS
    low, bound = _seen(own, window)
    first, last = tl.maximum(low // KEYS * KEYS, span * SPAN), tl.minimum(bound, (span + 1) * SPAN)
    if first >= last:
        return
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    at = ((row * HEADS + head) * G + g[:, None]) * D + d[None, :]
    query = tl.load(queries + at, mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    pitch = tl.load(own + PITCH + recent)
    layer = (place * 2 * HEADS + head) * pitch
    peak, weight, total = _nothing(GP, DP, WIDE)
    for block in range(first, last, KEYS):
        position = block + tl.arange(0, KEYS)
        slot, seen = _slots(own, lists, position, low, bound)
        address = tl.load(lists + tl.load(own + PAGES + recent) + slot // PAGE, mask=seen, other=0)
        start = tl.multiple_of(address.to(queries.dtype) + layer + slot % PAGE * D, ALIGNED)
        there = start[:, None] + d[None, :]
        visible = seen[:, None] & (d < D)[None, :]
        scores = _scores(query, tl.load(there, mask=visible, other=0.0), seen, cap, CAPPED, FACTORS, WIDE)
        higher, base, shrink = _raised(peak, tl.max(scores, 1))
        weights = tl.exp(scores - base[:, None])
        behind = tl.multiple_of(start + HEADS * pitch, ALIGNED)[:, None] + d[None, :]
        values = tl.load(behind, mask=visible, other=0.0)
        total = total * shrink[:, None] + _mixed(weights, values, FACTORS, WIDE)
        weight = weight * shrink + tl.sum(weights, 1)
        peak = higher
    part = ((row * HEADS + head) * spans + span) * GP + g
    tl.store(peaks + part, peak)
    tl.store(sums + part, weight)
    tl.store(mixed + part[:, None] * D + d[None, :], total, mask=(d < D)[None, :])


@triton.jit(
    do_not_specialize=["window", "spans", "stride"],
    do_not_specialize_on_alignment=["peaks", "sums", "fields", "sinks", "out"],
)
def combine(
    mixed,
    peaks,
    sums,
    fields,
    sinks,
    out,
    window,
    spans,
    stride,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Combine the spans of `attend` in order into ``out`` ``[T, HEADS * G * D]``, whose rows are ``stride`` numbers
    apart.

    ``sinks`` ``[HEADS * G]`` are scores that take weight and contribute no value.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, bound = _seen(fields + row * FIELDS, window)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    peak, weight, total = _nothing(GP, DP, WIDE)
    for span in range(low // KEYS * KEYS // SPAN, (bound + SPAN - 1) // SPAN):
        part = ((row * HEADS + head) * spans + span) * GP + g
        theirs = tl.load(peaks + part)
        higher, base, shrink = _raised(peak, theirs)
        grow = tl.exp(theirs - base)
        added = tl.load(mixed + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        total = total * shrink[:, None] + added * grow[:, None]
        weight = weight * shrink + tl.load(sums + part) * grow
        peak = higher
    if SINKS:
        sink = tl.load(sinks + head * G + g, mask=g < G, other=0.0).to(peak.dtype)
        higher, base, shrink = _raised(peak, sink)
        total = total * shrink[:, None]
        weight = weight * shrink + tl.exp(sink - base)
    result = total / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out + row * stride + (head * G + g[:, None]) * D + d[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def _seen(own, window):
    """The first position that a row sees, and the bound of the positions it sees."""
    at = tl.load(own + OWN)
    return tl.where(window > 0, tl.maximum(at - window + 1, 0), 0), tl.load(own + BOUND)


@triton.jit
def _slots(own, lists, position, low, bound):
    """The slots of these positions on the row's path, and whether the row sees them."""
    hidden, visible = tl.load(own + HIDDEN), tl.load(own + HIDDEN + 1)
    seen = (position >= low) & (position < bound) & ((position < hidden) | (position >= visible))
    ahead = position - tl.load(own + PATH_FROM)
    listed = tl.load(lists + tl.load(own + PATH) + ahead, mask=seen & (ahead >= 0), other=0)
    return tl.where(ahead >= 0, listed, position), seen


@triton.jit
def _nothing(GP: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """The initial largest score, sum of weights and sum of values."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    return tl.full([GP], float("-inf"), kind), tl.zeros([GP], kind), tl.zeros([GP, DP], kind)


@triton.jit
def _raised(peak, theirs):
    """The new largest score, the base to which scores are relative, and the factor for earlier sums."""
    higher = tl.maximum(peak, theirs)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: weights are 0, not NaN
    return higher, base, tl.exp(peak - base)


@triton.jit
def _scores(query, keys, seen, cap, CAPPED: tl.constexpr, FACTORS: tl.constexpr, WIDE: tl.constexpr):
    """Scores ``[GP, KEYS]``, minus infinity for keys that the row does not see."""
    if WIDE:
        scores = tl.sum(query[:, None, :] * keys[None, :, :], 2)
    else:
        scores = tl.dot(query.to(FACTORS), tl.trans(keys.to(FACTORS)), input_precision="ieee")
    if CAPPED:
        scores = cap * (1 - 2 / (tl.exp(2 * scores / cap) + 1))  # tanh, which the interpreter lacks
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def _mixed(weights, values, FACTORS: tl.constexpr, WIDE: tl.constexpr):
    """Sums of values ``[GP, DP]``."""
    if WIDE:
        return tl.sum(weights[:, :, None] * values[None, :, :], 1)
    else:
        return tl.dot(weights.to(FACTORS), values.to(FACTORS), input_precision="ieee")
