"""Texts whose answers run through fewer layers than their source: a deep encoder and a shallow decoder in one stack.

Kasai et al. 2021 (arXiv:2006.10369) use encoders and decoders; here the source's rows are causal. The answer's rows
enter the last layers as embeddings, and see the source's keys there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from parlay.cache import Rows, Store
from parlay.models.config import DecoderConfig, Shallow
from parlay.models.forward import Forward, ForwardBatch, ForwardOutput
from parlay.types import NO_TREE, Segment, Skip

Begin = Callable[[ForwardBatch], Callable[[], ForwardOutput]]
"""Starts to run rows; see `Forward.begin`."""
_HALVES: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")


def unused_layers(config: DecoderConfig) -> Skip:
    """The layers that an answer's rows skip."""
    first = config.num_layers - config.shallow.layers if config.shallow else 0
    return frozenset((half, layer) for layer in range(first) for half in _HALVES)


def deep_rows(store: Store, segments: Sequence[Segment], shallow: Shallow) -> list[int]:
    """How many rows of each segment run through all layers: of those that run again, pending ones, or nodes.

    These are a text's rows up to its first separator; without one they are all rows, including nodes. Raises ValueError
    for a node below a separator that is a node itself.
    """
    found = []
    for segment in segments:
        cached = store.length(segment.sequence)
        before = store.ids(Segment(segment.sequence, (), base=-cached)) if cached else ()
        again, text = max(0, -segment.base), (*before, *segment.pending)
        if shallow.after in text:
            found.append(max(0, text.index(shallow.after) + 1 - (cached - again)))
            continue
        ends = {node for node, token in enumerate(segment.tree.tokens) if token == shallow.after}
        if ends.intersection(segment.tree.parents):
            raise ValueError("the source has no end, so a draft can't go on behind one: put the separator after it")
        found.append(again + len(segment.pending) + len(segment.tree.tokens))
    return found


@dataclass(frozen=True, slots=True)
class TwoDepths:
    """Runs the first ``deep`` rows of each place through all layers, then the others without the layers in ``skip``."""

    forward: Forward
    skip: Skip
    deep: Sequence[int]

    def begin(self, work: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Start to run the rows; see `Forward.begin`. Raises ValueError for features."""
        if work.features:
            raise ValueError("rows that read something else than tokens have no depth here")
        halves = [self._half(work, deep=deep) for deep in (True, False)]
        (first, _), (last, _) = halves
        if not first:
            return self.forward.begin(halves[1][1])
        if not last:
            return self.forward.begin(work)
        outs = [self.forward.begin(half)() for _, half in halves]
        return lambda: _merged(work, [rows for rows, _ in halves], outs)

    def _half(self, work: ForwardBatch, *, deep: bool) -> tuple[list[int], ForwardBatch]:
        """The batch's row numbers of one depth, and the work with these rows."""
        rows, places = list[int](), list[Rows]()
        begins = accumulate((place.end - place.base for place in work.places), initial=0)
        for begin, place, count in zip(begins, work.places, self.deep, strict=False):
            until = min(max(count, place.base), place.end)
            first, end = (place.base, until) if deep else (until, place.end)
            if first == end:
                continue
            rows += range(begin + first - place.base, begin + end - place.base)
            cut = place if end == place.end else place._replace(pending=end, tree=NO_TREE, together=0)
            places.append(cut._replace(base=first))
        number = {row: at for at, row in enumerate(rows)}
        half = work._replace(
            ids=[work.ids[row] for row in rows],
            places=places,
            wanted=[number[row] for row in work.wanted if row in number],
            adapters=[work.adapters[row] for row in rows] if work.adapters else (),
            inputs=None if work.inputs is None else work.inputs[rows],
            skip=work.skip if deep else work.skip | self.skip,
        )
        return rows, half


def _merged(work: ForwardBatch, rows: Sequence[Sequence[int]], outs: Sequence[ForwardOutput]) -> ForwardOutput:
    """Merge both halves' logits and taps in the order of the work's rows."""
    known = [set(each) for each in rows]
    logits = torch.empty(len(work.wanted), outs[0].logits.shape[1])
    for own, out in zip(known, outs, strict=True):
        logits[[at for at, row in enumerate(work.wanted) if row in own]] = out.logits
    order = torch.tensor([row for each in rows for row in each]).argsort()
    states = {layer: torch.cat([out.taps[layer] for out in outs])[order] for layer in outs[0].taps}
    return ForwardOutput(logits, states, sum(out.tap_seconds for out in outs))
