"""The rows of committed texts on a head's own layers: which must run now, and on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from parlay.drafters.heads.sequences import HeadSequence, HeadSequences
from parlay.types import Features, Observation, Runner, Segment, SequenceView

_CHUNK = 512  # rows of one sequence in one forward
_FEW = 16  # rows that run with the last one: to run those before it first would take longer

Inputs = Callable[[Tensor, Sequence[int]], Tensor]
"""What rows read, ``[K, H]``, of the target's features ``[K, F]`` and of the tokens that come one after each."""


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """One sequence: the tokens of the rows that run first, the root's last, and the target's features of these rows."""

    view: SequenceView
    name: int
    pending: tuple[int, ...]
    features_KF: Tensor
    make_inputs: Inputs

    def inputs(self) -> Tensor:
        """Inputs of the rows, ``[K, H]``."""
        return self.make_inputs(self.features_KF, self.pending)


class TextRows:
    """``taps`` are the target's layers whose states make the features."""

    def __init__(self, runner: Runner, taps: Sequence[int], inputs: Inputs) -> None:
        self.runner = runner
        self._taps, self._inputs = tuple(taps), inputs
        self._sequences = HeadSequences(runner, taps)

    def take(self, observation: Observation) -> None:
        """Take in what a step observed."""
        if observation.taps:
            self._sequences.take(observation.view, observation.start, observation.taps)

    def release(self, sequence: int) -> None:
        """Unknown names are ignored."""
        self._sequences.release(sequence)

    def waiting(self, views: Sequence[SequenceView], rows: Sequence[int | None]) -> dict[int, WaitingRows]:
        """Sequences that can run now, by place; all but the last chunk of their rows has run.

        Each sequence needs room for so many ``rows`` beside those of its text; with None it is left out.
        """
        room = {
            place: len(view.tokens) + more
            for place, (view, more) in enumerate(zip(views, rows, strict=True))
            if more is not None and len(view.tokens) > view.prompt_length  # else this step shows the prompt's features
        }
        busy = {views[place].sequence for place in room}
        self._catch_up([views[place] for place in room])
        ready = [place for place in room if self._sequences.reserve(views[place], room[place], busy)]
        return {place: self._waiting(views[place]) for place in ready}

    def keep(self, waiting: WaitingRows) -> None:
        """Commit the rows that have run, except the root's, which the next proposal recomputes."""
        self._sequences.keep(waiting.view, len(waiting.pending))

    def _catch_up(self, views: Sequence[SequenceView]) -> None:
        """Leave out what nobody saw, and have the target compute the last features if these are lacking.

        A prefix hit leaves a gap before what was seen of a prompt, and a pause one in the answer. What a head drafts
        without them is right a little less often; to compute them would make all requests wait.
        """
        for view in views:
            self._sequences.leave_out(view)
        while lacking := [view for view in views if self._sequences.lacks(view)]:
            views = self._closed(lacking)

    def _closed(self, lacking: Sequence[SequenceView]) -> list[SequenceView]:
        """Closes the first gap of each; those that have no such gap any more."""
        layers = lacking[0].layers
        assert layers is not None, "the needs name taps"
        spans = [self._sequences.lacking(view) for view in lacking]
        for view, (start, _), taps in zip(lacking, spans, layers.states(lacking, spans, self._taps), strict=True):
            if taps:
                self._sequences.take(view, start, taps)
        return [
            view for view, (_, end) in zip(lacking, spans, strict=True) if self._sequences.aligned(view).known >= end
        ]

    def _waiting(self, view: SequenceView) -> WaitingRows:
        held = self._sequences.aligned(view)
        while (waiting := held.rows_waiting) > _FEW:
            self._feed(view, held, min(waiting - 1, _CHUNK))
        pending = held.read(view.tokens, waiting)
        return WaitingRows(view, held.name, pending, held.features(), self._inputs)

    def _feed(self, view: SequenceView, held: HeadSequence, rows: int) -> None:
        """So many rows whose outputs nobody reads, so that of the last layer only keys and values are computed."""
        tokens = held.read(view.tokens, rows)
        inputs = Features(self._inputs(held.features()[:rows], tokens))
        self.runner.forward([Segment(held.name, tokens, logits_from=len(tokens), features=inputs)])
        self._sequences.keep(view, len(tokens))
