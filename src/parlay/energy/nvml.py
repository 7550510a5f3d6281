"""NVIDIA's counter of a GPU's energy since the driver was loaded (Volta and later), through NVML.

It is updated every 20 to 100 ms, so windows should last some seconds. Some GPUs average power over part of the time
only, so several windows are better than one.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from parlay.energy.meter import Counter, CounterError

_MILLIJOULE = 1e-3


def nvml_counters(device: int) -> tuple[list[Counter], str]:
    """The counter of GPU number ``device``, or none; and in one line what it is, or why there is none."""
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
