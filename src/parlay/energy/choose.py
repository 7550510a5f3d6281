"""Finds the energy counters of a device by trying them, with a line that says which there are and why."""

from __future__ import annotations

from pathlib import Path

from parlay.energy.meter import EnergyMeter
from parlay.energy.nvml import nvml_counters
from parlay.energy.rapl import POWERCAP, rapl_counters


def choose_meter(device: str = "cpu", *, powercap: Path = POWERCAP) -> EnergyMeter:
    """A meter of what decoding on ``device`` (a runner's) uses: its GPU, and the processors that drive it.

    Where nothing can be read it measures seconds alone and says why.
    """
    kind, _, number = device.partition(":")
    processors, about_processors = rapl_counters(powercap)
    if kind == "cpu":
        return EnergyMeter(processors, about_processors)
    if kind != "cuda":
        return EnergyMeter([], f"no counter of {kind} devices is known")
    gpu, about_gpu = nvml_counters(int(number or 0))
    if not gpu:
        return EnergyMeter([], about_gpu)  # joules of the processors alone would look like those of everything
    return EnergyMeter([*gpu, *processors], f"{about_gpu}; {about_processors}", settle=_synchronise)


def _synchronise() -> None:
    import torch  # here, because a processor's meter needs none

    torch.cuda.synchronize()
