"""Budgets, proposals, trimming, and afterwards what drafters and policies are told.

What fails in it, drafter or policy, costs its requests the drafts and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from parlay import trees
from parlay.engine.commit import Commit
from parlay.engine.constrained import drafters_part, legal, with_forced
from parlay.engine.layers import TargetLayers
from parlay.engine.scheduler import Scheduler, Turn
from parlay.engine.sequence import Sequence
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, RunnerSpec, Spent, Strategy

logger = logging.getLogger(__name__)


class Drafting:
    """Fills in the drafts of a batch's turns."""

    def __init__(
        self,
        spec: RunnerSpec,
        scheduler: Scheduler,
        layers: TargetLayers | None,
        *,
        max_context: int,
        max_draft_rows: int,
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._layers = layers
        self._max_context = max_context
        self._max_draft_rows = max_draft_rows
        self._most = max_draft_rows
        """Nodes of one draft: where as many draft as in the last step, more would be cut again."""
        self._planned: list[Sequence] = []
        """Those that could draft in the last step."""
        self._rest = 0
        """For how many more steps of these their policies have nothing to draft."""
        self._resting = False
        """This is one of those steps."""

    def propose(self, batch: list[Turn]) -> None:
        """Ask each drafter once for all its sequences, then trim to what pays, fits and can be verified."""
        ready = [turn for turn in batch if turn.at_root and turn.sequence.drafting]
        if not self._goes_on_resting(batch, ready):
            rests = [self._draft(strategy, turns) for strategy, turns in _by_strategy(ready)]
            self._rest = min(rests, default=0)
        for turn in ready:
            self._add_forced(turn)
        drafted = [turn for turn in ready if turn.draft is not NO_DRAFT]
        self._most = min(self._max_draft_rows, max(1, self._max_draft_rows // (len(drafted) or 1)))
        if drafted:
            self._fit_rows(drafted)

    def _goes_on_resting(self, batch: list[Turn], ready: list[Turn]) -> bool:
        """Whether the same sequences run, and no others, as when their policies had nothing to draft for a while."""
        sequences = [turn.sequence for turn in ready]
        self._resting = self._rest > 0 and len(ready) == len(batch) and sequences == self._planned
        self._planned = sequences
        self._rest -= self._resting
        return self._resting

    def _draft(self, strategy: Strategy, turns: list[Turn]) -> int:
        """Drafts of one strategy's sequences. For how many more steps there are none to come."""
        wanted, rest = self._plan(strategy, turns)
        assert strategy.drafter is not None
        if strategy.drafter.needs.layers:
            wanted = self._lend(wanted)
        if wanted:
            self._ask(strategy, strategy.drafter, wanted)
        if self._layers is not None:
            self._layers.reclaim()
        return rest

    def _plan(self, strategy: Strategy, turns: list[Turn]) -> tuple[list[tuple[Turn, int]], int]:
        """The turns for which something is to be drafted, and how many nodes at most; without any, a policy's rest."""
        views = [turn.sequence for turn in turns]
        try:
            budgets = strategy.policy.plan(views)
            wanted = [pair for pair in zip(turns, budgets, strict=True) if pair[1] > 0]
            rest = 0 if wanted else strategy.policy.rest(views)
        except Exception as error:
            for view in views:
                drop_drafter(view, error)
            return [], 0
        limits = [(turn, min(budget, self._most, self._limit(turn.sequence))) for turn, budget in wanted]
        return [(turn, limit) for turn, limit in limits if limit > 0], rest

    def _limit(self, sequence: Sequence) -> int:
        """A draft longer than what may still be committed, less the token that every step commits, is waste."""
        return 0 if self._spec.tree == "none" else sequence.room(self._max_context) - 1

    def _lend(self, wanted: list[tuple[Turn, int]]) -> list[tuple[Turn, int]]:
        """Set scratch aside for rows of the target's own layers; where room is short, for fewer, and no draft for 0.

        The pending rows of the whole batch have their room already, so the verify still fits whatever is written.
        A long pending run, as in prefill, would run twice: more of it than may be drafted is not worth it.
        """
        assert self._layers is not None
        lent: list[tuple[Turn, int]] = []
        for turn, budget in wanted:
            limit = budget if len(turn.pending) <= budget else 0
            while limit and not self._scheduler.reserve_draft(turn.sequence, limit):
                limit //= 2
            if limit:
                self._layers.lend(turn.sequence, limit)
                lent.append((turn, limit))
        return lent

    def _ask(self, strategy: Strategy, drafter: Drafter, wanted: list[tuple[Turn, int]]) -> None:
        try:
            drafts = drafter.propose([turn.sequence for turn, _ in wanted], [limit for _, limit in wanted])
            drafts = [self._sound(strategy, draft, limit) for draft, (_, limit) in zip(drafts, wanted, strict=True)]
            drafts = _legal(drafts, [turn for turn, _ in wanted])
            drafts = self._trim(strategy, [turn for turn, _ in wanted], drafts)
        except Exception as error:
            self._isolate(strategy, drafter, wanted, error)
            return
        for draft, (turn, limit) in zip(drafts, wanted, strict=True):
            turn.draft = self._fitting(turn.sequence, draft, limit)

    def _add_forced(self, turn: Turn) -> None:
        """Tokens that must come next need no drafter and no budget; a strategy that drafts nothing stays plain."""
        sequence, constraint = turn.sequence, turn.sequence.request.constraint
        if constraint is None or sequence.strategy.drafter is None:
            return
        limit = min(self._limit(sequence), self._max_draft_rows)
        if limit <= 0:
            return
        laws = sequence.strategy.rule.laws
        law = turn.draft.law if len(turn.draft) else "point" if "point" in laws else min(laws)
        draft = with_forced(turn.draft, constraint.forced(limit), law, self._spec.vocab_size)
        if draft is not turn.draft:
            draft = trees.best_chain(draft) if self._spec.tree == "chain" else draft  # probes may hang beside it
            turn.draft = self._fitting(sequence, draft, len(draft)) or turn.draft

    def _fitting(self, sequence: Sequence, draft: Draft, limit: int) -> Draft:
        """The draft if context and cache can hold it; else what they hold of it without its probes, or nothing.

        A drawn draft needs room for its whole budget: its length may hang on what was drawn, its fate must not.
        """
        if self._fits(sequence, draft, limit):
            return draft
        plain = trees.without_probes(draft) if draft.probes else NO_DRAFT
        return plain if self._fits(sequence, plain, limit) else NO_DRAFT

    def _fits(self, sequence: Sequence, draft: Draft, limit: int) -> bool:
        rows = len(draft)
        if not 0 < rows <= self._max_context - len(sequence.tokens):
            return False
        return self._scheduler.reserve_draft(sequence, rows if draft.law == "point" else max(rows, limit))

    def _trim(self, strategy: Strategy, turns: list[Turn], drafts: list[Draft]) -> list[Draft]:
        if not any(draft.tree.tokens for draft in drafts):
            return drafts
        if self._spec.tree == "chain":
            drafts = [trees.best_chain(draft) for draft in drafts]
        return strategy.policy.trim([turn.sequence for turn in turns], drafts)

    def _isolate(self, strategy: Strategy, drafter: Drafter, wanted: list[tuple[Turn, int]], error: Exception) -> None:
        """Someone's proposal failed: ask for each sequence alone, and let those that fail again go on plainly."""
        if len(wanted) > 1:
            for one in wanted:
                self._ask(strategy, drafter, [one])
            return
        drop_drafter(wanted[0][0].sequence, error)

    def learn(self, batch: list[Turn], commits: list[Commit], spent: Spent) -> None:
        """Tell policies what the step's drafts came to, each once for all its sequences."""
        if self._resting:
            return
        groups: dict[int, tuple[Strategy, list[Sequence], list[Draft], list[int]]] = {}
        for turn, done in zip(batch, commits, strict=True):
            sequence = turn.sequence
            if not (done.committed and sequence.drafting and sequence.strategy.drafter is not None):
                continue
            draft = turn.draft if sequence.request.constraint is None else drafters_part(turn.draft)
            if draft is None:
                continue
            _, views, drafts, accepted = groups.setdefault(id(sequence.strategy), (sequence.strategy, [], [], []))
            views.append(sequence)
            drafts.append(draft)
            accepted.append(done.accepted if draft is turn.draft else 0)
        for strategy, views, drafts, accepted in groups.values():
            try:
                strategy.policy.learn(views, drafts, accepted, spent)
            except Exception as error:
                for sequence in views:
                    drop_drafter(sequence, error)

    def observe(self, told: list[tuple[Sequence, Observation]]) -> None:
        """Tell drafters what became of their drafts, each once for all its sequences."""
        groups: dict[int, tuple[Drafter, list[tuple[Sequence, Observation]]]] = {}
        for sequence, observation in told:
            drafter = sequence.strategy.drafter
            assert drafter is not None
            groups.setdefault(id(drafter), (drafter, []))[1].append((sequence, observation))
        for drafter, members in groups.values():
            try:
                drafter.observe([observation for _, observation in members])
            except Exception as error:
                for sequence, _ in members:
                    drop_drafter(sequence, error)

    def _sound(self, strategy: Strategy, draft: Draft, budget: int) -> Draft:
        """The draft within its budget. Raises ValueError for one that no forward or no rule could take."""
        tree = draft.tree
        nodes = len(tree.tokens)
        if nodes == 0:
            return NO_DRAFT
        if draft.law not in strategy.rule.laws:
            raise ValueError(f"accept rule {type(strategy.rule).__name__} can't judge drafts of law {draft.law!r}")
        if len(tree.parents) != nodes or len(draft.sources) != nodes or len(draft.scores) not in (0, nodes):
            raise ValueError(f"draft of {nodes} tokens with parents, sources or scores of other lengths")
        if not 0 <= draft.probes <= nodes:
            raise ValueError(f"draft of {nodes} tokens, {draft.probes} of them probes")
        if min(tree.tokens) < 0 or max(tree.tokens) >= self._spec.vocab_size:
            raise ValueError(f"drafted token outside the vocabulary of {self._spec.vocab_size}")
        if not trees.is_chain(tree) and any(not -1 <= parent < node for node, parent in enumerate(tree.parents)):
            raise ValueError("drafted node whose parent does not come before it")
        if draft.law != "point" and (draft.probs is None or len(draft.probs) != nodes):
            raise ValueError("drawn draft that does not tell the law each node was drawn from")
        return draft if nodes <= budget else trees.first(draft, budget)

    def _fit_rows(self, turns: list[Turn]) -> None:
        """One row budget for all: over it, probes go first, then every draft is cut to the same number of nodes.

        Where that would be none, the first in rank keep one each.
        """
        if sum(len(turn.draft) for turn in turns) <= self._max_draft_rows:
            return
        for turn in turns:
            turn.draft = trees.without_probes(turn.draft)
        share = _even_share([len(turn.draft) for turn in turns], self._max_draft_rows)
        for place, turn in enumerate(turns):
            turn.draft = trees.first(turn.draft, share or int(place < self._max_draft_rows))


def _legal(drafts: list[Draft], turns: list[Turn]) -> list[Draft]:
    """Of drafts of constrained texts what their constraints allow."""
    pairs = [(draft, turn.sequence.request.constraint) for draft, turn in zip(drafts, turns, strict=True)]
    return [draft if constraint is None else legal(draft, constraint) for draft, constraint in pairs]


def drop_drafter(sequence: Sequence, error: Exception) -> None:
    """Its drafter or its policy has failed."""
    sequence.drop_drafter()
    logger.warning(
        "the drafter of strategy %s failed (%s: %s): request %s goes on without drafts, its text unchanged",
        sequence.strategy.name, type(error).__name__, error, sequence.request.id,
    )  # fmt: skip


def _by_strategy(turns: list[Turn]) -> Iterable[tuple[Strategy, list[Turn]]]:
    groups: dict[int, tuple[Strategy, list[Turn]]] = {}
    for turn in turns:
        strategy = turn.sequence.strategy
        if strategy.drafter is not None:
            groups.setdefault(id(strategy), (strategy, []))[1].append(turn)
    return groups.values()


def _even_share(sizes: list[int], total: int) -> int:
    """The largest cap under which sizes, each cut to the cap, sum to at most ``total``."""
    cap = max(sizes)
    while cap > 0 and sum(min(size, cap) for size in sizes) > total:
        cap -= 1
    return cap
