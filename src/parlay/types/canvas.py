"""Canvases: places after a text that a model fills in any order, and who chooses the order."""

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
    """Temperatures of a canvas's forwards: from ``first`` towards ``last``, evenly over so many ``steps``."""

    first: float
    last: float
    steps: int

    def at(self, forwards: int) -> float:
        """The temperature after so many forwards."""
        return self.last + (self.first - self.last) * max(1, self.steps - forwards) / self.steps


class CanvasLayout(NamedTuple):
    """How a strategy lays canvases out: at most ``size`` places where the model does not say how many; 0: the answer's.

    Of ``group`` neighbouring places all are decided before one of the next; 0: of a whole canvas. Groups begin where
    the canvas does, or where a model's block does. ``stale``: what is cached of a text all of whose rows see each other
    is used as it is, and computed again when a group begins.

    Of answers whose length is guessed, ``lengths`` are tried, one after another, and the likeliest is taken. ``reads``
    is the kind of `Ends` that the selector is for, or noise; empty: of canvases with masks whose places are the text.
    With ``cooling`` logits are divided by its temperatures, besides the request's.
    """

    size: int = 0
    group: int = 0
    stale: bool = False
    lengths: int = 1
    reads: str = ""
    cooling: Cooling | None = None


ONE_CANVAS = CanvasLayout()


class Decided(NamedTuple):
    """A token that a place has, and the log-probability with which it was chosen among those that could be drawn.

    ``logprobs`` is what a result says of the token, where the request wants log-probabilities.
    """

    token: int
    score: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Canvas:
    """The places that follow one sequence's text; None is an open one. It began with ``size`` places.

    When the first places are decided, their tokens join the text and leave the canvas. ``forwards`` counts those since
    it began, and ``full`` those that ran with no place open. ``memory`` is what the selector noted of places in the
    last forward. ``fresh``: no forward of the group that is filled now has run. ``inputs`` are what open places read in
    place of the mask, if anything. Of an answer whose length is guessed, ``rivals`` are what the places of others, to
    be tried yet, read, and ``best`` is the likeliest so far, with the mean of its log-probabilities. ``measures``: its
    rows tell how long the answer is.
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
        """The ids of the places: the mask where one is open, or noise."""
        if self.spec.noise and self.inputs:
            return self.reads
        return tuple([self.spec.mask_id if decided is None else decided.token for decided in self.places])

    @property
    def reads(self) -> tuple[int, ...]:
        """The ids that the rows of the places read."""
        if not self.inputs:
            return self.tokens
        each = zip(self.inputs, self.places, strict=True)
        return tuple([token if decided is None else decided.token for token, decided in each])

    @property
    def order(self) -> tuple[int, ...]:
        """The places in the order of their rows."""
        if not self.spec.ordered:
            return tuple(range(len(self.places)))
        return (*[place for place, decided in enumerate(self.places) if decided is not None], *self.open)


class Guesses(NamedTuple):
    """The target's guesses for places of one canvas, in the order of the text. At others no token can be drawn yet.

    ``tokens`` are the shared sampler's, each drawn with the noise of its own position, whatever the step.
    ``probs_PV`` are the distributions that they were drawn from, in float64; of a greedy request the softmax of its
    processed logits. ``numbers_PJ`` are the logits of the tokens of numbers, for models that have such.
    """

    places: tuple[int, ...]
    tokens: tuple[int, ...]
    probs_PV: Tensor
    numbers_PJ: Tensor | None = None


class Fill(NamedTuple):
    """The places that a selector decides now, with their tokens, and decided ones that it opens again.

    ``memory`` is what it wants to find noted of places, by place, when it is asked next. With ``again`` it wants to see
    the canvas once more, though no place is open: it may decide places anew.
    """

    places: tuple[int, ...]
    tokens: tuple[int, ...]
    reopened: tuple[int, ...] = ()
    memory: Mapping[int, Tensor] = MappingProxyType({})
    again: bool = False


class Selector(Protocol):
    """Decides which places of a canvas are filled in this step, where other sequences have an `AcceptRule`.

    It may rank places by anything that does not know the noise, such as the largest probability, a margin or the
    entropy, but not by the probability of the drawn token: that would change the distribution of the text.
    """

    @property
    def exactness(self) -> Exactness: ...

    @property
    def revokes(self) -> bool:
        """Whether it may open decided places again, or decide them anew: then no token joins the text before all that
        can be are decided."""
        ...

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        """Decide at least one place of each canvas that has an open one. It must be done after finitely many steps.

        ``guesses`` are of the open places, or of all if it revokes. A pure function: it may be called again.
        """
        ...
