"""NEST (Li et al. 2024): drafts what follows in a datastore where the target's state was most like the present one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parlay.drafters.resources import Resources
from parlay.options import NEIGHBOURS, Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, SequenceView, trees

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "nest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions(Options):
    """Options of NEST: the datastore, and how many of its entries are looked at."""

    file: str = option("", "the datastore, built with --states; empty: the one that the target writes with", opens=True)
    neighbours: int = option(NEIGHBOURS, "nearest states to read", low=1, high=4096)


class Spans(Drafter):
    """Span proposals of nearest-neighbour speculative decoding (NEST, Li et al. 2024, arXiv:2405.19325).

    The state that chose the last token is looked up in the datastore. Of the neighbours after which the
    document has this token, too, the nearest one gives the draft: the rest of its document. If there is none, the draft
    continues from the place of the last one, if the text agrees. The drafts suit targets that mix in the datastore's
    distribution, and others.
    """

    def __init__(self, resources: Resources, options: SpanOptions) -> None:
        """Raises UsageError if there is no datastore, ParlayError for one that can't be used."""
        from parlay.drafters.heads.states import LatestStates  # here, because the catalogue loads no torch

        if resources.open_states is None:
            raise UsageError(
                f"strategy {SOURCE} needs a target whose hidden states can be read, and this one's can't: choose "
                "another strategy"
            )
        self._store = resources.open_states(options.file)
        self._tokens = self._store.store.tokens
        self._border, self._neighbours = self._store.store.header.vocab_size, options.neighbours
        self._states = LatestStates(self._store.layer)
        self._last: dict[int, tuple[int, int]] = {}
        """By sequence, the length of a text whose last token stands at a place of the datastore, and that place."""

    @property
    def needs(self) -> Needs:
        return Needs(taps=(self._store.layer,))

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafting = [view for view, budget in zip(views, budgets, strict=True) if budget > 0]
        states = dict(zip([view.sequence for view in drafting], self._states.of(drafting), strict=True))
        return [
            self._propose(view, budget, states[view.sequence]) if budget > 0 else NO_DRAFT
            for view, budget in zip(views, budgets, strict=True)
        ]

    def _propose(self, view: SequenceView, budget: int, state_H: Tensor | None) -> Draft:
        place = self._place(view, state_H)
        if place is None:
            return NO_DRAFT
        self._last[view.sequence] = len(view.tokens), place
        ahead = self._tokens[place + 1 : place + 1 + budget].tolist()
        end = ahead.index(self._border) if self._border in ahead else len(ahead)
        return trees.chain(ahead[:end], SOURCE)

    def _place(self, view: SequenceView, state_H: Tensor | None) -> int | None:
        """The place in the datastore of the last token, after the most similar text as far as states tell."""
        token = view.tokens[-1]
        if state_H is not None:
            found = self._store.nearest(state_H.float().cpu().numpy(), self._neighbours)
            places = found.places_K[found.tokens_K == token]
            if len(places):
                return int(places[0])
        length, last = self._last.get(view.sequence, (0, 0))
        place = last + len(view.tokens) - length
        goes_on = length and last <= place < len(self._tokens)
        return place if goes_on and self._tokens[last : place + 1].tolist() == list(view.tokens[length - 1 :]) else None

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._states.take(observation)

    def release(self, sequence: int) -> None:
        self._states.release(sequence)
        self._last.pop(sequence, None)
