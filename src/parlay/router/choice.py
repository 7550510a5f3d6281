"""Works out the worth of each choice in a step: the tokens that it should bring, less the worth of its seconds.

The formulas are in docs/explanation/how-auto-chooses.md, under the names that they have here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from operator import add

from parlay.router.acceptance import MOST_SHARE, expected_accepted
from parlay.router.arms import ArmInSequence, ArmState
from parlay.router.prices import Drafts, KnownSizes, Size, StepPrices
from parlay.router.ranking import Candidates, best_of
from parlay.types import Draft, trees

_SLOTS = 8  # how many lengths of a draft are compared, about
_MARGIN = 0.05  # tokens of expected profit before a draft is asked for, because records err
_SURCHARGE = 1.05  # factor on the price of rows: in a large batch most drafts are near break-even, where errors count
_SURE = 0.98  # if drafting is free, drafts are sized as if this share of levels were right
LEAST = 1e-9  # worth of a draft that pays only by its confidence bound


@dataclass(slots=True, eq=False)
class Offer:
    """A draft that was proposed in this step: the nodes that may pay, in ascending order, and their path probabilities.

    ``gains[n]``: how many tokens the n likeliest nodes are expected to bring. A drawn draft stays whole, and whether it
    is verified may not depend on what was drawn: its only gain, ``gains[0]``, is the expected gain of ``requested``
    nodes.
    """

    arm: ArmInSequence
    draft: Draft
    requested: int
    nodes: Sequence[int] = ()
    path_probs: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)
    """What ``gains`` are worth by the goal."""
    bearing: Set[int] = frozenset()
    """Nodes that are never cut, because the probes below them are worth their rows."""

    @property
    def is_drawn(self) -> bool:
        return self.draft.kind != "point"

    @property
    def is_probes(self) -> bool:
        """Whether the draft has only probes, which prepare the arm's draft of the next step."""
        return 0 < self.draft.probes == len(self.draft)

    @property
    def fixed_rows(self) -> int:
        """Rows of the draft that are computed even if all candidates are cut."""
        return self.draft.probes + len(self.bearing) if self.draft.kind == "point" else len(self.draft)

    @property
    def candidates(self) -> Candidates:
        """The nodes that may be cut."""
        if not self.bearing:
            return self.nodes, self.path_probs
        free = [pair for pair in zip(self.nodes, self.path_probs, strict=True) if pair[0] not in self.bearing]
        return [node for node, _ in free], [path_prob for _, path_prob in free]


@dataclass(slots=True, eq=False)
class Choice:
    """A draft of ``nodes`` nodes: those of ``offer`` if it was proposed already, else what ``arm`` is to propose.

    ``gain``: expected tokens beyond the one that every step commits; ``value``: the gain by the goal. ``worth``: the
    value less what ``seconds`` are worth.
    """

    worth: float = 0.0
    gain: float = 0.0
    value: float = 0.0
    seconds: float = 0.0
    arm: ArmInSequence | None = None
    nodes: int = 0
    offer: Offer | None = None


NOTHING = Choice()


def offered(arm: ArmInSequence, draft: Draft, requested: int, prices: StepPrices) -> Offer:
    """The draft as an offer, with the path probability of each node. Nodes that can never pay are left out."""
    goal = prices.goal
    if draft.kind != "point":
        gain = expected_accepted(arm.record.share, arm.state.depth.of(requested))
        return Offer(arm, draft, requested, gains=[gain], worths=[goal.worth(gain)])
    nodes, path_probs, gains, worths = arm.state.calibration.paths(draft, arm.record.shift, prices.floor, goal.shares)
    if len(path_probs) > arm.limit:
        if isinstance(nodes, range):
            return Offer(arm, draft, requested, nodes[: arm.limit], path_probs[: arm.limit], gains, worths)
        likely = dict(zip(nodes, path_probs, strict=True))
        nodes = best_of((nodes, path_probs), arm.limit)
        path_probs = [likely[node] for node in nodes]
    return Offer(arm, draft, requested, nodes, path_probs, gains, worths)


