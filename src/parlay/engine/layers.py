"""The target's own layers, lent to drafters for one proposal. Rows and seconds are counted, and memory is reserved."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from parlay import trees
from parlay.engine.sequence import Sequence
from parlay.types import NO_SKIP, Runner, Segment, Skip, View


@dataclass(slots=True)
class _Loan:
    """One sequence's scratch: at most ``limit`` rows beyond its tokens.

    ``written`` are the tokens after the cached ones whose rows are there, from a forward that left out ``skip``.
    """

    sequence: Sequence
    limit: int
    skip: Skip = NO_SKIP
    written: list[int] = field(default_factory=list)


class TargetLayers:
    """The `Layers` of every sequence of an engine. Only sequences that are lent now can run."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._loans: dict[int, _Loan] = {}

    def lend(self, sequence: Sequence, limit: int) -> None:
        """Let this sequence run. Its tokens and ``limit`` more are reserved already. Its scratch is forgotten."""
        self._loans[sequence.sequence] = _Loan(sequence, limit)

    def reclaim(self) -> None:
        """The proposal is over."""
        self._loans.clear()

    def forward(self, views: Seq[View], paths: Seq[Seq[int]], skip: Skip, rows: int = 1) -> Tensor:
        """See `Layers`. Raises ValueError for a sequence that is not lent or given twice, and for rows it lacks."""
        loans = [self._loan(view, path, rows) for view, path in zip(views, paths, strict=True)]
        if len({view.sequence for view in views}) < len(views):
            raise ValueError("one sequence was given twice in one forward of the target's layers")
        segments = [_segment(loan, path, skip, rows) for loan, path in zip(loans, paths, strict=True)]
        for loan in loans:
            loan.written = []  # unless the forward succeeds
        began = time.perf_counter()
        out = self._runner.forward(segments, skip=skip)
        seconds = time.perf_counter() - began
        for loan, segment in zip(loans, segments, strict=True):
            loan.sequence.tally.count_layers(segment.rows, seconds)
            if segment.base >= 0:  # rows that saw cached ones without these sub-layers serve no other call
                loan.skip, loan.written = skip, [*segment.pending, *segment.tree.tokens]
        return out.logits_RV

    def _loan(self, view: View, path: Seq[int], rows: int) -> _Loan:
        loan = self._loans.get(view.sequence)
        if loan is None:
            raise ValueError(f"the layers of sequence {view.sequence} are not lent: they can be used in propose only")
        length = len(loan.sequence.tokens)
        if len(path) > loan.limit or not 0 < rows <= length + len(path):
            raise ValueError(
                f"{rows} rows at the end of {length} tokens and {len(path)} more: at least one row, and at most "
                f"{loan.limit} tokens more than the sequence has"
            )
        return loan


def _segment(loan: _Loan, path: Seq[int], skip: Skip, rows: int) -> Segment:
    """The rows that must run: those neither cached nor left in scratch by the last call, and all wanted rows."""
    sequence = loan.sequence
    pending = tuple(sequence.tokens[sequence.cached :])
    first_wanted = len(pending) + len(path) - rows
    known = _common(loan.written, [*pending, *path]) if loan.skip == skip else 0
    base = min(known, first_wanted)
    return Segment(sequence.sequence, pending, trees.chain_tree(path), logits_from=first_wanted, base=base)


def _common(written: Seq[int], ahead: Seq[int]) -> int:
    length = min(len(written), len(ahead))
    return next((place for place in range(length) if written[place] != ahead[place]), length)
