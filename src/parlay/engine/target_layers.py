"""Lends the target's own layers to drafters for one proposal, within reserved memory, and counts rows and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.engine.chosen_keys import VOTERS
from parlay.engine.sequence import Sequence
from parlay.engine.tally import Clock, since
from parlay.types import (
    WHOLE_FORM,
    DraftForm,
    Features,
    OutOfRoom,
    Output,
    Runner,
    Segment,
    SequenceView,
    shared_length,
    trees,
)


@dataclass(slots=True)
class _Loan:
    """One sequence's scratch rows in the cache: at most ``limit`` beyond its tokens.

    ``written`` are the tokens after the cached ones whose scratch rows are there, computed by a forward in ``form``.
    """

    sequence: Sequence
    limit: int
    form: DraftForm = WHOLE_FORM
    written: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Recomputation:
    """Hidden states that a drafter lacks.

    A fork of the sequence recomputes them, from row ``first`` of its segment on.
    """

    name: int
    loan: _Loan
    segment: Segment | None = None
    first: int = 0
    states: Mapping[int, Tensor] = field(default_factory=dict)


class TargetLayers:
    """The `Layers` of all sequences of an engine. Only sequences on loan can run.

    ``most_rows`` bounds the rows of one call of `states`, which feeds text as prefill does.
    """

    def __init__(self, runner: Runner, most_rows: int, clock: Clock) -> None:
        self._runner = runner
        self._most_rows = most_rows
        self._clock = clock
        self._loans: dict[int, _Loan] = {}
        self._names = itertools.count(-1, -1)  # the numbers of the engine's sequences are not negative

    def lend(self, sequence: Sequence, limit: int) -> None:
        """Let a sequence run, with empty scratch. The caller has reserved memory for its tokens and ``limit`` more."""
        self._loans[sequence.sequence] = _Loan(sequence, limit)

    def reclaim(self) -> None:
        """End all loans, because the proposal is over."""
        self._loans.clear()

    def forward(
        self,
        views: Seq[SequenceView],
        paths: Seq[Seq[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        """See `Layers`. Raises ValueError for a sequence that is not lent or given twice, or rows it does not have."""
        if form.keys:
            self._choose(self._loans_of(views), form)
        loans, segments = self._segments(views, paths, form, rows)
        if inputs_KH is None or not len(inputs_KH):
            return self._run(loans, segments, form).logits_RV
        out = self._run(loans, [segment._replace(features=Features(inputs_KH)) for segment in segments], form)
        for loan in loans:
            loan.written = []  # rows made from inputs can't be reused for tokens
        return out.logits_RV

    def early(self, views: Seq[SequenceView], paths: Seq[Seq[int]], layer: int, rows: int = 1) -> Tensor:
        """See `Layers`. Raises ValueError as `forward` does."""
        form = DraftForm(frozenset(half for half in self._runner.spec.sublayers if half[1] >= layer))
        loans, segments = self._segments(views, paths, form, rows)
        without_head = [segment._replace(logits_from=segment.end) for segment in segments]
        states_NH, end, wanted = self._run(loans, without_head, form, (layer,)).taps[layer], 0, []
        for segment in segments:
            end += segment.rows
            wanted.append(states_NH[end - rows : end])
        return torch.cat(wanted)

    def _choose(self, loans: Seq[_Loan], form: DraftForm) -> None:
        """Choose anew which keys draft passes in this form attend to, for the texts for which that is due."""
        due = [loan for loan in loans if loan.sequence.chosen.is_due(form, loan.sequence)]
        segments = []
        for loan in due:
            sequence = loan.sequence
            pending, adapter = tuple(sequence.tokens[sequence.cached :]), sequence.request.adapter
            again = -min(VOTERS, sequence.cached)
            segment = Segment(sequence.sequence, pending, logits_from=len(pending), base=again, adapter=adapter)
            segments.append(segment._replace(bits=form.bits, votes=True))
        if due:
            votes = self._run(due, segments, form).votes
            for loan, votes_LKTP in zip(due, votes, strict=True):
                assert votes_LKTP is not None, "each of these segments votes"
                loan.sequence.chosen.choose(votes_LKTP, form, loan.sequence)

    def _segments(
        self, views: Seq[SequenceView], paths: Seq[Seq[int]], form: DraftForm, rows: int
    ) -> tuple[list[_Loan], list[Segment]]:
        loans = self._loans_of(views)
        for loan, path in zip(loans, paths, strict=True):
            _check(loan, path, rows)
        return loans, [_segment(loan, path, form, rows) for loan, path in zip(loans, paths, strict=True)]

    def _run(self, loans: Seq[_Loan], segments: Seq[Segment], form: DraftForm, taps: Seq[int] = ()) -> Output:
        for loan in loans:
            loan.written = []  # if the forward fails, no scratch row can be trusted
        began = self._clock()
        out = self._runner.forward(segments, taps, form.skip)
        seconds = since(began, self._clock)
        for loan, segment in zip(loans, segments, strict=True):
            loan.sequence.tally.count_layers(segment.rows, seconds)
            if segment.base >= 0:  # rows computed in this form can't be used in another
                loan.form, loan.written = form, [*segment.pending, *segment.tree.tokens]
        return out

    def states(
        self, views: Seq[SequenceView], spans: Seq[tuple[int, int]], taps: Seq[int]
    ) -> list[Mapping[int, Tensor]]:
        """See `Layers`. Forks of the sequences run the missing rows, so no sequence has to be cut back."""
        most = max(1, self._most_rows // max(1, len(views)))
        readings = [self._reading(loan, *span, most) for loan, span in zip(self._loans_of(views), spans, strict=True)]
        due = [reading for reading in readings if reading.segment is not None]
        try:
            self._read(due, taps)
        finally:
            for reading in readings:
                self._runner.release(reading.name)
        return [reading.states for reading in readings]

    def _reading(self, loan: _Loan, start: int, end: int, most: int) -> _Recomputation:
        """Fork a sequence, cut the fork back to ``start``, and reserve memory for ``most`` tokens, up to ``end``."""
        reading = _Recomputation(next(self._names), loan)
        tokens = loan.sequence.tokens
        end = min(start + most, end, loan.sequence.cached)
        if start < end:
            self._runner.fork(loan.sequence.sequence, reading.name)
            cached = self._runner.truncate(reading.name, start)
            if self._reserve(reading.name, end):
                reading.first = start - cached
                text, adapter = tuple(tokens[cached:end]), loan.sequence.request.adapter
                reading.segment = Segment(reading.name, text, logits_from=end - cached, adapter=adapter)
        return reading

    def _reserve(self, name: int, tokens: int) -> bool:
        try:
            return self._runner.reserve(name, tokens)
        except OutOfRoom:
            return False

    def _read(self, readings: list[_Recomputation], taps: Seq[int]) -> None:
        if not readings:
            return
        began = self._clock()
        out = self._runner.forward([reading.segment for reading in readings if reading.segment], taps)
        seconds = since(began, self._clock)
        end = 0
        for reading in readings:
            assert reading.segment is not None
            begin, end = end + reading.first, end + reading.segment.rows
            reading.states = {layer: out.taps[layer][begin:end] for layer in taps}
            reading.loan.sequence.tally.count_layers(reading.segment.rows, seconds)

    def _loans_of(self, views: Seq[SequenceView]) -> list[_Loan]:
        names = [view.sequence for view in views]
        for name in names:
            if name not in self._loans:
                raise ValueError(f"the layers of sequence {name} are not lent: they can be used in propose only")
        if len(set(names)) < len(names):
            raise ValueError("one sequence was given twice in one forward of the target's layers")
        return [self._loans[name] for name in names]


def _check(loan: _Loan, path: Seq[int], rows: int) -> None:
    length = len(loan.sequence.tokens)
    if len(path) > loan.limit or not 0 < rows <= length + len(path):
        raise ValueError(
            f"{rows} rows at the end of {length} tokens and {len(path)} more: at least one row, and at most "
            f"{loan.limit} tokens more than the sequence has"
        )


def _segment(loan: _Loan, path: Seq[int], form: DraftForm, rows: int) -> Segment:
    """The rows to run: those neither cached nor left in scratch by the last call, and all wanted rows."""
    sequence = loan.sequence
    pending = tuple(sequence.tokens[sequence.cached :])
    first_wanted = len(pending) + len(path) - rows
    known = shared_length(loan.written, [*pending, *path]) if loan.form == form else 0
    base = min(known, first_wanted)
    return Segment(
        *(sequence.sequence, pending, trees.chain_tree(path)),
        logits_from=first_wanted,
        base=base,
        adapter=sequence.request.adapter,
        hidden=form.hidden(sequence.cached),
        bits=form.bits,
        chosen=sequence.chosen.pages if form.keys and form.hidden(sequence.cached)[1] else None,
    )
