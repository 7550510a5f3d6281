"""What is kept of strategies stays small, whatever clients ask for; nothing goes that is in use or not yet written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from parlay import LLM, SamplingParams
from parlay.cost.measured import MeasuredCost
from parlay.drafters.resources import Resources
from parlay.options import Options, option
from parlay.strategies.built import KEPT, StrategyCache
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView

GONE: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedOptions(Options):
    number: int = option(0, "which one")


class Noted:
    """Drafts nothing, and notes when it is asked to write what it keeps."""

    needs = Needs()

    def __init__(self, resources: Resources, options: NotedOptions) -> None:
        resources.closing.callback(GONE.append, options.number)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


def name(number: int) -> str:
    return f"{__name__}:Noted:number={number}"


@pytest.fixture(autouse=True)
def _none_gone() -> None:
    GONE.clear()


def make(in_use: set[str]) -> StrategyCache:
    resources = Resources(8, lambda model: pytest.fail(f"{model} was opened"))
    return StrategyCache(resources, MeasuredCost(), in_use=lambda: in_use, kept=3)


def test_the_least_recently_used_goes_and_writes_what_it_keeps() -> None:
    strategies = make(set())
    first = strategies.get(name(1))
    strategies.get(name(2))
    strategies.get(name(3))
    assert strategies.get(name(1)) is first
    strategies.get(name(4))
    assert GONE == [2]
    assert strategies.get(name(1)) is first
    strategies.close()
    assert sorted(GONE) == [1, 2, 3, 4]


def test_what_is_in_use_stays_however_many_come_and_goes_later() -> None:
    in_use = {make(set()).get(name(number)).name for number in (1, 2, 3, 4)}
    strategies = make(in_use)
    kept = [strategies.get(name(number)) for number in (1, 2, 3, 4)]
    assert [strategies.get(name(number)) for number in (1, 2, 3, 4)] == kept
    assert not GONE
    in_use.clear()
    strategies.get(name(5))
    assert GONE == [1, 2]


def test_the_owners_own_strategy_stays_whatever_clients_ask_for() -> None:
    strategies = make(set())
    own = strategies.get(strategies.build_default(name(0)))
    for number in range(1, 9):
        strategies.get(name(number))
    assert strategies.get(name(0)) is own
    assert 0 not in GONE


def test_an_llm_forgets_strategies_and_writes_the_rest_when_it_closes() -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    with LLM("parlay-mini", strategy="none") as llm:
        texts = {llm.generate("A", params, strategy=name(number))[0].outputs[0].text for number in range(KEPT + 3)}
        assert len(texts) == 1
        assert GONE == [0, 1, 2, 3]  # "none" is the owner's own
        assert not llm.engine.requests.strategies()
    assert sorted(GONE) == list(range(KEPT + 3))