def bearing(offer: Offer, prices: StepPrices) -> Set[int]:
    """The nodes that must stay because probes below them are worth their rows.

    If the accepted path ends just above probes, the next step has a draft, which should gain as many tokens as this
    one.
    """
    draft = offer.draft
    first, parents = len(draft) - draft.probes, draft.tree.parents
    ends = dict(zip(offer.nodes, offer.path_probs, strict=True))  # how likely the accepted path ends at each node
    for node, path_prob in zip(offer.nodes, offer.path_probs, strict=True):
        if parents[node] >= 0:
            ends[parents[node]] -= path_prob
    kept: set[int] = set()
    for anchor, probes in Counter(trees.anchors(draft.tree, draft.probes)).items():
        if 0 <= anchor < first and ends.get(anchor, 0.0) * offer.gains[-1] > prices.rate * prices.of_nodes(probes):
            kept.update(trees.path_to(draft.tree, anchor))
    return kept


def best_cut(offer: Offer, prices: StepPrices) -> Choice:
    """The offer, cut to the number of nodes that is worth most."""
    rate = prices.rate
    if offer.is_drawn:
        seconds = prices.of_nodes(offer.requested)
        gain, value = offer.gains[0], offer.worths[0]
        worth = value - rate * seconds
        return Choice(worth, gain, value, seconds, offer.arm, offer.requested, offer) if worth > 0 else NOTHING
    most, worth, nodes = min(len(offer.path_probs), prices.most), 0.0, 0
    stride = -(-most // _SLOTS) or 1
    for count in (*range(stride, most, stride), most):
        value = offer.worths[count] - _SURCHARGE * rate * prices.of_nodes(count)
        if value > worth:
            worth, nodes = value, count
    if not nodes:
        return NOTHING
    gain, value = offer.gains[nodes], offer.worths[nodes]
    return Choice(worth, gain, value, prices.of_nodes(nodes), offer.arm, nodes, offer)


def best_size(
    arm: ArmInSequence, prices: StepPrices, share: float, most: float = math.inf, stake: float = math.inf
) -> Choice:
    """The draft size that is worth most if the arm is right at this ``share`` of levels.

    If drafting is free, more nodes are asked for, because those that do not pay are cut later. The worth is at most
    ``most``. Drafts longer than a trial cost at most ``stake`` seconds.
    """
    state = arm.state
    known = prices.known.get(state.number) or _known(state, prices)
    (drafts, sizes), limit = known, arm.limit
    if drafts.seconds and drafts.seconds[-1] > stake:
        limit = min(limit, max(state.trial, drafts.sizes[max(0, bisect_right(drafts.seconds, stake) - 1)]))
    key = int(100 * share + 0.5), limit
    found = sizes.get(key)
    if found is None:
        found = _best_size(limit, drafts, prices, share, _MARGIN)
        if prices.is_free(state.drafting(limit)) and state.seconds.is_known:
            found = _best_size(limit, drafts, prices, max(share, _SURE), 0.0)[0], *found[1:]
        sizes[key] = found
    size, gain, value, seconds = found
    if not size:
        return NOTHING
    worth = max(LEAST, value - prices.rate * seconds)
    return Choice(worth if worth < most else most, gain, value, seconds, arm, size)


def _best_size(limit: int, drafts: Drafts, prices: StepPrices, share: float, margin: float) -> Size:
    goal, rate, share = prices.goal, prices.rate, min(share, MOST_SHARE)
    endless, best, most = share / (1 - share), (0, 0.0, 0.0, 0.0), margin
    for size, depth, seconds in zip(drafts.sizes, drafts.depths, drafts.seconds, strict=True):
        if size > limit:
            break
        gain = endless * (1 - share**depth)  # `expected_accepted`
        value = goal.worth(gain)
        if value - rate * seconds > most:
            best, most = (size, gain, value, seconds), value - rate * seconds
    return best


def _known(arm: ArmState, prices: StepPrices) -> KnownSizes:
    """The sizes known for this arm at about this rate, cached by all that its price depends on."""
    key = arm.number, math.ceil(10 * arm.depth.share - 0.5), arm.seconds.revision, arm.probes
    at_rate = round(100 * prices.rate * prices.token), *key
    known = prices.known_at.get(at_rate)
    if known is None:
        known = prices.known_at[at_rate] = prices.drafts.get(key) or _drafts(arm, key, prices), {}
    prices.known[arm.number] = known
    return known


def _drafts(arm: ArmState, key: tuple[int, ...], prices: StepPrices) -> Drafts:
    sizes = arm.sizes[1 : bisect_right(arm.sizes, prices.most)]
    depths = [arm.depth.of(size) for size in sizes]
    drafting = [prices.of_drafting(arm.drafting(size)) for size in sizes]
    rows = [prices.of_nodes(size + arm.probes) for size in sizes]
    drafts = prices.drafts[key] = Drafts(sizes, depths, list(map(add, drafting, rows)))
    return drafts
