"""Every check and every cut of a proposed draft on its way to the forward, in one order.

1. sound: a draft that no forward or no accept rule could take is the drafter's fault
2. budget: no more nodes than its drafter was allowed, probes not counted
3. constraint: no node that the request's constraint forbids
4. branches: the best chain, for a runner that can't run trees
5. policy: the nodes that pay
6. forced: the tokens that a constraint leaves no alternative to are added
7. rows: all drafts of the step share one budget of rows
8. memory: the context and the cache must hold it

`DraftAdmission.admit` takes one drafter's drafts through 1 to 4, `trim` those of one strategy through 5, `add_forced`
and `settle` take all drafts of the step through 6 and then 7 and 8. What raises in 1 to 6 costs its requests their
drafts. A draft that was drawn from a distribution is cut only in ways that do not depend on what was drawn.
"""

from __future__ import annotations

from parlay.engine.constrained import legal, with_forced
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence_step import SequenceStep
from parlay.types import NO_DRAFT, AcceptRule, Constraint, Draft, Policy, RunnerSpec, trees


class DraftAdmission:
    """Decides which nodes of a step's drafts the target verifies."""

    def __init__(self, spec: RunnerSpec, scheduler: Scheduler, *, max_context: int, max_draft_rows: int) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._max_context = max_context
        self._max_draft_rows = max_draft_rows
        self._share = max_draft_rows
        """Nodes per draft for which the row budget suffices, if as many sequences draft as in the last step."""

    def limit(self, step: SequenceStep) -> int:
        """How many nodes a drafter may draft now. More would be cut again, or lie beyond the end of the text."""
        return min(self._share, self._before_end(step))

    def admit(self, rule: AcceptRule, steps: list[SequenceStep]) -> None:
        """Steps 1 to 4, for the drafts of one drafter. Raises ValueError for a draft that is not sound."""
        for step in steps:
            check(step.draft, rule, self._spec)
            step.draft = trees.first(step.draft, step.budget)
            if step.sequence.request.constraint is not None:
                step.draft = legal(step.draft, step.sequence.request.constraint)
            if self._spec.tree == "chain":
                step.draft = trees.best_chain(step.draft)

    def trim(self, policy: Policy, steps: list[SequenceStep]) -> None:
        """Step 5, for the drafts of one strategy."""
        trimmed = policy.trim([step.sequence for step in steps], [step.draft for step in steps])
        for step, draft in zip(steps, trimmed, strict=True):
            step.draft = draft

    def add_forced(self, steps: list[SequenceStep]) -> None:
        """Step 6, for the drafts of the whole step. Doing it again changes nothing."""
        for step in steps:
            constraint = step.sequence.request.constraint
            if constraint is not None and step.sequence.strategy.drafters:  # without a drafter decoding stays plain
                self._add_forced(step, constraint)

    def settle(self, steps: list[SequenceStep]) -> None:
        """Steps 7 and 8, for the drafts of the whole step."""
        drafted = [step for step in steps if step.draft.tree.tokens]
        rows = self._scheduler.draft_rows(self._max_draft_rows)
        copies = sum([step.sequence.request.copies for step in drafted])
        nodes = rows * len(drafted) // copies if drafted else rows
        self._share = min(nodes, max(1, nodes // (len(drafted) or 1)))
        if sum([len(step.draft.tree.tokens) for step in drafted]) > nodes:
            _share_nodes(drafted, nodes)
        for step in drafted:
            if not self._fits(step):
                step.draft = trees.without_probes(step.draft) if step.draft.probes else NO_DRAFT
                step.draft = step.draft if self._fits(step) else NO_DRAFT

    def _add_forced(self, step: SequenceStep, constraint: Constraint) -> None:
        """Add tokens without an alternative, which need no drafter and no budget."""
        limit = min(self._before_end(step), self._max_draft_rows)
        if limit <= 0:
            return
        kinds = step.sequence.rule.kinds
        kind = step.draft.kind if len(step.draft) else "point" if "point" in kinds else min(kinds)
        draft = with_forced(step.draft, constraint.forced(limit), kind, self._spec.vocab_size)
        # Probes may hang beside the forced tokens.
        step.draft = trees.best_chain(draft) if self._spec.tree == "chain" else draft

    def _before_end(self, step: SequenceStep) -> int:
        """How many drafted tokens may still be committed: each step commits one more than it accepts."""
        return 0 if self._spec.tree == "none" else step.sequence.room(self._max_context) - 1

    def _fits(self, step: SequenceStep) -> bool:
        """Whether context and cache have room for the draft.

        A drawn draft needs room for its whole budget: its length may depend on what was drawn, its fate must not.
        """
        rows, sequence = len(step.draft), step.sequence
        if not 0 < rows <= self._max_context - len(sequence.tokens):
            return False
        return self._scheduler.reserve_draft(sequence, rows if step.draft.kind == "point" else max(rows, step.budget))


def check(draft: Draft, rule: AcceptRule, spec: RunnerSpec) -> None:
    """Raises ValueError for a draft that no forward or no accept rule could take."""
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
    """Probes go first, then every draft is cut to the same number of nodes.

    If that would be none, the first steps keep one node each.
    """
    for step in steps:
        step.draft = trees.without_probes(step.draft)
    share = _even_share([len(step.draft) for step in steps], nodes)
    for place, step in enumerate(steps):
        step.draft = trees.first(step.draft, share or int(place < nodes))


def _even_share(sizes: list[int], total: int) -> int:
    """The largest cap under which sizes, each cut to the cap, sum to at most ``total``."""
    cap = max(sizes)
    while cap > 0 and sum(min(size, cap) for size in sizes) > total:
        cap -= 1
    return cap
