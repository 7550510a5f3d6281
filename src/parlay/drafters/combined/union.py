"""Several drafters in one merged tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from parlay.drafters.combined import members
from parlay.drafters.resources import Resources
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, Observation, SequenceView, trees

SOURCE = "union"
_DECAY = 0.9  # decay of a member's record, per step in which it proposed
_REST = 0.02  # how far a record returns to its initial value, per step in which only others proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionOptions(Options):
    """Options of the union: the drafters whose drafts are joined."""

    of: tuple[str, ...] = option(("prompt-lookup", "draft-model"), "the drafters, joined by +", strategies=True)


class Union:
    """Merged proposals of several drafters, as SpecInfer merges the trees of several models (arXiv:2305.09781).

    Equal nodes become one, which counts for the member with the better record; that member proposes first. The budget
    is divided in proportion to the squared acceptance rate of each member in this sequence, over recent steps. What one
    member leaves unused, the next may spend. The record of a member that proposes nothing is slowly forgotten, so that
    it is tried again. No member drafts more than its own ``k``.
    """

    def __init__(self, resources: Resources, options: UnionOptions) -> None:
        if len(options.of) < 2 or len(set(options.of)) < len(options.of):
            raise UsageError(f"strategy {SOURCE}: of={'+'.join(options.of)} must name two or more different drafters")
        self._members = [members.build(SOURCE, nested) for nested in resources.nested]
        self.needs = members.needs_of(self._members, outcomes=True)
        self._states: dict[int, _MemberRecords] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Propose in turns, in each sequence the best member first.

        A member proposes for all sequences of a turn at once.
        """
        merged = [NO_DRAFT] * len(views)
        states = [self._state(view.sequence) for view in views]
        orders = [state.favourites() for state in states]
        limits = [state.limits(order, most) for state, order, most in zip(states, orders, budgets, strict=True)]
        for turn in range(len(self._members)):
            for number, member in enumerate(self._members):
                left = {
                    place: limits[place][turn] - len(merged[place])
                    for place, order in enumerate(orders)
                    if order[turn] == number
                }
                drafts = member.propose([views[place] for place in left], list(left.values()))
                for place, draft in zip(left, drafts, strict=True):
                    merged[place] = trees.merge([merged[place], draft])
                    states[place].own(number, merged[place])
        return merged

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._state(observation.view.sequence).credit(observation)
        for member in self._members:
            member.observe(observations)

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)
        for member in self._members:
            member.release(sequence)

    def _state(self, sequence: int) -> _MemberRecords:
        return self._states.setdefault(sequence, _MemberRecords(len(self._members)))


class _MemberRecords:
    """The members' records in one sequence, and which of them proposed the nodes of its latest draft."""

    def __init__(self, count: int) -> None:
        self._records = [_Record() for _ in range(count)]
        self._owners: dict[int, int] = {}  # path to a node -> member

    def favourites(self) -> list[int]:
        """The members, those with better records first. Begins a new draft."""
        self._owners.clear()
        return sorted(range(len(self._records)), key=lambda member: -self._records[member].rate)

    def limits(self, order: Sequence[int], budget: int) -> list[int]:
        """How many nodes the tree may have after each turn."""
        weights = [self._records[member].rate ** 2 for member in order]
        total = sum(weights)
        return [round(budget * weight / total) if total else budget for weight in accumulate(weights)]

    def own(self, member: int, draft: Draft) -> None:
        """Give nodes without an owner to the member."""
        for path in _paths(draft):
            self._owners.setdefault(path, member)

    def credit(self, observation: Observation) -> None:
        """Count each node for the member that proposed it. (Sources can't identify members: two may share a name.)"""
        owners = [self._owners.get(path) for path in _paths(observation.draft)] if self._owners else []
        for number, record in enumerate(self._records):
            if number in owners:
                accepted = sum(owners[node] == number for node in observation.verdict.path)
                record.learn(owners.count(number), accepted)
            elif self._owners:
                record.rest()
        self._owners.clear()


class _Record:
    """The recent acceptance rate of one member in one sequence."""

    __slots__ = ("_accepted", "_proposed")

    def __init__(self) -> None:
        self._accepted = 1.0
        self._proposed = 2.0

    @property
    def rate(self) -> float:
        return self._accepted / self._proposed

    def learn(self, proposed: int, accepted: int) -> None:
        self._accepted = self._accepted * _DECAY + accepted
        self._proposed = self._proposed * _DECAY + proposed

    def rest(self) -> None:
        """Move a little towards the initial rate."""
        self._accepted += _REST * (1.0 - self._accepted)
        self._proposed += _REST * (2.0 - self._proposed)


def _paths(draft: Draft) -> list[int]:
    """A hash of the tokens down to each node. It identifies the node in a merged tree, whatever is cut later."""
    paths: list[int] = []
    for token, parent in zip(draft.tree.tokens, draft.tree.parents, strict=True):
        paths.append(hash((paths[parent] if parent >= 0 else 0, token)))
    return paths
