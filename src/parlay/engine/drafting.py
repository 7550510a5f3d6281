"""Budgets and proposals, and afterwards reports to drafters and policies.

A drafter or policy that raises costs its requests their drafts and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from parlay.engine.admission import DraftAdmission
from parlay.engine.clock import Clock, since
from parlay.engine.constrained import drafters_part
from parlay.engine.isolation import isolated
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep, charge, grouped
from parlay.engine.target_layers import TargetLayers
from parlay.types import NO_DRAFT, Budgets, Draft, Drafter, Needs, Policy, Spent, Strategy


class Drafting:
    """Fills in the drafts of a step's steps, and reports their outcomes to drafters and policies."""

    def __init__(self, admission: DraftAdmission, scheduler: Scheduler, layers: TargetLayers, clock: Clock) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._layers = layers
        self._clock = clock
        self._planned: list[Sequence] = []
        """The sequences that could draft in the last step."""
        self._inactive = 0
        """For how many more steps of these sequences their policies are inactive."""
        self._is_inactive = False
        """Whether this step is one of those."""

    def propose(self, steps: list[SequenceStep]) -> None:
        """Ask drafters, each at once for all sequences that want it, then settle what the target verifies."""
        ready = [step for step in steps if step.at_root and step.sequence.drafting]
        if not self._stays_inactive(steps, ready):
            self._inactive = sys.maxsize
            for group in _by_strategy(ready):
                self._draft(group[0].sequence.strategy, group)
        isolated(self._admission.add_forced, ready, _leave_out)
        self._admission.settle(ready)

    def _stays_inactive(self, steps: list[SequenceStep], ready: list[SequenceStep]) -> bool:
        """Whether policies are still inactive: the same sequences run as in the last step, and steps are left."""
        sequences = [step.sequence for step in ready]
        self._is_inactive = self._inactive > 0 and len(ready) == len(steps) and sequences == self._planned
        self._planned = sequences
        self._inactive -= self._is_inactive
        return self._is_inactive

    def _draft(self, strategy: Strategy, steps: list[SequenceStep]) -> None:
        """One strategy's sequences. Its policy says which drafter each asks, until it has enough to choose from."""
        began, asking, policy = self._clock(), 0.0, strategy.policy
        proposed: dict[SequenceStep, Draft] = {}
        asks = self._told(policy.plan, steps)
        for _ in strategy.drafters:
            if not asks:
                break
            now = self._clock()
            offers = self._asked(strategy, asks)
            asking += since(now, self._clock)
            proposed |= {step: draft for step, draft in offers.items() if draft is not None}
            asks = self._told(partial(_weighed, policy, steps, offers), steps)
        if any(map(len, proposed.values())):
            isolated(partial(self._admission.trim, policy), list(proposed), _leave_out)
        watching = [step for step in steps if step.watching]
        for step in watching:
            step.planning_seconds = max(0.0, since(began, self._clock) - asking) / len(watching)

    def _told(
        self, say: Callable[[list[Sequence]], Budgets], steps: list[SequenceStep]
    ) -> list[tuple[SequenceStep, int]]:
        """The drafters to ask now, by the policy's word, and whether it will be inactive afterwards."""
        asks: list[tuple[SequenceStep, int]] = []

        def tell(steps: list[SequenceStep]) -> None:
            budgets = say([step.sequence for step in steps])
            drafters = budgets.drafters or [0] * len(steps)
            for step, nodes, drafter in zip(steps, budgets.nodes, drafters, strict=True):
                if nodes > 0:
                    step.budget = min(nodes, self._admission.limit(step))
                    step.watching = (*step.watching, drafter)
                    asks.append((step, drafter))
            for step, others in zip(steps, budgets.watching, strict=bool(budgets.watching)):
                step.watching = tuple({*step.watching, *others} - step.sequence.lost)
            self._inactive = min(self._inactive, 0 if asks else budgets.inactive)

        isolated(tell, steps, _leave_out, again=False)
        return asks

    def _asked(self, strategy: Strategy, asks: list[tuple[SequenceStep, int]]) -> dict[SequenceStep, Draft | None]:
        """What the drafters propose; None where one failed."""
        offers: dict[SequenceStep, Draft | None] = {}
        for number, drafter in enumerate(strategy.drafters):
            group = [step for step, asked in asks if asked == number]
            if not group:
                continue
            began = self._clock()
            ready = self._lent([step for step in group if number not in step.sequence.lost], drafter.needs)
            if ready:
                isolated(partial(self._ask, strategy, drafter), ready, partial(_fail, number))
            self._layers.reclaim()
            offers |= {step: step.draft for step in ready}
            offers |= {step: None for step in group if number in step.sequence.lost}
            charge([(step, number) for step in group], since(began, self._clock))
        return offers

    def _lent(self, steps: list[SequenceStep], needs: Needs) -> list[SequenceStep]:
        """Those whose drafter can be asked, with the target's layers lent if it needs them."""
        asked = [step for step in steps if step.budget > 0]
        if needs.layers:
            return [step for step in asked if self._lend(step)]
        if needs.taps:
            for step in asked:
                self._layers.lend(step.sequence, 0)
        return asked

    def _lend(self, step: SequenceStep) -> bool:
        """Set memory aside for rows of the target's own layers. If there is little, lower the budget.

        The pending rows of the whole batch have their memory already, so the verify still fits whatever is written.
        A long pending run, as in prefill, would run twice: that is not worth it if it is longer than the budget.
        """
        if len(step.pending) > step.budget:
            return False
        while step.budget and not self._scheduler.reserve_draft(step.sequence, step.budget):
            step.budget //= 2
        if step.budget:
            self._layers.lend(step.sequence, step.budget)
        return step.budget > 0

    def _ask(self, strategy: Strategy, drafter: Drafter, steps: list[SequenceStep]) -> None:
        drafts = drafter.propose([step.sequence for step in steps], [step.budget for step in steps])
        for step, draft in zip(steps, drafts, strict=True):
            step.draft = draft
        self._admission.admit(strategy.rule, steps)

    def learn(self, steps: list[SequenceStep], spent: Spent) -> None:
        """Report the outcome of all its sequences' drafts to each policy, in one call."""
        if self._is_inactive:
            return
        for group in _by_strategy([step for step in steps if step.done.committed and step.sequence.drafting]):
            isolated(
                partial(_learn, group[0].sequence.strategy.policy, spent), group, SequenceStep.drop_policy, again=False
            )

    def observe(self, steps: list[SequenceStep]) -> None:
        """Report the step of all its sequences to each drafter that asks for it, in one call."""
        groups: dict[tuple[int, int], list[SequenceStep]] = {}
        for step in steps:
            for number in step.observers:
                groups.setdefault((number, id(step.sequence.strategy.drafters[number])), []).append(step)
        for (number, _), group in groups.items():
            began = self._clock()
            isolated(partial(_observe, number), group, partial(_drop, number), again=False)
            charge([(step, number) for step in group], since(began, self._clock))


