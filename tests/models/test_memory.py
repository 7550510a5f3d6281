"""How much memory a machine, or the control group it runs us in, is said to have free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parlay.models.opening import free_bytes

CPU = torch.device("cpu")


def machine(root: Path, files: dict[str, str]) -> int:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return free_bytes(CPU, root / "groups", root / "proc")


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8_192_000),
        ({"groups/memory.max": "max\n", "groups/memory.current": "5\n", "groups/memory.stat": ""}, 8_192_000),
        (
            {
                "groups/memory.max": "1000000\n",
                "groups/memory.current": "600000\n",
                "groups/memory.stat": "anon 1\ninactive_file 50000\n",
            },
            450_000,
        ),
        (
            {
                "groups/memory/memory.limit_in_bytes": "1000\n",
                "groups/memory/memory.usage_in_bytes": "1500\n",
                "groups/memory/memory.stat": "total_inactive_file 100\n",
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "version 2", "version 1, used up"],
)
def test_the_least_of_machine_and_group_is_what_can_be_had(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert machine(tmp_path, files) == free


def test_without_any_file_there_is_still_a_number(tmp_path: Path) -> None:
    assert free_bytes(CPU, tmp_path, tmp_path) > 0
