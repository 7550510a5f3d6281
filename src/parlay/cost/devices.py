"""Known devices by their makers' figures, to predict speeds on machines that users do not have. None were measured.

Rates are in TFLOP/s for dense weights with sums in float32; makers often quote twice that, for sparse weights. Memory
bandwidth is in GB/s, power in watts. A comment above each group names the sources: the makers' data sheets and
architecture papers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parlay.cost.overheads import Overheads
from parlay.cost.roofline import Machine
from parlay.types import FieldError, PowerModel

BANDWIDTH_SHARE, RATE_SHARE = 0.75, 0.6
"""Assumed: the share of the maker's figures that good kernels reach."""
DECODING_SHARE = 0.6
"""Assumed: the share of its maximum power that a board draws while memory bandwidth limits its speed. While arithmetic
limits it, the board draws all of it."""
_LAUNCH_SECONDS = 5e-6
_LAYER_LAUNCHES, _ATTEND_LAUNCHES, _FORWARD_LAUNCHES = 12, 6, 20
"""Assumed numbers of kernel launches, without CUDA graphs: per layer, per sequence in a layer, and per forward."""
_ENGINE = Overheads(step=2.5e-4, sequence=5e-5, drafted=5e-5, node=5e-6, level=2e-4, level_sequence=5e-5)
"""Assumed seconds that the engine itself takes in a step."""

_HOST_BANDWIDTH: Mapping[int, float] = MappingProxyType({3: 16, 4: 32, 5: 64})
"""GB/s of 16 lanes in one direction, by generation of PCI Express. Makers often quote twice that, for both directions.
"""

_WIDE = "float32", "float64"


@dataclass(frozen=True, slots=True)
class Device:
    """A device's figures. ``bandwidth`` of its memory is in GB/s.

    The rates are in TFLOP/s: ``half_rate`` for bfloat16 or float16, ``single_rate`` for float32. ``watts`` is the
    maximum power of the board, ``memory`` its memory in GB (10^9 bytes), and ``pcie`` the PCI Express generation of the
    16 lanes that join it to the host. A driver's name for the device contains one of the words in ``called``.
    """

    bandwidth: float
    half_rate: float
    single_rate: float
    watts: float
    memory: float
    pcie: int
    called: tuple[str, ...]

    @property
    def host_bandwidth(self) -> float:
        """GB/s of reads from the host's memory, over all 16 lanes."""
        return _HOST_BANDWIDTH[self.pcie]


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # NVIDIA Blackwell: DGX B200 data sheet (per GPU), GeForce RTX Blackwell architecture paper.
        "b200": Device(8000, 2250, 80, 1000, 180, 5, ("B200",)),
        "rtx-5090": Device(1792, 209.5, 104.8, 575, 32, 5, ("RTX 5090",)),
        # NVIDIA Hopper: H200 and H100 data sheets.
        "h200": Device(4800, 989, 67, 700, 141, 5, ("H200",)),
        "h100-sxm": Device(3350, 989, 67, 700, 80, 5, ("H100 80GB HBM3",)),
        "h100-pcie": Device(2000, 756, 51, 350, 80, 5, ("H100 PCIe",)),
        # NVIDIA Ada: L40S and L4 data sheets, Ada GPU architecture paper.
        "l40s": Device(864, 362, 91.6, 350, 48, 4, ("L40S",)),
        "l4": Device(300, 121, 30.3, 72, 24, 4, ("L4",)),
        "rtx-4090": Device(1008, 165.2, 82.6, 450, 24, 4, ("RTX 4090",)),
        # NVIDIA Ampere: A100 and A10 data sheets, GA102 architecture paper.
        "a100-80gb": Device(2039, 312, 19.5, 400, 80, 4, ("A100-SXM4-80GB",)),
        "a100-40gb": Device(1555, 312, 19.5, 400, 40, 4, ("A100-SXM4-40GB",)),
        "a10": Device(600, 125, 31.2, 150, 24, 4, ("A10",)),
        "rtx-3090": Device(936, 71, 35.6, 350, 24, 4, ("RTX 3090",)),
        # NVIDIA Turing: T4 data sheet; float16 only.
        "t4": Device(320, 65, 8.1, 70, 16, 3, ("T4",)),
        # AMD: Instinct MI300X data sheet.
        "mi300x": Device(5300, 1307, 163.4, 750, 192, 5, ("MI300X",)),
    }
)


_ALIASES = {
    "h100": "h100-sxm",
    "a100": "a100-80gb",
    **{name.removeprefix("rtx-"): name for name in DEVICES if name.startswith("rtx-")},
    **{name.replace("rtx-", "rtx"): name for name in DEVICES if name.startswith("rtx-")},
}
"""Shorter names that people use. A name that fits several versions means the largest one."""


def find_device(name: str) -> Device:
    """Return a device of the table by its name or alias. Raises ValueError for any other name."""
    lower = name.lower()
    device = DEVICES.get(_ALIASES.get(lower, lower))
    if device is None:
        known = ", ".join([*DEVICES, "h100", "a100"])
        raise FieldError("device", f"{name!r} is not known: name one of {known}, or measure this machine")
    return device


def power(called: str, row_seconds: float) -> PowerModel | None:
    """Model the power of the device that its driver calls ``called``; None if it is not in the table.

    ``row_seconds`` is the time that each further row adds to a forward of many rows.
    """
    for device in DEVICES.values():
        for name in device.called:
            if re.search(rf"\b{name}\b", called):
                return power_below(device.watts, row_seconds, f"the {device.watts:g} W of the board {name}")
    return None


def power_below(most: float, row_seconds: float, source: str) -> PowerModel:
    """Model the power of a device that draws at most ``most`` watts. ``source`` names the origin of this number.

    The device draws `DECODING_SHARE` of it in any forward. It draws the rest only while it computes a further row,
    which takes ``row_seconds``.
    """
    watts = DECODING_SHARE * most
    return PowerModel(watts, (most - watts) * row_seconds, f"modelled from {source}")


def machine(name: str, dtype: str) -> Machine:
    """Return the speeds that a device of the table is assumed to reach with weights of ``dtype``.

    Raises ValueError for a name that is not in the table.
    """
    device = find_device(name)
    rate = RATE_SHARE * 1e12 * (device.single_rate if dtype in _WIDE else device.half_rate)
    bandwidth = BANDWIDTH_SHARE * 1e9 * device.bandwidth
    return Machine(
        bandwidth=bandwidth,
        rate=rate,
        attention_bandwidth=bandwidth,
        attention_rate=rate,
        vector_bandwidth=bandwidth,
        layer_seconds=_LAYER_LAUNCHES * _LAUNCH_SECONDS,
        attend_seconds=_ATTEND_LAUNCHES * _LAUNCH_SECONDS,
        forward_seconds=_FORWARD_LAUNCHES * _LAUNCH_SECONDS,
        engine=_ENGINE,
    )
