"""Measures joules: a meter, and the hardware counters that it reads."""

from parlay.energy.choose import choose_meter
from parlay.energy.decoding import measure_power
from parlay.energy.meter import Counter, Energy, EnergyMeter, TooShort, Window, joules_per_token

__all__ = [
    "Counter",
    "Energy",
    "EnergyMeter",
    "TooShort",
    "Window",
    "choose_meter",
    "joules_per_token",
    "measure_power",
]
