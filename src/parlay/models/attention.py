"""Exact attention of one sequence's new rows over its cached keys.

A head group's queries are folded into the rows of one product: ``[kv_heads, rows * group, D]`` against keys
``[kv_heads, S, D]``, which are stored in the sequence's buffer first and read from there without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay import trees
from parlay.cache import Rows
from parlay.models.attention_form import Form, Heads
from parlay.models.rope import Rope
from parlay.types import Tree

Attend = Callable[[int, Tensor, Tensor], None]
"""``(layer, qkv, out)``: store keys and values of T rows and write their attention.

``qkv`` ``[T, qkv_heads, D/2]`` is complex: pairs of query, key and value heads. ``out`` is ``[T, num_heads * D]``.
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
        """Free slots wanted between pending rows and nodes: where the paths of a branching tree are laid out."""
        return 0 if trees.is_chain(tree) else max(trees.depths(tree))

    def plan(self, rows: Rows, pending: int, tree: Tree) -> Attend:
        """How one segment's rows attend, the same in every layer."""
        heads = self._heads
        count = pending + len(tree)
        spare = _round_up(heads.group, self._form.rows) + self._form.rows
        queries = torch.zeros(heads.num_kv_heads, count * heads.group + spare, heads.head_dim, dtype=self._dtype)
        if trees.is_chain(tree):
            depths: range | list[int] = range(count)
            runs = [_Run(tuple(depths), rows.start)]
        else:
            depths = row_depths(pending, tree)
            runs = _tree_runs(rows, pending, tree)
        writer = _Writer(heads, rows, pending, queries, self._rope.at(rows.start, depths))
        return _Plan(writer, [self._tile(rows, queries, tile) for run in runs for tile in run.cut(_TILE_ROWS)])

    def _tile(self, rows: Rows, queries: Tensor, run: _Run) -> _Tile:
        group, length = self._heads.group, len(run.rows)
        padded = _round_up(length * group, self._form.rows)
        keys = _round_up(run.position + length, self._form.keys)
        first = run.rows[0]
        gather = None
        if run.rows[-1] - first != length - 1:
            gather = torch.tensor(run.rows)
        return _Tile(
            rows=slice(first, first + length),
            gather=gather,
            queries=queries[:, first * group : first * group + padded],
            spare=padded - length * group,
            hidden=self._hidden[:padded, : keys - run.position - 1],
            keys=rows.buffer[:, 0, :, :keys].transpose(2, 3).unbind(0),
            values=rows.buffer[:, 1, :, :keys].unbind(0),
            moves=_Moves.of(rows, run),
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

    def cut(self, most: int) -> Iterator[_Run]:
        """Runs of at most so many rows; the first brings the copies."""
        yield replace(self, rows=self.rows[:most])
        for begin in range(most, len(self.rows), most):
            yield _Run(self.rows[begin : begin + most], self.position + begin)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Copies of rows between slots of each layer's buffer ``[2, kv_heads, slots, D]``."""

    sources: Tensor
    layers: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    @staticmethod
    def of(rows: Rows, run: _Run) -> _Moves | None:
        if not run.sources:
            return None
        targets = rows.buffer[:, :, :, run.place : run.place + len(run.sources)].unbind(0)
        return _Moves(torch.tensor(run.sources), rows.buffer.unbind(0), targets)

    def __call__(self, layer: int) -> None:
        self.targets[layer].copy_(self.layers[layer].index_select(2, self.sources))


@dataclass(frozen=True, slots=True)
class _Tile:
    """One product: queries of some rows against the keys from slot 0 on, of which ``hidden`` masks the last."""

    rows: slice
    gather: Tensor | None
    queries: Tensor
    spare: int
    hidden: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    moves: _Moves | None

    def __call__(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """``queries`` ``[kv_heads, rows, group * D]`` of the whole segment, ``out`` ``[rows, kv_heads, group * D]``."""
        if self.moves is not None:
            self.moves(layer)
        chosen = self.queries if self.gather is None else self._gathered(queries, self.gather)
        scores = torch.bmm(chosen, self.keys[layer])
        scores[:, :, scores.shape[2] - self.hidden.shape[1] :].add_(self.hidden)
        result = torch.bmm(torch.softmax(scores, -1), self.values[layer])
        used = result[:, : result.shape[1] - self.spare].reshape(out.shape[1], -1, out.shape[2]).transpose(0, 1)
        if self.gather is None:
            out[self.rows] = used
        else:
            out[self.gather] = used.to(out.dtype)

    def _gathered(self, queries: Tensor, rows: Tensor) -> Tensor:
        chosen = torch.zeros_like(self.queries)
        chosen[:, : chosen.shape[1] - self.spare] = queries.index_select(1, rows).view(
            chosen.shape[0], -1, chosen.shape[2]
        )
        return chosen


class _Writer:
    """Turns a segment's rows by position: queries into their product's layout, keys and values into the buffer."""

    def __init__(self, heads: Heads, rows: Rows, pending: int, queries: Tensor, turns: tuple[Tensor, Tensor]) -> None:
        self._heads = heads
        self._query_turns, self._kv_turns = turns
        count = len(self._query_turns)
        layers, _, kv_heads, slots, head_dim = rows.buffer.shape
        pairs = torch.view_as_complex(rows.buffer.view(layers, 2, kv_heads, slots, head_dim // 2, 2))
        parts = [(0, pending, rows.start), (pending, count, rows.nodes_at)]
        if rows.nodes_at == rows.start + pending:
            parts = [(0, count, rows.start)]
        self._parts = [
            (begin, end, pairs[:, :, :, at : at + end - begin].permute(0, 3, 1, 2, 4).unbind(0))
            for first, last, slot in parts
            for begin, end, at in _blocks(first, last, slot, heads.qkv_heads * head_dim // 2)
        ]
        used = queries[:, : count * heads.group]
        self.queries = used.view(kv_heads, count, heads.group * head_dim)
        self._query_pairs = torch.view_as_complex(used.view(kv_heads, count, heads.group, head_dim // 2, 2))
        self._query_pairs = self._query_pairs.transpose(0, 1)

    def __call__(self, layer: int, qkv: Tensor) -> None:
        heads = self._heads
        queries = qkv[:, : heads.num_heads].view(self._query_pairs.shape)
        keys_values = qkv[:, heads.num_heads :].view(len(qkv), 2, heads.num_kv_heads, -1)
        for begin, end, target in self._parts:
            rows = slice(begin, end)
            torch.mul(queries[rows], self._query_turns[rows], out=self._query_pairs[rows])
            torch.mul(keys_values[rows], self._kv_turns[rows], out=target[layer])


class _Plan:
    """One segment's attention, ready for every layer."""

    def __init__(self, writer: _Writer, tiles: list[_Tile]) -> None:
        self._writer, self._tiles = writer, tiles

    def __call__(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        self._writer(layer, qkv)
        queries = self._writer.queries
        rows = out.view(len(out), len(queries), -1)
        for tile in self._tiles:
            tile(layer, queries, rows)


def row_depths(pending: int, tree: Tree) -> list[int]:
    """Positions of pending rows and nodes, counted from the first pending row."""
    return [*range(pending), *(pending - 1 + depth for depth in trees.depths(tree))]


def _tree_runs(rows: Rows, pending: int, tree: Tree) -> list[_Run]:
    """Pending rows, then for each leaf the nodes of its path that no earlier path had."""
    base = rows.start + pending
    runs = [_Run(tuple(range(pending)), rows.start)]
    laid: tuple[int, ...] = ()
    computed: set[int] = set()
    for path in trees.leaf_paths(tree):
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(laid, path, strict=False)))
        done = sum(node in computed for node in path)
        sources = tuple(rows.nodes_at + node for node in path[shared:])
        runs.append(_Run(tuple(pending + node for node in path[done:]), base + done, sources, base + shared))
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
