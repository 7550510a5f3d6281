"""Asks policies for budgets and drafters for drafts, admits the drafts, and reports outcomes to both.

If a drafter or a policy raises, its requests lose their drafts and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import add

from parlay.engine.constrained import drafters_part, legal, with_forced
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep, charge, grouped, isolated, listed
from parlay.engine.tally import Clock, since
from parlay.engine.target_layers import TargetLayers
from parlay.types import (
    NO_DRAFT,
    AcceptRule,
    BesideDrafter,
    Budgets,
    Constraint,
    Draft,
    Drafter,
    Needs,
    Policy,
    RunnerSpec,
    Spent,
    Strategy,
    trees,
)


class Drafting:
    """Fills in the drafts of one step's sequences, and later reports the outcomes to drafters and policies."""

    def __init__(self, admission: DraftAdmission, scheduler: Scheduler, layers: TargetLayers, clock: Clock) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._layers = layers
        self._clock = clock
        self._planned: list[Sequence] = []
        """The sequences that could draft in the last step."""
        self._inactive = 0
        """For how many more steps the policies of these sequences are not asked."""

    def propose(self, steps: list[SequenceStep]) -> bool:
        """Ask each drafter once for all its sequences, then cut the drafts to what the target verifies.

        Returns whether policies were asked. If not, they learn nothing from this step.
        """
        ready: list[SequenceStep] = []
        for step in steps:
            step.sequence.beside = None
            if step.at_root and step.sequence.drafting:
                ready.append(step)
        if active := not self._stays_inactive(steps, ready):
            self._inactive = sys.maxsize
            for group in _by_strategy(ready):
                self._draft(group[0].sequence.strategy, group)
        if constrained := [step for step in ready if step.sequence.request.constraint is not None]:
            isolated(self._admission.add_forced, constrained, _leave_out)
        self._admission.settle(ready)
        return active

    def _stays_inactive(self, steps: list[SequenceStep], ready: list[SequenceStep]) -> bool:
        """Whether policies are still not to be asked: they said for how many steps, and the same sequences run."""
        sequences = [step.sequence for step in ready]
        inactive = self._inactive > 0 and len(ready) == len(steps) and sequences == self._planned
        self._planned = sequences
        self._inactive -= inactive
        return inactive

    def _draft(self, strategy: Strategy, steps: list[SequenceStep]) -> None:
        """Draft for the sequences of one strategy.

        The policy names a drafter for each sequence, and may name another after each proposal, until it has enough
        drafts to choose from.
        """
        began, asking, policy = self._clock(), 0.0, strategy.policy
        views = [step.sequence for step in steps]
        proposed: dict[SequenceStep, Draft] = {}
        wanted = self._set_budgets(steps, partial(policy.plan, views))
        for _ in strategy.drafters:
            if not wanted:
                break
            now = self._clock()
            offers = self._ask(strategy, wanted)
            asking += since(now, self._clock)
            proposed = trees.with_offers(proposed, offers)
            drafts = [offers.get(step, NO_DRAFT) for step in steps]  # empty for steps that asked no drafter
            wanted = self._set_budgets(steps, partial(policy.next_budgets, views, drafts))
        if any(map(len, proposed.values())):
            isolated(partial(self._admission.trim, policy), list(proposed), _leave_out)
        watching = [step for step in steps if step.watching]
        for step in watching:
            step.planning_seconds = max(0.0, since(began, self._clock) - asking) / len(watching)

    def _set_budgets(self, steps: list[SequenceStep], decide: Callable[[], Budgets]) -> list[tuple[SequenceStep, int]]:
        """Let the policy set budgets. Returns the steps that now ask a drafter, each with the drafter's number."""
        wanted: list[tuple[SequenceStep, int]] = []

        def apply(steps: list[SequenceStep]) -> None:
            budgets = decide()
            drafters = budgets.drafters or [0] * len(steps)
            for step, nodes, drafter in zip(steps, budgets.nodes, drafters, strict=True):
                if nodes > 0:
                    step.budget = min(nodes, self._admission.limit(step))
                    step.watching = (*step.watching, drafter)
                    wanted.append((step, drafter))
            for step, others in zip(steps, budgets.watching, strict=bool(budgets.watching)):
                step.watching = tuple({*step.watching, *others} - step.sequence.lost)
            self._inactive = min(self._inactive, 0 if wanted else budgets.inactive)

        isolated(apply, steps, _leave_out, again=False)
        return wanted

    def _ask(self, strategy: Strategy, wanted: list[tuple[SequenceStep, int]]) -> dict[SequenceStep, Draft | None]:
        """Ask each drafter once for all its steps.

        A step gets None if its drafter failed, and is absent if the drafter could not be asked.
        """
        offers: dict[SequenceStep, Draft | None] = {}

        def propose(drafter: Drafter, steps: list[SequenceStep]) -> None:
            drafts = drafter.propose([step.sequence for step in steps], [step.budget for step in steps])
            for step, draft in zip(steps, listed(drafts, (Draft,), len(steps), "propose"), strict=True):
                step.draft = draft
            self._admission.admit(strategy.rule, steps)

        for number, drafter in enumerate(strategy.drafters):
            group = [step for step, other in wanted if other == number]
            if not group:
                continue
            began, needs = self._clock(), drafter.needs
            sound = [step for step in group if step.budget > 0 and number not in step.sequence.lost]
            ready = [step for step in sound if self._lend_layers(step, needs)] if needs.layers or needs.taps else sound
            for step in ready:
                step.called = (*step.called, number)
            if ready:
                isolated(partial(propose, drafter), ready, partial(_fail, number))
            if needs.beside and isinstance(drafter, BesideDrafter):
                for step in ready:
                    step.sequence.beside = drafter
            if needs.layers or needs.taps:
                self._layers.reclaim()
            offers |= {step: step.draft for step in ready}
            offers |= {step: None for step in group if number in step.sequence.lost}
            charge([(step, number) for step in ready], since(began, self._clock))
        return offers

    def _lend_layers(self, step: SequenceStep, needs: Needs) -> bool:
        """Let a drafter run the target's own layers, and reserve memory for its rows. False if it can't be asked.

        If memory is short, the budget is lowered. The pending rows of the whole batch have memory already, so the
        verify still fits. The drafter would run a long pending run, as in prefill, a second time: it is not asked if
        that is longer than the budget. A drafter that only reads taps writes no rows.
        """
        if not needs.layers:
            self._layers.lend(step.sequence, 0)
            return True
        if len(step.pending) > step.budget:
            return False
        while step.budget and not self._scheduler.reserve_draft(step.sequence, step.budget):
            step.budget //= 2
        if step.budget:
            self._layers.lend(step.sequence, step.budget)
        return step.budget > 0

    def learn(self, steps: list[SequenceStep], spent: Spent) -> None:
        """Report drafts and accepted nodes to each policy, in one call for all its sequences."""
        for group in _by_strategy([step for step in steps if step.commit.committed and step.sequence.drafting]):
            isolated(
                partial(_learn, group[0].sequence.strategy.policy, spent), group, SequenceStep.drop_policy, again=False
            )

    def observe(self, steps: list[SequenceStep]) -> None:
        """Show the step to each drafter that asks for it, in one call for all its sequences."""
        groups: dict[tuple[int, int], list[SequenceStep]] = {}
        for step in steps:
            for number in step.observers if step.sequence.needs else ():
                groups.setdefault((number, id(step.sequence.strategy.drafters[number])), []).append(step)
        for (number, _), group in groups.items():
            began = self._clock()
            isolated(partial(_observe, number), group, partial(_drop, number), again=False)
            charge([(step, number) for step in group], since(began, self._clock))


