"""Exact attention of one sequence's new rows over its cached keys.

A head group's queries are folded into the rows of one product: ``[K, T * G, D]`` against keys ``[K, S, D]``, which are
stored in the sequence's buffer first and read from there.

Shapes: N rows of all segments, of which T are this segment's; A query, key and value heads together; K key/value heads;
G query heads for each of them; D numbers of a head, which are P pairs (complex); S slots of the buffer; Q rows of a
product's queries, which are T * G and what pads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.models.rope import Rope
from parlay.models.torch_ops.attention_form import Form, Heads, SeenPrefix
from parlay.models.torch_ops.gathered import Gathered
from parlay.types import Tree, trees

Attend = Callable[[int, Tensor], None]
"""``(layer, qkv_NAP)``: store keys and values of one segment's rows and write the attention of these rows.

``qkv_NAP`` holds the rows of all segments: query, key and value heads as complex pairs.
"""

_TILE_ROWS = 256
"""Most rows per product, so that scores stay small and early rows of a long prefill skip later keys."""
SERIAL = 32_768
"""torch splits elementwise work of more elements between threads, in the middle of a row if need be."""


class ExactAttention:
    """Attention whose rows come out bit for bit the same, whatever rows and keys are beside them.

    Sums over keys run in path order, in products padded to a fixed multiple of rows and keys. A branching tree is
    computed path by path: the nodes of a path are copied behind the pending rows, then those not yet computed attend.
    """

    def __init__(self, heads: Heads, form: Form, rope: Rope, dtype: torch.dtype) -> None:
        self._heads, self._form, self._rope, self._dtype = heads, form, rope, dtype
        rows = _round_up(_TILE_ROWS * heads.group, form.rows)
        ahead = torch.arange(form.keys + rows // heads.group)
        hidden = ahead >= torch.arange(rows)[:, None] // heads.group
        self._hidden = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def gap(self, tree: Tree) -> int:
        """How many free slots there must be between pending rows and nodes: paths of a branching tree go there."""
        return 0 if trees.is_chain(tree) else max(trees.depths(tree))

    def plan(self, rows: Gathered, place: Rows, begin: int, out: Tensor, prefix: SeenPrefix | None = None) -> Attend:
        """How one segment attends, the same in every layer: rows from ``begin`` on, into ``out`` ``[T, K * G * D]``."""
        heads = self._heads
        count = len(out)
        spare = _round_up(heads.group, self._form.rows) + self._form.rows
        queries_KQD = torch.zeros(heads.num_kv_heads, count * heads.group + spare, heads.head_dim, dtype=self._dtype)
        if trees.is_chain(place.tree):
            runs = [_Run(tuple(range(count)), place.start + place.base)]
        else:
            runs = _tree_runs(rows, place)
        turns = self._rope.at(positions(place))
        parts = _parts(heads, rows, place, begin=begin, queries_KQD=queries_KQD, turns=turns)
        grouped = out.view(count, heads.num_kv_heads, heads.group * heads.head_dim)
        seers = count - (prefix.rows if prefix else 0)
        tiles = [
            self._tile(rows, queries_KQD, grouped, tile, prefix if tile.rows[0] >= seers else None)
            for run in runs
            for part in run.apart(seers)
            for tile in part.cut(_TILE_ROWS)
        ]
        return _Plan(parts, tiles)

    def _tile(
        self, rows: Gathered, queries_KQD: Tensor, out_TKW: Tensor, run: _Run, prefix: SeenPrefix | None
    ) -> _Tile:
        """The product of one run's rows. ``out_TKW`` is what all rows' attention goes to, W = G * D."""
        group, length, first = self._heads.group, len(run.rows), run.rows[0]
        padded = _round_up(length * group, self._form.rows)
        keys = _round_up(run.position + length, self._form.keys)
        _, kv_heads, width = out_TKW.shape
        adjacent = run.rows[-1] - first == length - 1
        return _Tile(
            queries=queries_KQD[:, first * group : first * group + padded],
            gather=None if adjacent else _Gather(queries_KQD[:, : len(out_TKW) * group], torch.tensor(run.rows), group),
            hidden=self._hidden[:padded, : keys - run.position - 1],
            hidden_from=run.position + 1,
            keys=rows.buffer[:, 0, :, :keys].transpose(2, 3).unbind(0),
            values=rows.buffer[:, 1, :, :keys].unbind(0),
            out=out_TKW[first : first + length] if adjacent else out_TKW,
            size=(length, kv_heads, width),
            stride=(width, padded * self._heads.head_dim, 1),
            moves=_Moves.of(rows, run),
            prefix=prefix,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows at consecutive positions of one path, from ``position`` on.

    Before they attend, the contents of slots ``sources`` are copied to slot ``place`` and on.
    """

    rows: tuple[int, ...]
    position: int
    sources: tuple[int, ...] = ()
    place: int = 0

    def apart(self, first: int) -> Iterator[_Run]:
        """The rows before row ``first``, and the others: one run or two, of which the first brings the copies."""
        before = sum(row < first for row in self.rows)
        yield replace(self, rows=self.rows[: before or None])
        if 0 < before < len(self.rows):
            yield _Run(self.rows[before:], self.position + before)

    def cut(self, most: int) -> Iterator[_Run]:
        """Runs of at most so many rows; the first brings the copies."""
        yield replace(self, rows=self.rows[:most])
        for begin in range(most, len(self.rows), most):
            yield _Run(self.rows[begin : begin + most], self.position + begin)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Copies of rows between slots of each layer's buffer ``[2, K, S, D]``, in each layer the same.

    ``sources`` are slots. Each of ``targets`` is the part of that layer's buffer that they are copied to.
    """

    sources: Tensor
    layers: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    @staticmethod
    def of(rows: Gathered, run: _Run) -> _Moves | None:
        if not run.sources:
            return None
        targets = rows.buffer[:, :, :, run.place : run.place + len(run.sources)].unbind(0)
        return _Moves(torch.tensor(run.sources), rows.buffer.unbind(0), targets)

    def __call__(self, layer: int) -> None:
        self.targets[layer].copy_(self.layers[layer].index_select(2, self.sources))


@dataclass(frozen=True, slots=True)
class _Gather:
    """The ``rows`` ``[T]`` of one path, which are not adjacent. ``queries`` ``[K, Q, D]`` are those of all rows."""

    queries: Tensor
    rows: Tensor
    group: int

    def into(self, like_KQD: Tensor) -> Tensor:
        """These rows' queries, padded to the shape of ``like_KQD``."""
        heads, _, head_dim = like_KQD.shape
        chosen = self.queries.view(heads, -1, self.group * head_dim).index_select(1, self.rows)
        padded = torch.zeros_like(like_KQD)
        padded[:, : len(self.rows) * self.group] = chosen.view(heads, -1, head_dim)
        return padded


