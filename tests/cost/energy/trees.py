"""Energy files in /sys of some kinds of machine, as Linux's documents describe them, with made-up values.

Each line is a file's path and its content.
"""

from __future__ import annotations

from pathlib import Path

INTEL_LAPTOP = """
class/powercap/intel-rapl/enabled 1
class/powercap/intel-rapl:0/name package-0
class/powercap/intel-rapl:0/energy_uj 262000000000
class/powercap/intel-rapl:0/max_energy_range_uj 262143328850
class/powercap/intel-rapl:0/constraint_0_name long_term
class/powercap/intel-rapl:0/constraint_0_power_limit_uw 28000000
class/powercap/intel-rapl:0/constraint_1_name short_term
class/powercap/intel-rapl:0/constraint_1_power_limit_uw 64000000
class/powercap/intel-rapl:0:0/name core
class/powercap/intel-rapl:0:0/energy_uj 140000000000
class/powercap/intel-rapl:0:0/max_energy_range_uj 262143328850
class/powercap/intel-rapl:0:1/name uncore
class/powercap/intel-rapl:0:1/energy_uj 9000000000
class/powercap/intel-rapl:0:1/max_energy_range_uj 262143328850
class/powercap/intel-rapl:1/name psys
class/powercap/intel-rapl:1/energy_uj 400000000000
class/powercap/intel-rapl:1/max_energy_range_uj 262143328850
class/powercap/intel-rapl-mmio:0/name package-0
class/powercap/intel-rapl-mmio:0/energy_uj 262000000000
class/powercap/intel-rapl-mmio:0/max_energy_range_uj 262143328850
class/power_supply/AC/type Mains
class/power_supply/AC/online 0
class/power_supply/BAT0/type Battery
class/power_supply/BAT0/scope System
class/power_supply/BAT0/status Discharging
class/power_supply/BAT0/energy_now 41230000
class/power_supply/hidpp_battery_0/type Battery
class/power_supply/hidpp_battery_0/scope Device
class/power_supply/hidpp_battery_0/status Discharging
"""

INTEL_SERVER = """
class/powercap/intel-rapl:0/name package-0
class/powercap/intel-rapl:0/energy_uj 1000000
class/powercap/intel-rapl:0/max_energy_range_uj 262143328850
class/powercap/intel-rapl:0/constraint_0_name long_term
class/powercap/intel-rapl:0/constraint_0_power_limit_uw 205000000
class/powercap/intel-rapl:0:0/name dram
class/powercap/intel-rapl:0:0/energy_uj 2000000
class/powercap/intel-rapl:0:0/max_energy_range_uj 65712999613
class/powercap/intel-rapl:1/name package-1
class/powercap/intel-rapl:1/energy_uj 3000000
class/powercap/intel-rapl:1/max_energy_range_uj 262143328850
class/powercap/intel-rapl:1/constraint_0_name long_term
class/powercap/intel-rapl:1/constraint_0_power_limit_uw 205000000
class/powercap/intel-rapl:1:0/name dram
class/powercap/intel-rapl:1:0/energy_uj 4000000
class/powercap/intel-rapl:1:0/max_energy_range_uj 65712999613
"""

AMD_DESKTOP = """
class/powercap/intel-rapl:0/name package-0
class/powercap/intel-rapl:0/energy_uj 65532600000
class/powercap/intel-rapl:0/max_energy_range_uj 65532610987
class/powercap/intel-rapl:0:0/name core
class/powercap/intel-rapl:0:0/energy_uj 700000
class/powercap/intel-rapl:0:0/max_energy_range_uj 65532610987
"""

AMD_SERVER_OF_OLD = """
class/hwmon/hwmon0/name k10temp
class/hwmon/hwmon0/temp1_input 41000
class/hwmon/hwmon2/name amd_energy
class/hwmon/hwmon2/energy1_label Ecore000
class/hwmon/hwmon2/energy1_input 11000000
class/hwmon/hwmon2/energy2_label Ecore001
class/hwmon/hwmon2/energy2_input 12000000
class/hwmon/hwmon2/energy3_label Esocket0
class/hwmon/hwmon2/energy3_input 500000000
class/hwmon/hwmon2/energy4_label Esocket1
class/hwmon/hwmon2/energy4_input 600000000
"""

TABLET = """
class/power_supply/cw2015-battery/type Battery
class/power_supply/cw2015-battery/status Discharging
class/power_supply/cw2015-battery/charge_now 3000000
class/power_supply/cw2015-battery/voltage_now 4000000
"""

VIRTUAL_MACHINE = """
class/hwmon/hwmon0/name acpitz
class/power_supply/AC/type Mains
"""


def grow(tree: str, system: Path) -> Path:
    """Write a tree's files under a folder that stands for /sys, and return it."""
    for line in tree.strip().splitlines():
        name, _, content = line.partition(" ")
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(f"{content}\n")
    return system
