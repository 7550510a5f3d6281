"""Measures joules: a meter, and the hardware counters that it reads."""

from parlay.cost.energy.counters import choose_meter
from parlay.cost.energy.decoding import MeasurementFailed, measure_power
from parlay.cost.energy.meter import Counter, CounterError, Energy, EnergyMeter, TooShort, Window, joules_per_token

__all__ = [
    "Counter",
    "CounterError",
    "Energy",
    "EnergyMeter",
    "MeasurementFailed",
    "TooShort",
    "Window",
    "choose_meter",
    "joules_per_token",
    "measure_power",
]
