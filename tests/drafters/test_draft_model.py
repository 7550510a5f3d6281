"""The draft model, on a toy runner whose logits betray any stale cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.sampler import sample
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Request, trees
from tests.drafters.sight import GREEDY, SAMPLED, MakeRunner, Sight, propose, token_paths

VOCAB = 12


def drafter_on(runner: Any, settings: str = "min_p=0") -> DraftModel:
    resources = Resources(vocab_size=VOCAB, open_runner=lambda name: runner, default_draft="toy")
    drafter = build(parse(f"draft-model:{settings}"), resources)
    assert isinstance(drafter, DraftModel)
    return drafter


def test_a_chain_is_what_the_model_itself_writes(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    draft = propose(drafter_on(runner), Sight(0, [1, 2, 3]), 5)
    assert list(draft.tree.tokens) == runner.continuation([1, 2, 3], 5)
    assert trees.is_chain(draft.tree)
    for depth, (token, score) in enumerate(zip(draft.tree.tokens, draft.scores, strict=True)):
        probabilities = runner.logits([1, 2, 3, *draft.tree.tokens[:depth]]).softmax(-1)
        assert score == pytest.approx(float(probabilities[token]), rel=1e-5)


def test_a_sampled_chain_is_what_the_one_sampler_draws_from_the_models_logits(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    view = Sight(0, [1, 2, 3], SAMPLED)
    drafted = propose(drafter_on(runner), view, 6).tree.tokens
    written: list[Any] = []
    for _ in range(6):
        logits = runner.logits([1, 2, 3, *written])
        written += sample(logits[None], [view], [written])
    assert list(drafted) == written


@pytest.mark.parametrize("settings", ["min_p=0", "min_p=0,shape=tree"])
def test_whatever_was_committed_the_next_draft_is_that_of_a_fresh_drafter(
    toy_runner: MakeRunner, settings: str
) -> None:
    """Full acceptance and one more, partial, none, skipped steps, a rewind, another text under the same name."""
    runner = toy_runner()
    drafter = drafter_on(runner, settings)
    view = Sight(0, [1, 2, 3])
    for commit in ("all", "none", "some", "all", "all", "skip", "rewind", "replace", "some"):
        draft = propose(drafter, view, 5)
        assert draft == propose(drafter_on(toy_runner(), settings), replace(view, tokens=list(view.tokens)), 5)
        path = list(draft.tree.tokens)
        if commit == "all":
            view.tokens += [*path, 11]
        elif commit == "some":
            view.tokens += [*path[:2], 11]
        elif commit == "none":
            view.tokens += [11]
        elif commit == "skip":
            view.tokens += [5] * 700
        elif commit == "rewind":
            del view.tokens[4:]
        else:
            view.tokens = [9, 8, 7]


def test_after_full_acceptance_two_tokens_are_fed_in_one_forward(toy_runner: MakeRunner) -> None:
    """The last drafted token was never run, so it is fed with the bonus; nothing else runs twice."""
    runner = toy_runner()
    drafter = drafter_on(runner)
    view = Sight(0, [1, 2, 3])
    draft = propose(drafter, view, 3)
    view.tokens += [*draft.tree.tokens, 11]
    runner.calls.clear()
    propose(drafter, view, 2)
    assert runner.calls[0][0].pending == (draft.tree.tokens[-1], 11)
    assert [sum(segment.rows for segment in call) for call in runner.calls] == [2, 1]


def test_an_accepted_tree_path_stays_cached(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    drafter = drafter_on(runner, "min_p=0,shape=tree,width=2")
    view = Sight(0, [1, 2, 3])
    propose(drafter, view, 6)
    (cached,) = runner.cached.values()
    assert cached[:3] == [1, 2, 3]
    assert len(cached) > 3
    view.tokens += [*cached[3:], 11]
    runner.calls.clear()
    propose(drafter, view, 1)
    assert [segment.pending for call in runner.calls for segment in call] == [(11,)]


def test_a_long_prompt_is_fed_in_chunks_that_ask_for_no_logits(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    propose(drafter_on(runner), Sight(0, [1] * 900), 1)
    assert max(sum(segment.rows for segment in call) for call in runner.calls) < 300
    assert all(segment.logits_from == segment.rows for call in runner.calls[:-1] for segment in call)


@pytest.mark.parametrize("settings", ["min_p=0", "min_p=0.02", "min_p=0,shape=tree", "min_p=0.01,shape=tree,width=4"])
@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_drafts_what_each_sequence_drafts_alone(
    toy_runner: MakeRunner, settings: str, request_: Request
) -> None:
    views = [Sight(number, [number, *range(1, 2 + 4 * number)], request_) for number in range(4)]
    budgets = [5, 0, 9, 2]
    together = drafter_on(toy_runner(), settings).propose(views, budgets)
    for view, budget, draft in zip(views, budgets, together, strict=True):
        assert draft == propose(drafter_on(toy_runner(), settings), view, budget)
        assert len(draft) <= budget


def best_tree(runner: Any, tokens: Sequence[int], width: int, budget: int) -> set[tuple[int, ...]]:
    """The likeliest paths when each node offers its ``width`` best children: by expanding everything."""
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    paths: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(4):
        grown = []
        for path in frontier:
            top = runner.logits([*tokens, *path]).softmax(-1).topk(width)
            for probability, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                child = (*path, token)
                reach[child] = reach[path] * probability
                paths.append((-reach[child], child))
                grown.append(child)
        frontier = grown
    return {path for _, path in sorted(paths)[:budget]}


@pytest.mark.parametrize("start", range(5))
def test_a_tree_grown_one_node_at_a_time_has_the_likeliest_paths(toy_runner: MakeRunner, start: int) -> None:
    """With one expansion per forward the best-first order is exact."""
    runner = toy_runner()
    drafter = drafter_on(runner, "min_p=0,shape=tree,width=1")
    assert token_paths(propose(drafter, Sight(0, [start]), 4)) == best_tree(runner, [start], 1, 4)


@pytest.mark.parametrize("start", range(5))
def test_a_wide_tree_takes_as_few_forwards_as_its_width_allows(toy_runner: MakeRunner, start: int) -> None:
    """Three nodes of width three are the root's likeliest children; two more of any parent take one more forward."""
    runner = toy_runner()
    drafter = drafter_on(runner, "min_p=0,shape=tree,width=3")
    likeliest = runner.logits([start]).topk(3).indices.tolist()
    assert token_paths(propose(drafter, Sight(0, [start]), 3)) == {(token,) for token in likeliest}
    assert len(runner.calls) == 1
    runner.calls.clear()
    paths = token_paths(propose(drafter, Sight(1, [start]), 5))
    assert len(paths) == 5
    assert {(token,) for token in likeliest} <= paths
    assert len(runner.calls) == 2


