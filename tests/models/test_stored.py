"""Stored weights: block sizes are those of the reference package, and bytes must fit the shape."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from parlay.models.dequantize import dense
from parlay.models.stored import FORMATS, Format, StoredTensor


@pytest.mark.parametrize("format", Format)
def test_blocks_are_as_large_as_the_reference_package_says(format: Format) -> None:
    kind = gguf.GGMLQuantizationType[format.name]
    assert FORMATS[kind.value] is format
    assert gguf.GGML_QUANT_SIZES[kind] == (format.block, format.block_bytes)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Q4_0 \[3, 64\] wants bytes \[3, 36\]"):
        StoredTensor(Format.Q4_0, (3, 64), torch.zeros(3, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no whole number of Q6_K blocks of 256"):
        StoredTensor(Format.Q6_K, (3, 64), torch.zeros(3, 34, dtype=torch.uint8))


def test_other_rows_make_another_tensor_of_the_same_format() -> None:
    stored = StoredTensor(Format.Q8_0, (4, 32), torch.arange(4 * 34, dtype=torch.uint8).view(4, 34))
    chosen = stored.with_rows(stored.data[[2, 0]])
    assert chosen.shape == (2, 32)
    assert chosen.data.equal(stored.data[[2, 0]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")
@pytest.mark.parametrize("format", Format)
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
