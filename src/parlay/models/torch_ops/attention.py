"""Exact attention of a sequence's new rows over its cached keys.

The queries of a head group are folded into the rows of one product, ``[K, T * G, D]`` against keys ``[K, S, D]``, which
are first copied to one layer's buffer.

Shapes: N rows of all segments, T of them this segment's; A query, key and value heads together; K key-value heads; G
query heads per key-value head; D numbers of a head, as P complex pairs; S slots of the buffer; Q rows of a product's
queries: T * G and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.models.config import LayerForm
from parlay.models.rope import Rotations
from parlay.models.torch_ops.attention_form import (
    SERIAL,
    AttentionKind,
    Form,
    Heads,
    LayerRopes,
    SeenPrefix,
    capped,
    softmax_with,
)
from parlay.models.torch_ops.runs import Run, runs
from parlay.models.torch_ops.step_rows import StepRows
from parlay.types import ChosenPages, trees

Attend = Callable[[int, Tensor], None]
"""Called with ``(layer, qkv_NAP)``: stores keys and values of one segment's rows, and writes their attention.

``qkv_NAP`` has the query, key and value heads of all segments' rows as complex pairs.
"""

_TILE_ROWS = 256
"""Most rows per product, so that scores stay small and the first rows of a long prefill skip later keys."""


class ExactAttention:
    """Attention whose rows are bit-identical, whatever other rows and keys there are.

    Sums over keys run in path order, in products padded to a fixed multiple of rows and keys. A branching tree is
    computed path by path: a path's nodes are copied after the pending rows, and those not computed yet attend.
    """

    def __init__(
        self,
        kind: AttentionKind,
        forms: Sequence[LayerForm],
        ropes: LayerRopes,
        padding: Form,
        *,
        dtype: torch.dtype,
        sinks: Sequence[Tensor | None],
    ) -> None:
        """``forms`` and ``sinks`` (``[heads]`` or None) are those of all layers; only the layers of ``kind`` run
        here."""
        heads = kind.heads
        self._heads, self._forms, self._ropes, self._form, self._dtype = heads, forms, ropes, padding, dtype
        self._readers = kind.readers
        self._sinks = [None if layer is None else layer.view(-1, heads.group) for layer in sinks]
        rows = _round_up(_TILE_ROWS * heads.group, padding.rows)
        ahead = torch.arange(padding.keys + rows // heads.group)
        hidden = ahead >= torch.arange(rows)[:, None] // heads.group
        self._hidden = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def plan(self, rows: StepRows, place: Rows, begin: int, out: Tensor, prefix: SeenPrefix | None = None) -> Attend:
        """Plan one segment's attention, which is the same in every layer: rows from ``begin`` on, into ``out`` ``[T, K
        * G * D]``."""
        heads = self._heads
        count = len(out)
        keys = Keys.of(rows, place, heads, self._form.keys, self._dtype)
        spare = _round_up(heads.group, self._form.rows) + self._form.rows
        queries_KQD = torch.zeros(heads.num_kv_heads, count * heads.group + spare, heads.head_dim, dtype=self._dtype)
        rotations = self._ropes.at(rows.positions, rows.last)
        parts = _parts(heads, keys, begin=begin, queries_KQD=queries_KQD, rotations=rotations)
        grouped = out.view(count, heads.num_kv_heads, heads.group * heads.head_dim)
        seers = count - (prefix.rows if prefix else 0)
        tiles = [
            self._tile(keys, queries_KQD, grouped, tile, prefix if tile.rows[0] >= seers else None)
            for run in runs(place, keys.nodes_at)
            for part in run.apart(seers)
            for tile in part.cut(_TILE_ROWS)
        ]
        return _Plan(keys, parts, tiles, self._readers)

    def _tile(self, keys: Keys, queries_KQD: Tensor, out_TKW: Tensor, run: Run, prefix: SeenPrefix | None) -> _Tile:
        """The product of one run's rows. ``out_TKW`` is the output of all rows, with W = G * D."""
        group, length, first = self._heads.group, len(run.rows), run.rows[0]
        padded = _round_up(length * group, self._form.rows)
        seen = _round_up(run.end, self._form.keys)
        _, kv_heads, width = out_TKW.shape
        adjacent = run.rows[-1] - first == length - 1
        return _Tile(
            queries=queries_KQD[:, first * group : first * group + padded],
            gather=None if adjacent else _Gather(queries_KQD[:, : len(out_TKW) * group], torch.tensor(run.rows), group),
            hidden=self._hide_all(keys, run, padded, seen),
            caps=[form.score_cap for form in self._forms],
            sinks=[None if sinks is None else sinks[:, torch.arange(padded) % group, None] for sinks in self._sinks],
            keys=keys.buffer[0, :, :seen].transpose(1, 2),
            values=keys.buffer[1, :, :seen],
            out=out_TKW[first : first + length] if adjacent else out_TKW,
            size=(length, kv_heads, width),
            stride=(width, padded * self._heads.head_dim, 1),
            moves=_Moves.of(keys, run),
            prefix=prefix,
            votes=self._votes(keys, run),
        )

    def _hide_all(self, keys: Keys, run: Run, padded: int, seen: int) -> list[_Hidden]:
        """The masks of `_hide` for each layer; layers without a window also hide the pages that their heads did not
        choose."""
        windows = {form.window for form in self._forms}
        hidden = {window: self._hide(run, padded, seen, window, keys.hidden) for window in windows}
        chosen = keys.chosen.pages_LKC if keys.chosen is not None else None
        if chosen is None or None not in hidden:
            return [hidden[form.window] for form in self._forms]
        slots_LKS = (chosen.long()[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)
        all_KQS = hidden[None].added.expand(chosen.shape[1], -1, -1)
        index = [slots_KS[:, None].expand(-1, padded, -1) for slots_KS in slots_LKS]
        return [
            hidden[form.window] if form.window else _Hidden(0, all_KQS.scatter(2, shown, 0.0))
            for form, shown in zip(self._forms, index, strict=True)
        ]

    def _votes(self, keys: Keys, run: Run) -> list[Tensor | None]:
        """Where the run's rows write their votes ``[K, rows, P]``, for each layer without a window."""
        rows = slice(run.rows[0], run.rows[-1] + 1)
        voting = [keys.votes is not None and not form.window for form in self._forms]
        return [
            keys.votes[at, :, rows] if votes and keys.votes is not None else None for at, votes in enumerate(voting)
        ]

    def _hide(self, run: Run, padded: int, seen: int, window: int | None, span: tuple[int, int]) -> _Hidden:
        """Minus infinity where one of the run's (padded) rows must not see a key; no row sees the keys of ``span``."""
        if window is None and not run.together and not span[1]:
            first = run.position + 1
            return _Hidden(first, self._hidden[:padded, : seen - first])
        rows, keys = torch.arange(padded)[:, None] // self._heads.group, torch.arange(seen)
        own = (run.position + rows).clamp(max=run.position + len(run.rows) - 1)
        hidden = keys >= run.end if run.together else keys > own
        if window is not None:
            hidden = hidden | (keys <= own - window)
        hidden = hidden | ((keys >= span[0]) & (keys < span[1]))
        return _Hidden(0, torch.zeros(padded, seen, dtype=self._dtype).masked_fill_(hidden, -torch.inf))


@dataclass(frozen=True, slots=True)
class Keys:
    """One layer's keys and values of a sequence in path order: ``buffer`` ``[2, K, S, D]``, refilled for each layer.

    Committed and pending rows have the slots of their positions, nodes those from ``nodes_at`` on. If the tree
    branches, the slots between are for copies of paths. ``there`` nodes have run already. S is a multiple of the
    products' padding. No row sees the slots of the span ``hidden``, except for ``chosen`` pages. Rows write to
    ``votes``, if present.
    """

    buffer: Tensor
    rows: StepRows
    first: int
    root_end: int
    nodes_at: int
    there: int
    hidden: tuple[int, int]
    chosen: ChosenPages | None
    votes: Tensor | None

    @staticmethod
    def of(rows: StepRows, place: Rows, heads: Heads, multiple: int, dtype: torch.dtype) -> Keys:
        root_end, nodes = place.start + place.pending, len(place.tree)
        nodes_at = root_end + (0 if trees.is_chain(place.tree) else max(trees.depths(place.tree)))
        slots = _round_up(nodes_at + nodes, multiple)
        buffer = torch.zeros(2, heads.num_kv_heads, slots, heads.head_dim, dtype=dtype)
        first, there = min(rows.known, root_end), max(0, place.base - place.pending)
        seen = place.hidden, place.chosen, place.votes
        return Keys(buffer, rows, first, root_end, nodes_at, there, *seen)

    def spans(self) -> list[tuple[int, int, int]]:
        """The rows to run, as spans of neighbouring slots: first row, end row, first slot."""
        count, split = len(self.rows.positions), self.root_end - self.first
        if self.nodes_at == self.root_end:
            return [(0, count, self.rows.known)]
        spans = [(0, split, self.first), (split, count, self.nodes_at + self.there)]
        return [span for span in spans if span[0] < span[1]]

    def fill(self, layer: int) -> None:
        """Copy the cached rows to their slots. The rows to run are written by others before they are read."""
        past = self.rows.read(layer)
        if past is not None:
            self.buffer[:, :, : self.first] = past[:, :, : self.first]
            self.buffer[:, :, self.nodes_at : self.nodes_at + self.there] = past[:, :, self.root_end :]

    def store(self, layer: int) -> None:
        """Write the rows that ran to their pages."""
        new = [self.buffer[:, :, slot : slot + last - first] for first, last, slot in self.spans()]
        self.rows.write(layer, new[0] if len(new) == 1 else torch.cat(new, 2))


@dataclass(frozen=True, slots=True)
class _Moves:
    """Copies rows from the slots ``sources`` of ``buffer`` ``[2, K, S, D]`` to ``target``, a part of it."""

    buffer: Tensor
    sources: Tensor
    target: Tensor

    @staticmethod
    def of(keys: Keys, run: Run) -> _Moves | None:
        if not run.sources:
            return None
        target = keys.buffer[:, :, run.place : run.place + len(run.sources)]
        return _Moves(keys.buffer, torch.tensor(run.sources), target)

    def __call__(self) -> None:
        self.target.copy_(self.buffer.index_select(2, self.sources))


class _Hidden(NamedTuple):
    """A mask ``added`` ``[Q, n]``, or ``[K, Q, n]`` if heads differ, which is added to the scores from slot ``first``
    on.

    It is minus infinity where a row must not see a key.
    """

    first: int
    added: Tensor


@dataclass(frozen=True, slots=True)
class _Gather:
    """Collects the queries of the ``rows`` ``[T]`` of one path, which are not adjacent. ``queries`` ``[K, Q, D]`` are
    those of all rows."""

    queries: Tensor
    rows: Tensor
    group: int

    def into(self, like_KQD: Tensor) -> Tensor:
        """Gather these rows' queries, padded to the shape of ``like_KQD``."""
        heads, _, head_dim = like_KQD.shape
        chosen = self.queries.view(heads, -1, self.group * head_dim).index_select(1, self.rows)
        padded = torch.zeros_like(like_KQD)
        padded[:, : len(self.rows) * self.group] = chosen.view(heads, -1, head_dim)
        return padded


@dataclass(frozen=True, slots=True)
class _Tile:
    """One product: ``queries`` ``[K, Q, D]`` of some rows with the keys in slots 0 to S.

    ``keys`` are ``[K, D, S]`` and ``values`` ``[K, S, D]``. Each layer has its mask, its cap of scores, and its sinks
    ``[K, Q, 1]`` or None. With ``size`` and ``stride`` the product ``[K, Q, D]`` is viewed as ``[T, K, G * D]``, the
    shape of ``out``. The rows' votes go to ``votes`` ``[K, T, P]`` of each layer that has any.
    """

    queries: Tensor
    gather: _Gather | None
    hidden: list[_Hidden]
    caps: list[float]
    sinks: list[Tensor | None]
    keys: Tensor
    values: Tensor
    out: Tensor
    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    moves: _Moves | None
    prefix: SeenPrefix | None
    votes: list[Tensor | None]

    def __call__(self, layer: int) -> None:
        if self.moves is not None:
            self.moves()
        queries = self.queries if self.gather is None else self.gather.into(self.queries)
        scores, hidden = torch.bmm(queries, self.keys), self.hidden[layer]
        if self.caps[layer]:
            scores = capped(scores, self.caps[layer])
        scores.narrow(2, hidden.first, hidden.added.shape[-1]).add_(hidden.added)
        result = self._mixed(layer, queries, scores).as_strided(self.size, self.stride)
        if self.gather is None:
            self.out.copy_(result)
        else:
            self.out[self.gather.rows] = result.to(self.out.dtype)

    def _mixed(self, layer: int, queries_KQD: Tensor, scores_KQS: Tensor) -> Tensor:
        """The attention of the tile's rows, ``[K, Q, D]``, contiguous."""
        if self.prefix is None:
            weights = softmax_with(self.sinks[layer], scores_KQS)
            self._vote(self.votes[layer], weights)
            return torch.bmm(weights, self.values)
        more = torch.bmm(queries_KQD, self.prefix.keys[layer].transpose(1, 2))
        if self.caps[layer]:
            more = capped(more, self.caps[layer])
        weights = softmax_with(self.sinks[layer], torch.cat((scores_KQS, more), -1))
        path, before = torch.split(weights, [scores_KQS.shape[2], more.shape[2]], -1)
        return torch.bmm(path, self.values) + torch.bmm(before, self.prefix.values[layer])

    def _vote(self, votes_KTP: Tensor | None, weights_KQS: Tensor) -> None:
        if votes_KTP is not None:
            heads, rows, pages = votes_KTP.shape
            group = self.size[2] // self.queries.shape[2]
            cast = weights_KQS[:, : rows * group, : pages * BLOCK].reshape(heads, rows, group, pages, BLOCK)
            votes_KTP.copy_(cast.sum((2, 4)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rotates some rows by their positions: queries go to their product's layout, keys and values to the buffer.

    ``first`` is the first of these rows in a contiguous ``qkv_NAP``, which has queries, then keys and values if any.
    ``rotations`` has one entry per layer. The results go to ``query_target`` ``[T, K, G, P]`` and ``kv_target`` ``[T,
    2, K, P]``.
    """

    first: int
    rotations: list[Rotations]
    query_target: Tensor
    kv_target: Tensor

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        _, kv_heads, group, pairs = size = self.query_target.shape
        target, rotations, (_, heads, _) = self.kv_target, self.rotations[layer], qkv_NAP.shape
        row_stride, queries_end = heads * pairs, kv_heads * group * pairs
        offset = self.first * row_stride
        queries = qkv_NAP.as_strided(size, (row_stride, group * pairs, pairs, 1), offset)
        torch.mul(queries, rotations.queries, out=self.query_target)
        if row_stride > queries_end:
            stride = (row_stride, kv_heads * pairs, pairs, 1)
            keys_values = qkv_NAP.as_strided(target.shape, stride, offset + queries_end)
            torch.mul(keys_values, rotations.keys_values, out=target)


class _Plan:
    """One segment's attention, prepared for all layers of a kind. The layers ``readers`` use the keys that the layer
    before left in the buffer."""

    def __init__(self, keys: Keys, parts: list[_Part], tiles: list[_Tile], readers: frozenset[int]) -> None:
        self._keys, self._parts, self._tiles, self._readers = keys, parts, tiles, readers

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        if layer not in self._readers:
            self._keys.fill(layer)
        for part in self._parts:
            part(layer, qkv_NAP)
        for tile in self._tiles:
            tile(layer)
        if layer not in self._readers:
            self._keys.store(layer)


def _parts(heads: Heads, keys: Keys, *, begin: int, queries_KQD: Tensor, rotations: Sequence[Rotations]) -> list[_Part]:
    """Pending rows and nodes, which may be apart, in blocks that torch does not split between threads."""
    count, pairs = len(keys.rows.positions), heads.head_dim // 2
    buffer = torch.view_as_complex(keys.buffer.view(*keys.buffer.shape[:-1], pairs, 2))
    used = queries_KQD[:, : count * heads.group].view(heads.num_kv_heads, count, heads.group, pairs, 2)
    targets = torch.view_as_complex(used).transpose(0, 1)
    return [
        _Part(
            first=begin + first,
            rotations=[Rotations(*(factors[first:last] for factors in each)) for each in rotations],
            query_target=targets[first:last],
            kv_target=buffer[:, :, slot : slot + last - first].permute(2, 0, 1, 3),
        )
        for span in keys.spans()
        for first, last, slot in _blocks(*span, heads.qkv_heads * pairs)
    ]


def _blocks(first: int, last: int, slot: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Row blocks small enough that torch does not split one between threads: (begin, end, first slot)."""
    step = max(1, SERIAL // width)
    for begin in range(first, last, step):
        yield begin, min(begin + step, last), slot + begin - first


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
