"""States that a head's own layers compute at the last row of each text, for trees that need no more of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.heads.state_heads import States
from parlay.drafters.heads.text_rows import Inputs, TextRows, WaitingRows
from parlay.types import NO_TREE, Features, Observation, Runner, Segment, SequenceView, Tree, trees


class _LayerRows(ABC):
    """Runs the rows that wait of each text, then those of ``extra``."""

    def __init__(self, runner: Runner, taps: Sequence[int], inputs: Inputs, extra: Tree = NO_TREE) -> None:
        self._runner, self._extra = runner, extra
        self._rows = TextRows(runner, taps, inputs)

    @abstractmethod
    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        """One forward: a state for each text."""

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """None where the text is its root alone, features can't be had now, or there is no room."""
        most, more = self._runner.spec.max_context, len(self._extra)
        found = self._rows.waiting(views, [more if len(view.tokens) + more <= most else None for view in views])
        states: list[Tensor | None] = [None] * len(views)
        if found:
            for place, state in zip(found, self._run(list(found.values())), strict=True):
                states[place] = state
                self._rows.keep(found[place])
        return states

    def take(self, observation: Observation) -> None:
        """Take in what a step observed."""
        self._rows.take(observation)

    def release(self, sequence: int) -> None:
        """Unknown names are ignored."""
        self._rows.release(sequence)


class LayerLogits(_LayerRows):
    """The logits ``[1 + M, D]`` of the last row and of M mask rows after it.

    ``mask_MH`` are the inputs of the mask rows, whose token is ``mask_id``.
    """

    def __init__(
        self, runner: Runner, taps: Sequence[int], inputs: Inputs, mask_MH: Tensor | None = None, mask_id: int = 0
    ) -> None:
        masks = NO_TREE if mask_MH is None else trees.chain_tree([mask_id] * len(mask_MH))
        super().__init__(runner, taps, inputs, masks)
        self._mask_MH = mask_MH

    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        out = self._runner.forward([self._segment(text) for text in texts])
        return list(torch.split(out.logits_RV, 1 + len(self._extra)))

    def _segment(self, text: WaitingRows) -> Segment:
        inputs_KH = text.inputs() if self._mask_MH is None else torch.cat((text.inputs(), self._mask_MH))
        last = len(text.pending) - 1
        return Segment(text.name, text.pending, self._extra, last, features=Features(inputs_KH))


class LayerOutputs(_LayerRows):
    """Outputs of the one layer at the last row, ``[H]``."""

    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        segments = [
            Segment(text.name, text.pending, logits_from=len(text.pending), features=Features(text.inputs()))
            for text in texts
        ]
        behind = self._runner.spec.num_layers
        rows = torch.split(self._runner.forward(segments, (behind,)).taps[behind], [each.rows for each in segments])
        return [rows_KH[-1] for rows_KH in rows]


class SideBySide:
    """The states of several sources in a row, ``[sum, D]``."""

    def __init__(self, sources: Sequence[States]) -> None:
        self._sources = sources

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """None where one of them lacks it."""
        parts = zip(*(source.of(views) for source in self._sources), strict=True)
        return [_joined(states) for states in parts]

    def take(self, observation: Observation) -> None:
        """Take in what a step observed."""
        for source in self._sources:
            source.take(observation)

    def release(self, sequence: int) -> None:
        """Unknown names are ignored."""
        for source in self._sources:
            source.release(sequence)


def _joined(states: Sequence[Tensor | None]) -> Tensor | None:
    known = [state for state in states if state is not None]
    return torch.cat(known) if len(known) == len(states) else None
