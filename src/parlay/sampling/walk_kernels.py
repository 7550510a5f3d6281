"""Triton kernels of the shared-noise accept rule: draw tokens and walk down a tree, in one launch.

A program walks one sequence's tree and computes the rows that it visits, as `parlay.sampling.rules.shared_noise` does.
It draws the same tokens as `parlay.sampling.sampler`, or reports that it is not sure: if a number is not finite, or
rounding decides what top-p keeps.

Shapes: V the vocabulary, read in blocks of ``BLOCK``. It is not a constant, so that one trial compiles for all models.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROOT = tl.constexpr(0)
NODES = tl.constexpr(1)
TREE = tl.constexpr(2)
STREAMS = tl.constexpr(3)
GREEDY = tl.constexpr(4)
TOP_K = tl.constexpr(5)
TEMPERATURE = tl.constexpr(6)
TOP_P = tl.constexpr(7)
LEAST = tl.constexpr(8)
FIELDS = tl.constexpr(9)
"""Numbers per sequence, in the order of `parlay.sampling.fused_walk`."""

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
LOWEST = tl.constexpr(-(1 << 51))
NONE = tl.constexpr(1 << 40)


@triton.jit(do_not_specialize=["stride", "room", "V"], do_not_specialize_on_alignment=["logits", "numbers", "out"])
def walk(logits, numbers, out, stride, room, V, BLOCK: tl.constexpr):
    """Walk each sequence's tree over ``logits`` ``[R, V]``, whose rows are ``stride`` numbers apart.

    ``numbers`` int64: `FIELDS` of each sequence, then the data that these point to. Writes ``[S, 2 + 2 * room]`` to
    ``out``: whether the sampler must decide, how many tokens were chosen, these tokens, and the nodes that have them.
    """
    sequence = tl.program_id(0)
    own, to = numbers + sequence * FIELDS, out + sequence.to(tl.int64) * (2 + 2 * room)
    tree, nodes, root = numbers + tl.load(own + TREE), tl.load(own + NODES), tl.load(own + ROOT)
    node, count = root * 0 - 1, root * 0
    unsure = count > 0
    going = count == 0
    while going:
        row = logits + (root + 1 + node) * stride
        token, unsure = _token(row, own, tl.load(numbers + tl.load(own + STREAMS) + count), V, BLOCK)
        tl.store(to + 2 + count, token)
        node = _child(tree, nodes, node, token)
        tl.store(to + 2 + room + count, node)
        count += 1
        going = (node >= 0) & (unsure == 0)
    tl.store(to, unsure.to(tl.int64))
    tl.store(to + 1, count)


@triton.jit
def _child(tree, nodes, node, token):
    """The child of a node with this token, or -1. ``tree`` has the parents, then the tokens."""
    found = node * 0 - 1
    for first in range(0, nodes, 16):
        number = first + tl.arange(0, 16)
        there = number < nodes
        parents = tl.load(tree + number, mask=there, other=-2)
        tokens = tl.load(tree + nodes + number, mask=there, other=-2)
        fits = there & (parents == node) & (tokens == token)
        found = tl.maximum(found, tl.max(tl.where(fits, number.to(tl.int64), -1)))
    return found


@triton.jit
def _token(row, own, state, V, BLOCK: tl.constexpr):
    """The token of a row, and whether the sampler must decide."""
    temperature = tl.load(own + TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    token, top, bad = _top(row, temperature, V, BLOCK)
    unsure = bad
    if (tl.load(own + GREEDY) == 0) & (bad == 0):
        floor, equal, unsure = _floor(row, own, temperature, top, V, BLOCK)
        least = tl.load(own + LEAST).to(tl.float64, bitcast=True)
        lowest = (top.to(tl.float64) + least).to(tl.float32)
        token = _draw(row, temperature, state, floor, equal, lowest, V, BLOCK)
    return token, unsure


@triton.jit
def _read(row, first, temperature, V, BLOCK: tl.constexpr):
    """Ids of a block, which of them exist, and their scores."""
    ids = first + tl.arange(0, BLOCK)
    there = ids < V
    numbers = tl.load(row + ids, mask=there, other=float("-inf")).to(tl.float32)
    return ids, there, tl.div_rn(numbers, tl.full([BLOCK], 1.0, tl.float32) * temperature)


@triton.jit
def _top(row, temperature, V, BLOCK: tl.constexpr):
    """The first id of the largest score, that score, and whether any number is NaN or the largest is not finite."""
    token, top = tl.program_id(0).to(tl.int64) * 0, temperature * 0 - float("inf")
    bad = token > 0
    for first in range(0, V, BLOCK):
        ids, there, scores = _read(row, first, temperature, V, BLOCK)
        bad = bad | (tl.max((scores != scores).to(tl.int32)) > 0)
        numbers = tl.where(scores != scores, float("-inf"), scores)
        here = tl.max(numbers)
        place = tl.min(tl.where((numbers == here) & there, ids, V)).to(tl.int64)
        token = tl.where(here > top, place, token)
        top = tl.maximum(top, here)
    return token, top, bad | (top == float("inf")) | (top == float("-inf"))


@triton.jit
def _key(scores):
    """Integers from 0 to 2**32 in the order of the scores; both zeros have the same."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _floor(row, own, temperature, top, V, BLOCK: tl.constexpr):
    """Keys that top-k and then top-p keep: those above a floor, and how many of the first ones on it; or unsure.

    A floor is the largest key from which on there is enough: tokens for top-k, probability for top-p.
    """
    count, share = tl.load(own + TOP_K), tl.load(own + TOP_P).to(tl.float64, bitcast=True)
    floor, equal = count * 0 - 1, count * 0 + NONE
    unsure = count < 0
    if count > 0:
        floor, above, weight = _lowest(row, temperature, top, count.to(tl.float64), floor, equal, False, V, BLOCK)
        equal = count - above.to(tl.int64)
    if share < 1:
        whole, weight = _mass(row, temperature, top, count * 0 - 1, floor, equal, True, V, BLOCK)
        goal = share * whole
        found, above, weight = _lowest(row, temperature, top, goal, floor, equal, True, V, BLOCK)
        needed = (goal - above) / weight
        near = tl.abs(needed - tl.floor(needed + 0.5)) * weight
        unsure = (near <= 1e-9 * whole) | (weight <= 0)
        floor, equal = found, tl.ceil(needed).to(tl.int64)
    return floor, equal, unsure


