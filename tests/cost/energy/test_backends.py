"""Which counters are read, on files and a driver that stand for machines; and what is said where there are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from parlay.cost.energy import CounterError, choose_meter
from parlay.cost.energy.counters import nvml_counters
from parlay.cost.energy.system_files import rapl_counters


def domain(system: Path, folder: str, name: str, microjoules: int = 0, most: int = 999_999) -> Path:
    place = system / "class/powercap" / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{most}\n")
    (place / "energy_uj").write_text(f"{microjoules}\n")
    return place / "energy_uj"


def test_packages_and_their_memory_are_added_up_and_parts_of_packages_are_not(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0")
    domain(tmp_path, "intel-rapl:0:0", "core")
    dram = domain(tmp_path, "intel-rapl:0:1", "dram")
    domain(tmp_path, "intel-rapl:1", "psys")
    domain(tmp_path, "intel-rapl-mmio:0", "package-0")  # the same package through another driver
    (tmp_path / "class/powercap/intel-rapl").mkdir()  # the control type itself
    meter = choose_meter("cpu", system=tmp_path)
    assert meter.includes == ("package-0", "dram of package-0")
    assert meter.reason == "RAPL counters of package-0, dram of package-0"
    window = meter.begin()
    package.write_text("300000")
    dram.write_text("50000")
    assert meter.end(window).joules == pytest.approx(0.35)


def test_a_domain_wraps_around_at_its_own_range(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0", microjoules=900_000)
    meter = choose_meter("cpu", system=tmp_path)
    window = meter.begin()
    package.write_text("100000")
    assert meter.end(window).joules == pytest.approx(0.2)


def test_a_virtual_machine_has_no_domains_and_says_so(tmp_path: Path) -> None:
    meter = choose_meter("cpu", system=tmp_path / "nowhere")
    energy = meter.end(meter.begin())
    assert energy.joules is None
    assert "no RAPL domains" in energy.reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_that_may_not_be_read_are_a_reason(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0").chmod(0)
    counters, reason = rapl_counters(tmp_path)
    assert not counters
    assert "can be read only by root" in reason


def test_counters_that_break_later_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0")
    meter = choose_meter("cpu", system=tmp_path)
    package.unlink()
    with pytest.raises(CounterError, match="the counter of package-0 can't be read any more"):
        meter.begin()
    driver = Driver(5_000)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    ((counter,), _) = nvml_counters(0)
    driver.millijoules = None
    with pytest.raises(CounterError, match="the counter of GPU 0 can't be read any more: Not Supported"):
        counter.read()


def test_counters_that_are_no_numbers_are_a_reason(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0").write_text("?")
    counters, reason = rapl_counters(tmp_path)
    assert not counters
    assert "can't be read" in reason


class Driver(ModuleType):
    """Stands for `pynvml`."""

    class NVMLError(Exception): ...

    def __init__(self, millijoules: int | None) -> None:
        super().__init__("pynvml")
        self.millijoules = millijoules
        self.__spec__ = type(sys.__spec__)("pynvml", None)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if self.millijoules is None:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def test_a_gpu_is_counted_in_millijoules_and_says_that_processors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(5_000)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    meter = choose_meter("cuda:1", system=tmp_path)
    assert meter.includes == ("GPU 1",)
    assert "NVML counter of GPU 1 (H200); no RAPL domains" in meter.reason
    window = meter.begin()
    driver.millijoules = 7_500
    assert meter.end(window).joules == pytest.approx(2.5)


def test_a_gpu_without_a_counter_is_a_reason_also_where_processors_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processors' part alone would look like the whole."""
    domain(tmp_path, "intel-rapl:0", "package-0")
    monkeypatch.setitem(sys.modules, "pynvml", Driver(None))
    meter = choose_meter("cuda", system=tmp_path)
    assert meter.includes == ()
    assert meter.reason == "NVML counts no energy of GPU 0: Not Supported"


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.cost.energy.counters.find_spec", lambda name: None)
    assert nvml_counters(0) == ([], "no NVML for Python: pip install 'parlay[energy]'")


def test_other_devices_have_no_counter_that_is_known() -> None:
    assert choose_meter("mps").reason == "no counter of mps devices is known"
