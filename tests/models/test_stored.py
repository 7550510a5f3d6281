"""Stored weights: block sizes are those of the reference package, and bytes must fit the shape."""

from __future__ import annotations

import gguf
import pytest
import torch

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
