"""The horizontal cascade, and CS Drafting's matrix, which lays out both kinds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parlay.drafters.combined.cs_drafting import Step, layout
from parlay.drafters.resources import Resources
from parlay.options import Options, UsageError, option
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import (
    NO_DRAFT,
    Draft,
    Needs,
    Observation,
    SequenceView,
    Tree,
    Verdict,
    trees,
)
from tests.drafters.sight import MakeRunner, Sight, propose

VOCAB = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingOptions(Options):
    by: int = option(1, "step")
    most: int = option(99, "most tokens")
    bush: bool = option(False, "with a wrong sibling")


class Counting:
    """Counts on from the last token, in steps of ``by``, at most ``most`` tokens; a bush has a wrong sibling first."""

    needs = Needs(taps=(1,), top_k=1)
    made: list[Counting]

    def __init__(self, resources: Resources, options: CountingOptions) -> None:
        Counting.made.append(self)
        self.by, self.most, self.bush = options.by, options.most, options.bush
        self.asked: list[tuple[list[int], int]] = []
        self.seen: list[Observation] = []
        self.released: list[int] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self.asked += [(list(view.tokens), budget) for view, budget in zip(views, budgets, strict=True)]
        return [self._draft(view.tokens[-1], min(self.most, most)) for view, most in zip(views, budgets, strict=True)]

    def _draft(self, last: int, count: int) -> Draft:
        tokens = [last + self.by * place for place in range(1, count + 1)]
        if not self.bush or count < 2:
            return trees.chain(tokens, f"by {self.by}", [0.9] * count)
        tree = Tree((90, *tokens[:-1]), (-1, -1, *range(1, count - 1)))
        return Draft(tree, sources=("bush",) * count, scores=(0.1,) + (0.9,) * (count - 1))

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, sequence: int) -> None:
        self.released.append(sequence)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    Counting.made = []
    monkeypatch.setitem(sys.modules, "toy_levels", sys.modules[__name__])


def made(text: str, runner: Any = None) -> Any:
    return build(parse(text), Resources(VOCAB, lambda name: runner, default_draft="toy"))


def counting(*settings: str) -> Any:
    return made("horizontal:levels=" + "+".join(f"toy_levels:Counting({one})" for one in settings))


def test_each_level_goes_on_where_the_one_before_ends() -> None:
    draft = propose(counting("k=3", "by=10,k=2", "by=100"), Sight(), 7)
    assert draft.tree == trees.chain_tree((4, 5, 6, 16, 26, 126, 226))
    assert draft.sources == ("by 1",) * 3 + ("by 10",) * 2 + ("by 100",) * 2
    assert draft.scores == (0.9,) * 7
    first, second, third = Counting.made
    assert first.asked == [([1, 2, 3], 3)]
    assert second.asked == [([1, 2, 3, 4, 5, 6], 2)]
    assert third.asked == [([1, 2, 3, 4, 5, 6, 16, 26], 2)]


def test_a_level_that_has_less_to_say_leaves_the_rest_to_the_next() -> None:
    draft = propose(counting("most=1,k=3", "by=10,most=0", "by=100"), Sight(), 4)
    assert draft.tree == trees.chain_tree((4, 104, 204, 304))
    assert propose(counting("most=0", "by=10,k=2"), Sight(), 4).tree == trees.chain_tree((13, 23))
    assert propose(counting("most=0", "most=0,k=2"), Sight(), 4) == NO_DRAFT


def test_below_a_tree_the_next_level_goes_on_from_its_best_path() -> None:
    draft = propose(counting("bush=true,k=3", "bush=true,by=10,k=3", "by=100"), Sight(), 8)
    assert draft.tree.tokens == (90, 4, 5, 90, 15, 25, 125, 225)
    assert draft.tree.parents == (-1, -1, 1, 2, 2, 4, 5, 6)


def test_the_budget_is_never_exceeded_and_levels_are_not_asked_for_nothing() -> None:
    for budget in range(9):
        assert len(propose(counting("bush=true,k=3", "by=10"), Sight(), budget)) <= budget
    Counting.made.clear()
    drafter = counting("k=3", "by=10,k=2")
    drafts = drafter.propose([Sight(0), Sight(1, [50]), Sight(2)], [2, 5, 0])
    assert [draft.tree.tokens for draft in drafts] == [(4, 5), (51, 52, 53, 63, 73), ()]
    assert Counting.made[1].asked == [([50, 51, 52, 53], 2)]


def test_what_was_drafted_does_not_stay_in_the_sequence() -> None:
    """The next draft depends on the committed tokens alone, whatever became of the one before."""
    drafter = counting("k=2", "by=10,k=2")
    view = Sight()
    for commit in ([4, 5, 15], [7], [], [8, 9, 10, 11]):
        view.tokens += commit
        last = view.tokens[-1]
        assert propose(drafter, view, 4).tree.tokens == (last + 1, last + 2, last + 12, last + 22)
    view.tokens[:] = [60]
    assert propose(drafter, view, 4).tree.tokens == (61, 62, 72, 82)


def test_needs_are_joined_and_every_level_is_told() -> None:
    drafter = counting("k=2", "by=10,k=2")
    assert drafter.needs == Needs(taps=(1,), top_k=1)
    view = Sight()
    draft = propose(drafter, view, 4)
    drafter.observe([Observation(view, draft, Verdict((0,), (4, 9)), {1: torch.ones(2, 4)}, ((4,),) * 5)])
    drafter.release(0)
    for level in Counting.made:
        assert [one.draft for one in level.seen] == [draft]
        assert level.released == [0]


def test_one_level_is_none() -> None:
    with pytest.raises(UsageError, match="two or more"):
        made("horizontal:levels=prompt-lookup")


# --------------------------------------------------------------------------------------------------- the matrix


def test_the_papers_matrix_is_a_horizontal_cascade_of_vertical_ones() -> None:
    """5 tokens by A, for which B writes 1 and the matcher 10 at a time; 14 by B; 10 by the matcher."""
    matcher = Step(2, k=10)
    for_a = (Step(1, k=11, enough=1, below=(matcher,)), matcher)
    assert layout([[5, 14, 10], [0, 1, 10], [0, 0, 10]]) == (
        Step(0, k=16, enough=5, below=for_a),
        Step(1, k=24, enough=14, below=(matcher,)),
        matcher,
    )


def test_a_matrix_of_zeros_above_a_drafter_leaves_it_alone() -> None:
    assert layout([[5, 0], [0, 10]]) == (Step(0, k=15, enough=5, below=(Step(1, k=10),)),)
    assert layout([[5, 10], [0, 0]]) == (Step(0, k=5), Step(1, k=10))
    assert layout([[0, 7], [0, 0]]) == (Step(1, k=7),)


def test_a_matrix_of_one_drafter_is_that_drafter_alone(toy_runner: MakeRunner) -> None:
    alone = made("draft-model:min_p=0", toy_runner())
    matrix = made("cs-drafting:drafters=draft-model(min_p=0),matrix=6", toy_runner())
    view = Sight()
    for step in range(4):
        assert propose(matrix, view, 6) == propose(alone, view, 6)
        view.tokens += [step, 7]
    assert len(propose(matrix, view, 30)) == 6


def test_the_model_writes_its_tokens_and_the_matcher_goes_on(toy_runner: MakeRunner) -> None:
    """Row 0 of the matrix 2/3: at least two tokens of the model's own, whatever the matcher says, then its copy."""
    runner = toy_runner()
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = made("cs-drafting:drafters=draft-model(min_p=0)+prompt-lookup,matrix=2/3+0/2", runner)
    draft = propose(drafter, Sight(0, tokens), 9)
    own = runner.continuation(tokens, 2)
    assert list(draft.tree.tokens[:2]) == own
    rest = made("prompt-lookup").propose([Sight(1, [*tokens, *draft.tree.tokens[:2]])], [3])[0]
    assert draft.tree.tokens[2:] == rest.tree.tokens
    assert len(runner.calls) <= 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("matrix=5/x+0/1", "whole numbers"),
        ("matrix=5", "2 rows of 2"),
        ("matrix=5/1+0/1+0/0", "2 rows of 2"),
        ("matrix=5/1/1+0/1/1", "2 rows of 2"),
        ("matrix=5/-1+0/1", "numbers of at least 0"),
        ("matrix=5/1+1/1", "left of the diagonal"),
        ("matrix=0/0+0/1", "nothing is drafted"),
        ("matrix=", "2 rows of 2"),
        ("drafters=,matrix=", "0 rows"),
        ("drafters=none,matrix=4", "none drafts nothing"),
        ("drafters=prompt-lookup+prompt-lookup(max_ngram=3)", "can only be the first"),
        ("matrix=2000/1+0/1", "at most 1024"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_said_in_one_line(settings: str, words: str, toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        made(f"cs-drafting:{settings}", toy_runner())
    assert "\n" not in str(caught.value)
