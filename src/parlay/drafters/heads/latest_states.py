"""The target's state of the token before the root, which is all that some heads read, for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parlay.drafters.history import History
from parlay.types import Observation, SequenceView


class LatestStates:
    """The states that enter ``layer``. A state that no step has shown is computed by the target's layers."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._held: dict[int, tuple[History, Tensor]] = {}

    def take(self, observation: Observation) -> None:
        """Take the latest state from a step."""
        if observation.taps:
            states_TH = observation.taps[self._layer]
            self._keep(observation.view, observation.start + len(states_TH), states_TH[-1])

    def of(self, views: Sequence[SequenceView]) -> list[Tensor | None]:
        """``[H]`` for each; None where the cache has no room to compute it now, or the text is its root alone."""
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
        """Unknown names are ignored."""
        self._held.pop(sequence, None)

    def _keep(self, view: SequenceView, count: int, state_H: Tensor) -> None:
        """The state of the last of so many tokens."""
        history = self._held[view.sequence][0] if view.sequence in self._held else History()
        history.cut(min(history.agree(view.tokens), count))
        history.tokens += view.tokens[len(history.tokens) : count]
        self._held[view.sequence] = history, state_H

    def _find(self, view: SequenceView) -> Tensor | None:
        if view.sequence not in self._held:
            return None
        history, state_H = self._held[view.sequence]
        count = len(view.tokens) - 1
        return state_H if len(history.tokens) == count and history.agree(view.tokens) == count else None