@dataclass(frozen=True, slots=True)
class _Tile:
    """One product: ``queries`` ``[K, Q, D]`` of some rows against the keys of slots 0 to S.

    ``keys`` ``[K, D, S]`` and ``values`` ``[K, S, D]`` are those of each layer. ``hidden`` is added to the scores from
    slot ``hidden_from`` on: minus infinity where a row must not see a key. ``size`` and ``stride`` read the product
    ``[K, Q, D]`` as ``[T, K, G * D]``, which is the shape of ``out``.
    """

    queries: Tensor
    gather: _Gather | None
    hidden: Tensor
    hidden_from: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    out: Tensor
    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    moves: _Moves | None
    prefix: SeenPrefix | None

    def __call__(self, layer: int) -> None:
        if self.moves is not None:
            self.moves(layer)
        queries = self.queries if self.gather is None else self.gather.into(self.queries)
        scores = torch.bmm(queries, self.keys[layer])
        scores.narrow(2, self.hidden_from, self.hidden.shape[1]).add_(self.hidden)
        result = self._mixed(layer, queries, scores).as_strided(self.size, self.stride)
        if self.gather is None:
            self.out.copy_(result)
        else:
            self.out[self.gather.rows] = result.to(self.out.dtype)

    def _mixed(self, layer: int, queries_KQD: Tensor, scores_KQS: Tensor) -> Tensor:
        """``[K, Q, D]``, contiguous."""
        if self.prefix is None:
            return torch.bmm(torch.softmax(scores_KQS, -1), self.values[layer])
        more = torch.bmm(queries_KQD, self.prefix.keys[layer].transpose(1, 2))
        weights = torch.softmax(torch.cat((scores_KQS, more), -1), -1)
        path, before = torch.split(weights, [scores_KQS.shape[2], more.shape[2]], -1)
        return torch.bmm(path, self.values[layer]) + torch.bmm(before, self.prefix.values[layer])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows turned by their positions: queries into their product's layout, keys and values into the buffer.

    ``offset`` is where the rows' queries begin in a contiguous ``qkv_NAP``, keys and values follow at ``kv_offset``.
    ``query_turns`` ``[T, 1, 1, P]`` and ``kv_turns`` ``[T, 2, 1, P]`` are factors; ``query_target`` ``[T, K, G, P]``
    and ``kv_targets`` ``[T, 2, K, P]`` (one for each layer) are where the products go.
    """

    offset: int
    kv_offset: int
    row_stride: int
    query_turns: Tensor
    kv_turns: Tensor
    query_target: Tensor
    kv_targets: tuple[Tensor, ...]

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        _, _, group, pairs = size = self.query_target.shape
        target = self.kv_targets[layer]
        queries = qkv_NAP.as_strided(size, (self.row_stride, group * pairs, pairs, 1), self.offset)
        torch.mul(queries, self.query_turns, out=self.query_target)
        stride = (self.row_stride, target.shape[2] * pairs, pairs, 1)
        torch.mul(qkv_NAP.as_strided(target.shape, stride, self.kv_offset), self.kv_turns, out=target)


class _Plan:
    """One segment's attention, ready for every layer."""

    def __init__(self, parts: list[_Part], tiles: list[_Tile]) -> None:
        self._parts, self._tiles = parts, tiles

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        for part in self._parts:
            part(layer, qkv_NAP)
        for tile in self._tiles:
            tile(layer)


