"""The decoder's products on AArch64, run by an emulator: exact within a block, the same alone and in company.

Skipped where there is no cross compiler or no emulator; `make check-arm` installs both.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from parlay.compiled import build
from parlay.models.weights.dequantize import dense
from parlay.models.weights.grids import packable
from tests.models.test_formats import BLOCKS, assert_product, rows, stored

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SETS = {"plain": "cortex-a53", "dotprod": "neoverse-n1"}
"""Instruction sets, each with a processor that has it and nothing wider."""
SHAPE, ROWS = (21, 512), 9

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER} and {EMULATOR}: make check-arm"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`products.c` with the whole core, as the package would build it on such a machine."""
    folder = tmp_path_factory.mktemp("arm")
    build.build_objects([COMPILER], "aarch64", folder)
    made = folder / "products"
    source = Path(__file__).parent / "arm" / "products.c"
    command = [COMPILER, "-std=gnu11", "-O1", "-static", "-pthread", "-w", "-I", str(build.SOURCES), "-o", str(made)]
    subprocess.run([*command, str(source), *map(str, sorted(folder.glob("*.o"))), "-lm"], check=True)
    return made


@pytest.mark.parametrize("name", SETS)
def test_products_of_every_format_are_exact_and_the_same_alone_and_in_company(program: Path, name: str) -> None:
    x_NK = rows(ROWS, SHAPE[1])
    weights = {format: stored(format, SHAPE) for format in BLOCKS}
    data = [packable(weight).contiguous().numpy().tobytes() for weight in weights.values()]
    asked = b"".join(
        struct.pack("<5q", format.number, *SHAPE, ROWS, len(each)) + each + x_NK.numpy().tobytes()
        for format, each in zip(weights, data, strict=True)
    )
    command = [EMULATOR, "-cpu", SETS[name], str(program), name]
    done = subprocess.run(command, input=asked, capture_output=True, check=True, timeout=120)
    made = torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).view(len(weights), 2, ROWS, SHAPE[0])
    for (format, weight), (together, alone) in zip(weights.items(), made, strict=True):
        assert torch.equal(together, alone), format
        assert_product(together, x_NK, dense(weight))


def test_the_widest_set_that_the_processor_has_is_taken(program: Path) -> None:
    """A processor without dot products has no such set, though the library has."""
    run = [subprocess.run([EMULATOR, "-cpu", cpu, str(program), "dotprod"], input=b"") for cpu in SETS.values()]
    assert [done.returncode for done in run] == [3, 0]
