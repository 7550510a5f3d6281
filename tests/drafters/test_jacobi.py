"""Jacobi decoding: how many forwards it takes, that its fixed point is plain decoding, what becomes of its guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.fixed_point.jacobi import Jacobi
from parlay.drafters.options import JacobiOptions as Options
from parlay.drafters.resources import Resources
from parlay.engine import Limits
from parlay.options import UsageError
from parlay.router.policies import Fixed, adaptive
from parlay.sampling.rules import SharedNoise
from parlay.strategies.spelling import parse
from parlay.testing import reference
from parlay.testing.conformance.stage import StageRequest, StageSample, Steady, decode
from parlay.testing.reference import LogitsOf
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import (
    NO_DRAFT,
    Draft,
    Drafter,
    NoiseKey,
    Observation,
    Policy,
    Request,
    SamplingParams,
    Strategy,
    Tokenizer,
    Tree,
    Verdict,
    trees,
)
from tests.drafters.sight import no_runner

VOCAB = 24
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1, max_tokens=40)


RESOURCES = Resources(vocab_size=VOCAB, open_runner=no_runner)
REQUEST = Request(id="r", prompt=(5, 6, 7), params=SamplingParams(), key=NoiseKey(0))


@dataclass
class Sight:
    tokens: list[int] = field(default_factory=lambda: [5, 6, 7])
    sequence: int = 0
    request: Request = REQUEST
    prompt_length: int = 3


def propose(drafter: Drafter, sight: Sight, budget: int) -> list[int]:
    draft = drafter.propose([sight], [budget])[0]
    assert trees.is_chain(draft.tree)
    assert len(draft.scores) == len(draft.sources) == len(draft)
    assert all(0 <= score <= 1 for score in draft.scores)
    return list(draft.tree.tokens)


def tell(drafter: Drafter, sight: Sight, draft: Draft, path: Sequence[int], choices: Sequence[int]) -> None:
    """Commit the path and one more token, then let the drafter observe."""
    sampled = (choices[0], *(choices[node + 1] for node in path))
    sight.tokens += sampled
    rows = tuple((token,) for token in choices)
    drafter.observe([Observation(sight, draft, Verdict(tuple(path), sampled), top_k=rows)])


def run(
    logits_of: LogitsOf, params: SamplingParams, policy: Policy | None = None, budget: int = 64, **settings: int | str
) -> StageSample:
    drafter = Jacobi(RESOURCES, Options(**settings))  # type: ignore[arg-type]
    strategy = Strategy("jacobi", (drafter,), SharedNoise(), policy or Fixed(budget))
    (sample,) = decode(ToyRunner(logits_of, VOCAB), [(StageRequest((5, 6, 7), params, seed=3), strategy)], Limits())
    return sample


def position_only(ids: Sequence[int]) -> Tensor:
    """A target that ignores all context but its length."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(ids)))


def counting(ids: Sequence[int]) -> Tensor:
    """Each token is the one before it and one more: every guess hangs on the one before."""
    return torch.nn.functional.one_hot(torch.tensor((ids[-1] + 1) % VOCAB), VOCAB).float()


BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"guess": "last"},
        {"variant": "block", "block": 6, "guess": "prompt"},
        {"variant": "hybrid", "block": 5, "bound": 23},
        {"recycle": 4, "ngram": 3},
        {"variant": "block", "block": 6, "recycle": 9, "ngram": 2},
    ],
    ids=str,
)


@BOTH
@SETTINGS
def test_the_fixed_point_is_plain_decoding_within_as_many_forwards_as_tokens(
    params: SamplingParams, settings: dict[str, int | str]
) -> None:
    logits_of = RandomLogits(VOCAB)
    sample = run(logits_of, params, **settings)
    expected = reference.decode(logits_of, StageRequest((5, 6, 7), params, seed=3).request("expected"))
    assert sample.tokens == expected.output
    assert sample.metrics.steps <= len(sample.tokens)


@BOTH
@pytest.mark.parametrize(("settings", "steps"), [({}, 2), ({"variant": "block", "block": 8}, 2 * 5)])
def test_a_target_that_ignores_context_converges_in_two_iterations(
    params: SamplingParams, settings: dict[str, int | str], steps: int
) -> None:
    """The first forward computes every token, the second finds all of them right: per block."""
    assert run(position_only, params, **settings).metrics.steps == steps


