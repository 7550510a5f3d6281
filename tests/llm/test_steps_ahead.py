"""Lookahead Reasoning: the exact form writes plain decoding's own text; else a judge decides which steps stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.llm import steps_ahead
from parlay.llm.judging import Words
from parlay.llm.steps_ahead import SOURCE, AheadParams
from parlay.types import Exactness, ParlayError

PROMPT = "The cat and the dog, the cat and the bird, the cat and the"
SHORT = AheadParams(steps=3, until="sentence", step_tokens=5)
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", router_memory="off", draft_model="parlay-mini-draft") as model:
        yield model


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM("parlay-mini-draft", dtype="float32", router_memory="off") as model:
        yield model


@pytest.mark.parametrize(
    ("params", "strategy"),
    [
        (GREEDY, None),
        (GREEDY, "none"),
        (GREEDY, "draft-model:k=4"),
        (SamplingParams(temperature=0.8, seed=5, max_tokens=40, presence_penalty=1, min_tokens=12), None),
        (SamplingParams(temperature=0, max_tokens=23), None),
        (SamplingParams(temperature=0.9, seed=1, max_tokens=60, stop=["e"], min_tokens=30), None),
        (SamplingParams(temperature=0.9, seed=2, max_tokens=60, stop_token_ids=[11, 12, 13]), None),
    ],
)
def test_the_exact_form_is_plain_decoding(llm: LLM, small: LLM, params: SamplingParams, strategy: str | None) -> None:
    (plain,) = llm.generate(PROMPT, params, strategy="none")
    output = llm.reason_ahead(PROMPT, params, SHORT, drafter=small, strategy=strategy)
    assert output.token_ids == plain.chosen.token_ids
    assert (output.text, output.finish_reason) == (plain.chosen.text, plain.chosen.finish_reason)
    assert output.exactness is plain.chosen.exactness
    assert output.writers == ("target",) * len(output.token_ids)
    assert output.drafted >= output.rounds > 0
    llm.runner.check()
    small.runner.check()
    assert llm.engine.idle


def test_all_steps_of_a_drafter_that_is_the_model_itself_stand(llm: LLM) -> None:
    """Each round then has one step more than was drafted."""
    (plain,) = llm.generate(PROMPT, GREEDY, strategy="none")
    with LLM("parlay-mini", dtype="float32", router_memory="off") as twin:
        output = llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=twin)
    assert output.token_ids == plain.chosen.token_ids
    assert output.accepted == output.drafted
    assert output.rounds <= 3


def test_a_drafted_step_is_drafted_from_at_once_whatever_comes_before_it(llm: LLM) -> None:
    """The steps before it are output, too: a prediction without them would begin at the wrong place.

    Each of the three parts verifies its step in one forward, and ends in the next.
    """
    params = SamplingParams(temperature=0, max_tokens=36)
    steps = AheadParams(steps=3, until="sentence", step_tokens=12)
    strategy = "prediction:fallback=,policy=fixed,k=16"
    with LLM("parlay-mini", dtype="float32", router_memory="off") as twin:
        before = sum(llm.engine.requests.stats().steps.values())
        output = llm.reason_ahead(PROMPT, params, steps, drafter=twin, strategy=strategy)
    assert (len(output.token_ids), output.rounds, output.accepted) == (36, 1, 3)
    assert sum(llm.engine.requests.stats().steps.values()) - before == 2


def test_a_text_that_is_not_to_be_stored_teaches_no_strategy(llm: LLM, small: LLM) -> None:
    strategy = "suffix-decoding:policy=fixed"
    prompt = "A song that nobody else asks for: "

    def steps() -> int:
        (output,) = llm.generate(prompt, GREEDY, strategy=strategy, store=False)
        return output.chosen.metrics.steps

    found = [steps()]
    for store in (False, True):
        llm.reason_ahead(prompt, GREEDY, SHORT, drafter=small, strategy=strategy, store=store)
        found.append(steps())
    before, private, stored = found
    assert stored < private == before


def test_what_a_judge_lets_stand_is_the_drafters(llm: LLM, small: LLM) -> None:
    asked: list[tuple[str, str]] = []

    def judge(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        asked.extend(pairs)
        return [answer] * len(pairs)

    (plain,) = llm.generate(PROMPT, GREEDY, strategy="none")
    answer = False
    output = llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=small, judge=judge)
    assert output.token_ids == plain.chosen.token_ids
    assert output.exactness is Exactness.LOSSY
    assert all(drafted != own for drafted, own in asked)
    answer = True
    output = llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=small, judge=judge)
    assert output.token_ids != plain.chosen.token_ids
    assert output.writers.count(SOURCE) > output.writers.count("target")
    assert output.accepted == output.drafted
    assert len(output.writers) == len(output.token_ids) == 40


def test_the_model_itself_may_judge(llm: LLM, small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens stand for yes and no, which the toy model does not have."""
    monkeypatch.setattr(steps_ahead, "words_of", lambda model: Words(40, 41))
    judged = AheadParams(until="sentence", step_tokens=5, judge="model")
    output = llm.reason_ahead(PROMPT, GREEDY, judged, drafter=small)
    assert output.exactness is Exactness.LOSSY
    assert len(output.token_ids) == 40
    monkeypatch.undo()
    with pytest.raises(ValueError, match="judge=model can't ask this model yes or no"):
        llm.reason_ahead(PROMPT, GREEDY, judged, drafter=small)


@pytest.mark.parametrize("room", [{"max_model_len": 24}, {"memory": 3}], ids=["context", "memory in pages"])
def test_where_the_drafter_has_no_room_the_target_goes_on_alone(llm: LLM, small: LLM, room: dict[str, Any]) -> None:
    (plain,) = llm.generate(PROMPT, GREEDY, strategy="none")
    if "memory" in room:
        room = {"memory": room["memory"] * small.runner.store.shape.page_bytes}  # type: ignore[attr-defined]
    with LLM("parlay-mini-draft", dtype="float32", router_memory="off", **room) as narrow:
        output = llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=narrow)
    assert output.token_ids == plain.chosen.token_ids
    assert output.drafted


def test_a_step_that_fails_is_told_and_nothing_stays_behind(
    llm: LLM, small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        raise ParlayError("the judge is away")

    with pytest.raises(ParlayError, match="the judge is away"):
        llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=small, judge=broken)
    with pytest.raises(ValueError, match="the judge has 0 answers for"):
        llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=small, judge=lambda pairs: [])
    step = llm.engine.step
    calls = iter(range(100))
    monkeypatch.setattr(llm.engine, "step", lambda: step() if next(calls) < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.reason_ahead(PROMPT, GREEDY, SHORT, drafter=small)
    monkeypatch.undo()
    assert llm.engine.idle
    assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))[0].chosen.token_ids


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(n=2), "n can't be used"),
        (SamplingParams(logprobs=1), "logprobs can't be used"),
        (SamplingParams(structured_outputs={"regex": "a"}), "structured_outputs can't be used"),  # type: ignore[arg-type]
    ],
)
def test_what_steps_cannot_honour_is_refused(llm: LLM, small: LLM, params: SamplingParams, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.reason_ahead(PROMPT, params, drafter=small)


def test_the_drafter_must_be_another_model_of_the_same_tokenizer(llm: LLM, small: LLM) -> None:
    with pytest.raises(ValueError, match=r"drafter: .* can't draft steps"):
        llm.reason_ahead(PROMPT, drafter=llm)
    for wrong in ({"steps": 0}, {"steps": 99}, {"step_tokens": 1}, {"until": "page"}, {"judge": "jury"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AheadParams(**wrong)  # type: ignore[arg-type]
