"""Several drafters in one tree: merged nodes, shared budgets, separate credit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from parlay.drafters.combined.union import Union
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, Verdict, trees
from tests.drafters.sight import Sight, no_runner


class Counter:
    """Proposes the numbers from its first one on; `asked` and `seen` tell what reached it."""

    first = 1
    most = 100
    needs = Needs(taps=(2, 1))

    def __init__(self, resources: Resources) -> None:
        self.asked: list[tuple[int, int]] = []
        self.seen: list[Observation] = []
        self.released: list[int] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self.asked += [(view.sequence, budget) for view, budget in zip(views, budgets, strict=True)]
        source = type(self).__name__
        return [
            trees.chain(range(self.first, self.first + min(budget, self.most)), source, [0.9] * min(budget, self.most))
            for budget in budgets
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, sequence: int) -> None:
        self.released.append(sequence)


class Other(Counter):
    """Another first number."""

    first = 50
    needs = Needs(taps=(3,), top_k=2)


class Moved(Counter):
    """Another first number under the same source."""

    first = 60

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [replace(draft, sources=("Counter",) * len(draft)) for draft in super().propose(views, budgets)]


class Short(Counter):
    """Only one."""

    first = 70
    most = 1


class Same(Counter):
    """Agrees with the counter."""


RESOURCES = Resources(vocab_size=100, open_runner=no_runner)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toy_members", sys.modules[__name__])


def union_of(*names: str) -> Union:
    union = build(parse(f"union:of={'+'.join(f'toy_members:{name}' for name in names)}"), RESOURCES)
    assert isinstance(union, Union)
    return union


def members(union: Union) -> list[Counter]:
    return [member._drafter for member in union._members if isinstance(member._drafter, Counter)]


def verify(union: Union, view: Sight, draft: Draft, source: str, accepted: int) -> None:
    """The target agrees with the first ``accepted`` nodes of one source."""
    nodes = [node for node, name in enumerate(draft.sources) if name == source][:accepted]
    sampled = tuple(draft.tree.tokens[node] for node in nodes)
    union.observe([Observation(view, draft, Verdict(tuple(nodes), (*sampled, 99)))])


def test_at_first_the_budget_is_split_evenly_and_sources_are_counted_apart() -> None:
    draft = union_of("Counter", "Other").propose([Sight()], [6])[0]
    assert draft.tree.tokens == (1, 2, 3, 50, 51, 52)
    assert draft.sources == ("Counter",) * 3 + ("Other",) * 3
    assert draft.tree.parents == (-1, 0, 1, -1, 3, 4)


def test_what_one_leaves_unused_the_next_may_spend() -> None:
    draft = union_of("Short", "Counter").propose([Sight()], [6])[0]
    assert draft.sources == ("Short",) + ("Counter",) * 5


def test_equal_nodes_are_one_and_the_budget_is_never_exceeded() -> None:
    draft = union_of("Counter", "Same").propose([Sight()], [6])[0]
    assert draft.tree.tokens == (1, 2, 3, 4, 5, 6)[: len(draft)]
    assert set(draft.sources[:3]) == {"Counter"}
    for budget in range(8):
        assert len(union_of("Counter", "Short", "Other").propose([Sight()], [budget])[0]) <= budget


def test_the_better_record_of_a_sequence_gets_more_of_its_budget_and_goes_first() -> None:
    union = union_of("Counter", "Other")
    good, fresh = Sight(0), Sight(1)
    for _ in range(5):
        draft = union.propose([good], [8])[0]
        verify(union, good, draft, "Other", 8)
    drafts = union.propose([good, fresh], [8, 8])
    assert drafts[0].sources.count("Other") >= 7
    assert drafts[0].sources[0] == "Other"
    assert drafts[1].sources.count("Other") == 4


def test_a_favourite_that_fails_loses_its_place() -> None:
    union = union_of("Counter", "Other")
    view = Sight()
    for source in ["Counter"] * 5 + ["none of them"] * 40:
        verify(union, view, union.propose([view], [8])[0], source, 8)
    favoured = union.propose([view], [8])[0].sources.count("Counter")
    assert 0 < favoured < 8


def test_members_see_every_observation_and_release_and_their_needs_are_joined() -> None:
    union = union_of("Counter", "Other")
    assert union.needs == Needs(taps=(1, 2, 3), top_k=2)
    view = Sight(4)
    draft = union.propose([view], [4])[0]
    verify(union, view, draft, "Counter", 1)
    union.release(4)
    for member in members(union):
        assert [observation.draft for observation in member.seen] == [draft]
        assert member.released == [4]


def test_a_member_is_asked_for_its_sequences_at_once_and_not_for_nothing() -> None:
    union = union_of("Counter", "Other")
    union.propose([Sight(0), Sight(1), Sight(2)], [4, 0, 4])
    assert [member.asked for member in members(union)] == [[(0, 2), (2, 2)], [(0, 2), (2, 2)]]


@pytest.mark.parametrize("of", ["", "prompt-lookup", "prompt-lookup+prompt-lookup"])
def test_a_union_has_two_or_more_different_members(of: str) -> None:
    with pytest.raises(UsageError, match="two or more different"):
        build(parse(f"union:of={of}"), RESOURCES)


def test_members_that_do_not_exist_or_draft_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean prompt-lookup"):
        build(parse("union:of=promt-lookup+none"), RESOURCES)
    with pytest.raises(UsageError, match="none drafts nothing"):
        build(parse("union:of=prompt-lookup+none"), RESOURCES)


def test_a_member_drafts_no_more_than_its_own_k_and_the_others_may_spend_the_rest() -> None:
    union = union_of("Counter(k=2)", "Other")
    assert union.propose([Sight()], [8])[0].sources == ("Counter",) * 2 + ("Other",) * 6
    silent = union_of("Counter(k=0)", "Other")
    assert silent.propose([Sight()], [8])[0].sources == ("Other",) * 8
    assert members(silent)[0].asked == []


def test_credit_goes_to_the_member_even_where_sources_share_a_name() -> None:
    """Two settings of one drafter: the second is right, so it comes to go first."""
    union = union_of("Counter", "Moved")
    view = Sight()
    for _ in range(5):
        draft = union.propose([view], [8])[0]
        nodes = tuple(node for node, token in enumerate(draft.tree.tokens) if token >= 60)
        tokens = tuple(draft.tree.tokens[node] for node in nodes)
        union.observe([Observation(view, draft, Verdict(nodes, (*tokens, 99)))])
    assert set(draft.sources) == {"Counter"}
    assert union.propose([view], [8])[0].tree.tokens[0] == 60


def test_each_member_is_told_what_it_needs_and_no_more() -> None:
    """A drafter of two choices does not see five, nor taps of layers it never asked for."""
    union = union_of("Counter", "Other")
    taps = {layer: torch.full((1, 2), float(layer)) for layer in (1, 2, 3)}
    union.observe([Observation(Sight(), NO_DRAFT, Verdict((), (5,)), taps, ((5, 4, 3),))])
    counter, other = (member.seen[0] for member in members(union))
    assert sorted(counter.taps) == [1, 2]
    assert counter.top_k == ()
    assert sorted(other.taps) == [3]
    assert other.top_k == ((5, 4),)


def test_a_member_that_failed_is_tried_again_while_the_other_fills_every_draft() -> None:
    union, view = union_of("Counter", "Other"), Sight()
    for _ in range(20):
        verify(union, view, union.propose([view], [8])[0], "Counter", 8)
    asked = 0
    for _ in range(300):
        draft = union.propose([view], [8])[0]
        asked += draft.sources.count("Other")
        verify(union, view, draft, "Counter", 8)
    assert 0 < asked < 30


@pytest.mark.parametrize("name", ["ppd", "bita", "speculative-streaming", "set-block"])
def test_strategies_that_guess_at_probes_are_refused_because_members_have_none(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} guesses on rows beside its own draft.*use it alone, or in auto:of="):
        build(parse(f"union:of=prompt-lookup+{name}"), RESOURCES)


def test_what_drafts_during_forwards_is_refused_because_the_engine_would_not_charge_it() -> None:
    with pytest.raises(UsageError, match=r"parallel-draft drafts during the target's forwards.*name draft-model there"):
        build(parse("union:of=prompt-lookup+parallel-draft(url=http://toy)"), RESOURCES)