def _leave_out(step: SequenceStep, error: Exception) -> None:
    """Verify no draft in this step, and stop drafting: the policy failed, or its draft is not sound."""
    step.budget, step.draft = 0, NO_DRAFT
    step.drop_policy(error)


def _fail(number: int, step: SequenceStep, error: Exception) -> None:
    """Verify no draft in this step, and stop using the drafter, which raised or proposed an unsound draft."""
    step.budget, step.draft = 0, NO_DRAFT
    step.drop_drafter(number, error)


def _drop(number: int, step: SequenceStep, error: Exception) -> None:
    """Stop using a drafter that raised when it was shown the step."""
    step.drop_drafter(number, error)


def _learn(policy: Policy, spent: Spent, steps: list[SequenceStep]) -> None:
    """Report to one policy. If forced tokens were added to a draft, the policy sees only the drafter's part."""
    views: list[Sequence] = []
    drafts: list[Draft] = []
    accepted: list[int] = []
    seeing, planning, by_drafter, asked = 0, 0.0, list[float](), set[int]()
    for step in steps:
        if step.watching:
            seeing += 1
            planning += step.planning_seconds
            asked.update(step.called)
            if step.seconds:
                by_drafter = [*map(add, by_drafter, step.seconds)] if by_drafter else step.seconds
        draft = step.draft if step.sequence.request.constraint is None else drafters_part(step.draft)
        if draft is not None:
            views.append(step.sequence)
            drafts.append(draft)
            accepted.append(step.commit.accepted if draft is step.draft else 0)
    if views:
        seconds = (planning + sum(by_drafter)) / max(1, seeing)
        called = tuple([number in asked for number in range(len(by_drafter))])
        spent = Spent(seconds, spent.verify_seconds, spent.rows, spent.context, tuple(by_drafter), planning, called)
        policy.learn(views, drafts, accepted, spent)


