"""Classifier-free guidance: moves a request's text away from what the model writes after a negative prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from parlay.models.ensembles.combining import combine, contrast
from parlay.models.ensembles.parts import Part
from parlay.models.wrapped_runner import WrappedRunner
from parlay.types import NO_SKIP, Finish, Output, Request, Runner, Segment, Skip


@dataclass(slots=True)
class _Guided:
    """A guided sequence: its cached tokens, and its output so far after the negative prompt."""

    scale: float
    tokens: list[int]
    negative: Part
    last: Segment | None = None
    ahead: int = 0
    """How many tokens of the negative prompt the next forward only prefills."""

    def wanted(self, segment: Segment) -> int:
        """How many of the segment's last rows are guided: none in a chunk of the prompt."""
        if self.ahead or len(self.tokens) + len(segment.pending) < self.negative.cut:
            return 0
        return min(segment.end - segment.logits_from, 1 + len(segment.tree))


class _Pair(NamedTuple):
    """Places of a guided segment and of its negative segment in a forward, and how many last rows are combined."""

    segment: int
    negative: int
    rows: int
    scale: float


class GuidedRunner(WrappedRunner):
    """Lets sequences of ``inner`` be guided, each at its own scale; the others run as without it.

    A guided sequence has two segments in each forward: after its prompt, and after its negative prompt. Both are in one
    batch, so a text is as exact as with ``inner``. Logits of the prompt's own rows and layer-skipping drafts are not
    guided.
    """

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._guided: dict[int, _Guided] = {}
        self._names = itertools.count(1 << 60)  # the engine counts its sequences from 0

    def guide(self, sequence: int, request: Request, tokens: Sequence[int], cached: int) -> None:
        """See `GuidingRunner.guide`."""
        assert request.guidance is not None, "the request names no guidance"
        head, cut = request.guidance.negative, len(request.prompt)
        part = Part(self._inner, next(self._names), head, cut)
        part.open((*head, *tokens[cut:]), request.salt)
        self._guided[sequence] = _Guided(request.guidance.scale, list(tokens[:cached]), part)

    def read_ahead(self, sequence: int, tokens: int, rows: int) -> int:
        """See `GuidingRunner.read_ahead`."""
        guided = self._guided[sequence]
        lacks = guided.negative.lacks(tokens)
        guided.ahead = rows if lacks > max(rows, 2) else 0
        return guided.ahead

    def reserve(self, sequence: int, tokens: int) -> bool:
        guided = self._guided.get(sequence)
        return self._inner.reserve(sequence, tokens) and (guided is None or guided.negative.reserve(tokens))

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        if self._is_plain(segments, skip):
            return self._inner.forward(segments, taps, skip)
        return self.begin(segments, taps, skip)()

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        """Begin a forward with the negative segments after the others. All have logits, which are combined."""
        if self._is_plain(segments, skip):
            return self._inner.begin(segments, taps, skip)
        segments = [segment._replace(likeliest=False) for segment in segments]
        negatives: list[Segment] = []
        pairs: list[_Pair] = []
        beside = 0
        for place, segment in enumerate(segments):
            if (guided := self._guided.get(segment.sequence)) is not None:
                wanted, ahead = guided.wanted(segment), max(1, guided.ahead)
                guided.last, fed = segment, guided.negative.feed(guided.tokens, segment, wanted, ahead)
                beside += guided.negative.caught_up + (fed.rows if fed is not None else 0)
                if fed is not None:
                    if wanted:
                        pairs.append(_Pair(place, len(segments) + len(negatives), wanted, guided.scale))
                    negatives.append(fed)
        finish = self._inner.begin([*segments, *negatives], taps)
        ran = sum(segment.rows for segment in segments)
        return lambda: replace(_guide(out := finish(), pairs, len(segments), ran), beside=beside, lost=self._lost(out))

    def _lost(self, out: Output) -> dict[int, tuple[str, ...]]:
        """The lost ensemble members by sequence, including those that only its negative text has lost."""
        if not out.lost:
            return {}
        negatives = {guided.negative.name: name for name, guided in self._guided.items()}
        lost = {name: members for name, members in out.lost.items() if name not in negatives}
        for name in out.lost.keys() & negatives.keys():
            lost[negatives[name]] = tuple(dict.fromkeys((*lost.get(negatives[name], ()), *out.lost[name])))
        return lost

    def _is_plain(self, segments: Sequence[Segment], skip: Skip) -> bool:
        """Whether no guided sequence runs, or only a layer-skipping draft does."""
        if skip or any(segment.approximate for segment in segments):
            return True
        return self._guided.keys().isdisjoint([segment.sequence for segment in segments])

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        cached = self._inner.keep(sequence, path)
        if (guided := self._guided.get(sequence)) is not None:
            assert guided.last is not None, "keep without a forward"
            tree = guided.last.tree
            guided.tokens += [*guided.last.pending, *(tree.tokens[node] for node in path)]
            guided.negative.keep(path, tree)
            del guided.tokens[cached:]
        return cached

    def truncate(self, sequence: int, length: int) -> int:
        cached = self._inner.truncate(sequence, length)
        if (guided := self._guided.get(sequence)) is not None:
            guided.negative.truncate(guided.negative.place(cached))
            del guided.tokens[cached:]
        return cached

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)
        if (guided := self._guided.pop(sequence, None)) is not None:
            self._inner.release(guided.negative.name)


def _guide(out: Output, pairs: Sequence[_Pair], segments: int, ran: int) -> Output:
    """Combine the pairs' logits, and cut the output to the first ``segments`` segments, of which ``ran`` rows ran."""
    starts = out.starts
    logits_RV = out.logits_RV[: starts[segments]].clone()
    for pair in pairs:
        end, negative_end = starts[pair.segment + 1], starts[pair.negative + 1]
        own_RV: Tensor = out.logits_RV[end - pair.rows : end]
        negative_RV = out.logits_RV[negative_end - pair.rows : negative_end]
        rule = partial(contrast, beta=pair.scale - 1)
        logits_RV[end - pair.rows : end] = combine(rule, [own_RV, negative_RV])
    taps = {layer: states_NH[:ran] for layer, states_NH in out.taps.items()}
    return replace(out, logits_RV=logits_RV, starts=starts[: segments + 1], taps=taps)