@triton.jit
def _weights(keys, scores, top, bound, WEIGHED: tl.constexpr):
    """Weights of scores whose keys are above a bound: their probability up to a factor, or 1."""
    if WEIGHED:
        return tl.where(keys > bound, tl.exp((scores - top).to(tl.float64)), 0.0)
    else:
        return (keys > bound).to(tl.float64)


@triton.jit
def _mass(row, temperature, top, than, bound, equal, WEIGHED: tl.constexpr, V, BLOCK: tl.constexpr):
    """The weight of keys above ``than`` among those left: above ``bound``, and ``equal`` ones on it.

    Also returns the weight of one token on ``than``.
    """
    whole = top.to(tl.float64) * 0
    weight, on_bound = whole, whole
    for first in range(0, V, BLOCK):
        _, there, scores = _read(row, first, temperature, V, BLOCK)
        keys = tl.where(there, _key(scores), -2)
        weights = _weights(keys, scores, top, -2, WEIGHED)
        whole += tl.sum(tl.where((keys > than) & (keys > bound), weights, 0.0))
        weight = tl.maximum(weight, tl.max(tl.where(keys == than, weights, 0.0)))
        on_bound = tl.maximum(on_bound, tl.max(tl.where(keys == bound, weights, 0.0)))
    return whole + tl.where((bound > than) & (bound >= 0), on_bound * equal.to(tl.float64), 0.0), weight


@triton.jit
def _lowest(row, temperature, top, goal, bound, equal, WEIGHED: tl.constexpr, V, BLOCK: tl.constexpr):
    """The largest key from which on the weight reaches a goal, the weight above it, and that of one token on it.

    Only the keys left count, as in `_mass`. Each pass finds four bits of the key.
    """
    found, digit = bound * 0, tl.arange(0, 16).to(tl.int64)
    for turn in range(8):
        keys_D = found + (digit << (28 - 4 * turn))
        sums_D = tl.zeros([16], tl.float64)
        on_bound = goal * 0
        for first in range(0, V, BLOCK):
            _, there, scores = _read(row, first, temperature, V, BLOCK)
            keys = tl.where(there, _key(scores), -2)
            weights = _weights(keys, scores, top, bound, WEIGHED)
            sums_D += tl.sum(tl.where(keys[None, :] >= keys_D[:, None], weights[None, :], 0.0), 1)
            on = _weights(keys, scores, top, -2, WEIGHED)
            on_bound = tl.maximum(on_bound, tl.max(tl.where(keys == bound, on, 0.0)))
        sums_D += tl.where((keys_D <= bound) & (bound >= 0), on_bound * equal.to(tl.float64), 0.0)
        found += tl.max(tl.where(sums_D >= goal, digit, 0)) << (28 - 4 * turn)
    above, weight = _mass(row, temperature, top, found, bound, equal, WEIGHED, V, BLOCK)
    return found, above, weight


@triton.jit
def _draw(row, temperature, state, floor, equal, lowest, V, BLOCK: tl.constexpr):
    """The first id of the largest score with noise, among the kept keys.

    A block is examined if the bits of its noise say that its best could win; see `noise._best_by_bound`.
    """
    token, rank = floor * 0, floor * 0
    best = temperature.to(tl.float64) * 0 - float("inf")
    for first in range(0, V, BLOCK):
        ids, there, scores = _read(row, first, temperature, V, BLOCK)
        keys = _key(scores)
        on = (keys == floor) & there
        order = rank + tl.cumsum(on.to(tl.int64), 0)
        kept = there & ((keys > floor) | (on & (order <= equal))) & (scores >= lowest)
        rank += tl.sum(on.to(tl.int64))
        bits = _bits(state, ids)
        missing = best - tl.max(tl.where(kept, scores, float("-inf"))).to(tl.float64)
        cell = tl.exp(-tl.exp(tl.minimum(1e-6 * (1 + tl.abs(best)) - missing, 100.0))) * 4503599627370496.0
        needed = tl.maximum(tl.floor(cell).to(tl.int64) - 4 + LOWEST, LOWEST) << 12
        if tl.max((kept & (bits >= needed)).to(tl.int32)) > 0:
            noisy = tl.where(kept, scores.to(tl.float64) + _gumbel(bits), float("-inf"))
            here = tl.max(noisy)
            place = tl.min(tl.where((noisy == here) & kept, ids, V)).to(tl.int64)
            token = tl.where(here > best, place, token)
            best = tl.maximum(best, here)
    return token


@triton.jit
def _bits(state, ids):
    """`noise.bits` of a stream's tokens."""
    z = state.to(tl.uint64, bitcast=True) + (ids.to(tl.uint64) + 1) * GOLDEN
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _gumbel(bits):
    """`noise.gumbel`, by two logarithms in float64."""
    uniform = ((bits >> 12).to(tl.float64) + 2251799813685248.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
