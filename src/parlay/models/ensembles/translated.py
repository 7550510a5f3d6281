"""A model with another tokenizer, as a runner that takes and returns the ids of the ensemble's other members."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from parlay.models.wrapped_runner import WrappedRunner
from parlay.types import NO_SKIP, OutOfRoom, Output, Runner, RunnerSpec, Segment, Skip, Tree

_FAR = 1000.0
"""Nats between the least likely common token and the tokens that the model lacks."""


@dataclass(frozen=True, slots=True)
class Translation:
    """How each token of one vocabulary is written in another, without retokenizing the text.

    ``own[id]`` are the other vocabulary's ids for a token, one or more. ``common`` maps ids of tokens that are a single
    token there, too. ``head`` are ids that begin each text there. ``per_token`` is the mean number of ids per token, at
    least 1.
    """

    own: Sequence[tuple[int, ...]]
    common: Mapping[int, int]
    head: tuple[int, ...] = ()
    per_token: float = 1.0

    def write(self, tokens: Sequence[int], place: int) -> tuple[tuple[int, ...], ...]:
        """The other vocabulary's ids of each token, where the first is token number ``place`` of the text."""
        head = self.head if place == 0 else ()
        return tuple([(*head, *self.own[token]) if not at else self.own[token] for at, token in enumerate(tokens)])


@dataclass(slots=True)
class _Text:
    """A sequence. ``ends`` are the positions in the other ids at which each cached token ends, ``known`` those of the
    prompt's tokens.

    ``rows`` are the ends of the rows of each row of the last segment, of which the first ``pending`` are not nodes.
    """

    ends: list[int]
    known: list[int]
    rows: list[int] = field(default_factory=list)
    pending: int = 0

    def last(self, row: int) -> int:
        """The last inner row of a row of the segment; rows below 0 are those of cached tokens."""
        if row >= 0:
            return self.rows[row] - 1
        cached = len(self.ends) + row
        return (self.ends[cached] if cached >= 0 else 0) - self.ends[-1] - 1


