"""A drafter that reads hidden states of the target's layers, as trained heads do, and checks them against the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from parlay.drafters.per_sequence import History
from parlay.testing.toys import tap_row
from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, SequenceView

StateOf = Callable[[int, Sequence[int]], Tensor]
"""Returns the hidden state ``[H]`` that enters a layer at the last id of a text."""


class ToyHead:
    """Drafts like ``inner`` if it has the states of all tokens before the root, and nothing if it lacks some.

    It asks the engine for states that it was not shown. ``shown`` and ``asked`` count the states that it got in these
    two ways. ``lacking`` counts the drafts that stayed empty. ``wrong`` lists the states that differ from those of
    ``state_of`` by more than ``noise_bound``.
    """

    def __init__(
        self, inner: Drafter, state_of: StateOf, layers: tuple[int, int] = (1, 4), noise_bound: float = 0.0
    ) -> None:
        self.needs = Needs(taps=layers, outcomes=False)
        self.shown = self.asked = self.lacking = 0
        self.wrong: list[str] = []
        self._inner = inner
        self._state_of = state_of
        self._noise_bound = noise_bound
        self._histories: dict[int, History] = {}
        """The tokens of each sequence whose states it has."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._catch_up([view for view in views if self._lacks(view)])
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self.shown += self._take(observation.view, observation.start, observation.taps)

    def release(self, sequence: int) -> None:
        self._histories.pop(sequence, None)

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        self.lacking += self._lacks(view) > 0
        return NO_DRAFT if self._lacks(view) else self._inner.propose([view], [budget])[0]

    def _lacks(self, view: SequenceView) -> int:
        """Count the tokens before the root whose states are lacking."""
        return len(view.tokens) - 1 - len(self._agreed(view).tokens)

    def _agreed(self, view: SequenceView) -> History:
        """Return the tokens with states, cut back to those that still agree with the view."""
        history = self._histories.setdefault(view.sequence, History())
        history.cut(min(history.agree(view.tokens), len(view.tokens) - 1))
        return history

    def _catch_up(self, views: Sequence[SequenceView]) -> None:
        if not views:
            return
        layers = views[0].layers
        assert layers is not None, "the needs name taps"
        spans = [(len(self._agreed(view).tokens), len(view.tokens) - 1) for view in views]
        for view, (start, _), taps in zip(views, spans, layers.states(views, spans, self.needs.taps), strict=True):
            self.asked += self._take(view, start, taps) if taps else 0

    def _take(self, view: SequenceView, start: int, taps: Mapping[int, Tensor]) -> int:
        """Check the states from ``start`` on, and keep them unless earlier ones are lacking. Returns the number of
        states."""
        if set(taps) != set(self.needs.taps):
            self.wrong.append(f"states of layers {sorted(taps)}, asked for {self.needs.taps}")
        count = len(taps[self.needs.taps[0]])
        for layer, states_TH in taps.items():
            for place, state_H in enumerate(states_TH, start + 1):
                text = view.tokens[:place]
                gap = float((state_H - self._state_of(layer, text)).abs().max())
                if not gap <= self._noise_bound:
                    self.wrong.append(f"layer {layer} after {len(text)} tokens: {gap:.3g} off")
        history = self._agreed(view)
        if start <= len(history.tokens) < start + count:
            history.tokens += view.tokens[len(history.tokens) : start + count]
        return count


def toy_state(layer: int, text: Sequence[int]) -> Tensor:
    """Return the hidden state of a `ToyRunner`."""
    return torch.tensor(tap_row(layer, text), dtype=torch.float64)