def test_where_each_token_hangs_on_the_last_every_token_takes_a_forward() -> None:
    """The bound of m iterations is reached: a wrong guess is followed by what follows from a wrong guess."""
    metrics = run(counting, GREEDY).metrics
    assert metrics.steps == 40
    assert metrics.accepted_tokens == 0


def test_the_next_draft_is_the_last_iterate_shifted_by_what_was_committed() -> None:
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    assert propose(drafter, sight, 4) == [0, 0, 0, 0]
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    assert propose(drafter, sight, 4) == [11, 12, 13, 14]
    tell(drafter, sight, trees.chain([11, 12, 13, 14], "jacobi"), [0], [11, 15, 16, 17, 18])
    assert propose(drafter, sight, 5) == [16, 17, 18, 0, 0]


def test_an_earlier_guess_is_verified_where_its_first_token_comes_and_gone_on_from() -> None:
    """The target said 11, 12, 13 two places too early; then 11 is committed, and 12, 13 stand beside the block."""
    drafter, sight = Jacobi(RESOURCES, Options(recycle=2, ngram=3)), Sight()
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    assert propose(drafter, sight, 4) == [11, 12, 13, 14], "nothing began with 9 but what the block says"
    tell(drafter, sight, trees.chain([11, 12, 13, 14], "jacobi"), [], [10, 1, 2, 3, 4])
    tell(drafter, sight, NO_DRAFT, [], [11])
    (draft,) = drafter.propose([sight], [5])
    assert draft.tree == Tree((2, 3, 4, 12, 13), (-1, 0, 1, -1, 3))
    tell(drafter, sight, draft, [3, 4], [12, 20, 20, 20, 13, 21])
    assert propose(drafter, sight, 2) == [20, 0], "what the block said of a place that the n-gram did not reach"


def test_the_next_guesses_are_those_along_an_ngram_that_was_right_for_longer() -> None:
    drafter, sight = Jacobi(RESOURCES, Options(recycle=2, ngram=4)), Sight()
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([11, 12, 13, 14], "jacobi"), [], [11, 1, 2, 3, 4])
    (draft,) = drafter.propose([sight], [6])
    assert draft.tree == Tree((1, 2, 3, 12, 13, 14), (-1, 0, 1, -1, 3, 4))
    tell(drafter, sight, draft, [3], [12, 20, 20, 20, 15, 16, 17])
    assert propose(drafter, sight, 3) == [16, 17, 0]


def test_recycled_ngrams_get_at_most_half_of_the_budget_and_are_forgotten_with_the_text() -> None:
    drafter, sight = Jacobi(RESOURCES, Options(recycle=8, ngram=5)), Sight()
    for _ in range(6):
        (draft,) = drafter.propose([sight], [12])
        tell(drafter, sight, draft, [], [7, *range(1, len(draft) + 1)])
    (draft,) = drafter.propose([sight], [12])
    assert len(draft) <= 12
    assert draft.tree.tokens[:6] == tuple(range(1, 7)), "the block comes first"
    drafter.release(0)
    assert drafter.propose([Sight()], [12])[0].tree.tokens == (0,) * 12


def test_a_guess_scores_higher_the_more_tokens_before_it_stood_still() -> None:
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 5)
    tell(drafter, sight, trees.chain([0] * 5, "jacobi"), [], [9, 0, 0, 0, 4, 5])
    scores = drafter.propose([sight], [6])[0].scores
    assert scores[0] < scores[1] < scores[2] == scores[3]
    assert scores[4] == scores[0]  # the token before it has just changed
    assert scores[5] < scores[0]  # not computed yet


def test_a_trimmed_draft_corrects_what_was_verified_and_keeps_the_other_guesses() -> None:
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    assert propose(drafter, sight, 4) == [11, 12, 13, 14]
    tell(drafter, sight, trees.chain([11], "jacobi"), [], [8, 20])
    assert propose(drafter, sight, 4) == [20, 13, 14, 0]


def test_steps_without_a_draft_only_move_it_on() -> None:
    """A draft that was cut away wholly, and a step in which none was asked for."""
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    propose(drafter, sight, 4)
    tell(drafter, sight, NO_DRAFT, [], [8])
    tell(drafter, sight, NO_DRAFT, [], [8])
    assert propose(drafter, sight, 4) == [13, 14, 0, 0]


def test_tokens_taken_back_start_it_over() -> None:
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 4)
    tell(drafter, sight, trees.chain([0, 0, 0, 0], "jacobi"), [], [9, 11, 12, 13, 14])
    propose(drafter, sight, 4)
    assert propose(drafter, replace(sight, tokens=[5, 6, 8, 8, 8]), 3) == [0, 0, 0]


