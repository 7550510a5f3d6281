"""SpecReason: drafts are whole steps, and a step that did not stand is left to the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from parlay import LLM, SamplingParams
from parlay.drafters.draft_models.reasoning_steps import StepEnds
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Drafter, Exactness, Tokenizer
from tests.drafters.sight import MakeRunner, Sight, propose

VOCAB = 12
PROMPT = "The cat and the dog, the cat and the bird, the cat and the"


class Letters:
    """A tokenizer of one text for each token; ``ends`` are sentence ends."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def decode(self, ids: list[int]) -> str:
        return "." if ids[0] in self._ends else "x"


def drafter_on(runner: Any, *ends: int) -> Drafter:
    tokenizer = cast(Tokenizer, Letters(*ends))
    resources = Resources(
        vocab_size=VOCAB, open_runner=lambda name: runner, default_draft="toy", tokenizer=tokenizer, rule="step"
    )
    drafter = build(parse("spec-reason"), resources)
    assert drafter is not None
    return drafter


def test_a_draft_is_one_step(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    whole = runner.continuation([1, 2, 3], 8)
    end = whole[4]
    first = whole.index(end)
    assert list(propose(drafter_on(runner, end), Sight(0, [1, 2, 3]), 8).tree.tokens) == whole[: first + 1]
    assert list(propose(drafter_on(runner), Sight(0, [1, 2, 3]), 8).tree.tokens) == whole


def test_a_step_that_did_not_stand_is_written_by_the_target(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    whole = runner.continuation([1, 2, 3], 8)
    other, end, *_ = (token for token in range(VOCAB) if token not in whole)
    drafter, view = drafter_on(runner, end), Sight(0, [1, 2, 3])
    propose(drafter, view, 8)
    view.tokens += [whole[0], other]
    for _ in range(3):
        assert propose(drafter, view, 8) is NO_DRAFT
        view.tokens += [other]
    view.tokens += [end]
    assert len(propose(drafter, view, 8)) > 0


def test_where_steps_end() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return ["a", ".", ".\n", " so: ", "\n\n", "3.5"][ids[0]]

    words = cast(Tokenizer, Words())
    sentences, lines = StepEnds(words, "sentence"), StepEnds(words, "line")
    assert [token in sentences for token in range(6)] == [False, True, True, True, True, False]
    assert [token in lines for token in range(6)] == [False, False, True, False, True, False]


def test_it_needs_a_tokenizer_and_the_targets_vocabulary(toy_runner: MakeRunner) -> None:
    bare = Resources(vocab_size=VOCAB, open_runner=lambda name: toy_runner(), default_draft="toy", rule="step")
    with pytest.raises(UsageError, match="came without a tokenizer"):
        build(parse("spec-reason"), bare)
    other = Resources(
        vocab_size=VOCAB + 1,
        open_runner=lambda name: toy_runner(),
        default_draft="toy",
        tokenizer=cast(Tokenizer, Letters()),
        rule="step",
    )
    with pytest.raises(UsageError, match="choose a draft model with the target's tokenizer"):
        build(parse("spec-reason"), other)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", draft_model="parlay-mini-draft") as model:
        yield model


def test_without_allowed_surprise_the_text_is_that_of_plain_decoding(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    (plain,) = llm.generate(PROMPT, params, strategy="none")
    (exact,) = llm.generate(PROMPT, params, strategy="spec-reason:step.nats=0")
    assert exact.chosen.token_ids == plain.chosen.token_ids
    assert exact.chosen.exactness is Exactness.LOSSY


def test_all_steps_stand_where_all_surprise_is_allowed(llm: LLM) -> None:
    """The text is the small model's, but for the token that the target writes after each step."""
    params = SamplingParams(temperature=0, max_tokens=32)
    (output,) = llm.generate(PROMPT, params, strategy="spec-reason:step.nats=99,k=6")
    sources = output.chosen.sources
    assert set(sources) == {"spec-reason", "target"}
    assert sources.count("spec-reason") > 2 * sources.count("target")
    assert output.chosen.metrics.acceptance_rate == 1