def _parts(
    heads: Heads, rows: Gathered, place: Rows, *, begin: int, queries_KQD: Tensor, turns: tuple[Tensor, Tensor]
) -> list[_Part]:
    """Pending rows and nodes, which may lie apart, in blocks that torch does not split between threads.

    ``turns`` are ``[T, 1, 1, P]`` for queries and ``[T, 2, 1, P]`` for keys and values.
    """
    query_turns, kv_turns = turns
    count, pairs = len(query_turns), heads.head_dim // 2
    buffer = torch.view_as_complex(rows.buffer.view(*rows.buffer.shape[:-1], pairs, 2))
    used = queries_KQD[:, : count * heads.group].view(heads.num_kv_heads, count, heads.group, pairs, 2)
    targets = torch.view_as_complex(used).transpose(0, 1)
    row_stride = heads.qkv_heads * pairs
    first_slot, split = place.start + place.base, max(0, place.pending - place.base)
    spans = [(0, count, first_slot)]
    if rows.nodes_at > place.start + place.pending:
        node_slot = rows.nodes_at + max(0, place.base - place.pending)
        spans = [(0, split, first_slot), (split, count, node_slot)]
    return [
        _Part(
            offset=(begin + first) * row_stride,
            kv_offset=(begin + first) * row_stride + heads.num_heads * pairs,
            row_stride=row_stride,
            query_turns=query_turns[first:last],
            kv_turns=kv_turns[first:last],
            query_target=targets[first:last],
            kv_targets=buffer[:, :, :, slot : slot + last - first].permute(0, 3, 1, 2, 4).unbind(0),
        )
        for span in spans
        for first, last, slot in _blocks(*span, row_stride)
    ]


def positions(place: Rows) -> range | list[int]:
    """The positions of the rows that run."""
    if trees.is_chain(place.tree):
        return range(place.start + place.base, place.start + place.end)
    root = place.start + place.pending - 1
    return [*range(place.start, root + 1), *(root + depth for depth in trees.depths(place.tree))][place.base :]


def _tree_runs(rows: Gathered, place: Rows) -> list[_Run]:
    """Pending rows, then for each leaf the nodes of its path that no earlier path or forward had."""
    behind_root = place.start + place.pending
    alone = range(max(0, place.pending - place.base))
    runs = [_Run(tuple(alone), place.start + place.base)] if alone else []
    laid: tuple[int, ...] = ()
    computed = set(range(place.base - place.pending))
    for path in trees.leaf_paths(place.tree):
        done = sum(node in computed for node in path)
        if done == len(path):
            continue
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(laid, path, strict=False)))
        sources = tuple(rows.nodes_at + node for node in path[shared:])
        new = tuple(place.pending + node - place.base for node in path[done:])
        runs.append(_Run(new, behind_root + done, sources, behind_root + shared))
        laid = path
        computed.update(path)
    return runs


def _blocks(first: int, last: int, slot: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Row blocks small enough that torch does not split one between threads: (begin, end, first slot)."""
    step = max(1, SERIAL // width)
    for begin in range(first, last, step):
        yield begin, min(begin + step, last), slot + begin - first


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
