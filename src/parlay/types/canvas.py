"""Canvases: places after a text that a model fills in any order, and the protocol that chooses the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from parlay.types.base import Exactness
from parlay.types.model_forms import CanvasSpec
from parlay.types.requests import SequenceView
from parlay.types.results import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


class Cooling(NamedTuple):
    """Temperatures of a canvas's forwards: linear from ``first`` to ``last`` over ``steps`` forwards."""

    first: float
    last: float
    steps: int

    def at(self, forwards: int) -> float:
        """The temperature after this many forwards."""
        return self.last + (self.first - self.last) * max(1, self.steps - forwards) / self.steps


class CanvasLayout(NamedTuple):
    """How a strategy lays out and fills canvases.

    ``size``: the most places of a canvas, if the model sets no number; 0: as many as the answer may have. ``group``:
    all of this many neighbouring places are decided before the next group is begun; 0: the whole canvas is one group.
    Groups begin where the canvas does, or where a model's block does. ``stale``: where all rows of a text see each
    other, cached rows are used as they are, and computed again only when a group begins.

    ``lengths``: how many lengths are tried, one after another, if the length of an answer is guessed; the likeliest
    answer is taken. ``reads``: the kind of `Ends` that the selector can read, or "noise"; empty: canvases with masks
    whose places are the text. ``cooling``: logits are divided by its temperatures, in addition to the request's.
    """

    size: int = 0
    group: int = 0
    stale: bool = False
    lengths: int = 1
    reads: str = ""
    cooling: Cooling | None = None


ONE_CANVAS = CanvasLayout()


class Decided(NamedTuple):
    """A place's token, and the log-probability with which it was chosen among the tokens that could be drawn.

    ``logprobs`` is what the result reports for the token, if the request wants log-probabilities.
    """

    token: int
    score: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Canvas:
    """The places that follow one sequence's text; None is an open place. It began with ``size`` places.

    When its first places are decided, their tokens join the text and leave the canvas. ``forwards``: how many ran since
    it began; ``full``: how many of them with no open place. ``memory``: what the selector noted about places in the
    last forward. ``fresh``: no forward has run for the group that is being filled. ``inputs``: the ids that open places
    read, if not the mask.

    If the answer's length is guessed, ``rivals`` are the inputs of other lengths that are still to be tried, and
    ``best`` is the likeliest answer so far, with its mean log-probability. ``measures``: the rows of this canvas tell
    how long the answer is.
    """

    spec: CanvasSpec
    places: tuple[Decided | None, ...]
    size: int
    forwards: int = 0
    full: int = 0
    memory: Mapping[int, Tensor] = field(default_factory=dict, compare=False)
    fresh: bool = True
    inputs: tuple[int, ...] = ()
    rivals: tuple[tuple[int, ...], ...] = ()
    best: tuple[tuple[Decided, ...], float] | None = None
    measures: bool = False

    @property
    def open(self) -> tuple[int, ...]:
        return tuple([place for place, decided in enumerate(self.places) if decided is None])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the places; for an open place, the mask or what it reads as noise."""
        if self.spec.noise and self.inputs:
            return self.reads
        return tuple([self.spec.mask_id if decided is None else decided.token for decided in self.places])

    @property
    def reads(self) -> tuple[int, ...]:
        """The ids that the rows of the places read as input."""
        if not self.inputs:
            return self.tokens
        each = zip(self.inputs, self.places, strict=True)
        return tuple([token if decided is None else decided.token for token, decided in each])

    @property
    def order(self) -> tuple[int, ...]:
        """The places in the order of their rows in the forward."""
        if not self.spec.ordered:
            return tuple(range(len(self.places)))
        return (*[place for place, decided in enumerate(self.places) if decided is not None], *self.open)


class Guesses(NamedTuple):
    """The target's guesses for places of one canvas, in text order; places where nothing can be drawn yet are left out.

    ``tokens``: drawn by the shared sampler, each with the noise of its own position, whatever the step. ``probs_PV``:
    the distributions that they were drawn from, in float64; for a greedy request, the softmax of its processed logits.
    ``numbers_PJ``: the logits of the number tokens, for models that have such tokens.
    """

    places: tuple[int, ...]
    tokens: tuple[int, ...]
    probs_PV: Tensor
    numbers_PJ: Tensor | None = None


class Fill(NamedTuple):
    """The places that a selector decides now, with their tokens, and the decided places that it opens again.

    ``memory``: notes by place, which the selector finds on the canvas at its next call. ``again``: the selector wants
    to see the canvas once more although no place is open, because it may decide places anew.
    """

    places: tuple[int, ...]
    tokens: tuple[int, ...]
    reopened: tuple[int, ...] = ()
    memory: Mapping[int, Tensor] = MappingProxyType({})
    again: bool = False


class Selector(Protocol):
    """Decides which places of a canvas are filled in a step.

    Sequences with a canvas have it instead of an `AcceptRule`. It may rank places by anything that does not depend on
    the noise, such as the largest probability, a margin or the entropy. It may not rank them by the probability of the
    drawn token: that would change the distribution of the text.
    """

    @property
    def exactness(self) -> Exactness: ...

    @property
    def revokes(self) -> bool:
        """Whether it may open or change decided places. Then no token joins the text until all places are decided."""
        ...

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        """Decide at least one place of each canvas that has an open one. Finitely many calls must fill a canvas.

        ``guesses`` are for the open places, or for all if the selector revokes. A pure function: it may be called
        again.
        """
        ...
