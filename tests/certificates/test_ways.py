"""Ways to decode are priced by the answers that they gave lately and by what runs beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from parlay.certificates.ways import FEW, TRIAL, Way, Ways
from parlay.testing.conformance.stage import Steady
from parlay.types import Cost, EngineStats, Exactness, Metrics

EXACT, FILLED = "auto", "denoise:k=4,selector=confidence"
WAYS = (Way(EXACT), Way(FILLED, 2.0))


class Priced(Steady):
    """A forward takes 1 ms, and 0.1 ms more for each row."""

    def forward(self, rows: int, context: int) -> float:
        return 1e-3 + 1e-4 * rows


@dataclass
class Model:
    """A model with so many requests under way."""

    beside: int = 0
    cost: Cost = field(default_factory=Priced)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=0, running=self.beside, preemptions=0, finished={}, cache_tokens_used=0, cache_tokens_total=0,
            prefix_tokens_asked=0, prefix_tokens_found=0, drafter_faults=0, step_tokens={}, steps={}, step_seconds=0.0,
            step_rows=0, committed_tokens=0,
        )  # fmt: skip


def took(strategy: str, *, tokens: int, steps: int, rows: int) -> Metrics:
    return Metrics(strategy, Exactness.LOSSY, prompt_tokens=8, completion_tokens=tokens, steps=steps, rows=rows * steps)


def told(model: Model) -> Ways:
    """One token per forward of one row, or four per forward of nine."""
    ways = Ways(model)
    for _ in range(FEW):
        ways.learn("prose", took(EXACT, tokens=40, steps=40, rows=1))
        ways.learn("prose", took(FILLED, tokens=40, steps=10, rows=9))
    return ways


def test_a_forward_costs_all_its_time_alone_and_its_rows_beside_others() -> None:
    alone, beside = told(Model()), told(Model(beside=4))
    assert alone.price(EXACT, "prose") == pytest.approx(1.1e-3)
    assert alone.price(FILLED, "prose") == pytest.approx(1.9e-3 / 4)
    assert beside.price(EXACT, "prose") == pytest.approx(1e-4)
    assert beside.price(FILLED, "prose") == pytest.approx(9e-4 / 4)
    assert (alone.cheapest(WAYS, "prose"), beside.cheapest(WAYS, "prose")) == (1, 0)


def test_without_answers_calibration_counts_and_each_kind_is_known_by_itself() -> None:
    ways = told(Model(beside=4))
    assert ways.price(FILLED, "code") is None
    assert ways.cheapest(WAYS, "code") == 1
    assert ways.cheapest((Way(EXACT), Way(FILLED, 0.5)), "code") == 0
    for _ in range(FEW):
        ways.learn("code", took(EXACT, tokens=40, steps=40, rows=1))
    assert ways.cheapest(WAYS, "code") == 1, "the other one is still expected to be twice as fast"


def test_what_is_dearer_is_tried_now_and_then_and_chosen_when_it_has_become_cheaper() -> None:
    ways = told(Model(beside=4))
    chosen = [ways.cheapest(WAYS, "prose") for _ in range(2 * TRIAL + 2)]
    assert chosen.count(1) == 2
    assert chosen[TRIAL] == 1
    for _ in range(40):
        ways.learn("prose", took(FILLED, tokens=40, steps=4, rows=9))
    assert ways.cheapest(WAYS, "prose") == 1


def test_strategies_that_clients_name_without_end_take_no_more_memory() -> None:
    ways = told(Model())
    for number in range(2000):
        ways.cheapest([Way(f"auto:power={number}"), Way(FILLED)], "prose")
    assert len(ways._times_passed) < 300
    assert ways.price(FILLED, "prose") is not None
