"""What each choice of one step is worth: tokens that it is expected to bring, and the seconds that it costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from parlay.router.acceptance import expected_accepted
from parlay.router.aim import USUAL, Aim
from parlay.router.arms import ArmInSequence
from parlay.router.goals import Goal
from parlay.router.ranking import best_of
from parlay.types import Cost, Draft

_UNLIMITED, _MOST_NODES = 1 << 20, 1 << 12  # nodes of a step, without a limit of power and with one
_SLOTS = 8  # about so many lengths of a draft are compared
_MARGIN = 0.05  # tokens that a draft must seem to bring beyond its price before it is asked for: records err
_Size = tuple[int, float, float]
"""Nodes to ask an arm for, tokens that they are expected to bring, and the seconds that they cost."""
_Sizes = dict[tuple[int, float, float, int, int], _Size]


class StepPrices:
    """What rows cost in this batch. Valid as long as ``key`` is: the batch, and the revision of the cost.

    ``rows`` of a plain step: one per sequence, and those of other strategies. ``plain`` are its seconds, ``token``
    those of plain decoding per token. For a goal in joules they are seconds in which the machine draws as many without
    rows. Within the limit of power, ``room`` nodes may be verified in all, and ``most`` are worth asking each sequence
    for.
    """

    def __init__(
        self,
        key: tuple[int, ...],
        cost: Cost,
        sequences: int,
        rows: int,
        context: int,
        *,
        aim: Aim = USUAL,
    ) -> None:
        self.key, self.sequences, self.rows, self.context, self.goal = key, sequences, rows, context, aim.goal
        self._cost, self._aim, self._factor, self._row_seconds = cost, aim, aim.effort.price, aim.row_seconds
        self.plain = self._forward(rows)
        self.token = self.plain / rows
        self._sizes: dict[float, _Sizes] = {}
        self._rate, self._latest = 0.0, self._sizes.setdefault(0.0, {})
        self._rows = {0: 0.0}
        self.room = self._within_power()
        self.most = -(-self.room // sequences)

    def of_nodes(self, nodes: int) -> float:
        """Seconds that so many nodes take of a step, if each sequence has as many."""
        seconds = self._rows.get(nodes)
        if seconds is None:
            more = self._forward(self.rows + nodes * self.sequences) - self.plain
            seconds = self._rows[nodes] = self._factor * more / self.sequences
        return seconds

    def of_drafting(self, seconds: float) -> float:
        """What so many seconds of drafting count for."""
        return self._factor * seconds

    def of_step(self, drafting: float, rows: int) -> float:
        """What a step counts for: so many seconds of drafting, and a forward of so many rows.

        Without end if rows beyond those of plain decoding draw more than the limit of power.
        """
        if rows > self.rows and not self._allows(rows):
            return math.inf
        return self.plain + self._factor * (drafting + self._forward(rows) - self.plain)

    @property
    def exceeds_power(self) -> bool:
        """Whether plain decoding alone draws more than the limit."""
        return not self._allows(self.rows)

    def _allows(self, rows: int) -> bool:
        return not self._aim.most_watts or self._aim.allows(rows, self._cost.forward(rows, self.context))

    def _forward(self, rows: int) -> float:
        return self._cost.forward(rows, self.context) + self._row_seconds * rows

    def _within_power(self) -> int:
        """How many nodes a step may have. More rows draw more, except where their seconds jump; see `of_step`."""
        if not self._aim.most_watts:
            return _UNLIMITED
        rows = range(self.rows + 1, self.rows + 1 + _MOST_NODES)
        return bisect_left(rows, True, key=lambda rows: not self._allows(rows))

    def sizes(self, rate: float) -> _Sizes:
        """Results of `best_size` while a second is worth about ``rate`` tokens; a step has one rate."""
        if rate != self._rate:
            self._rate, self._latest = rate, self._sizes.setdefault(round(rate * self.plain, 2), {})
        return self._latest


@dataclass(slots=True, eq=False)
class Offer:
    """A draft that was proposed in this step: the nodes that may pay, in ascending order, and their path probabilities.

    ``gains[n]``: tokens that the likeliest n nodes are expected to bring.
    """

    arm: ArmInSequence
    draft: Draft
    nodes: Sequence[int] = ()
    path_probs: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)
    """What these are worth by the goal."""


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


def offered(arm: ArmInSequence, draft: Draft, floor: float, goal: Goal) -> Offer:
    """The draft with the path probability of each node; nodes below ``floor`` are left out."""
    nodes, path_probs = arm.whole.calibration.candidates(draft, arm.record.odds, floor, 0)
    chained = isinstance(nodes, range)
    if len(nodes) > arm.limit:
        likely = dict(zip(nodes, path_probs, strict=True))
        nodes = nodes[: arm.limit] if chained else best_of((nodes, path_probs), arm.limit)
        path_probs = [likely[node] for node in nodes]
    ranked = path_probs if chained else sorted(path_probs, reverse=True)
    gains, worths = [0.0, *accumulate(ranked)], [0.0, *accumulate(goal.shares(ranked))]
    return Offer(arm, draft, nodes, path_probs, gains, worths)


def best_cut(offer: Offer, prices: StepPrices, rate: float) -> Choice:
    """The offer, cut where it is worth most, if a second is worth ``rate`` tokens."""
    most, worth, nodes = min(len(offer.path_probs), prices.most), 0.0, 0
    stride = -(-most // _SLOTS) or 1
    for count in (*range(stride, most, stride), most):
        value = offer.worths[count] - rate * prices.of_nodes(count)
        if value > worth:
            worth, nodes = value, count
    return Choice(worth, offer.gains[nodes], prices.of_nodes(nodes), offer.arm, nodes, offer) if nodes else NOTHING


def best_size(arm: ArmInSequence, prices: StepPrices, rate: float, share: float) -> Choice:
    """The size that is worth most of the drafts that an arm could be asked for, if this share of levels is right."""
    whole = arm.whole
    depth, known = whole.depth, prices.sizes(rate)
    key = whole.number, round(share, 2), round(depth.share, 1), arm.limit, whole.seconds.revision
    found = known.get(key)
    if found is None:
        found = 0, 0.0, 0.0
        worth = _MARGIN
        for size in whole.sizes[1:]:
            if size > arm.limit or size > prices.most:
                break
            gain = expected_accepted(share, depth.of(size))
            seconds = prices.of_drafting(whole.seconds.of(size)) + prices.of_nodes(size)
            value = prices.goal.worth(gain) - rate * seconds
            if value > worth:
                worth, found = value, (size, gain, seconds)
        known[key] = found
    size, gain, seconds = found
    return Choice(prices.goal.worth(gain) - rate * seconds, gain, seconds, arm, size) if size else NOTHING
