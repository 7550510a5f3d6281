"""Counters of machines as Linux shows them; and what is said and assumed where root alone may read them."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from parlay.cost.devices import DECODING_SHARE
from parlay.cost.energy import CounterError, choose_meter
from parlay.cost.energy.power_model import modelled_power, power_of
from parlay.cost.energy.system_files import package_limit
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from tests.cost.energy.trees import (
    AMD_DESKTOP,
    AMD_SERVER_OF_OLD,
    INTEL_LAPTOP,
    INTEL_SERVER,
    TABLET,
    VIRTUAL_MACHINE,
    grow,
)


def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody read counters of joules, as on systems where root alone may; root reads everything in tests."""
    read = Path.read_text

    def refuse(path: Path, *arguments: object, **named: object) -> str:
        if path.name == "energy_uj" or path.name.endswith("_input"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", refuse)


@pytest.mark.parametrize(
    ("tree", "includes", "moved", "joules"),
    [
        (INTEL_LAPTOP, ("package-0",), {"class/powercap/intel-rapl:0/energy_uj": 6_671_149}, 150.0),
        (
            INTEL_SERVER,
            ("package-0", "dram of package-0", "package-1", "dram of package-1"),
            {
                "class/powercap/intel-rapl:0/energy_uj": 2_000_000,
                "class/powercap/intel-rapl:0:0/energy_uj": 2_500_000,
                "class/powercap/intel-rapl:1/energy_uj": 5_000_000,
                "class/powercap/intel-rapl:1:0/energy_uj": 4_250_000,
            },
            1.0 + 0.5 + 2.0 + 0.25,
        ),
        (AMD_DESKTOP, ("package-0",), {"class/powercap/intel-rapl:0/energy_uj": 989_012}, 1.0),
        (
            AMD_SERVER_OF_OLD,
            ("socket 0", "socket 1"),
            {"class/hwmon/hwmon2/energy3_input": 502_000_000, "class/hwmon/hwmon2/energy4_input": 603_000_000},
            5.0,
        ),
        (TABLET, ("battery cw2015-battery",), {"class/power_supply/cw2015-battery/charge_now": 2_999_000}, 14.4),
    ],
    ids=["Intel laptop", "Intel server", "AMD desktop", "AMD server", "tablet"],
)
def test_a_machine_s_joules(
    tmp_path: Path, tree: str, includes: tuple[str, ...], moved: dict[str, int], joules: float
) -> None:
    """The laptop's and the desktop's counters wrap around meanwhile."""
    meter = choose_meter("cpu", system=grow(tree, tmp_path))
    assert meter.includes == includes
    window = meter.begin()
    for file, value in moved.items():
        (tmp_path / file).write_text(f"{value}\n")
    assert meter.end(window).joules == pytest.approx(joules, rel=1e-3)


def test_a_battery_is_asked_where_processors_may_not_be_and_tells_nothing_while_it_charges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked(monkeypatch)
    battery = grow(INTEL_LAPTOP, tmp_path) / "class/power_supply/BAT0"
    meter = choose_meter("cpu", system=tmp_path)
    assert meter.reason == "the whole machine by battery BAT0"
    window = meter.begin()
    (battery / "energy_now").write_text("41220000")
    assert meter.end(window).joules == pytest.approx(36.0)
    (battery / "status").write_text("Charging")
    with pytest.raises(CounterError, match="BAT0 no longer drains"):
        meter.end(window)
    reason = choose_meter("cpu", system=tmp_path).reason
    assert "can be read only by root: allow users to read energy_uj" in reason
    assert "BAT0: a battery counts only while it drains" in reason


def test_a_battery_is_not_added_to_a_gpu_that_it_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parlay.cost.energy import Counter

    monkeypatch.setattr(
        "parlay.cost.energy.counters.nvml_counters", lambda number: ([Counter("GPU 0", lambda: 0, 1e-3)], "NVML")
    )
    locked(monkeypatch)
    meter = choose_meter("cuda:0", system=grow(INTEL_LAPTOP, tmp_path))
    assert meter.includes == ("GPU 0",)
    assert meter.reason.startswith("NVML; the counters in")


@pytest.mark.parametrize(("tree", "file"), [(INTEL_SERVER, "energy_uj"), (AMD_SERVER_OF_OLD, "energy3_input")])
def test_counters_without_permission_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str, file: str
) -> None:
    locked(monkeypatch)
    meter = choose_meter("cpu", system=grow(tree, tmp_path))
    assert not meter.includes
    assert f"can be read only by root: allow users to read {file}" in meter.reason
    assert "\n" not in meter.reason


def test_without_permission_watts_are_modelled_from_the_limit_that_everybody_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locked(monkeypatch)
    assert package_limit(grow(INTEL_SERVER, tmp_path)) == (410.0, "package-0, package-1")
    modelled = modelled_power("cpu", Steady(), tmp_path)
    assert modelled is not None
    assert modelled.watts == pytest.approx(DECODING_SHARE * 410)
    assert modelled.source == "modelled from the 410 W that package-0, package-1 may draw"
    few, many = (modelled.mean(rows, Steady().forward(rows, 0)) for rows in (1, 32))
    assert modelled.watts <= few <= many
    monkeypatch.setattr(
        "parlay.cost.energy.power_model.choose_meter", lambda device: choose_meter(device, system=tmp_path)
    )
    monkeypatch.setattr("parlay.cost.energy.power_model.package_limit", lambda system: package_limit(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert power_of(ToyRunner(RandomLogits(24), 24), Steady()) == modelled
    (line,) = [record.getMessage() for record in caplog.records]
    assert "modelled from the 410 W" in line
    assert "can be read only by root" in line


@pytest.mark.parametrize("tree", [VIRTUAL_MACHINE, AMD_DESKTOP], ids=["virtual machine", "AMD"])
def test_where_nobody_tells_a_limit_nothing_is_assumed(tmp_path: Path, tree: str) -> None:
    assert package_limit(grow(tree, tmp_path)) is None
    assert modelled_power("cpu", Steady(), tmp_path) is None


@pytest.mark.parametrize("limit", ["0", "", "none"])
def test_a_package_without_a_limit_tells_none(tmp_path: Path, limit: str) -> None:
    tree = grow(INTEL_SERVER, tmp_path)
    (tree / "class/powercap/intel-rapl:1/constraint_0_power_limit_uw").write_text(limit)
    assert package_limit(tree) is None
