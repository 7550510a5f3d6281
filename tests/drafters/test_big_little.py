"""Big-little decoding: the small model writes while it is sure, the target takes back surprises, `writers` say who."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parlay import LLM, SamplingParams
from parlay.llm.outputs import CompletionOutput

PROMPTS = ["Once upon a time there was a king who", "The cat and the dog, the cat and the bird, the cat and the"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SMALL = "model=parlay-mini-draft"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32") as model:
        yield model


def written(llm: LLM, parameters: str, params: SamplingParams = GREEDY) -> list[CompletionOutput]:
    strategy = f"big-little:{SMALL},{parameters}"
    return [output.outputs[0] for output in llm.generate(PROMPTS, params, strategy=strategy)]


def test_without_surprise_allowed_a_greedy_text_is_the_targets_own(llm: LLM) -> None:
    """The best token always stands; a sampled request still gets what the rule allows, and is lossy."""
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, strategy="none")]
    outputs = written(llm, "rollback.nats=0,fallback=0")
    assert [output.token_ids for output in outputs] == plain
    assert {output.exactness for output in outputs} == {"lossy"}
    assert {output.writers for output in outputs} == {()}, "every token is the target's own choice"


def test_a_small_model_that_is_never_sure_enough_writes_nothing(llm: LLM) -> None:
    outputs = written(llm, "fallback=1,rollback.nats=99")
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, strategy="none")]
    for output, own in zip(outputs, plain, strict=True):
        small = output.sources.count("big-little")
        assert small in {0, output.metrics.draft_tokens}  # only where it was certain to the last bit
        assert small or output.token_ids == own


def test_never_rolled_back_the_small_model_writes_ten_tokens_and_the_target_one(llm: LLM) -> None:
    """Every drafted token stays, and each is the small model's own choice after the text before it."""
    with LLM("parlay-mini-draft", dtype="float32") as small:
        for output in written(llm, "fallback=0,rollback.nats=10000"):
            assert output.metrics.accepted_tokens == output.metrics.draft_tokens > 0
            assert output.writers[:11] == output.sources[:11] == ("big-little",) * 10 + ("target",)
        first = written(llm, "fallback=0,rollback.nats=10000")[0]
        alone = small.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))[0]
        assert first.token_ids[:10] == alone.outputs[0].token_ids


def test_more_surprise_allowed_means_more_of_the_small_models_words(llm: LLM) -> None:
    shares = []
    for nats in (0, 2, 10000):
        outputs = written(llm, f"fallback=0,rollback.nats={nats}")
        shares.append(sum(output.sources.count("big-little") for output in outputs))
    assert shares[0] <= shares[1] <= shares[2]
    assert shares[0] < shares[2]
