"""Budgets and proposals, and afterwards reports to drafters and policies.

A drafter or policy that raises costs its requests their drafts and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from parlay.engine.admission import DraftAdmission
from parlay.engine.clock import since
from parlay.engine.constrained import drafters_part
from parlay.engine.isolation import isolated
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import Turn, charge, grouped
from parlay.engine.target_layers import TargetLayers
from parlay.types import NO_DRAFT, Budgets, Draft, Drafter, Needs, Policy, Spent, Strategy


class Drafting:
    """Fills in the drafts of a step's turns, and reports their outcomes to drafters and policies."""

    def __init__(self, admission: DraftAdmission, scheduler: Scheduler, layers: TargetLayers) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._layers = layers
        self._planned: list[Sequence] = []
        """The sequences that could draft in the last step."""
        self._inactive = 0
        """For how many more steps of these sequences their policies are inactive."""
        self._is_inactive = False
        """Whether this step is one of those."""

    def propose(self, turns: list[Turn]) -> None:
        """Ask drafters, each at once for all sequences that want it, then settle what the target verifies."""
        ready = [turn for turn in turns if turn.at_root and turn.sequence.drafting]
        if not self._stays_inactive(turns, ready):
            self._inactive = sys.maxsize
            for group in _by_strategy(ready):
                self._draft(group[0].sequence.strategy, group)
        isolated(self._admission.add_forced, ready, _leave_out)
        self._admission.settle(ready)

    def _stays_inactive(self, turns: list[Turn], ready: list[Turn]) -> bool:
        """Whether policies are still inactive: the same sequences run as in the last step, and steps are left."""
        sequences = [turn.sequence for turn in ready]
        self._is_inactive = self._inactive > 0 and len(ready) == len(turns) and sequences == self._planned
        self._planned = sequences
        self._inactive -= self._is_inactive
        return self._is_inactive

    def _draft(self, strategy: Strategy, turns: list[Turn]) -> None:
        """One strategy's sequences. Its policy says which drafter each asks, until it has enough to choose from."""
        began, asking, policy = time.perf_counter(), 0.0, strategy.policy
        proposed: dict[Turn, Draft] = {}
        asks = self._told(policy.plan, turns)
        for _ in strategy.drafters:
            if not asks:
                break
            now = time.perf_counter()
            offers = self._asked(strategy, asks)
            asking += since(now)
            proposed |= {turn: draft for turn, draft in offers.items() if draft is not None}
            asks = self._told(partial(_weighed, policy, turns, offers), turns)
        if any(map(len, proposed.values())):
            isolated(partial(self._admission.trim, policy), list(proposed), _leave_out)
        watching = [turn for turn in turns if turn.watching]
        for turn in watching:
            turn.planning_seconds = max(0.0, since(began) - asking) / len(watching)

    def _told(self, say: Callable[[list[Sequence]], Budgets], turns: list[Turn]) -> list[tuple[Turn, int]]:
        """The drafters to ask now, by the policy's word, and whether it will be inactive afterwards."""
        asks: list[tuple[Turn, int]] = []

        def tell(turns: list[Turn]) -> None:
            budgets = say([turn.sequence for turn in turns])
            drafters = budgets.drafters or [0] * len(turns)
            for turn, nodes, drafter in zip(turns, budgets.nodes, drafters, strict=True):
                if nodes > 0:
                    turn.budget = min(nodes, self._admission.limit(turn))
                    turn.watching = (*turn.watching, drafter)
                    asks.append((turn, drafter))
            for turn, others in zip(turns, budgets.watching, strict=bool(budgets.watching)):
                turn.watching = tuple({*turn.watching, *others} - turn.sequence.lost)
            self._inactive = min(self._inactive, 0 if asks else budgets.inactive)

        isolated(tell, turns, _leave_out, again=False)
        return asks

    def _asked(self, strategy: Strategy, asks: list[tuple[Turn, int]]) -> dict[Turn, Draft | None]:
        """What the drafters propose; None where one failed."""
        offers: dict[Turn, Draft | None] = {}
        for number, drafter in enumerate(strategy.drafters):
            group = [turn for turn, asked in asks if asked == number]
            if not group:
                continue
            began = time.perf_counter()
            ready = self._lent([turn for turn in group if number not in turn.sequence.lost], drafter.needs)
            if ready:
                isolated(partial(self._ask, strategy, drafter), ready, partial(_fail, number))
            self._layers.reclaim()
            offers |= {turn: turn.draft for turn in ready}
            offers |= {turn: None for turn in group if number in turn.sequence.lost}
            charge([(turn, number) for turn in group], since(began))
        return offers

    def _lent(self, turns: list[Turn], needs: Needs) -> list[Turn]:
        """Those whose drafter can be asked, with the target's layers lent if it needs them."""
        asked = [turn for turn in turns if turn.budget > 0]
        if needs.layers:
            return [turn for turn in asked if self._lend(turn)]
        if needs.taps:
            for turn in asked:
                self._layers.lend(turn.sequence, 0)
        return asked

    def _lend(self, turn: Turn) -> bool:
        """Set memory aside for rows of the target's own layers. If there is little, lower the budget.

        The pending rows of the whole batch have their memory already, so the verify still fits whatever is written.
        A long pending run, as in prefill, would run twice: that is not worth it if it is longer than the budget.
        """
        if len(turn.pending) > turn.budget:
            return False
        while turn.budget and not self._scheduler.reserve_draft(turn.sequence, turn.budget):
            turn.budget //= 2
        if turn.budget:
            self._layers.lend(turn.sequence, turn.budget)
        return turn.budget > 0

    def _ask(self, strategy: Strategy, drafter: Drafter, turns: list[Turn]) -> None:
        drafts = drafter.propose([turn.sequence for turn in turns], [turn.budget for turn in turns])
        for turn, draft in zip(turns, drafts, strict=True):
            turn.draft = draft
        self._admission.admit(strategy.rule, turns)

    def learn(self, turns: list[Turn], spent: Spent) -> None:
        """Report the outcome of all its sequences' drafts to each policy, in one call."""
        if self._is_inactive:
            return
        for group in _by_strategy([turn for turn in turns if turn.done.committed and turn.sequence.drafting]):
            isolated(partial(_learn, group[0].sequence.strategy.policy, spent), group, Turn.drop_policy, again=False)

    def observe(self, turns: list[Turn]) -> None:
        """Report the step of all its sequences to each drafter that asks for it, in one call."""
        groups: dict[tuple[int, int], list[Turn]] = {}
        for turn in turns:
            for number in turn.observers:
                groups.setdefault((number, id(turn.sequence.strategy.drafters[number])), []).append(turn)
        for (number, _), group in groups.items():
            began = time.perf_counter()
            isolated(partial(_observe, number), group, partial(_drop, number), again=False)
            charge([(turn, number) for turn in group], since(began))


