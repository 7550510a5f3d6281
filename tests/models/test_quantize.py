"""Matrices rounded to blocks: near what they were, and as other readers of GGUF files understand them."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from parlay.models.compiled.product import Product
from parlay.models.weights.fused import as_tensor
from parlay.models.weights.quantize import fits_blocks, in_q4_1, in_q5_0, in_q8_0
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads

ROUNDING = {in_q8_0: 1 / 254, in_q5_0: 1 / 32, in_q4_1: 1 / 30}
"""Half a step, as a share of the range of a block: of its largest number twice, and from its least to its largest.

Of Q5_0 a whole step: its codes reach one step less far on the side that does not hold the number of largest size."""


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + 0.3


@pytest.mark.parametrize("rounded", ROUNDING)
def test_no_number_moves_by_more_than_half_a_step(rounded: Callable[[Tensor], StoredTensor]) -> None:
    exact = matrix(7, 96)
    exact[2, 32:64] = 0  # a block of zeros
    exact[3, :32] = -1.5  # one without any range
    left = as_tensor(rounded(exact), torch.float32)
    blocks = exact.reshape(-1, 32)
    span = 2 * blocks.abs().amax(1) if rounded is in_q8_0 else blocks.amax(1) - blocks.amin(1)
    most = span * ROUNDING[rounded] + 2e-3 * blocks.abs().amax(1)  # scales have 11 bits
    assert ((left - exact).reshape(-1, 32).abs() <= most[:, None]).all()
    assert not left[2, 32:64].any()


@pytest.mark.parametrize("rounded", ROUNDING)
def test_other_readers_of_the_format_find_the_same_numbers(rounded: Callable[[Tensor], StoredTensor]) -> None:
    stored = rounded(matrix(5, 64))
    kind = gguf.GGMLQuantizationType[stored.format.name]
    theirs = gguf.dequantize(np.ascontiguousarray(stored.data.numpy()), kind)
    assert torch.equal(torch.from_numpy(theirs.copy()), as_tensor(stored, torch.float32))


@pytest.mark.parametrize("columns", [96, 50])
def test_a_product_alone_is_near_the_exact_one(columns: int) -> None:
    """In blocks of eight bits, or in bfloat16 where rows are no whole blocks."""
    weight, inputs = matrix(70, columns), matrix(3, columns, seed=1)
    assert fits_blocks(weight) == (columns == 96)
    found, exact = Product(weight)(inputs), inputs @ weight.T
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_a_product_of_many_rows_has_the_bits_of_its_rows_alone() -> None:
    """They are divided among threads."""
    product, inputs = Product(matrix(70, 96)), matrix(150, 96, seed=1)
    with threads.using(2):
        together = product(inputs)
    assert torch.equal(together, torch.cat([product(inputs[row : row + 1]) for row in range(len(inputs))]))


def test_a_product_alone_reads_no_rows_of_another_size() -> None:
    with pytest.raises((ValueError, RuntimeError), match="96"):
        Product(matrix(70, 96))(matrix(3, 64))
