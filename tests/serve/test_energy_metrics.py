"""Joules of a server: measured of the machine, or modelled of each model's steps, and never one for the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from parlay.aio import AsyncLLM
from parlay.cost.energy import Counter, CounterError, EnergyMeter
from parlay.serve.observe.energy import ServerEnergy
from parlay.serve.registry import Registry
from parlay.types import PowerModel

POWER = PowerModel(30.0, 0.5, "modelled from the 50 W of a test")


def samples(energy: ServerEnergy) -> dict[str, float]:
    return {f"{each.name} {each.labels['source']} {each.labels['model']}": each.value
            for family in energy.collect() for each in family.samples}  # fmt: skip


def counted(readings: Iterator[int]) -> EnergyMeter:
    return EnergyMeter([Counter("package-0", lambda: next(readings), 1.0)], "a counter")


def test_measured_joules_are_the_machine_s_and_are_divided_by_tokens_since_then(engine: AsyncLLM) -> None:
    energy = ServerEnergy(Registry({"mini": engine}), lambda device: counted(iter([5, 5, 5, 65, 125])))
    energy.add(1000)  # before anything was measured
    assert samples(energy) == {"parlay_energy_joules_total measured ": 0.0}
    energy.add(30)
    assert samples(energy)["parlay_joules_per_token measured "] == pytest.approx(2.0)
    assert samples(energy) == {
        "parlay_energy_joules_total measured ": 120.0,
        "parlay_joules_per_token measured ": pytest.approx(4.0),
    }


def test_a_counter_that_breaks_stays_where_it_was(engine: AsyncLLM) -> None:
    readings = iter([0, 0, 40])

    def read() -> int:
        if (value := next(readings, None)) is None:
            raise CounterError("gone")
        return value

    meter = EnergyMeter([Counter("package-0", read, 1.0)], "a counter")
    energy = ServerEnergy(Registry({"mini": engine}), lambda device: meter)
    assert [samples(energy)["parlay_energy_joules_total measured "] for _ in range(3)] == [40.0, 40.0, 40.0]


def test_modelled_joules_are_those_of_a_model_s_steps_and_the_log_says_so_once(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("parlay.serve.observe.energy.modelled_power", lambda device, cost: POWER)
    energy = ServerEnergy(Registry({"mini": engine}), lambda device: EnergyMeter([], "root alone may read"))
    stats = engine.stats()
    expected = 30.0 * stats.step_seconds + 0.5 * stats.step_rows
    with caplog.at_level(logging.WARNING):
        found, _ = samples(energy), samples(energy)
    assert found["parlay_energy_joules_total modelled mini"] == pytest.approx(expected)
    if stats.committed_tokens:
        assert found["parlay_joules_per_token modelled mini"] == pytest.approx(expected / stats.committed_tokens)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"energy of mini: {POWER}, because root alone may read"


def test_where_nothing_is_known_nothing_is_shown(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.serve.observe.energy.modelled_power", lambda device, cost: None)
    assert samples(ServerEnergy(Registry({"mini": engine}), lambda device: EnergyMeter([], "no counters"))) == {}
