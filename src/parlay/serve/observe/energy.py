"""A server's energy in joules, and per token: measured for the machine if it has counters, else estimated for each
model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parlay.aio import AsyncLLM
from parlay.cost.energy import CounterError, EnergyMeter, choose_meter
from parlay.cost.energy.power_model import modelled_power
from parlay.serve.hosted import Served
from parlay.serve.registry import Registry
from parlay.types import PowerModel

_LABELS = ("model", "source")
_MACHINE = ""  # the model label of measured joules, which counters can't attribute to a model

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Used:
    """Joules of a model or of the machine, and the output tokens of that time."""

    model: str
    source: str
    joules: float
    tokens: int


class _Device:
    """A device's energy counters, read relative to the first reading."""

    def __init__(self, meter: EnergyMeter) -> None:
        self.meter = meter
        self._window = meter.begin()
        self._joules = 0.0

    def joules(self) -> float:
        """Read the counters; the last value if no counter moves or one can't be read any more."""
        try:
            self._joules = self.meter.end(self._window).joules or 0.0
        except CounterError as error:
            _log.debug("%s", error)
        return self._joules


class ServerEnergy(Collector):
    """Measured since the first scrape; estimated from a model's steps since it was loaded.

    Measured joules are the whole machine's, including idle power and other programs. If a model's device has no
    readable counter, but a known power, the log says so once. ``choose`` makes a device's meter.
    """

    def __init__(self, models: Registry, choose: Callable[[str], EnergyMeter] = choose_meter) -> None:
        self._models, self._choose = models, choose
        self._devices: dict[str, _Device] = {}
        self._powers: WeakKeyDictionary[AsyncLLM, PowerModel | None] = WeakKeyDictionary()
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        """Count the output tokens of a finished request."""
        if self._devices:  # joules before the first scrape are not counted, either
            self._tokens += tokens

    def describe(self) -> list[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "parlay_energy_joules",
            "Energy, by source: measured for the whole machine, without a model, or estimated for a model's steps.",
            labels=_LABELS,
        )
        mean = GaugeMetricFamily(
            "parlay_joules_per_token", "Energy per token of the answers of that time.", labels=_LABELS
        )
        with self._lock:
            used = list(self._used(self._models.loaded))
        for each in used:
            total.add_metric([each.model, each.source], each.joules)
            if each.tokens:
                mean.add_metric([each.model, each.source], each.joules / each.tokens)
        yield from (total, mean)

    def _used(self, loaded: list[Served]) -> Iterator[_Used]:
        for model in loaded:
            if model.spec.device not in self._devices:
                self._devices[model.spec.device] = _Device(self._choose(model.spec.device))
            if not self._devices[model.spec.device].meter.includes and (power := self._power(model)) is not None:
                stats = model.service.stats()
                joules = power.watts * stats.step_seconds + power.row_joules * stats.step_rows
                yield _Used(model.name, "modelled", joules, stats.committed_tokens)
        if measured := [each for each in self._devices.values() if each.meter.includes]:
            yield _Used(_MACHINE, "measured", sum(each.joules() for each in measured), self._tokens)

    def _power(self, model: Served) -> PowerModel | None:
        """The assumed power of the model's device; None if unknown."""
        if model.service not in self._powers:
            device = model.spec.device
            power = self._powers[model.service] = modelled_power(device, model.llm.engine.cost)
            if power is not None:
                _log.warning("energy of %s: %s, because %s", model.name, power, self._devices[device].meter.reason)
        return self._powers[model.service]
