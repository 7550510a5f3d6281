"""Budget policies by name: no drafts, a fixed size, as much as pays, and the rules of papers."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from parlay.router.acceptance import UNSCORED, Outcome, ScoreCalibration, matched
from parlay.router.arms import Arm
from parlay.router.router import Router
from parlay.types import NOTHING_NEEDED, Budgets, Cost, Draft, Needs, Policy, SequenceView, Spent, trees

_MORE, _LESS, _LEAST = 2, 1, 1
_MOST = 1024  # upper bound of the parameter k
_RECORD = 256  # a threshold is fitted to this many of the latest tested nodes
_FEWEST = 6  # tested nodes before the first fit
_MISSED = 3.0  # weight of a right node below the threshold, relative to a wrong one above it


class Fixed(Policy):
    """Always drafts ``budget`` nodes and verifies all of them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        return Budgets([self.budget] * len(views))

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        """Learn nothing."""

    def release(self, sequence: int) -> None:
        """Keep no state to release."""


class Plain(Fixed):
    """Never drafts."""

    def __init__(self) -> None:
        super().__init__(0)


class Heuristic(Fixed):
    """The ``heuristic`` schedule of assisted generation (Gante 2023, transformers' ``num_assistant_tokens_schedule``).

    A sequence starts with ``budget`` nodes. It drafts two more after each draft that was accepted to its end, and one
    less after any other, but at least one. A new sequence starts from the number at which the last one ended or, with
    ``transient``, from ``budget``. A step that verifies nothing changes nothing. ``budget`` 0 is plain decoding.
    """

    def __init__(self, budget: int, *, transient: bool = False) -> None:
        super().__init__(budget)
        self._transient = transient
        self._budgets: dict[int, int] = {}

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        return Budgets([self._budgets.get(view.sequence, self.budget) for view in views])

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            depths = trees.depths(draft.tree)[: len(draft) - draft.probes]
            if depths:
                budget = self._budgets.get(view.sequence, self.budget)
                change = _MORE if right == max(depths) else -_LESS
                self._budgets[view.sequence] = min(max(_LEAST, budget + change), _MOST)

    def release(self, sequence: int) -> None:
        last = self._budgets.pop(sequence, self.budget)
        if not self._transient:
            self.budget = last