def _leave_out(turn: Turn, error: Exception) -> None:
    """Verify nothing of what was proposed: the policy failed, or what was made of the draft is not sound."""
    turn.budget, turn.draft = 0, NO_DRAFT
    turn.drop_policy(error)


def _fail(number: int, turn: Turn, error: Exception) -> None:
    """A drafter proposed nothing that could be used."""
    turn.budget, turn.draft = 0, NO_DRAFT
    turn.drop_drafter(number, error)


def _drop(number: int, turn: Turn, error: Exception) -> None:
    turn.drop_drafter(number, error)


def _weighed(policy: Policy, turns: list[Turn], offers: Mapping[Turn, Draft | None], views: list[Sequence]) -> Budgets:
    """The policy's word when it has seen these offers; `NO_DRAFT` stands for those who were not asked."""
    return policy.weigh(views, [offers.get(turn, NO_DRAFT) for turn in turns])


def _learn(policy: Policy, spent: Spent, turns: list[Turn]) -> None:
    """If forced tokens were added to a draft, the policy sees only the drafter's part."""
    views: list[Sequence] = []
    drafts: list[Draft] = []
    accepted: list[int] = []
    for turn in turns:
        draft = turn.draft if turn.sequence.request.constraint is None else drafters_part(turn.draft)
        if draft is not None:
            views.append(turn.sequence)
            drafts.append(draft)
            accepted.append(turn.done.accepted if draft is turn.draft else 0)
    if views:
        asked = [turn for turn in turns if turn.watching]
        seconds = sum([turn.draft_seconds for turn in asked]) / len(asked) if asked else 0.0
        by_drafter = tuple([sum(each) for each in zip(*[turn.seconds for turn in asked if turn.seconds], strict=True)])
        planning = sum([turn.planning_seconds for turn in asked])
        spent = Spent(seconds, spent.verify_seconds, spent.rows, spent.context, by_drafter, planning)
        policy.learn(views, drafts, accepted, spent)


def _observe(number: int, turns: list[Turn]) -> None:
    """Turns that share the drafter of this number."""
    turns[0].sequence.strategy.drafters[number].observe([turn.observation(number) for turn in turns])


def _by_strategy(turns: list[Turn]) -> Iterable[list[Turn]]:
    """The turns that may draft, those of one strategy together."""
    drafting = [turn for turn in turns if turn.sequence.strategy.drafters]
    return grouped(drafting, lambda turn: id(turn.sequence.strategy))
