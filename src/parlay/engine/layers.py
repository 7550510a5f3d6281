"""The target's own layers, lent to drafters for one proposal: rows and seconds are counted, room is set aside."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from parlay.engine.sequence import Sequence
from parlay.types import Chain, LayerSkipper, Skip, View


@dataclass(slots=True)
class _Loan:
    """One sequence's scratch: at most ``limit`` rows beyond its tokens.

    ``written`` are the tokens after the cached ones whose rows lie there, from a forward that left out ``skip``.
    """

    sequence: Sequence
    limit: int
    skip: Skip = frozenset()
    written: list[int] = field(default_factory=list)


class TargetLayers:
    """The `Layers` of every sequence of an engine. What is not lent now can't be run."""

    def __init__(self, runner: LayerSkipper) -> None:
        self._runner = runner
        self._loans: dict[int, _Loan] = {}

    def lend(self, sequence: Sequence, limit: int) -> None:
        """Let this sequence run; its tokens and ``limit`` more are reserved. What lay in its scratch is forgotten."""
        self._loans[sequence.sequence] = _Loan(sequence, limit)

    def reclaim(self) -> None:
        """The proposal is over."""
        self._loans.clear()

    def forward(self, views: Seq[View], paths: Seq[Seq[int]], skip: Skip, rows: int = 1) -> Tensor:
        """See `Layers`. Raises ValueError for a sequence that is not lent, or twice there, and for rows it lacks."""
        loans = [self._loan(view, path, rows) for view, path in zip(views, paths, strict=True)]
        if len({view.sequence for view in views}) < len(views):
            raise ValueError("a sequence stands twice in one forward of the target's layers")
        chains = [_chain(loan, path, skip, rows) for loan, path in zip(loans, paths, strict=True)]
        for loan in loans:
            loan.written = []  # unless the forward succeeds
        began = time.perf_counter()
        logits_RV = self._runner.skip_forward(chains, skip)
        seconds = time.perf_counter() - began
        for loan, path, chain in zip(loans, paths, chains, strict=True):
            loan.sequence.tally.count_layers(len(chain.tokens), seconds)
            if chain.start >= loan.sequence.cached:
                loan.skip, loan.written = skip, [*loan.sequence.tokens[loan.sequence.cached :], *path]
        return logits_RV

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


def _chain(loan: _Loan, path: Seq[int], skip: Skip, rows: int) -> Chain:
    """What has to run: what is not cached, less what lies in scratch from the last call, but all wanted rows."""
    tokens, cached = loan.sequence.tokens, loan.sequence.cached
    first_wanted = len(tokens) + len(path) - rows
    ahead = [*tokens[cached:], *path]
    known = _common(loan.written, ahead) if loan.skip == skip else 0
    start = min(cached + known, first_wanted)
    fed = ahead[start - cached :] if start >= cached else [*tokens[start:cached], *ahead]
    return Chain(loan.sequence.sequence, start, tuple(fed), first_wanted - start)


def _common(written: Seq[int], ahead: Seq[int]) -> int:
    length = min(len(written), len(ahead))
    return next((place for place in range(length) if written[place] != ahead[place]), length)
