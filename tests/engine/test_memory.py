"""A real model in small memory: preemption changes no text, and drafting costs no request its prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parlay import LLM, SamplingParams
from parlay.cache import BLOCK
from parlay.llm.outputs import RequestOutput
from parlay.llm.request_options import RequestOptions

STRATEGIES = ["none", "prompt-lookup", "draft-model:k=3", "union"]
SYSTEM = "You are given a list of animals, and of the noises that they make. The cow moos, the dog barks. " * 6
ASKS = [
    SamplingParams(temperature=0, max_tokens=60, logprobs=1),
    SamplingParams(temperature=0.9, seed=4, max_tokens=60, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, max_tokens=60),
]
PROMPTS = [name + SYSTEM for name in ("The cat. ", "The horse. ", "One day. ", "Once upon a time. ")]
"""Each takes some 140 tokens of the cache at first, and 200 in the end; none begins as another does."""
ROOM = 640


def room_bytes(llm: LLM) -> int:
    """What `ROOM` tokens take in the target's cache."""
    return int(ROOM // BLOCK * llm.runner.store.shape.page_bytes)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(roomy: LLM) -> list[RequestOutput]:
    return [roomy.generate([prompt], ask, strategy="none")[0] for prompt, ask in zip(PROMPTS, ASKS, strict=True)]


@pytest.fixture
def small(roomy: LLM) -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", device="cpu", memory=room_bytes(roomy)) as llm:
        yield llm


def told(output: RequestOutput) -> tuple[object, ...]:
    (one,) = output.outputs
    return one.token_ids, one.text, one.logprobs, one.finish_reason, output.prompt_logprobs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preemption_changes_nothing_that_is_told(small: LLM, plain: list[RequestOutput], strategy: str) -> None:
    outputs = small.generate(PROMPTS, ASKS, strategy=strategy)
    assert [told(output) for output in outputs] == [told(output) for output in plain]
    small.runner.check()
    stats = small.engine.stats()
    assert stats.preemptions > 0
    assert stats.cache_tokens_used == 0


def prefixes(llm: LLM, strategy: str, salt: str) -> tuple[int, int]:
    """Prompt tokens asked for and found, by questions that share a beginning and by one that goes on from an answer."""
    before = llm.engine.stats()
    said = ""
    for name in ("Ann", "Bob", "Bob", "Eve"):
        params = SamplingParams(temperature=0, max_tokens=30)
        job = llm.job(SYSTEM + name + said, params, RequestOptions(strategy=strategy, salt=salt))
        for _ in llm._run([job]):
            llm.runner.check()
        said = job.output().outputs[0].text if name == "Bob" else ""
    stats = llm.engine.stats()
    return (
        stats.prefix_tokens_asked - before.prefix_tokens_asked,
        stats.prefix_tokens_found - before.prefix_tokens_found,
    )


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_as_many_prompt_tokens_are_found_cached_with_a_strategy_as_without(roomy: LLM, strategy: str) -> None:
    asked, found = prefixes(roomy, "none", f"plain, for {strategy}")
    assert prefixes(roomy, strategy, strategy) == (asked, found)
    shared = len(roomy.tokenizer.encode(SYSTEM)) - 1  # its last token may be another where a name follows
    assert found >= 3 * shared  # by all but the first


def test_a_request_that_memory_can_never_hold_is_refused_and_the_default_length_fits(small: LLM) -> None:
    most = small.runner.capacity() + 1
    assert most < small.runner.spec.max_context
    with pytest.raises(ValueError, match=rf"max_tokens {most} make .* holds {most}: shorten"):
        small.generate("One day", SamplingParams(max_tokens=most))
    job = small.job("One day", SamplingParams(max_tokens=None))
    request = job.samples[0].request
    assert request.params.max_tokens == most - len(request.prompt)
    with pytest.raises(ValueError, match="shorten"):
        small.generate("word " * most, SamplingParams(max_tokens=None))


def test_drafters_share_the_targets_memory(small: LLM) -> None:
    small.generate(SYSTEM, SamplingParams(max_tokens=4), strategy="draft-model")
    budget = small.runner.store._budget  # type: ignore[attr-defined]
    assert 0 < budget.total - budget.free <= budget.total
    assert len(budget._holders) == 3, "the target's cache, the draft model's, and what drafters keep of requests"


def test_memory_too_small_for_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="memory of 1 KiB is too small"):
        LLM("parlay-mini", memory="1KiB")
