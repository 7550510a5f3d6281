"""Public module of energy: meters that count joules, and joules per token."""

from parlay.cost.energy import (
    Counter,
    CounterError,
    Energy,
    EnergyMeter,
    TooShort,
    Window,
    choose_meter,
    joules_per_token,
)

__all__ = [
    "Counter",
    "CounterError",
    "Energy",
    "EnergyMeter",
    "TooShort",
    "Window",
    "choose_meter",
    "joules_per_token",
]
