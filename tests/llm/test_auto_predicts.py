"""``auto`` drafts from predictions: few steps where they are right, few more where they are not, and honest counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.engine import Engine
from parlay.llm.outputs import CompletionOutput, PredictionUse
from parlay.testing.conformance.stage import Steady

PROMPT = "Once upon a time there was a"
PARAMS = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """Opens models for which each further row costs a hundredth of a step, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parlay.llm.resources.Engine", partial(Engine, clock=lambda: 0.0))
        patch.setattr("parlay.llm.resources.cost_of", lambda runner, memory, read: Steady())
        yield partial(LLM, "parlay-mini", dtype="float32", seed=1, router_memory="off")


@pytest.fixture
def llm(opened: Any) -> Iterator[LLM]:
    """A model whose router has learned nothing."""
    with opened() as model:
        yield model


@pytest.fixture(scope="module")
def plain(opened: Any) -> CompletionOutput:
    with opened() as model:
        return decoded(model, strategy="none")


@pytest.fixture(scope="module")
def unpredicted(opened: Any) -> CompletionOutput:
    with opened() as model:
        return decoded(model)


def decoded(llm: LLM, params: SamplingParams = PARAMS, **given: Any) -> CompletionOutput:
    return llm.generate(PROMPT, params, **given)[0].outputs[0]


def test_a_right_one_takes_as_few_steps_as_by_the_strategy_that_only_predicts(
    opened: Any, llm: LLM, plain: CompletionOutput, unpredicted: CompletionOutput
) -> None:
    with opened() as other:
        alone = decoded(other, strategy="prediction", prediction=plain.text)
    sample = decoded(llm, prediction=plain.text)
    assert (sample.strategy, sample.token_ids) == ("auto", plain.token_ids)
    assert sample.metrics.steps <= alone.metrics.steps < unpredicted.metrics.steps
    assert sample.prediction is not None
    assert sample.prediction.accepted == 80 - sample.metrics.steps, "the target wrote one in each step"
    assert sample.prediction.rejected <= sample.metrics.steps


def test_a_useless_one_takes_hardly_more_steps_than_none(
    llm: LLM, plain: CompletionOutput, unpredicted: CompletionOutput
) -> None:
    useless = list(reversed(plain.token_ids))
    sample = decoded(llm, prediction=useless)
    assert sample.token_ids == plain.token_ids
    assert sample.metrics.steps <= unpredicted.metrics.steps + 2
    assert sample.prediction is not None
    assert sample.prediction.accepted + sample.prediction.rejected == len(useless)
    assert sample.prediction.accepted < 10


@pytest.mark.parametrize(
    "strategy", ["auto", "auto:of=prediction+prompt-lookup", "auto:of=suffix-decoding+prediction", "auto:of=prediction"]
)
def test_what_the_prompt_holds_too_came_from_the_prediction(llm: LLM, plain: CompletionOutput, strategy: str) -> None:
    """Two drafters copy the same tokens, and the prediction is what the request gave for that.

    Whether or not the drafters are named.
    """
    prompt = [*llm.get_tokenizer().encode(PROMPT), *plain.token_ids]
    (expected,) = llm.generate(prompt, PARAMS, strategy="none")
    answer = expected.outputs[0].token_ids
    sample = llm.generate(prompt, PARAMS, prediction=answer, strategy=strategy)[0].outputs[0]
    assert sample.token_ids == answer
    assert set(sample.sources) == {"prediction", "target"}
    assert sample.prediction == PredictionUse(80 - sample.metrics.steps, sample.metrics.steps)


@pytest.mark.parametrize("given", ["right", "useless", "none"])
@pytest.mark.parametrize("strategy", ["auto", "auto:of=prediction+prompt-lookup"])
def test_the_report_has_what_was_asked_verified_and_accepted(
    llm: LLM, plain: CompletionOutput, strategy: str, given: str
) -> None:
    """Of each drafter, as the steps and the sources of the tokens show it."""
    predictions = {"right": plain.token_ids, "useless": plain.token_ids[::-1], "none": None}
    sample = decoded(llm, strategy=strategy, prediction=predictions[given])
    metrics = sample.metrics
    assert metrics.router is not None
    drafters = metrics.router.drafters
    assert sum(each.accepted for each in drafters) == metrics.accepted_tokens == 80 - sample.sources.count("target")
    assert sum(each.verified for each in drafters) <= metrics.steps
    assert all(each.verified <= each.asked <= metrics.steps for each in drafters)
    written = Counter(source for source in sample.sources if source != "target")
    assert dict(metrics.accepted_by_source) == written
    assert sum(metrics.drafted_by_source.values()) == metrics.draft_tokens >= metrics.accepted_tokens
    if given != "none":
        assert sample.prediction is not None
        assert sample.prediction.accepted == written["prediction"]


def test_requests_without_one_decode_as_before_beside_those_that_have_one(
    llm: LLM, plain: CompletionOutput, unpredicted: CompletionOutput
) -> None:
    predictions = [None, plain.token_ids, list(reversed(plain.token_ids))]
    samples = [each.outputs[0] for each in llm.generate([PROMPT] * 3, PARAMS, prediction=predictions)]
    assert [sample.token_ids for sample in samples] == [plain.token_ids] * 3
    without, right, useless = samples
    assert without.prediction is None
    assert without.metrics.steps <= unpredicted.metrics.steps + 2
    assert right.metrics.steps < without.metrics.steps
    assert "prediction" not in drafters_of(without)
    assert "prediction" in drafters_of(useless)


def drafters_of(sample: CompletionOutput) -> list[str]:
    assert sample.metrics.router is not None
    return [each.drafter for each in sample.metrics.router.drafters]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "n": 3, "seed": 5},
        {"temperature": 0.0, "max_tokens": 7},
        {"temperature": 0.0, "stop": [" the"]},
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]{20,60}"}},
    ],
)
def test_the_text_is_that_of_plain_decoding_whatever_else_is_asked_for(
    llm: LLM, plain: CompletionOutput, options: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 40, **options})
    expected = llm.generate(PROMPT, params, strategy="none")[0].outputs
    for prediction in (plain.token_ids, expected[0].token_ids):
        samples = llm.generate(PROMPT, params, strategy="auto", prediction=prediction)[0].outputs
        assert [each.token_ids for each in samples] == [each.token_ids for each in expected]
        for each in samples:
            assert each.prediction is not None
            assert each.prediction.accepted == each.sources.count("prediction")
            assert each.prediction.accepted + each.prediction.rejected >= len(prediction)


@pytest.mark.parametrize(
    ("default", "used"),
    [
        ("none", "none"),
        ("auto:effort=high", "auto:effort=high"),
        ("prompt-lookup", "prediction"),
        ("auto:of=prompt-lookup", "prediction"),
    ],
)
def test_a_default_that_names_drafters_gives_way_and_others_stay(
    opened: Any, plain: CompletionOutput, default: str, used: str
) -> None:
    with opened(strategy=default) as llm:
        sample = decoded(llm, prediction=plain.token_ids)
    assert (sample.strategy, sample.token_ids) == (used, plain.token_ids)
    assert sample.prediction is not None
    assert (sample.prediction.accepted == 0) == (used == "none")