def _leave_out(step: SequenceStep, error: Exception) -> None:
    """Verify nothing of what was proposed: the policy failed, or what was made of the draft is not sound."""
    step.budget, step.draft = 0, NO_DRAFT
    step.drop_policy(error)


def _fail(number: int, step: SequenceStep, error: Exception) -> None:
    """A drafter proposed nothing that could be used."""
    step.budget, step.draft = 0, NO_DRAFT
    step.drop_drafter(number, error)


def _drop(number: int, step: SequenceStep, error: Exception) -> None:
    step.drop_drafter(number, error)


def _weighed(
    policy: Policy, steps: list[SequenceStep], offers: Mapping[SequenceStep, Draft | None], views: list[Sequence]
) -> Budgets:
    """The policy's word when it has seen these offers; `NO_DRAFT` stands for those who were not asked."""
    return policy.next_budgets(views, [offers.get(step, NO_DRAFT) for step in steps])


def _learn(policy: Policy, spent: Spent, steps: list[SequenceStep]) -> None:
    """If forced tokens were added to a draft, the policy sees only the drafter's part."""
    views: list[Sequence] = []
    drafts: list[Draft] = []
    accepted: list[int] = []
    for step in steps:
        draft = step.draft if step.sequence.request.constraint is None else drafters_part(step.draft)
        if draft is not None:
            views.append(step.sequence)
            drafts.append(draft)
            accepted.append(step.done.accepted if draft is step.draft else 0)
    if views:
        asked = [step for step in steps if step.watching]
        seconds = sum([step.draft_seconds for step in asked]) / len(asked) if asked else 0.0
        by_drafter = tuple([sum(each) for each in zip(*[step.seconds for step in asked if step.seconds], strict=True)])
        planning = sum([step.planning_seconds for step in asked])
        spent = Spent(seconds, spent.verify_seconds, spent.rows, spent.context, by_drafter, planning)
        policy.learn(views, drafts, accepted, spent)


def _observe(number: int, steps: list[SequenceStep]) -> None:
    """Turns that share the drafter of this number."""
    steps[0].sequence.strategy.drafters[number].observe([step.observation(number) for step in steps])


def _by_strategy(steps: list[SequenceStep]) -> Iterable[list[SequenceStep]]:
    """The steps that may draft, those of one strategy together."""
    drafting = [step for step in steps if step.sequence.strategy.drafters]
    return grouped(drafting, lambda step: id(step.sequence.strategy))
