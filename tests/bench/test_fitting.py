"""Thresholds of big-little are learned from examples for each kind of text, and the strategy has them by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.bench.fitting import ALL, Learned, fit, good_by_answer
from parlay.certificates.gate import chooses
from parlay.certificates.requirement import Floor
from parlay.llm.outputs import RequestOutput
from parlay.options import UsageError
from parlay.strategies.spelling import parse

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FLOOR = Floor(floor=0.75, agreement=0.9)
STORIES = [f"Once upon a time there were {number} kings who" for number in ("two", "three", "four", "five")]
STORIES += [f"Once upon a time there was a {one} who" for one in ("king", "cat", "dog", "bird")]
SUMS = [f"How many are {number} apples and 3 more?" for number in range(8)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", draft_model="parlay-mini-draft", router_memory="off") as model:
        yield model


def test_each_kind_has_its_own_thresholds(llm: LLM) -> None:
    """Answers to sums are all good here, however wild, those to other prompts only where they are the exact ones."""
    sums = {llm.token_ids(text) for text in SUMS}

    def is_good(answer: RequestOutput, exact: RequestOutput) -> bool:
        return exact.prompt_token_ids in sums or answer.chosen.token_ids == exact.chosen.token_ids

    prompts = [llm.token_ids(text) for text in (*STORIES, *SUMS)]
    params = replace(GREEDY, max_tokens=6)
    strategy, learned = fit(llm, prompts, parse("big-little"), FLOOR, params, is_good=is_good, progress=False)
    assert [one.kind for one in learned] == [ALL, "maths", "prose"]
    by_kind = {one.kind: one for one in learned}
    assert (by_kind["maths"].good, by_kind["maths"].examples) == (8, 8)
    assert all(one.good >= 0.75 * one.examples for one in learned)
    words = strategy.settings["rollback.by_kind"]
    assert isinstance(words, tuple)
    assert {word.partition("/")[0] for word in words} == {"maths", "prose"}
    output = llm.generate(STORIES[0], params, strategy=strategy)[0]
    assert output.chosen.strategy == str(strategy)
    assert parse(str(strategy)) == strategy


def test_each_lossy_answer_is_timed_beside_the_exact_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first turn of each setting, which is not kept, warms up."""
    asked: list[str] = []
    generate = LLM.generate

    def noted(self: LLM, prompts: list[int], *rest: Any, **more: Any) -> list[RequestOutput]:
        asked.append(str(more["strategy"]))
        return generate(self, prompts, *rest, **more)

    monkeypatch.setattr(LLM, "generate", noted)
    prompts = [llm.token_ids(text) for text in SUMS]
    params = replace(GREEDY, max_tokens=2)
    fit(llm, prompts, parse("big-little"), FLOOR, params, is_good=lambda one, other: False, progress=False)
    first = str(asked[0])
    assert asked[: 2 * 9] == [first, "none", "none", first] * 4 + [first, "none"]


def test_a_kind_is_decoded_by_its_thresholds(llm: LLM) -> None:
    """The small model never stops at sums, and never begins at stories."""
    strategy = "big-little:by_kind=maths/0+prose/1,rollback.by_kind=maths/99+prose/0"
    maths, prose = llm.generate([SUMS[0], STORIES[0]], GREEDY, strategy=strategy)
    assert maths.chosen.writers.count("big-little") > 6
    plain = llm.generate(STORIES[0], GREEDY, strategy="none")[0]
    assert prose.chosen.token_ids == plain.chosen.token_ids
    assert not prose.chosen.writers


def test_a_choice_that_is_slower_than_the_large_model_says_so() -> None:
    kept = Learned("maths", nats=2, fallback=0.4, good=9, examples=10, speed=0.87)
    told = "maths: fallback 0.4, 2 nats; 9 of 10 answers are good, 0.87 times the speed of exact decoding"
    assert kept.told("large") == f"{told}: slower than large alone"
    assert "alone" not in replace(kept, speed=1.2).told("large")


def test_only_settings_by_kind_ask_for_a_request_s_kind() -> None:
    """Inside another strategy too; a text that merely holds the word does not."""
    by_kind = ("auto", "big-little:by_kind=maths/0.5", "draft-model:rule=rollback,rollback.by_kind=code/1")
    assert all(map(chooses, (*by_kind, *map(parse, by_kind))))
    assert not any(map(chooses, ("none", "big-little", "draft-model:model=by_kind=1")))


def test_an_answer_may_be_worded_otherwise(llm: LLM) -> None:
    given = llm.generate("a", SamplingParams(temperature=0, max_tokens=1))[0]

    def output(text: str) -> RequestOutput:
        return replace(given, outputs=(replace(given.chosen, text=text),))

    is_good = good_by_answer("number")
    words = output("It is 12."), output("So 12.0"), output("It is 13.")
    assert [is_good(one, words[0]) for one in words] == [True, True, False]
    with pytest.raises(ValueError, match="the answer's pattern can't be used"):
        good_by_answer("(a+)+$")(output("a" * 40 + "b"), output("a"))


def test_what_has_no_thresholds_is_refused(llm: LLM) -> None:
    prompts = [llm.token_ids(text) for text in STORIES]
    with pytest.raises(ValueError, match="has no thresholds to learn"):
        fit(llm, prompts, parse("prompt-lookup"), FLOOR, GREEDY)
    with pytest.raises(ValueError, match="at least 8 examples"):
        fit(llm, prompts[:3], parse("big-little"), FLOOR, GREEDY)
    slips = ("", "+", "/1", "maths/1+", "maths/1+maths/1")
    for words in ("poetry/1", "maths", "maths/x", "maths/-1", "maths/nan", *slips):
        with pytest.raises(UsageError, match=r"^strategy big-little: rollback\.by_kind[^\n]*$"):
            llm.generate("a", GREEDY, strategy=f"big-little:rollback.by_kind={words}")
    with pytest.raises(UsageError, match="by_kind gives maths twice"):
        parse("big-little:by_kind=maths/0.5+code/1+maths/0.6")
    with pytest.raises(UsageError, match="at least 0 and at most 1"):
        llm.generate("a", GREEDY, strategy="big-little:by_kind=maths/2")
