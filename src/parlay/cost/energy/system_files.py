"""Reads energy counters from Linux's files: of processors (RAPL, hwmon drivers), and of a battery that drains.

Intel's and AMD's processors count their own energy; Linux shows AMD's counts from version 5.8 on. The counts are in
powercap files, which on most systems only root may read. For AMD's sockets, hwmon drivers show them, too. A battery
counts the energy of the whole machine. Linux's documentation gives the formats in
Documentation/ABI/testing/sysfs-class-powercap, sysfs-class-power and hwmon/amd_energy.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from parlay.cost.energy.meter import Counter, CounterError

SYSTEM = Path("/sys")
_POWERCAP, _HWMON, _SUPPLIES = "class/powercap", "class/hwmon", "class/power_supply"
_MICROJOULE = 1e-6
_MICROWATT = 1e-6
_MICROWATT_HOUR = 3.6e-3  # joules
_WANTED = ("package", "dram")
"""Beginnings of the names of the RAPL domains that are added up. Other domains would be counted twice: core and uncore
are parts of a package, and psys contains the packages."""
_SOCKETS = {"amd_energy": "Esocket"}
"""How the labels of whole sockets begin, for each hwmon driver that counts joules. A core is part of a socket and would
be counted twice."""

Found = tuple[list[Counter], str]
"""Counters, and one line that names them or says why there are none. Systems without such files have an empty line."""


def machine_counters(system: Path = SYSTEM) -> Found:
    """Find counters of the energy that a model on the processor uses: the packages', else a draining battery's."""
    return _first([package_counters, battery_counters], system)


def package_counters(system: Path = SYSTEM) -> Found:
    """Find counters of the processors' packages and their memory: RAPL's, else the hwmon drivers'."""
    counters, reason = _first([rapl_counters, hwmon_counters], system)
    return counters, reason or f"no RAPL domains in {system / _POWERCAP}, as in most virtual machines"


def _first(kinds: Sequence[Callable[[Path], Found]], system: Path) -> Found:
    """Return the counters of the first kind that can be read, else no counters and the reasons of every kind."""
    reasons = []
    for find in kinds:
        counters, reason = find(system)
        if counters:
            return counters, reason
        reasons.append(reason)
    return [], "; ".join(filter(None, reasons))


def rapl_counters(system: Path = SYSTEM) -> Found:
    """Open a RAPL counter for each package, and one for its memory."""
    return _opened("RAPL counters", system / _POWERCAP, list(_domains(system)))


def hwmon_counters(system: Path = SYSTEM) -> Found:
    """Open a counter for each socket whose hwmon driver counts joules."""
    return _opened("hwmon counters", system / _HWMON, list(_sockets(system)))


def battery_counters(system: Path = SYSTEM) -> Found:
    """Open a counter for each battery that drains. Together they count the energy of the whole machine.

    The counts change rarely, so a measurement must last minutes.
    """
    batteries = [place for place in sorted((system / _SUPPLIES).glob("*")) if _is_battery(place)]
    draining = [place for place in batteries if _text(place / "status") == "Discharging"]
    if batteries and not draining:
        return [], f"{', '.join(place.name for place in batteries)}: a battery counts only while it drains"
    try:
        counters = [_battery(place) for place in draining]
    except (OSError, ValueError) as error:
        return [], f"the battery can't be read: {error}"
    names = ", ".join(counter.name for counter in counters)
    return counters, f"the whole machine by {names}" if counters else ""


def package_limit(system: Path = SYSTEM) -> tuple[float, str] | None:
    """Return the watts that all packages together may draw for long, and the packages' names.

    Returns None if Linux does not know the limit of every package. Every user may read the limits, even where only root
    may read the counters.
    """
    limits = [
        (_limit(place.with_name(place.name.replace("_name", "_power_limit_uw"))) * _MICROWATT, name)
        for name, folder in _domains(system)
        if name.startswith("package")
        for place in folder.glob("constraint_*_name")
        if _text(place) == "long_term"
    ]
    if not limits or not all(watts for watts, _ in limits):
        return None
    return sum(watts for watts, _ in limits), ", ".join(name for _, name in limits)


def _limit(path: Path) -> int:
    """Read a limit in microwatts; 0 if no limit is set or the kernel has no data."""
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _domains(system: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of each wanted domain. A package that a second driver (-mmio) also shows comes once."""
    seen: set[str] = set()
    folders = (system / _POWERCAP).glob("*-rapl*:*")
    for folder in sorted(folders, key=lambda folder: ("-mmio" in folder.name, folder.name)):
        kind, package = _text(folder / "name"), folder.name.split(":")[1]
        name = kind if kind.startswith("package") else f"{kind} of package-{package}"
        if kind.startswith(_WANTED) and name not in seen:
            seen.add(name)
            yield name, folder


def _sockets(system: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and file of each socket's counter."""
    for driver in sorted((system / _HWMON).glob("hwmon*")):
        if begins := _SOCKETS.get(_text(driver / "name")):
            for label in sorted(driver.glob("energy*_label")):
                if _text(label).startswith(begins):
                    yield f"socket {_text(label).removeprefix(begins)}", label.with_name(_input(label.name))


def _input(label: str) -> str:
    return label.replace("_label", "_input")


def _opened(what: str, folder: Path, places: Iterable[tuple[str, Path]]) -> Found:
    """Open counters of microjoules. Each place is a name and a path: the folder of a domain, or a file."""
    try:
        counters = [_counter(name, place) for name, place in places]
    except PermissionError as error:
        file = Path(error.filename).name
        return [], f"the counters in {folder} can be read only by root: allow users to read {file}"
    except (OSError, ValueError) as error:
        return [], f"the counters in {folder} can't be read: {error}"
    return counters, f"{what} of {', '.join(counter.name for counter in counters)}" if counters else ""


def _counter(name: str, place: Path) -> Counter:
    domain = place.is_dir()
    path = place / "energy_uj" if domain else place

    def read() -> int:
        try:
            return _number(path)
        except (OSError, ValueError) as error:
            raise CounterError(f"the counter of {name} can't be read any more: {error}") from error

    _number(path)  # fail now rather than in the middle of a measurement
    return Counter(name, read, _MICROJOULE, _number(place / "max_energy_range_uj") if domain else None)


def _is_battery(place: Path) -> bool:
    """Tell whether a power supply is a battery that feeds the machine, rather than a device such as a mouse."""
    return _text(place / "type") == "Battery" and _text(place / "scope") != "Device"


def _battery(place: Path) -> Counter:
    """Open a battery's counter of microwatt-hours, or of microampere-hours, which the present voltage converts.

    The file counts the energy that is left, so the counter returns its negative.
    """
    name, path, unit = f"battery {place.name}", place / "energy_now", _MICROWATT_HOUR
    if not path.exists():
        path, unit = place / "charge_now", _MICROWATT_HOUR * _number(place / "voltage_now") * 1e-6

    def read() -> int:
        if _text(place / "status") != "Discharging":
            raise CounterError(f"{name} no longer drains, so it can't measure energy")
        try:
            return -_number(path)
        except (OSError, ValueError) as error:
            raise CounterError(f"the counter of {name} can't be read any more: {error}") from error

    read()
    return Counter(name, read, unit)


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