class TranslatedRunner(WrappedRunner):
    """Runs ``inner`` on texts in another vocabulary's ids; its logits are those of the common tokens.

    A token takes one or more rows in ``inner``, and its logits are those of the last. Tokens that ``inner`` lacks get
    logits far below all others. See `parlay.types.Runner`.
    """

    def __init__(self, inner: Runner, translation: Translation) -> None:
        super().__init__(inner)
        self._words = translation
        self._texts: dict[int, _Text] = {}
        device = inner.spec.device
        self._here = torch.tensor([*translation.common], device=device)
        self._there = torch.tensor([*translation.common.values()], device=device)

    @property
    def spec(self) -> RunnerSpec:
        spec = self._inner.spec
        longest = int(spec.max_context / self._words.per_token)
        return replace(
            spec,
            vocab_size=len(self._words.own),
            max_context=longest,
            layer_skip=False,
            features=False,
            together=False,
            likeliest=False,
            canvas=None,
            in_flight=1,
        )

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        words = self._words.write(tokens, 0)
        cached = self._inner.open(sequence, [one for word in words for one in word], salt)
        ends = [*accumulate(map(len, words))]
        self._texts[sequence] = _Text(ends, list(ends))
        return self._settle(sequence, cached)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Reserve room; tokens that are not known yet count as ``per_token`` ids each."""
        known = self._texts[sequence].known
        sure = known[min(tokens, len(known)) - 1] if known and tokens else 0
        return self._inner.reserve(sequence, sure + math.ceil(max(0, tokens - len(known)) * self._words.per_token))

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all rows. Raises OutOfRoom if tokens take more ids than were reserved."""
        fed: list[Segment] = []
        wanted: list[int] = []
        ran: list[int] = []
        logits = rows = 0
        for segment in segments:
            own, text = self._written(segment), self._texts[segment.sequence]
            wanted += [logits + text.last(row) - own.logits_from for row in range(segment.logits_from, segment.end)]
            ran += [rows + text.last(row) - own.base for row in range(segment.base, segment.end)]
            logits, rows = logits + own.end - own.logits_from, rows + own.rows
            fed.append(own)
        out = self._inner.forward(fed, taps, skip)
        starts = tuple(accumulate((segment.end - segment.logits_from for segment in segments), initial=0))
        states = {layer: states_NH[ran] for layer, states_NH in out.taps.items()}
        return Output(self._translated(out.logits_RV[wanted]), starts, states, out.tap_seconds)

    def _written(self, segment: Segment) -> Segment:
        """The segment in the other ids; each node becomes a chain of nodes."""
        text, tree = self._texts[segment.sequence], segment.tree
        pending, nodes = (
            self._words.write(segment.pending, len(text.ends)),
            [self._words.own[one] for one in tree.tokens],
        )
        text.rows = ends = [*accumulate(map(len, (*pending, *nodes)))]
        text.pending = len(pending)
        first = ends[len(pending) - 1]
        parents: list[int] = []
        for node, (ids, parent) in enumerate(zip(nodes, tree.parents, strict=True)):
            begin = ends[len(pending) + node - 1] - first
            parents += [
                ends[len(pending) + parent] - first - 1 if parent >= 0 else -1,
                *range(begin, begin + len(ids) - 1),
            ]
        before = text.ends[-1] if text.ends else 0
        if not self._inner.reserve(segment.sequence, before + ends[-1]):
            raise OutOfRoom(f"{self.spec.name} has no room for {before + ends[-1]} tokens: allow more memory")
        return segment._replace(
            pending=tuple([one for ids in pending for one in ids]),
            tree=Tree(tuple([one for ids in nodes for one in ids]), tuple(parents)),
            logits_from=text.last(segment.logits_from) if segment.logits_from < segment.end else ends[-1],
            base=text.last(segment.base - 1) + 1 if segment.base else 0,
        )

    def _translated(self, logits_RV: Tensor) -> Tensor:
        lowest_R1 = logits_RV.amin(-1, keepdim=True) if len(logits_RV) else logits_RV[:, :1]
        found_RV = (lowest_R1 - _FAR).repeat(1, len(self._words.own))
        found_RV[:, self._here] = logits_RV[:, self._there]
        return found_RV

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        text = self._texts[sequence]
        rows, first = text.rows, text.rows[text.pending - 1]
        nodes = [
            row - first for node in path for row in range(rows[text.pending + node - 1], rows[text.pending + node])
        ]
        before = text.ends[-1] if text.ends else 0
        text.ends += [before + end for end in rows[: text.pending]]
        for node in path:
            text.ends.append(text.ends[-1] + rows[text.pending + node] - rows[text.pending + node - 1])
        return self._settle(sequence, self._inner.keep(sequence, nodes))

    def _settle(self, sequence: int, cached: int) -> int:
        """Keep only whole tokens of the ``cached`` ids; returns their number."""
        ends = self._texts[sequence].ends
        while True:
            del ends[bisect_right(ends, cached) :]
            whole = ends[-1] if ends else 0
            if cached == whole:
                return len(ends)
            cached = self._inner.truncate(sequence, whole)

    def truncate(self, sequence: int, length: int) -> int:
        ends = self._texts[sequence].ends[:length]
        return self._settle(sequence, self._inner.truncate(sequence, ends[-1] if ends else 0))

    def fork(self, sequence: int, copy: int) -> None:
        self._inner.fork(sequence, copy)
        text = self._texts[sequence]
        self._texts[copy] = _Text(list(text.ends), text.known)

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._inner.release(sequence)

    def free_tokens(self) -> int:
        return int(self._inner.free_tokens() / self._words.per_token)

    def capacity(self) -> int:
        return int(self._inner.capacity() / self._words.per_token)
