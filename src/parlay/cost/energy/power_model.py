"""Finds the power of decoding on this machine: measured if there are counters, else modelled for known devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parlay.cost.devices import power as known_power
from parlay.cost.devices import power_below
from parlay.cost.energy import EnergyMeter, MeasurementFailed, choose_meter, measure_power
from parlay.cost.energy.decoding import ROWS
from parlay.cost.energy.system_files import SYSTEM, package_limit
from parlay.options import UsageError
from parlay.types import Cost, OutOfRoom, ParlayError, PowerModel, Runner, Segment

_log = logging.getLogger(__name__)

AGAIN_SECONDS = 600.0
"""Seconds after which a failed measurement may be repeated."""
_SCRATCH = -1  # number of the sequence that is measured; the engine's sequences have no negative numbers


class PowerOf:
    """Calls `power_of` for a runner, but repeats a failed measurement only after `AGAIN_SECONDS`.

    No request is served during a measurement, which takes seconds. Other errors do not delay the next call, because
    their cause may be gone by then.
    """

    def __init__(self, runner: Runner, cost: Cost, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = partial(power_of, runner, cost), clock
        self._failure, self._until = "", 0.0

    def __call__(self) -> PowerModel:
        """Return the power. Raises as `power_of` does."""
        if self._failure and self._clock() < self._until:
            raise MeasurementFailed(self._failure)
        try:
            return self._ask()
        except MeasurementFailed as error:
            self._failure, self._until = str(error), self._clock() + AGAIN_SECONDS
            raise


def power_of(runner: Runner, cost: Cost) -> PowerModel:
    """Return watts, and joules per row, of a runner that is idle. A measurement takes some two seconds.

    Raises UsageError if the power can be neither measured nor modelled, and ParlayError if the counters or the memory
    do not allow the measurement.
    """
    meter = choose_meter(runner.spec.device)
    if meter.includes:
        return _measured(runner, meter)
    modelled = modelled_power(runner.spec.device, cost)
    if modelled is None:
        raise UsageError(
            f"the power of this machine is not known ({meter.reason}; and there are no figures for the device "
            f"{_name(runner.spec.device)}): remove goal=energy and power, or make a counter readable, as "
            "docs/explanation/energy.md says"
        )
    _log.warning("the power of decoding is %s, because %s", modelled, meter.reason)
    return modelled


def modelled_power(device: str, cost: Cost, system: Path = SYSTEM) -> PowerModel | None:
    """Model the power of a device: of processors by the power limit of their packages, else by the maker's figure.

    Returns None if neither is known.
    """
    many = ROWS[-1]
    row_seconds = max(0.0, (cost.forward(2 * many, 1) - cost.forward(many, 1)) / many)
    limit = package_limit(system) if device == "cpu" else None
    if limit is None:
        return known_power(_name(device), row_seconds)
    most, whose = limit
    return power_below(most, row_seconds, f"the {most:g} W that {whose} may draw")


def _measured(runner: Runner, meter: EnergyMeter) -> PowerModel:
    runner.open(_SCRATCH, (0,))
    try:
        if not runner.reserve(_SCRATCH, max(ROWS)):
            raise OutOfRoom(f"there is no room for {max(ROWS)} rows")
        return measure_power(meter, partial(_forward, runner))
    except OutOfRoom as error:
        raise ParlayError(f"the power of decoding can't be measured: {error}; free memory and try again") from error
    finally:
        runner.release(_SCRATCH)


def _forward(runner: Runner, rows: int) -> None:
    tokens = tuple(row % runner.spec.vocab_size for row in range(rows))
    out = runner.forward([Segment(_SCRATCH, tokens)])
    out.logits_RV[-1, 0].item()  # waits until an asynchronous device is done


def _name(device: str) -> str:
    """Return the name that the driver gives the device."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    import torch  # here, because processors need none

    return torch.cuda.get_device_name(int(number or 0))
