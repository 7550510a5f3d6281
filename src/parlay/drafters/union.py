"""Several drafters in one merged tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from parlay import trees
from parlay.drafters import catalogue
from parlay.drafters.entries import Resources, UsageError
from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, View

SOURCE = "union"
_DECAY = 0.9  # of a member's record, per step in which it proposed


class Union:
    """Merged proposals of several drafters, as SpecInfer merges the trees of several models (arXiv:2305.09781).

    Nodes that are equal become one, credited to the member with the better record, which proposes first. The budget
    is split by the squared shares of each member's nodes that were accepted in this sequence lately; what one leaves
    unused the next may spend. Members run with their default parameters.
    """

    def __init__(self, resources: Resources, *, of: tuple[str, ...]) -> None:
        if len(of) < 2 or len(set(of)) < len(of):
            raise UsageError(f"strategy {SOURCE}: of={'+'.join(of)} must name two or more different drafters")
        self._members = [_member(name, resources) for name in of]
        self._owners: dict[str, int] = {}  # source of a node -> member that proposes it
        self._records: dict[int, list[_Record]] = {}

    @property
    def needs(self) -> Needs:
        needs = [member.needs for member in self._members]
        taps = sorted({layer for need in needs for layer in need.taps})
        return Needs(tuple(taps), max(need.choices for need in needs))

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        """In turns: each sequence's favourite first, each member with all the sequences whose turn is its own."""
        merged = [NO_DRAFT] * len(views)
        records = [self._records_of(view.sequence) for view in views]
        orders = [sorted(range(len(self._members)), key=lambda member: -each[member].rate) for each in records]
        limits = [_limits(each, order, budget) for each, order, budget in zip(records, orders, budgets, strict=True)]
        for turn in range(len(self._members)):
            for number, member in enumerate(self._members):
                left = {
                    place: limits[place][turn] - len(merged[place])
                    for place, order in enumerate(orders)
                    if order[turn] == number
                }
                places = [place for place, budget in left.items() if budget > 0]
                if not places:
                    continue
                drafts = member.propose([views[place] for place in places], [left[place] for place in places])
                for place, draft in zip(places, drafts, strict=True):
                    self._owners.update(dict.fromkeys(draft.sources, number))
                    merged[place] = trees.merge([merged[place], draft])
        return merged

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._credit(observation)
        for member in self._members:
            member.observe(observations)

    def release(self, sequence: int) -> None:
        self._records.pop(sequence, None)
        for member in self._members:
            member.release(sequence)

    def _records_of(self, sequence: int) -> list[_Record]:
        return self._records.setdefault(sequence, [_Record() for _ in self._members])

    def _credit(self, observation: Observation) -> None:
        """Each node counts for the member that proposed it."""
        records = self._records_of(observation.view.sequence)
        owners = [self._owners[source] for source in observation.draft.sources]
        for number in set(owners):
            accepted = sum(owners[node] == number for node in observation.verdict.path)
            records[number].learn(owners.count(number), accepted)


class _Record:
    """How many nodes of one member were accepted in one sequence, lately."""

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


def _limits(records: Sequence[_Record], order: Sequence[int], budget: int) -> list[int]:
    """How many nodes the tree may have after each turn."""
    weights = [records[member].rate ** 2 for member in order]
    total = sum(weights)
    return [round(budget * weight / total) if total else budget for weight in accumulate(weights)]


def _member(name: str, resources: Resources) -> Drafter:
    drafter = catalogue.build(catalogue.parse(name), resources)
    if drafter is None:
        raise UsageError(f"strategy {SOURCE}: {name} drafts nothing; leave it out")
    return drafter