def _observe(number: int, steps: list[SequenceStep]) -> None:
    """Show the steps to the drafter of this number, which they share."""
    steps[0].sequence.strategy.drafters[number].observe([step.observation(number) for step in steps])


def _by_strategy(steps: list[SequenceStep]) -> Iterable[list[SequenceStep]]:
    """The steps that may draft, those of one strategy together."""
    drafting = [step for step in steps if step.sequence.strategy.drafters]
    return grouped(drafting, lambda step: id(step.sequence.strategy))


class DraftAdmission:
    """Every check and every cut of a proposed draft on its way to the forward, in one order.

    1. sound: a draft that no forward or no accept rule could take is the drafter's fault
    2. budget: no more nodes than its drafter was allowed, probes not counted
    3. end: nothing below a token that ends the text
    4. constraint: no node that the request's constraint forbids
    5. branches: the best chain, for a runner that can't run trees
    6. policy: the nodes that pay
    7. forced: the tokens that a constraint leaves no alternative to are added
    8. rows: all drafts of the step share one budget of rows
    9. memory: the context and the cache must hold it

    `admit` takes one drafter's drafts through 1 to 5, `trim` those of one strategy through 6, `add_forced` and `settle`
    take all drafts of the step through 7 and then 8 and 9. What raises in 1 to 7 costs its requests their drafts. A
    draft that was drawn from a distribution is cut only in ways that do not depend on what was drawn.
    """

    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, *, max_context: int, max_draft_rows: int) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._max_context = max_context
        self._max_draft_rows = max_draft_rows
        self._share = max_draft_rows
        """Nodes per draft for which the row budget suffices, if as many sequences draft as in the last step."""

    def limit(self, step: SequenceStep) -> int:
        """How many nodes a drafter may draft now. More would be cut, or lie beyond the end of the text."""
        return min(self._share, self._before_end(step))

    def admit(self, rule: AcceptRule, steps: list[SequenceStep]) -> None:
        """Steps 1 to 5, for the drafts of one drafter. Raises ValueError for a draft that is not sound."""
        for step in steps:
            check(step.draft, rule, self._spec)
            step.draft = trees.first(step.draft, step.budget)
            if step.draft.kind == "point":
                step.draft = trees.ended(step.draft, step.sequence.request.stop_ids)
            if step.sequence.request.constraint is not None:
                step.draft = legal(step.draft, step.sequence.request.constraint)
            if self._spec.tree == "chain":
                step.draft = trees.best_chain(step.draft)

    def trim(self, policy: Policy, steps: list[SequenceStep]) -> None:
        """Step 6, for the drafts of one strategy."""
        trimmed = policy.trim([step.sequence for step in steps], [step.draft for step in steps])
        for step, draft in zip(steps, trimmed, strict=True):
            step.draft = draft

    def add_forced(self, steps: list[SequenceStep]) -> None:
        """Step 7, for the drafts of the whole step. Calling it again changes nothing."""
        for step in steps:
            constraint = step.sequence.request.constraint
            if constraint is not None and step.sequence.strategy.drafters:  # without a drafter decoding stays plain
                self._add_forced(step, constraint)

    def settle(self, steps: list[SequenceStep]) -> None:
        """Steps 8 and 9, for the drafts of the whole step."""
        drafted: list[SequenceStep] = []
        wanted = copies = 0
        for step in steps:
            if step.draft.tree.tokens:
                drafted.append(step)
                wanted += len(step.draft.tree.tokens)
                copies += step.sequence.request.copies
        rows = self._scheduler.draft_rows(self._max_draft_rows)
        nodes = rows * len(drafted) // copies if drafted else rows
        self._share = min(nodes, max(1, nodes // (len(drafted) or 1)))
        if wanted > nodes:
            _share_nodes(drafted, nodes)
        for step in drafted:
            if not self._fits(step):
                step.draft = trees.without_probes(step.draft) if step.draft.probes else NO_DRAFT
                step.draft = step.draft if self._fits(step) else NO_DRAFT

    def _add_forced(self, step: SequenceStep, constraint: Constraint) -> None:
        """Add the tokens that the constraint forces; they need no drafter and no budget."""
        limit = min(self._before_end(step), self._max_draft_rows)
        if limit <= 0:
            return
        kinds = step.sequence.rule.kinds
        kind = step.draft.kind if len(step.draft) else "point" if "point" in kinds else min(kinds)
        draft = with_forced(step.draft, constraint.forced(limit), kind, self._spec.vocab_size)
        # Probes may hang beside the forced tokens.
        step.draft = trees.best_chain(draft) if self._spec.tree == "chain" else draft

    def _before_end(self, step: SequenceStep) -> int:
        """How many drafted tokens may still be committed. Each step commits one more token than it accepts."""
        return 0 if self._spec.tree == "none" else step.sequence.room(self._max_context) - 1

    def _fits(self, step: SequenceStep) -> bool:
        """Whether context and cache have room for the draft.

        A drawn draft must have room for its whole budget: its length may depend on what was drawn, but whether it is
        verified must not.
        """
        rows, sequence = len(step.draft), step.sequence
        if not 0 < rows <= self._max_context - len(sequence.tokens):
            return False
        return self._scheduler.reserve_draft(sequence, rows if step.draft.kind == "point" else max(rows, step.budget))


def check(draft: Draft, rule: AcceptRule, spec: RunnerSpec) -> None:
    """Raises ValueError for a draft that the forward or the accept rule could not take."""
    tree = draft.tree
    nodes = len(tree.tokens)
    if nodes == 0:
        return
    if draft.kind not in rule.kinds:
        raise ValueError(f"accept rule {type(rule).__name__} can't judge drafts of kind {draft.kind!r}")
    if len(tree.parents) != nodes or len(draft.sources) != nodes or len(draft.scores) not in (0, nodes):
        raise ValueError(f"draft of {nodes} tokens with parents, sources or scores of other lengths")
    if not 0 <= draft.probes <= nodes:
        raise ValueError(f"draft of {nodes} tokens, {draft.probes} of them probes")
    apart = max(draft.together, len(draft.places))
    if apart and (not spec.together or apart > draft.probes):
        raise ValueError(f"{apart} of {draft.probes} probes see each other or move, or a runner that lets none")
    if draft.inputs is not None and (not spec.features or len(draft.inputs) != draft.probes):
        raise ValueError(f"inputs of {len(draft.inputs)} rows for {draft.probes} probes, or a runner that takes none")
    if min(tree.tokens) < 0 or max(tree.tokens) >= spec.vocab_size:
        raise ValueError(f"drafted token outside the vocabulary of {spec.vocab_size}")
    if not trees.is_chain(tree) and any(not -1 <= parent < node for node, parent in enumerate(tree.parents)):
        raise ValueError("drafted node whose parent does not come before it")
    if draft.kind != "point" and (draft.probs is None or len(draft.probs) != nodes):
        raise ValueError("drawn draft that does not tell the distribution each node was drawn from")


def _share_nodes(steps: list[SequenceStep], nodes: int) -> None:
    """Drop all probes, then cut every draft to the same number of nodes.

    If that number would be 0, the first steps keep one node each.
    """
    for step in steps:
        step.draft = trees.without_probes(step.draft)
    share = _even_share([len(step.draft) for step in steps], nodes)
    for place, step in enumerate(steps):
        step.draft = trees.first(step.draft, share or int(place < nodes))


def _even_share(sizes: list[int], total: int) -> int:
    """The largest cap such that the sizes, each cut to the cap, sum to at most ``total``."""
    cap = max(sizes)
    while cap > 0 and sum(min(size, cap) for size in sizes) > total:
        cap -= 1
    return cap
