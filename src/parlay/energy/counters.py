"""Energy counters of processors and GPUs, found by trying them.

Processors count by themselves (RAPL; AMD's too, from Linux 5.8 on), and Linux shows it in powercap files. NVIDIA's GPUs
count since the driver was loaded (Volta and later), and NVML says how much. NVML updates it every 20 to 100 ms, so
windows should last some seconds. Some GPUs average power over part of the time only, so several windows are better than
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from parlay.energy.meter import Counter, CounterError, EnergyMeter

POWERCAP = Path("/sys/class/powercap")
_MICROJOULE = 1e-6
_MILLIJOULE = 1e-3
_WANTED = ("package", "dram")
"""Domains to add up. Core and uncore are parts of a package, and psys holds packages: they would count twice."""


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


def rapl_counters(powercap: Path = POWERCAP) -> tuple[list[Counter], str]:
    """A counter for each package and its memory, or none; and one line that says which, or why there is none."""
    domains = list(_domains(powercap))
    if not domains:
        return [], f"no RAPL domains in {powercap}, as in most virtual machines"
    try:
        counters = [_counter(name, folder) for name, folder in domains]
    except PermissionError:
        return [], f"the counters in {powercap} are readable by root alone: grant reading of energy_uj"
    except (OSError, ValueError) as error:
        return [], f"the counters in {powercap} can't be read: {error}"
    return counters, f"RAPL counters of {', '.join(counter.name for counter in counters)}"


def _domains(powercap: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of each wanted domain; the same package seen through two drivers (-mmio) counts once."""
    seen: set[str] = set()
    for folder in sorted(powercap.glob("*-rapl*:*"), key=lambda folder: ("-mmio" in folder.name, folder.name)):
        try:
            kind = (folder / "name").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        package = folder.name.split(":")[1]
        name = kind if kind.startswith("package") else f"{kind} of package-{package}"
        if kind.startswith(_WANTED) and name not in seen:
            seen.add(name)
            yield name, folder


def _counter(name: str, folder: Path) -> Counter:
    path = folder / "energy_uj"

    def read() -> int:
        try:
            return _number(path)
        except (OSError, ValueError) as error:
            raise CounterError(f"the counter of {name} can't be read any more: {error}") from error

    _number(path)  # refused now rather than in the middle of a measurement
    return Counter(name, read, _MICROJOULE, _number(folder / "max_energy_range_uj"))


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))


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


def _synchronise() -> None:
    import torch  # here, because a processor's meter needs none

    torch.cuda.synchronize()