def test_the_first_child_is_the_token_that_the_sampler_draws(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    view = Sight(0, [4, 2], SAMPLED)
    draft = propose(drafter_on(runner, "min_p=0,shape=tree,width=3"), view, 3)
    drawn = sample(runner.logits([4, 2])[None], [view], [()])[0]
    children = [draft.tree.tokens[node] for node, parent in enumerate(draft.tree.parents) if parent == -1]
    assert drawn in children


def test_unlikely_paths_are_not_followed(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    draft = propose(drafter_on(runner, "min_p=0.1"), Sight(0, [1, 2, 3]), 50)
    reach = torch.tensor(draft.scores).cumprod(0)
    assert 0 < len(draft) < 50
    assert reach[-1] >= 0.1
    longer = propose(drafter_on(toy_runner(), "min_p=0"), Sight(0, [1, 2, 3]), len(draft) + 1)
    assert torch.tensor(longer.scores).prod() < 0.1


def test_the_least_recently_used_sequence_makes_room(toy_runner: MakeRunner) -> None:
    runner = toy_runner(capacity=30)
    drafter = drafter_on(runner)
    views = [Sight(number, [number] * 8) for number in range(3)]
    for view in views:
        assert len(propose(drafter, view, 4)) == 4
    assert len(runner.cached) == 2
    assert propose(drafter, views[0], 4) == propose(drafter_on(toy_runner()), views[0], 4)


def test_what_does_not_fit_is_not_drafted_and_the_others_are(toy_runner: MakeRunner) -> None:
    runner = toy_runner(capacity=30)
    views = [Sight(0, [1] * 8), Sight(1, [1] * 40), Sight(2, [2] * 8), Sight(3, [3] * 8)]
    drafts = drafter_on(runner).propose(views, [4, 4, 4, 4])
    assert [len(draft) for draft in drafts] == [4, 0, 4, 0]


def test_the_draft_models_context_is_never_exceeded(toy_runner: MakeRunner) -> None:
    drafter = drafter_on(toy_runner(max_context=10))
    assert [len(propose(drafter, Sight(size, [1] * size), 4)) for size in (5, 8, 10, 12)] == [4, 2, 0, 0]


def test_drafters_that_share_a_runner_do_not_meet(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    one, other = drafter_on(runner), drafter_on(runner, "min_p=0,shape=tree")
    view = Sight(0, [1, 2])
    assert propose(one, view, 3) == propose(drafter_on(toy_runner()), view, 3)
    assert len(propose(other, view, 3)) == 3
    one.release(0)
    assert len(runner.cached) == 1
    other.release(0)
    other.release(0)
    assert not runner.cached


def test_no_numbers_no_draft(toy_runner: MakeRunner) -> None:
    """Logits that are not numbers end a draft, not the run."""
    runner = toy_runner()
    runner.logits = lambda prefix: torch.full((VOCAB,), torch.nan)
    for settings in ("min_p=0", "min_p=0,shape=tree"):
        assert propose(drafter_on(runner, settings), Sight(0, [1, 2]), 3) == NO_DRAFT


def test_another_vocabulary_is_refused_with_both_sizes(toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match="13 tokens and the target one of 12"):
        drafter_on(toy_runner(vocab=13))


def test_a_tree_on_a_runner_without_trees_is_refused(toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match="shape=chain"):
        drafter_on(toy_runner(trees=False), "shape=tree")


def test_without_a_draft_model_the_error_says_how_to_name_one() -> None:
    with pytest.raises(UsageError, match="model=NAME_OR_PATH"):
        build(parse("draft-model"), Resources(vocab_size=VOCAB, open_runner=lambda name: pytest.fail("opened")))
