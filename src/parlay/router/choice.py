"""Works out what each choice of one step is worth: the tokens that it should bring, less the worth of its seconds.

The formulas are in docs/explanation/how-auto-chooses.md, under the names that they have here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parlay.router.acceptance import MOST_SHARE, expected_accepted
from parlay.router.arms import ArmInSequence, ArmState
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
    nodes, path_probs, gains, worths = arm.whole.calibration.paths(draft, arm.record.shift, prices.floor, goal.shares)
    if len(path_probs) > arm.limit:
        if isinstance(nodes, range):
            return Offer(arm, draft, asked, nodes[: arm.limit], path_probs[: arm.limit], gains, worths)
        likely = dict(zip(nodes, path_probs, strict=True))
        nodes = best_of((nodes, path_probs), arm.limit)
        path_probs = [likely[node] for node in nodes]
    return Offer(arm, draft, asked, nodes, path_probs, gains, worths)


def best_cut(offer: Offer, prices: StepPrices) -> Choice:
    """The offer, cut where it is worth most."""
    rate = prices.rate
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


def best_size(arm: ArmInSequence, prices: StepPrices, share: float, most: float = math.inf) -> Choice:
    """The size that is worth most of the drafts that an arm could be asked for, if this share of levels is right.

    Where its proposals cost nothing, as many nodes are asked for as may ever pay: those that do not are cut. The worth
    is at most ``most``.
    """
    whole, key = arm.whole, (int(100 * share + 0.5), arm.limit)
    known = prices.sizes.get(whole.number)
    if known is None:
        known = prices.sizes_of(whole.number, whole.price_key)
    found = known.get(key)
    if found is None:
        found = known[key] = _sized(arm, prices, share)
    size, gain, seconds = found
    if not size:
        return NOTHING
    return Choice(min(most, max(prices.goal.worth(gain) - prices.rate * seconds, LEAST)), gain, seconds, arm, size)


def _sized(arm: ArmInSequence, prices: StepPrices, share: float) -> Size:
    found = _best_size(arm, prices, share, _MARGIN)
    if arm.whole.seconds.is_known and prices.is_free(arm.whole.seconds.of(arm.limit)):
        return _best_size(arm, prices, max(share, _SURE), 0.0)[0], found[1], found[2]
    return found


def _best_size(arm: ArmInSequence, prices: StepPrices, share: float, margin: float) -> Size:
    found, most, rate, worth_of = (0, 0.0, 0.0), margin, prices.rate, prices.goal.worth
    share = min(share, MOST_SHARE)
    endless = share / (1 - share)
    for size, depth, seconds in _drafts(arm.whole, prices):
        if size > arm.limit:
            break
        gain = endless * float(1 - share**depth)  # `expected_accepted`
        worth = worth_of(gain) - rate * seconds
        if worth > most:
            most, found = worth, (size, gain, seconds)
    return found


def _drafts(arm: ArmState, prices: StepPrices) -> list[tuple[int, float, float]]:
    """List the sizes of an arm's drafts, and the levels and the seconds of each."""
    drafts = prices.drafts.get(arm.price_key)
    if drafts is None:
        drafts = prices.drafts[arm.price_key] = [
            (size, arm.depth.of(size), prices.of_drafting(arm.seconds.of(size)) + prices.of_nodes(size + arm.probes))
            for size in arm.sizes[1:]
            if size <= prices.most
        ]
    return drafts
