"""The default budget policy: draft as much as pays, by measured acceptance and measured cost."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from parlay.router.acceptance import UNSCORED, Outcome, Record, ScoreCalibration, walk
from parlay.router.ledger import PROMPTS, Account, Gains, Ledger
from parlay.router.prices import FREE, AnswerLengths, DraftDepth, DraftSeconds, Prices, Reading, sizes
from parlay.router.ranking import NO_CANDIDATES, best, best_count, best_of, cut_to
from parlay.types import NOTHING_NEEDED, Budgets, Cost, Draft, Needs, Policy, SequenceView, Spent, trees

_FIRST = 4  # nodes of a sequence's first draft, while the drafter is unknown
_KNOWN = 50  # drafts after which the drafter counts as known
_TRIAL = 2  # nodes of a trial
_LOOK = 16  # steps after which a sequence with credit looks at prices again
_DRAFTER = 0  # its number among those of the strategy


class Adaptive(Policy):
    """Drafts as much as raises tokens per second, after SmartSpec's goodput (arXiv:2406.14066).

    *Planning*: how many nodes to draft, from the share of levels accepted lately, the measured seconds of proposals,
    and the cost of forwards; 0 where no size pays. Prices are worked out again when the batch or an estimate changes.

    *Trimming*: a node's path probability is the product of its path's calibrated scores. All nodes of the batch are
    ranked by it, and the first m are verified for which (sequences + their path probabilities) / (draft seconds +
    v(rows)) is largest, where v(rows) is the cost of a forward. Drafts of other kinds than ``point`` are never trimmed:
    removing nodes by what was drawn would change the distribution. The probes of a `Draft` pay in later steps, so they
    are not trimmed; planning counts their rows, and a step of probes alone counts as one in which nothing was accepted.
    If all nodes of some drafts were kept and then accepted, drafts with scores as high are kept without ranking, until
    prices change.

    *Never slower*: each sequence has a `Ledger`, which limits what its drafts may lose. A sequence's first draft has
    `_FIRST` nodes at most, and each accepted draft doubles that limit; once the drafter is known, there is none. While
    nothing is to be drafted, the policy is inactive until the next trial. But for trials, a drafter reads no prompt
    that takes longer than its drafts can save in the answer. One that was right on held-out texts has credit from the
    start.

    A drafter that reads the target's states sees one step before it drafts after a pause, the step that reads the
    prompt first of all: so the target never computes states again that went by in the pause.

    Scores are calibrated by score bucket over all sequences, then shifted in log-odds for each sequence, which needs
    few observations. Calibration by depth, as static trees use it, would ignore how confident a drafter is.
    """

    def __init__(self, cost: Cost, max_budget: int, needs: Needs = NOTHING_NEEDED) -> None:
        """``needs`` are those of the drafter."""
        self._cost = cost
        self._max_budget = max_budget
        self._reads_states = bool(needs.taps)
        self._sizes = sizes(max_budget)
        self._calibration = ScoreCalibration()
        self._record = Record(expected=needs.expected)
        self._draft_seconds = DraftSeconds()
        self._reading, self._answers = Reading(), AnswerLengths()
        self._prompts, self._gains = Account(PROMPTS), Gains(proved=needs.expected > 0)
        self._states: dict[int, _State] = {}
        self._prices: Prices | None = None
        self._depth = DraftDepth()
        self._proposed = 0.0  # nodes per sequence, as proposed in this step
        self._probes = 0.0  # probes per draft, as last proposed
        self._others_seen = (0, 0)  # rows of other strategies in the last two steps

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        others = min(self._others_seen)  # a single chunk of another request's prompt does not count
        self._others_seen = (self._others_seen[1], self._others_seen[1])
        self._proposed = 0.0
        if self._max_budget == 0 or not views:
            return Budgets([0] * len(views), _LOOK)
        prices = self._current_prices(views, others)
        states = [self._state(view, prices) for view in views]
        nodes = [self._plan(state, prices) for state in states]
        watching = [(_DRAFTER,) if state.watches else () for state in states]
        return Budgets(nodes, 0 if any(nodes) or any(watching) else _inactive(states), watching=watching)

    def _plan(self, state: _State, prices: Prices) -> int:
        ledger = state.ledger
        ledger.earn()
        size = prices.best_size(state.record, self._depth) if ledger.is_funded else 0
        if size and ledger.is_unread and not self._pays_reading(state, prices, size):
            size = 0
        state.is_trial = not size and ledger.wait(1) <= 0
        size = min(size or (_TRIAL if state.is_trial else 0), state.limit)
        state.resumes, saw = not state.budget, state.budget > 0 or state.watches
        state.watches = self._reads_states and size > 0 and not saw
        state.budget = 0 if state.watches else size
        return state.budget

    def _pays_reading(self, state: _State, prices: Prices, size: int) -> bool:
        """Whether the rest of an answer is expected to save the time that reading its prompt takes."""
        saved = prices.saved(size, state.record, self._depth)
        return saved > 0 and self._answers.left(state.view) * saved >= self._reading.of(len(state.view.tokens))

    def _current_prices(self, views: Sequence[SequenceView], others: int) -> Prices:
        """The prices of this batch; computed anew only if the batch or an estimate has changed."""
        sequences, context = len(views), _mean_length(views)
        revisions = self._cost.revision, self._draft_seconds.revision
        key = sequences, others, *revisions, context.bit_length(), round(self._probes)
        if self._prices is None or self._prices.key != key:
            rows, steps = sequences + others, []
            for size in self._sizes:
                more = round((size + self._probes) * sequences) if size else 0
                steps.append((size, self._drafting(size, sequences), self._cost.forward(rows + more, context)))
            self._prices = Prices(key, sequences, rows, steps)
        return self._prices

    def _drafting(self, nodes: float, sequences: int) -> float:
        """Seconds of drafting so many nodes for each of so many sequences."""
        return self._draft_seconds.of(nodes) * sequences if nodes else 0.0

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        nodes, prices, kept = sum(map(len, drafts)), self._prices, list(drafts)
        if prices is None or not nodes:
            return kept
        self._proposed = nodes / len(drafts)
        self._probes = sum([draft.probes for draft in drafts]) / len(drafts)
        found = [draft for draft in drafts if len(draft)]
        most, least = max(map(len, found)), min([min(draft.scores, default=UNSCORED) for draft in found])
        if prices.kept_whole is None or most > prices.kept_whole[0] or least < prices.kept_whole[1]:
            kept = self._trim(prices, [self._states[view.sequence] for view in views], drafts, _mean_length(views))
            prices.kept_whole = (most, least) if all(map(operator.is_, kept, drafts)) else None
        return kept

    def _trim(self, prices: Prices, states: Sequence[_State], drafts: Sequence[Draft], context: int) -> list[Draft]:
        if all(state.is_trial and len(draft) <= _TRIAL for state, draft in zip(states, drafts, strict=True)):
            return list(drafts)  # they would all be kept
        nodes = sum(map(len, drafts))
        floor = self._floor(prices.rows, nodes, context)
        candidates = [
            self._calibration.candidates(draft, state.record.odds, floor, _TRIAL)
            if draft.kind == "point"
            else NO_CANDIDATES
            for state, draft in zip(states, drafts, strict=True)
        ]
        ranked = sorted(chain.from_iterable([path_probs for _, path_probs in candidates]), reverse=True)
        kept = best(candidates, ranked, self._worth(prices.rows, drafts, ranked, context))
        for place, state in enumerate(states):
            if state.is_trial and len(kept[place]) < _TRIAL:
                kept[place] = best_of(candidates[place], _TRIAL)
        return [cut_to(draft, nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def _floor(self, rows: int, nodes: int, context: int) -> float:
        """A path probability too low to verify: a quarter of the mean cost of a row, in tokens of plain decoding."""
        plain = self._cost.forward(rows, context)
        row = (self._cost.forward(rows + nodes, context) - plain) / nodes
        return 0.25 * row * rows / plain

    def _worth(self, plain: int, drafts: Sequence[Draft], ranked: Sequence[float], context: int) -> int:
        """How many of the ranked nodes to verify."""
        rows = plain + sum([draft.probes if draft.kind == "point" else len(draft) for draft in drafts])
        drafting, forward = self._drafting(self._proposed, len(drafts)), self._cost.forward
        tokens = partial(operator.add, plain)
        return best_count(ranked, tokens, lambda count: drafting + forward(rows + count, context))

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        rows = len(views) + sum(map(len, drafts))
        self._others_seen = (self._others_seen[0], max(0, spent.rows - rows))
        drafted = [
            (state, (draft, *walk(draft, right, view.tokens)))
            for view, draft, right in zip(views, drafts, accepted, strict=True)
            if (state := self._states.get(view.sequence)) and state.budget
        ]
        if not drafted or self._prices is None:
            return
        self._settle(drafted, spent, self._prices.token)
        outcomes = [outcome for _, outcome in drafted]
        for (state, outcome), expected in zip(drafted, self._calibration.learn(outcomes), strict=True):
            self._learn_outcome(state, outcome, expected)

    def _settle(self, drafted: Sequence[tuple[_State, Outcome]], spent: Spent, token: float) -> None:
        """Charge each sequence for its proposal and its rows, less the tokens that were accepted."""
        forward = self._cost.forward(spent.rows, spent.context)
        proposed, slowdown = self._proposed, max(1.0, spent.verify_seconds / forward)
        seconds = self._draft_seconds.own_work(proposed, spent.draft_seconds, slowdown, forward)
        known = min(spent.draft_seconds, self._draft_seconds.of(proposed))
        rows = {0: 0.0}
        is_first = False
        resumes = any(state.resumes for state, _ in drafted)
        for state, (draft, path, _) in drafted:
            ledger, count = state.ledger, len(draft)
            if count not in rows:
                rows[count] = forward - self._cost.forward(spent.rows - count, spent.context)
            loss, drafting = rows[count] - len(path) * token, seconds
            if state.resumes:  # what it took to catch up with the text is no delay
                drafting = max(seconds, spent.draft_seconds / slowdown)
            if ledger.is_unread:
                is_first, drafting = True, known
                ledger.read_prompt(spent.draft_seconds + loss)
                self._reading.learn(len(state.view.tokens), spent.draft_seconds - known)
            if count or spent.draft_seconds > FREE * forward:  # else it proposed nothing and cost nothing
                ledger.settle(drafting + loss, token, trial=state.is_trial, tested=count > 0)
        if not is_first and not (resumes and known < seconds):
            self._draft_seconds.learn(proposed, seconds if known else spent.draft_seconds, forward / len(drafted))

    def _learn_outcome(self, state: _State, outcome: Outcome, expected: float) -> None:
        draft, path, tested = outcome
        nodes, accepted = len(draft) - draft.probes, len(path)
        if not nodes:
            return
        if accepted < nodes and self._prices is not None:
            self._prices.kept_whole = None
        chained = trees.is_chain(draft.tree)
        missed = len(tested) > accepted and (chained or not path or draft.tree.parents[tested[-1]] == path[-1])
        state.record.learn(accepted, missed, len(tested), expected)
        self._depth.learn(nodes, nodes if chained else max(trees.depths(draft.tree)[:nodes]))
        if path:
            state.limit = min(2 * state.limit, self._max_budget)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            state.ledger.earn()
            self._answers.learn(state.view)

    def _state(self, view: SequenceView, prices: Prices) -> _State:
        state = self._states.get(view.sequence)
        if state is None:
            limit = self._max_budget if self._calibration.drafts >= _KNOWN else min(_FIRST, self._max_budget)
            state = _State(view, limit, Record(self._record), Ledger(view, prices.token, self._prompts, self._gains))
            self._states[view.sequence] = state
        return state


@dataclass(slots=True)
class _State:
    """What the policy remembers of one sequence."""

    view: SequenceView
    limit: int
    """Most nodes of the next draft."""
    record: Record
    ledger: Ledger
    budget: int = 0
    """As planned for this step."""
    is_trial: bool = False
    resumes: bool = True
    """It did not draft in the step before: its drafter may have to catch up with the text."""
    watches: bool = False
    """Its drafter sees this step, so that it can draft in the next one."""


def _inactive(states: Sequence[_State]) -> int:
    """Steps until the next trial, or until prices are compared again."""
    steps = min([state.ledger.wait(len(states)) for state in states]) - 1
    return max(0, min(steps, _LOOK - 1) if any(state.ledger.is_funded for state in states) else steps)


def _mean_length(views: Sequence[SequenceView]) -> int:
    return sum([len(view.tokens) for view in views]) // len(views)
