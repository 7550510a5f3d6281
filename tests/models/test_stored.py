"""Stored weights: block sizes are those of the reference package, and bytes must fit the shape."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import FORMATS, Format
from parlay.models.weights.fused import rows_of
from parlay.models.weights.stored import StoredTensor


@pytest.mark.parametrize("format", FORMATS.values())
def test_blocks_are_as_large_as_the_reference_package_says(format: Format) -> None:
    kind = gguf.GGMLQuantizationType[format.name]
    assert FORMATS[kind.value] is format
    assert gguf.GGML_QUANT_SIZES[kind] == (format.block, format.block_bytes)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Q4_0 \[3, 64\] wants bytes \[3, 36\]"):
        StoredTensor(Format.Q4_0, (3, 64), torch.zeros(3, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not a whole number of Q6_K blocks of 256"):
        StoredTensor(Format.Q6_K, (3, 64), torch.zeros(3, 34, dtype=torch.uint8))


def test_rows_come_in_the_order_that_is_named() -> None:
    stored = StoredTensor(Format.Q8_0, (4, 32), torch.arange(4 * 34, dtype=torch.uint8).view(4, 34))
    turned = replace(stored, order=torch.tensor([2, 0, 3, 1]))
    assert turned.rows.equal(stored.data[[2, 0, 3, 1]])
    assert dense(turned).equal(dense(stored)[[2, 0, 3, 1]])


def test_chosen_rows_are_those_of_the_whole_in_any_order() -> None:
    stored = StoredTensor(Format.Q8_0, (4, 32), torch.arange(4 * 34, dtype=torch.uint8).view(4, 34))
    turned, ids = replace(stored, order=torch.tensor([2, 0, 3, 1])), torch.tensor([3, 0, 3])
    for whole in (stored, turned):
        assert rows_of(whole, ids).equal(dense(whole)[ids])
        assert rows_of(dense(whole, torch.bfloat16), ids).equal(dense(whole, torch.bfloat16)[ids].float())


@pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")
@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (300, 2)])
def test_blocks_stand_for_the_numbers_that_the_reference_package_reads(format: Format, rows: int, blocks: int) -> None:
    """Any bytes are a block; scales that are no numbers come out as such on both sides."""
    made = np.random.default_rng(rows).integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8)
    expected = gguf.dequantize(made, gguf.GGMLQuantizationType[format.name]).astype(np.float32)
    numbers = dense(StoredTensor(format, (rows, blocks * format.block), torch.from_numpy(made)))
    np.testing.assert_array_equal(numbers.numpy(), expected)


def test_numbers_are_rounded_once_to_the_wanted_type() -> None:
    made = torch.randint(0, 64, (5, 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = StoredTensor(Format.Q8_0, (5, 32), made)
    assert dense(stored, torch.bfloat16).equal(dense(stored).bfloat16())


def test_parts_make_up_the_whole() -> None:
    stored = StoredTensor(Format.Q8_0, (5, 32), torch.arange(5 * 34, dtype=torch.uint8).view(5, 34))
    assert [part.shape for part in stored.parts(2)] == [(2, 32), (2, 32), (1, 32)]
    assert torch.cat([part.rows for part in stored.parts(2)]).equal(stored.rows)
    turned = replace(stored, order=torch.tensor([4, 0, 3, 1, 2]))
    assert torch.cat([part.rows for part in turned.parts(2)]).equal(turned.rows)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells how much memory is a file's")
def test_pages_of_a_file_that_were_read_are_given_back(tmp_path: Path) -> None:
    """Otherwise a model would be in memory twice while it loads. What is read again comes from the file again."""
    path = tmp_path / "blocks"
    path.write_bytes(bytes(range(64)) * (1 << 18))
    with path.open("rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(file, dtype=torch.uint8)[4096 - 34 * 64 :][: 34 * (1 << 18)].view(-1, 34 * 64)
    stored = StoredTensor(Format.Q8_0, (len(data), 2048), data, file)
    sums = []
    for _ in range(2):
        with stored.reading():
            sums.append(int(stored.rows.sum()))
            resident = _file_backed()
        assert resident - _file_backed() > data.nbytes // 2
    assert sums[0] == sums[1]


def _file_backed() -> int:
    """Bytes of this process's memory that are a file's."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssFile")).split()[1]) * 1024
