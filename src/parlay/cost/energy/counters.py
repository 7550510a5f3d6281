"""Finds the energy counters of a device by trying them, and makes a meter of them.

NVIDIA's GPUs (Volta and later) count the energy that they used since the driver was loaded. NVML, NVIDIA's management
library, reads this counter and updates it every 20 to 100 ms, so windows should last some seconds. Some GPUs average
power over part of the time only, so several windows are better than one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from parlay.cost.energy.meter import Counter, CounterError, EnergyMeter
from parlay.cost.energy.system_files import SYSTEM, machine_counters, package_counters

_MILLIJOULE = 1e-3


def choose_meter(device: str = "cpu", *, system: Path = SYSTEM) -> EnergyMeter:
    """Return a meter of the energy that decoding on a runner's ``device`` uses.

    For a GPU, the meter adds the energy of the host's processors. If no counter can be read, the meter measures seconds
    alone, and its ``reason`` says why.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return EnergyMeter(*machine_counters(system))
    if kind != "cuda":
        return EnergyMeter([], f"no counter of {kind} devices is known")
    gpu, about_gpu = nvml_counters(int(number or 0))
    if not gpu:
        return EnergyMeter([], about_gpu)  # users could take the processors' joules for the whole energy
    processors, about_processors = package_counters(system)  # no battery: its counter includes the GPU
    return EnergyMeter([*gpu, *processors], f"{about_gpu}; {about_processors}", settle=_synchronise)


def nvml_counters(device: int) -> tuple[list[Counter], str]:
    """Return the counter of GPU number ``device``, if any, and a line that names it or says why there is none."""
    if find_spec("pynvml") is None:
        return [], "no NVML for Python: pip install 'parlay[energy]'"
    import pynvml  # here, because it is optional

    return _counters(pynvml, device)


def _counters(nvml: ModuleType, device: int) -> tuple[list[Counter], str]:
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(device)
        name = nvml.nvmlDeviceGetName(handle)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return [], f"NVML counts no energy of GPU {device}: {error}"

    def read() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise CounterError(f"the counter of GPU {device} can't be read any more: {error}") from error

    return [Counter(f"GPU {device}", read, _MILLIJOULE)], f"NVML counter of GPU {device} ({name})"


def _synchronise() -> None:
    import torch  # here, because a processor's meter needs none

    torch.cuda.synchronize()
