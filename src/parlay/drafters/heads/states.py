"""Sources of a state per sequence: a layer of the target, or layers of the head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from parlay.drafters.heads.text_rows import Inputs, TextRows, WaitingRows
from parlay.drafters.heads.watch import StepRecord
from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateRoom
from parlay.types import NO_TREE, Features, Observation, Runner, Segment, SequenceView, Tree, trees


class States(StepRecord, Protocol):
    """A source of one state per sequence."""

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """The state of each view; None if it is not available now."""
        ...


class LatestStates:
    """The target's states that enter ``layer``. A state that was not observed is computed by the target's layers."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._latest: dict[int, tuple[History, Tensor]] = {}

    def take(self, observation: Observation) -> None:
        """Keep the last state of an observed step."""
        if observation.taps:
            states_TH = observation.taps[self._layer]
            self._keep(observation.view, observation.start + len(states_TH), states_TH[-1].clone())

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """The state ``[H]`` of each view; None if the cache has no room to compute it, or the text is only its root."""
        lacking = [view for view in views if len(view.tokens) > 1 and self._find(view) is None]
        if lacking:
            layers = lacking[0].layers
            assert layers is not None, "the needs name taps"
            spans = [(len(view.tokens) - 2, len(view.tokens) - 1) for view in lacking]
            for view, taps in zip(lacking, layers.states(lacking, spans, (self._layer,)), strict=True):
                if taps:
                    self._keep(view, len(view.tokens) - 1, taps[self._layer][-1])
        return [self._find(view) for view in views]

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        self._latest.pop(sequence, None)

    def _keep(self, view: SequenceView, count: int, state_H: Tensor) -> None:
        """Keep the state of token number ``count``."""
        history = self._latest[view.sequence][0] if view.sequence in self._latest else History()
        history.cut(min(history.agree(view.tokens), count))
        history.tokens += view.tokens[len(history.tokens) : count]
        self._latest[view.sequence] = history, state_H

    def _find(self, view: SequenceView) -> Tensor | None:
        if view.sequence not in self._latest:
            return None
        history, state_H = self._latest[view.sequence]
        count = len(view.tokens) - 1
        return state_H if len(history.tokens) == count and history.agree(view.tokens) == count else None


class _LayerRows(ABC):
    """Runs each text's rows that must run first, then those of ``extra``."""

    def __init__(
        self, runner: Runner, taps: Sequence[int], inputs: Inputs, room: StateRoom, extra: Tree = NO_TREE
    ) -> None:
        self._runner, self._extra = runner, extra
        self._rows = TextRows(runner, taps, inputs, room)

    @abstractmethod
    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        """Run one forward. Returns one state per text."""

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """The state of each view; None if the text is only its root, or features or room are missing."""
        most, more = self._runner.spec.max_context, len(self._extra)
        found = self._rows.waiting(views, [more if len(view.tokens) + more <= most else None for view in views])
        states: list[Tensor | None] = [None] * len(views)
        if found:
            for place, state in zip(found, self._run(list(found.values())), strict=True):
                states[place] = state
                self._rows.keep(found[place])
        return states

    def take(self, observation: Observation) -> None:
        """Take in the features of an observed step."""
        self._rows.take(observation)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        self._rows.release(sequence)


class LayerLogits(_LayerRows):
    """The logits ``[1 + M, D]`` of the last row and of M mask rows after it.

    ``mask_MH``: the inputs of the mask rows, whose token is ``mask_id``.
    """

    def __init__(
        self,
        runner: Runner,
        taps: Sequence[int],
        inputs: Inputs,
        mask_MH: Tensor | None = None,
        mask_id: int = 0,
        *,
        room: StateRoom,
    ) -> None:
        masks = NO_TREE if mask_MH is None else trees.chain_tree([mask_id] * len(mask_MH))
        super().__init__(runner, taps, inputs, room, masks)
        self._mask_MH = mask_MH

    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        out = self._runner.forward([self._segment(text) for text in texts])
        return list(torch.split(out.logits_RV, 1 + len(self._extra)))

    def _segment(self, text: WaitingRows) -> Segment:
        inputs_KH = text.inputs() if self._mask_MH is None else torch.cat((text.inputs(), self._mask_MH))
        last = len(text.pending) - 1
        return Segment(text.name, text.pending, self._extra, last, features=Features(inputs_KH))


class LayerOutputs(_LayerRows):
    """The layer's output at the last row, ``[H]``."""

    def _run(self, texts: Sequence[WaitingRows]) -> list[Tensor]:
        segments = [
            Segment(text.name, text.pending, logits_from=len(text.pending), features=Features(text.inputs()))
            for text in texts
        ]
        behind = self._runner.spec.num_layers
        rows = torch.split(self._runner.forward(segments, (behind,)).taps[behind], [each.rows for each in segments])
        return [rows_KH[-1] for rows_KH in rows]


class SideBySide:
    """The states of several sources, concatenated: ``[sum, D]``."""

    def __init__(self, sources: Sequence[States]) -> None:
        self._sources = sources

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """The states of each view; None if a source has none."""
        parts = zip(*(source.of(views) for source in self._sources), strict=True)
        return [_joined(states) for states in parts]

    def take(self, observation: Observation) -> None:
        """Take in an observed step."""
        for source in self._sources:
            source.take(observation)

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        for source in self._sources:
            source.release(sequence)


def _joined(states: Sequence[Tensor | None]) -> Tensor | None:
    known = [state for state in states if state is not None]
    return torch.cat(known) if len(known) == len(states) else None
