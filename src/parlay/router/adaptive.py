"""The default budget policy: draft as much as pays, by measured acceptance and measured cost."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

from parlay import trees
from parlay.router.estimates import UNSCORED, Calibration, DraftSeconds, Lean, Levels, Outcome, expected_accepted, walk
from parlay.router.purse import FREE, Bill, Openings, Purse
from parlay.router.ranking import NOBODY, best, best_of
from parlay.types import Cost, Draft, Spent, View

_FIRST = 4  # nodes of a sequence's first draft, while the drafter is unknown
_KNOWN = 50  # drafts after which it is known
_PROBE = 2  # nodes of a probe
_FRESH = 16  # steps after which costs are looked up again; one with a draft counts for `_AGED`
_AGED = 4
_STALE = 64  # most such steps, while costs turn out the same
_SAME = 0.05  # change of a cost that is taken for none
_SURE = 0.98  # acceptance of the surest drafts, for which such drafters get their budget
_UP = 0.1  # how far the depth per node follows a draft
_STRIDES = 16  # at most about so many sizes are compared when drafts are trimmed

_Size = tuple[int, float, float]
"""Nodes per sequence, and the seconds that drafting and verifying them take for the batch."""


class Adaptive:
    """Drafts what raises tokens per second, in the spirit of SmartSpec's goodput (arXiv:2406.14066).

    *Trimming*: a node's chance is the product of its path's calibrated scores. All nodes of the batch are ranked by
    chance, and the first m are verified for which (sequences + their chances) / (draft seconds + v(rows)) is largest;
    so a node stays while it is worth its row at the margin. Drafts of laws other than ``point`` are never trimmed:
    removing nodes by what was drawn would change the law. The probes of a `Draft` pay in later steps only, so they are
    not trimmed; planning counts their rows, and a step of probes alone as one in which nothing was accepted. Drafts as
    sure as those that were all kept, and then right to their ends, go unweighed while prices stand.

    *Planning*: how deep to draft, from the share of levels accepted lately and the measured draft seconds per node;
    0 where no depth pays. A drafter whose work is next to free drafts the whole budget and is trimmed.

    *Never slower*: a sequence begins with `_FIRST` nodes and doubles with each draft that holds, unless the drafter is
    known by then. Where nothing is worth drafting, a probe of `_PROBE` nodes is tried after `FIRST_WAIT` steps; each
    one that loses time doubles the wait, at least to 1 / `LOSS` times that loss. So probes take at most a share of
    `LOSS`. What drafts lose is paid from a purse, which holds `STAKE` forwards at first and fills with what drafts
    gain: when it is empty, only probes are drafted. So a drafter that is always wrong costs its stake and its probes;
    and where no draft is expected to pay, sequences whose prompts it has not read are tried for a share of `OPENING`.
    Where nothing is to be drafted, the policy wants to be left alone: until the next probe, and with money in a purse
    for at most `_FRESH` steps, twice as many each time that costs are found unchanged.

    Scores are calibrated by score bucket over all sequences, then shifted in log-odds for each sequence, because that
    needs few observations; calibration by depth, as static trees use it, knows nothing of a drafter's confidence.
    """

    def __init__(self, cost: Cost, max_budget: int) -> None:
        self._cost = cost
        self._max_budget = max_budget
        self._calibration = Calibration()
        self._levels = Levels()
        self._draft_seconds = DraftSeconds()
        self._depth_per_node = 1.0
        self._probes = 0.0  # that a draft carries, as last proposed
        self._openings = Openings()
        self._states: dict[int, _State] = {}
        self._prices: _Prices | None = None
        self._held: _Held | None = None
        self._proposed = 0.0  # nodes per sequence, in this step
        self._own_rows = 0
        self._other_rows = 0
        self._others_seen = (0, 0)  # rows that were not this strategy's, in the last two steps

    def plan(self, views: Sequence[View]) -> list[int]:
        self._own_rows, self._proposed = len(views), 0.0
        self._other_rows = min(self._others_seen)  # one chunk of somebody's prompt does not make a crowd
        self._others_seen = (self._others_seen[1], self._others_seen[1])
        if self._max_budget == 0 or not views:
            return [0] * len(views)
        states = [self._state(view) for view in views]
        prices = self._current_prices(views) if _any_purse(states) else None
        return [self._plan(state, prices) for state in states]

    def rest(self, views: Sequence[View]) -> int:
        """Until the next probe, or until prices are to be looked up again."""
        if self._max_budget == 0:
            return _FRESH
        states = [self._state(view) for view in views]
        steps = min([state.purse.until_probe(len(views)) for state in states]) - 1
        if self._prices is not None and _any_purse(states):
            steps = min(steps, self._prices.left)
            self._prices.left -= steps
        return max(0, steps)

    def _plan(self, state: _State, prices: _Prices | None) -> int:
        purse = state.purse
        purse.look()
        paying = self._paying(state, prices) if prices is not None and purse.forwards > 0 else 0
        state.budget = min(paying or (_PROBE if purse.probing else 0), state.limit)
        return state.budget

    def _paying(self, state: _State, prices: _Prices) -> int:
        """The size worth drafting, by these prices and what was accepted lately."""
        if state.prices is not prices:
            state.prices = prices
            share = prices.share or state.levels.share
            if share not in prices.paying:
                prices.paying[share] = self._paying_size(prices.table, share)
            state.paying = prices.paying[share]
        return state.paying

    def _current_prices(self, views: Sequence[View]) -> _Prices:
        """Looked up again for another batch, and now and then."""
        prices = self._prices
        batch = (len(views), self._other_rows)
        if prices is None or prices.batch != batch or (prices.left <= 0 and not self._stand(prices, views)):
            prices = self._prices = self._new_prices(batch, views)
        elif prices.left <= 0:
            prices = self._prices = prices.renewed()
        prices.left -= 1
        return prices

    def _new_prices(self, batch: tuple[int, int], views: Sequence[View]) -> _Prices:
        table = self._cost_table(views)
        # Next to free drafting: as much as the surest draft could use, and trimming does the rest.
        free = all(draft_seconds <= FREE * seconds for _, draft_seconds, seconds in table)
        return _Prices(batch, table, _SURE if free else None)

    def _stand(self, prices: _Prices, views: Sequence[View]) -> bool:
        """Whether the prices hold at both ends, and nothing was learnt since that matters beside them.

        That is, nothing was drafted by them, or as much is drafted as could ever pay, whatever was accepted lately.
        """
        if prices.used and prices.share is None:
            return False
        context = _mean_length(views)
        return all(
            math.isclose(sum(old[1:]), sum(self._size(old[0], len(views), context)[1:]), rel_tol=_SAME)
            for old in (prices.table[0], prices.table[-1])
        )

    def _cost_table(self, views: Sequence[View]) -> list[_Size]:
        """What it costs if each sequence drafts so many nodes, for a few sizes."""
        context = _mean_length(views)
        return [self._size(size, len(views), context) for size in (0, *_sizes(self._max_budget))]

    def _size(self, size: int, sequences: int, context: int) -> _Size:
        more = round((size + self._probes) * sequences) if size else 0
        seconds = self._cost.forward(sequences + self._other_rows + more, context)
        return size, self._seconds_of(size, sequences), seconds

    def _seconds_of(self, nodes: float, sequences: int) -> float:
        """What it takes to draft so many nodes for each of ``sequences``."""
        return self._draft_seconds.of(nodes) * sequences if nodes else 0.0

    def _paying_size(self, table: Sequence[_Size], share: float) -> int:
        """The size that gives most tokens per second if all sequences did as this one; 0 where none beats plain."""
        fixed = 1 + self._other_rows / self._own_rows
        best, best_rate = 0, 0.0
        for size, draft_seconds, seconds in table:
            gain = expected_accepted(share, size * self._depth_per_node)
            rate = (fixed + gain) / (draft_seconds + seconds)
            if rate > best_rate:
                best, best_rate = size, rate
        return best

    def trim(self, views: Sequence[View], drafts: Sequence[Draft]) -> list[Draft]:
        states = [self._state(view) for view in views]
        nodes = sum(map(len, drafts))
        self._proposed = nodes / len(drafts)
        self._probes = sum([draft.probes for draft in drafts]) / len(drafts)
        kept = list(drafts)
        if nodes and not self._as_sure_as_held(drafts):
            kept = self._trim(states, drafts, nodes, _mean_length(views))
            whole = all(map(operator.is_, kept, drafts))
            self._held = _Held.of([draft for draft in kept if len(draft)], self._prices) if whole else None
        self._own_rows += sum(map(len, kept))
        return kept

    def _as_sure_as_held(self, drafts: Sequence[Draft]) -> bool:
        """Whether drafts like these were all worth their rows, and then right to their ends, at the same prices."""
        held = self._held
        if held is None or held.prices is not self._prices:
            return False
        return all(
            len(draft) <= held.nodes and min(draft.scores, default=UNSCORED) >= held.score
            for draft in drafts
            if len(draft)
        )

    def _trim(self, states: Sequence[_State], drafts: Sequence[Draft], nodes: int, context: int) -> list[Draft]:
        if all(state.purse.probing and len(draft) <= _PROBE for state, draft in zip(states, drafts, strict=True)):
            return list(drafts)  # they would all be kept
        floor = self._floor(len(drafts), nodes, context)
        candidates = [
            self._calibration.candidates(draft, state.lean.odds, floor, _PROBE) if draft.law == "point" else NOBODY
            for state, draft in zip(states, drafts, strict=True)
        ]
        ranked = sorted(chain.from_iterable([reaches for _, reaches in candidates]), reverse=True)
        kept = best(candidates, ranked, self._worth(drafts, nodes, ranked, context))
        for place, state in enumerate(states):
            if state.purse.probing and len(kept[place]) < _PROBE:
                kept[place] = best_of(candidates[place], _PROBE)
        return [_cut(draft, nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def _floor(self, sequences: int, nodes: int, context: int) -> float:
        """A chance that is worth no row: a quarter of what rows cost on average, in tokens of plain decoding."""
        rows = sequences + self._other_rows
        plain = self._cost.forward(rows, context)
        row = (self._cost.forward(rows + nodes, context) - plain) / nodes
        return 0.25 * row * rows / plain

    def _worth(self, drafts: Sequence[Draft], nodes: int, ranked: Sequence[float], context: int) -> int:
        """How many of the ranked nodes to verify: where tokens per second are highest, and fewer of equals."""
        plain = len(drafts) + self._other_rows
        untrimmed = sum([draft.probes if draft.law == "point" else len(draft) for draft in drafts])
        rows, forward = plain + untrimmed, self._cost.forward
        draft_seconds = self._seconds_of(nodes / len(drafts), len(drafts))
        count, best_rate = 0, plain / (draft_seconds + forward(rows, context))
        gains = list(accumulate(ranked))
        stride = -(-len(gains) // _STRIDES)
        for more in [*range(stride, len(gains), stride), len(gains)] if gains else []:
            rate = (plain + gains[more - 1]) / (draft_seconds + forward(rows + more, context))
            if rate > best_rate:
                count, best_rate = more, rate
        return count

    def learn(self, views: Sequence[View], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent) -> None:
        self._others_seen = (self._others_seen[0], max(0, spent.rows - self._own_rows))
        bill = Bill(self._cost, spent, self._draft_seconds.of(self._proposed))
        states: list[_State] = []
        outcomes: list[Outcome] = []
        opening = False
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            state = self._state(view)
            if not state.budget:
                continue
            states.append(state)
            outcomes.append((draft, *walk(draft, right, view.tokens)))
            opening |= state.purse.new
            state.purse.settle(len(draft), right, bill)
        if not states:
            return
        if self._prices is not None:
            self._prices.left -= _AGED
            self._prices.used = True
        if not opening:  # a first proposal reads the prompt
            self._draft_seconds.learn(self._proposed, bill.likely if bill.usual else spent.draft_seconds)
        for state, outcome, expected in zip(states, outcomes, self._calibration.learn(outcomes), strict=True):
            self._learn_outcome(state, outcome, expected)

    def _learn_outcome(self, state: _State, outcome: Outcome, expected: float) -> None:
        draft, path, tested = outcome
        nodes, accepted = len(draft) - draft.probes, len(path)
        if not nodes:
            return
        if accepted < nodes:
            self._held = None
        state.lean.learn(accepted, len(tested), expected)
        chained = trees.is_chain(draft.tree)
        missed = len(tested) > accepted and (chained or not path or draft.tree.parents[tested[-1]] == path[-1])
        state.levels.learn(accepted, missed)
        depth = nodes if chained else max(trees.depths(draft.tree)[:nodes])
        self._depth_per_node += _UP * (depth / nodes - self._depth_per_node)
        if path:
            state.limit = min(2 * state.limit, self._max_budget)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            state.purse.count()

    def _state(self, view: View) -> _State:
        state = self._states.get(view.sequence)
        if state is None:
            known = self._calibration.drafts >= _KNOWN
            limit = self._max_budget if known else min(_FIRST, self._max_budget)
            purse = Purse(view, self._openings)
            state = self._states[view.sequence] = _State(limit, Levels(self._levels), purse)
        return state


@dataclass(slots=True, eq=False)
class _Prices:
    """What drafts cost a batch of so many sequences and other rows.

    Good for ``left`` more steps of ``lasting``; ``used`` once a draft was planned by them. ``share`` is what to reckon
    with instead of the share of levels that a sequence had accepted; ``paying`` are the sizes that pay, by share, as
    far as anyone asked.
    """

    batch: tuple[int, int]
    table: list[_Size]
    share: float | None
    left: int = _FRESH
    lasting: int = _FRESH
    used: bool = False
    paying: dict[float, int] = field(default_factory=dict)

    def renewed(self) -> _Prices:
        """The same prices, good for twice as many steps."""
        steps = min(2 * self.lasting, _STALE)
        return _Prices(self.batch, self.table, self.share, steps, steps)


class _Held(NamedTuple):
    """Drafts that were weighed and all kept, none of which has been wrong since: how many nodes, how sure at least."""

    prices: _Prices | None
    nodes: int
    score: float

    @classmethod
    def of(cls, drafts: Sequence[Draft], prices: _Prices | None) -> _Held:
        return cls(prices, max(map(len, drafts)), min([min(draft.scores, default=UNSCORED) for draft in drafts]))


class _State:
    """What is remembered of one sequence."""

    __slots__ = ("budget", "lean", "levels", "limit", "paying", "prices", "purse")

    def __init__(self, limit: int, levels: Levels, purse: Purse) -> None:
        self.lean = Lean()
        self.levels = levels
        self.limit = limit  # slow start: nodes that may be drafted for now
        self.budget = 0  # as planned for this step
        self.prices: _Prices | None = None  # by which `paying` was worked out
        self.paying = 0  # the size worth drafting
        self.purse = purse


def _any_purse(states: Sequence[_State]) -> bool:
    """Whether anyone may draft more than a probe, so that it matters what drafts cost."""
    return any(state.purse.forwards > 0 for state in states)


def _mean_length(views: Sequence[View]) -> int:
    return sum([len(view.tokens) for view in views]) // len(views)


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to ``most``."""
    sizes = sorted({size for power in range(12) for size in (1 << power, 3 << power)})
    return [*(size for size in sizes if size < most), most]


def _cut(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft without the nodes that are not worth it; drawn drafts stay whole."""
    whole = draft.law != "point" or len(nodes) == len(draft) - draft.probes
    return draft if whole else trees.prune(draft, nodes)
