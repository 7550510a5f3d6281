"""Processors' own counters (RAPL; AMD's too, from Linux 5.8 on), through the kernel's powercap files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parlay.energy.meter import Counter, CounterError

POWERCAP = Path("/sys/class/powercap")
_MICROJOULE = 1e-6
_WANTED = ("package", "dram")
"""Domains to add up. Core and uncore are parts of a package, and psys holds packages: they would count twice."""


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