def test_what_was_seen_in_a_tree_merged_with_others_counts() -> None:
    """Its own chain hangs among another drafter's nodes."""
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 2)
    merged = Draft(Tree((3, 0, 4, 0), (-1, -1, 0, 1)), sources=("a", "jacobi", "a", "jacobi"))
    tell(drafter, sight, merged, [0], [3, 10, 11, 12, 13])
    assert propose(drafter, sight, 2) == [13, 0]


@pytest.mark.parametrize(
    ("settings", "length", "expected"),
    [
        ({"variant": "block", "block": 5}, 0, 4),
        ({"variant": "block", "block": 5}, 3, 1),
        ({"variant": "block", "block": 5}, 4, 0),
        ({"variant": "block", "block": 5}, 5, 4),
        ({"variant": "hybrid", "block": 5, "bound": 7}, 5, 1),
        ({"variant": "hybrid", "block": 5, "bound": 7}, 7, 0),
        ({"variant": "hybrid", "block": 5, "bound": 7}, 10, 0),
        ({}, 4, 1000),
    ],
)
def test_a_draft_ends_where_its_block_does(settings: dict[str, int], length: int, expected: int) -> None:
    """The last token of a block needs no guess, as no row of the block comes after it."""
    sight = Sight(tokens=[5, 6, 7] + [1] * length)
    assert len(propose(Jacobi(RESOURCES, Options(**settings)), sight, 1000)) == expected  # type: ignore[arg-type]
    assert propose(Jacobi(RESOURCES, Options(**settings)), sight, 0) == []  # type: ignore[arg-type]


def test_first_guesses_are_pads_the_last_token_or_tokens_of_the_prompt() -> None:
    tokenizer = cast(Tokenizer, SimpleNamespace(pad_token_id=2))
    assert propose(Jacobi(replace(RESOURCES, tokenizer=tokenizer), Options()), Sight(), 3) == [2, 2, 2]
    assert propose(Jacobi(RESOURCES, Options(guess="last")), Sight(), 3) == [7, 7, 7]
    other = replace(REQUEST, key=NoiseKey(1))
    first, again, third = (
        propose(Jacobi(RESOURCES, Options(guess="prompt")), Sight(request=request), 30)
        for request in (REQUEST, REQUEST, other)
    )
    assert first == again != third
    assert set(first) == set(third) == {5, 6, 7}


def test_a_pad_outside_the_vocabulary_is_not_guessed() -> None:
    """Some tokenizers pad with a token that the model has no row for."""
    tokenizer = cast(Tokenizer, SimpleNamespace(pad_token_id=VOCAB))
    assert propose(Jacobi(replace(RESOURCES, tokenizer=tokenizer), Options()), Sight(), 1) == [0]


@BOTH
def test_it_lives_through_budgets_that_the_policy_cuts_and_withholds(params: SamplingParams) -> None:
    logits_of = RandomLogits(VOCAB)
    long = replace(params, max_tokens=150)
    sample = run(logits_of, long, policy=adaptive(Steady(), 16))
    assert (
        sample.tokens == reference.decode(logits_of, StageRequest((5, 6, 7), long, seed=3).request("expected")).output
    )
    assert sample.metrics.drafter_faults == 0


def test_it_proposes_its_iterate_where_a_copier_copies() -> None:
    """The text repeats itself; Jacobi decoding looks at no text, only at what the target said."""
    sight = Sight(tokens=[5, 6, 7, 5, 6])
    assert propose(PromptLookup(RESOURCES, PromptLookupOptions()), sight, 2) == [7, 5]
    assert propose(Jacobi(RESOURCES, Options()), sight, 2) == [0, 0]


def test_a_sequence_that_is_over_is_forgotten() -> None:
    drafter, sight = Jacobi(RESOURCES, Options()), Sight()
    propose(drafter, sight, 2)
    tell(drafter, sight, trees.chain([0, 0], "jacobi"), [], [9, 11, 12])
    drafter.release(0)
    drafter.release(0)
    assert propose(drafter, sight, 2) == [0, 0]


@pytest.mark.parametrize("wrong", ["variant=serial", "block=1", "bound=0", "guess=noise", "k=-1", "recycle=-1"])
def test_a_parameter_out_of_range_is_refused_in_one_line(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]) as caught:
        parse(f"jacobi:{wrong}")
    assert "\n" not in str(caught.value)