class _Watching(Fixed):
    """Compares each draft with what its step committed."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._lengths: dict[int, int] = {}  # length of each sequence whose draft is being verified

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        self._lengths.update({view.sequence: len(view.tokens) for view in views})
        return [self._trimmed(draft) for draft in drafts]

    @abstractmethod
    def _trimmed(self, draft: Draft) -> Draft:
        """The part of the draft that is verified."""

    def _outcome(self, view: SequenceView, draft: Draft, right: int) -> Outcome:
        """See `matched`.

        The text before the step ends ``right`` + 1 tokens back, unless a stop cut what was committed.
        """
        before = self._lengths.pop(view.sequence, len(view.tokens) - right - 1)
        return matched(draft, view.tokens[before:])

    def release(self, sequence: int) -> None:
        self._lengths.pop(sequence, None)


class Confidence(_Watching):
    """The confidence stop of assisted generation (Gante 2023; after DISCO, arXiv:2405.04304).

    A node whose score is below a threshold is the last of its path. The threshold starts at .4 and becomes the score
    that minimises FPR + 3 FNR (the ROC curve's corner) over the nodes tested lately. Nodes that the accepted path did
    not reach are not recorded. The first node below the threshold is still drafted: otherwise no such node would be
    tested, and the threshold could never fall. Drawn drafts and drafts without scores stay whole.
    """

    def __init__(self, budget: int, threshold: float = 0.4) -> None:
        super().__init__(budget)
        self.threshold = threshold
        self._record: deque[tuple[float, bool]] = deque(maxlen=_RECORD)

    def _trimmed(self, draft: Draft) -> Draft:
        return _end(draft, [score >= self.threshold for score in draft.scores])

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            outcome = self._outcome(view, draft, right)
            if draft.scores:
                self._learn_outcome(*outcome)

    def _learn_outcome(self, draft: Draft, path: Sequence[int], tested: Sequence[int]) -> None:
        self._record += [(draft.scores[node], node in path) for node in tested]
        if tested and len(self._record) >= _FEWEST:
            self.threshold = best_threshold(self._record, self.threshold)


def best_threshold(record: Sequence[tuple[float, bool]], default: float) -> float:
    """The lowest score at which a node should count as right: least FPR + 3 FNR over (score, accepted) pairs.

    If several are equally good, the highest. ``default`` if all nodes were accepted, or none.
    """
    right = sum(accepted for _, accepted in record)
    wrong = len(record) - right
    if not right or not wrong:
        return default
    best, best_cost = default, float("inf")
    found = drafted = 0
    ranked = sorted(record, reverse=True)
    for place, (score, accepted) in enumerate(ranked):
        found += accepted
        drafted += not accepted
        if place + 1 < len(ranked) and ranked[place + 1][0] == score:
            continue
        cost = drafted / wrong + _MISSED * (right - found) / right
        if cost < best_cost:
            best, best_cost = score, cost
    return best


class Risk(_Watching):
    """The stop of SpecDec++ (Huang et al. 2024, arXiv:2405.19715): a draft ends where 1 - a1 a2 ... exceeds ``most``.

    Each a is the probability that a node is right if its parent is. In the paper a trained head predicts it; here it is
    the drafter's calibrated score. As in the reference implementation, ``most`` is .3, and depth 1 counts as certain,
    so a draft has at least two levels. With ``most`` 1 no draft is cut. Drawn drafts stay whole.
    """

    def __init__(self, budget: int, most: float = 0.3) -> None:
        super().__init__(budget)
        self._most = most
        self._calibration = ScoreCalibration()

    def _trimmed(self, draft: Draft) -> Draft:
        return _end(draft, [1 - path_prob <= self._most for path_prob in self._path_probs(draft)])

    def _path_probs(self, draft: Draft) -> list[float]:
        """The probability of the path to each node, with the first level taken as certain."""
        reaches: list[float] = []
        for node, parent in enumerate(draft.tree.parents):
            chance = self._calibration.chance(draft.scores[node] if draft.scores else UNSCORED)
            reaches.append(reaches[parent] * chance if parent >= 0 else 1.0)
        return reaches

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        drafted = zip(views, drafts, accepted, strict=True)
        self._calibration.learn([self._outcome(view, draft, right) for view, draft, right in drafted])


def _end(draft: Draft, goes_on: Sequence[bool]) -> Draft:
    """The draft without the descendants of nodes whose ``goes_on`` is False."""
    if draft.kind != "point" or not goes_on:
        return draft
    real = len(draft) - draft.probes
    kept: set[int] = {-1}
    for node, parent in enumerate(draft.tree.parents[:real]):
        if parent in kept and (parent < 0 or goes_on[parent]):
            kept.add(node)
    return trees.prune(draft, sorted(kept - {-1}))


def adaptive(cost: Cost, budget: int, needs: Needs = NOTHING_NEEDED) -> Router:
    """Make a router with one arm: it drafts as much as pays, by measured acceptance and measured cost."""
    states = bool(needs.taps)
    layers = needs.layers and not states
    return Router(cost, [Arm("", budget, expected=needs.expected, sees_first=states, layers=layers)])


BY_NAME: Mapping[str, Callable[[int, Cost, Needs], Policy]] = MappingProxyType(
    {
        "adaptive": lambda budget, cost, needs: adaptive(cost, budget, needs),
        "fixed": lambda budget, cost, needs: Fixed(budget),
        "heuristic": lambda budget, cost, needs: Heuristic(budget),
        "heuristic-transient": lambda budget, cost, needs: Heuristic(budget, transient=True),
        "confidence": lambda budget, cost, needs: Confidence(budget),
        "risk": lambda budget, cost, needs: Risk(budget),
    }
)


def make_policy(name: str, budget: int, cost: Cost, needs: Needs) -> Policy:
    """Make the policy that a strategy's ``policy`` and ``k`` name. ``needs`` are its drafter's."""
    return BY_NAME[name](budget, cost, needs)
