"""The worth of each choice of one step: the tokens that it is expected to bring, less what its seconds are worth.

The formulas are in docs/explanation/how-auto-chooses.md, under the names that they have here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from parlay.router.acceptance import expected_accepted
from parlay.router.arms import ArmInSequence
from parlay.router.prices import Size, StepPrices
from parlay.router.ranking import best_of
from parlay.types import Draft

_SLOTS = 8  # about so many lengths of a draft are compared
_MARGIN = 0.05  # tokens that a draft must seem to bring beyond its price before it is asked for: records err
_SURE = 0.98  # share of the best drafts: so many nodes are asked for where only rows cost anything
LEAST = 1e-9  # worth of a draft that costs nothing and may turn out to be one of those


@dataclass(slots=True, eq=False)
class Offer:
    """A draft that was proposed in this step: the nodes that may pay, in ascending order, and their path probabilities.

    ``gains[n]``: tokens that the likeliest n nodes are expected to bring. A drawn draft stays whole, and nothing that
    was drawn decides whether it is verified: its only gain, ``gains[0]``, is that of a draft of the ``asked`` nodes.
    """

    arm: ArmInSequence
    draft: Draft
    asked: int
    nodes: Sequence[int] = ()
    path_probs: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)
    """What these are worth by the goal."""

    @property
    def is_drawn(self) -> bool:
        return self.draft.kind != "point"

    @property
    def fixed_rows(self) -> int:
        """Rows that are verified with it whatever nodes are left out."""
        return len(self.draft) if self.is_drawn else self.draft.probes


class Choice(NamedTuple):
    """``nodes`` of a draft: of ``offer``, if it was proposed already, else of what ``arm`` will propose.

    ``worth``: what the tokens that it brings beyond the one that every step commits (``gain``) are worth by the goal,
    less what its ``seconds`` are.
    """

    worth: float = 0.0
    gain: float = 0.0
    seconds: float = 0.0
    arm: ArmInSequence | None = None
    nodes: int = 0
    offer: Offer | None = None


NOTHING = Choice()


def offered(arm: ArmInSequence, draft: Draft, asked: int, prices: StepPrices) -> Offer:
    """The draft with the path probability of each node; nodes that never pay are left out."""
    goal = prices.goal
    if draft.kind != "point":
        gain = expected_accepted(arm.record.share, arm.whole.depth.of(asked))
        return Offer(arm, draft, asked, gains=[gain], worths=[goal.worth(gain)])
    nodes, path_probs = arm.whole.calibration.candidates(draft, arm.record.odds, prices.floor, 0)
    chained = isinstance(nodes, range)
    if len(nodes) > arm.limit:
        likely = dict(zip(nodes, path_probs, strict=True))
        nodes = nodes[: arm.limit] if chained else best_of((nodes, path_probs), arm.limit)
        path_probs = [likely[node] for node in nodes]
    ranked = path_probs if chained else sorted(path_probs, reverse=True)
    gains, worths = [0.0, *accumulate(ranked)], [0.0, *accumulate(goal.shares(ranked))]
    return Offer(arm, draft, asked, nodes, path_probs, gains, worths)


def best_cut(offer: Offer, prices: StepPrices, rate: float) -> Choice:
    """The offer, cut where it is worth most, if a second is worth ``rate`` tokens."""
    if offer.is_drawn:
        seconds = prices.of_nodes(offer.asked)
        worth = offer.worths[0] - rate * seconds
        return Choice(worth, offer.gains[0], seconds, offer.arm, offer.asked, offer) if worth > 0 else NOTHING
    most, worth, nodes = min(len(offer.path_probs), prices.most), 0.0, 0
    stride = -(-most // _SLOTS) or 1
    for count in (*range(stride, most, stride), most):
        value = offer.worths[count] - rate * prices.of_nodes(count)
        if value > worth:
            worth, nodes = value, count
    return Choice(worth, offer.gains[nodes], prices.of_nodes(nodes), offer.arm, nodes, offer) if nodes else NOTHING


def best_size(arm: ArmInSequence, prices: StepPrices, rate: float, share: float) -> Choice:
    """The size that is worth most of the drafts that an arm could be asked for, if this share of levels is right.

    Where its proposals cost nothing, as many nodes are asked for as may ever pay: those that do not are cut.
    """
    whole, known = arm.whole, prices.sizes(rate)
    key = whole.number, round(share, 2), round(whole.depth.share, 1), arm.limit, whole.seconds.revision, whole.probes
    found = known.get(key)
    if found is None:
        found = _best_size(arm, prices, rate, share, _MARGIN)
        if whole.seconds.is_known and prices.is_free(whole.seconds.of(arm.limit)):
            found = (_best_size(arm, prices, rate, max(share, _SURE), 0.0)[0], *found[1:])
        known[key] = found
    size, gain, seconds = found
    worth = max(prices.goal.worth(gain) - rate * seconds, LEAST)
    return Choice(worth, gain, seconds, arm, size) if size else NOTHING


def _best_size(arm: ArmInSequence, prices: StepPrices, rate: float, share: float, margin: float) -> Size:
    whole, found, most = arm.whole, (0, 0.0, 0.0), margin
    for size in whole.sizes[1:]:
        if size > arm.limit or size > prices.most:
            break
        gain = expected_accepted(share, whole.depth.of(size))
        seconds = prices.of_drafting(whole.seconds.of(size)) + prices.of_nodes(size + whole.probes)
        worth = prices.goal.worth(gain) - rate * seconds
        if worth > most:
            most, found = worth, (size, gain, seconds)
    return found
