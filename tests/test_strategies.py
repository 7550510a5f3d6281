"""A book of strategies stays small, whatever clients ask for, and nothing goes that is in use or not yet written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parlay import LLM, SamplingParams
from parlay.cost.measured import MeasuredCost
from parlay.drafters.entries import Resources
from parlay.strategies import KEPT, StrategyBook
from parlay.types import NO_DRAFT, Draft, Needs, Observation, View

GONE: list[int] = []


class Noted:
    """Drafts nothing, and notes when it is asked to write what it keeps."""

    needs = Needs()

    def __init__(self, resources: Resources, *, number: int = 0) -> None:
        resources.closing.callback(GONE.append, number)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


def name(number: int) -> str:
    return f"{__name__}:Noted:number={number}"


@pytest.fixture(autouse=True)
def _none_gone() -> None:
    GONE.clear()


def make(in_use: set[str]) -> StrategyBook:
    resources = Resources(8, lambda model: pytest.fail(f"{model} was opened"))
    return StrategyBook(resources, MeasuredCost(), in_use=lambda: in_use, kept=3)


def test_the_least_recently_used_goes_and_writes_what_it_keeps() -> None:
    book = make(set())
    first = book.get(name(1))
    book.get(name(2))
    book.get(name(3))
    assert book.get(name(1)) is first
    book.get(name(4))
    assert GONE == [2]
    assert book.get(name(1)) is first
    book.close()
    assert sorted(GONE) == [1, 2, 3, 4]


def test_what_is_in_use_stays_however_many_come_and_goes_later() -> None:
    in_use = {make(set()).get(name(number)).name for number in (1, 2, 3, 4)}
    book = make(in_use)
    kept = [book.get(name(number)) for number in (1, 2, 3, 4)]
    assert [book.get(name(number)) for number in (1, 2, 3, 4)] == kept
    assert not GONE
    in_use.clear()
    book.get(name(5))
    assert GONE == [1, 2]


def test_an_llm_forgets_strategies_and_writes_the_rest_when_it_closes() -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    with LLM("parlay-mini", strategy="none") as llm:
        texts = {llm.generate("A", params, strategy=name(number))[0].outputs[0].text for number in range(KEPT + 3)}
        assert len(texts) == 1
        assert GONE == [0, 1, 2]  # and "none" before them
        assert not llm.engine.strategies()
    assert sorted(GONE) == list(range(KEPT + 3))
