"""Weights in blocks: packed without changing a value, multiplied exactly within a block, the same alone and in company.

On every instruction set that this processor has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.compiled.build import LIBRARY, NAMES
from parlay.compiled.library import SWITCH, load
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import Format
from parlay.models.weights.grids import packable
from parlay.models.weights.stored import StoredTensor

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the package was installed without a C compiler")

SHAPES = [(37, 576), (64, 896), (5, 256), (33, 1536), (130, 512)]
"""Outputs that fill panels and that do not, by inputs that are multiples of 256 and that are not."""
BLOCKS = [format for format in Format if format.plain is None]
INT8 = 24
HALVES = {
    Format.Q6_K: (104,),
    Format.Q3_K: (54,),
    Format.Q2_K: (40, 41),
    Format.MXFP4: (),
    Format.IQ1_M: (),
} | dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0, 1))
"""Where a block holds numbers in half precision, counted in 16 bits; the first where nothing is said."""


@pytest.fixture(scope="module", params=NAMES)
def core(request: pytest.FixtureRequest) -> Iterator[structs.Core]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, request.param)
        found = load()
        if found.name.decode() != request.param:
            pytest.skip(f"no {request.param} here")
        yield found


def shapes_of(format: Format) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if shape[1] % format.block == 0]


def stored(format: Format, shape: tuple[int, int], seed: int = 0) -> StoredTensor:
    """Random blocks; scales are finite, some negative, some zero and some subnormal."""
    draw = np.random.default_rng(seed)
    if format.plain is not None:
        numbers = torch.from_numpy(draw.standard_normal(shape).astype(np.float32)).to(format.plain)
        return StoredTensor(format, shape, numbers.view(torch.uint8))
    count = shape[0] * shape[1] // format.block
    blocks = draw.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
    for place in HALVES.get(format, (0,)):
        scales = (draw.standard_normal(count) * 0.01).astype(np.float16)
        scales[:3] = 0.0, -0.0, 3e-7
        blocks[:, 2 * place : 2 * place + 2] = scales[:, None].view(np.uint8)
    if format is Format.MXFP4:
        blocks[:, 0] = draw.integers(110, 130, count)
        blocks[:3, 0] = 0, 1, 2
    if format is Format.IQ1_M:
        put_scattered(blocks, (draw.standard_normal(count) * 0.01).astype(np.float16))
    return StoredTensor(format, shape, torch.from_numpy(blocks).view(shape[0], -1))


def put_scattered(blocks: np.ndarray, scales: np.ndarray) -> None:
    """Scales of IQ1_M: four bits in the highest of each of the last four words."""
    words = blocks.view(np.uint16)
    for place in range(4):
        words[:, 24 + place] = words[:, 24 + place] & 0x0FFF | (scales.view(np.uint16) >> 4 * place & 15) << 12


@dataclass
class Packed:
    """A matrix as the library holds it."""

    core: structs.Core
    linear: structs.Linear
    memory: tuple[Tensor, ...]

    def read(self) -> Tensor:
        """Row by row, as embeddings are."""
        values = torch.empty(self.linear.outputs, self.linear.inputs)
        for row in range(len(values)):
            self.core.read(ctypes.byref(self.linear), row, values[row].data_ptr())
        return values

    def multiply(self, x_NK: Tensor) -> Tensor:
        """``[N, out]``."""
        x_NK = x_NK.contiguous()
        y = torch.empty(len(x_NK), self.linear.outputs)
        self.core.multiply(ctypes.byref(self.linear), x_NK.data_ptr(), len(x_NK), y.data_ptr())
        return y


def pack(core: structs.Core, kind: int, rows: Tensor, shape: tuple[int, int], scale: Tensor | None = None) -> Packed:
    out, inputs = shape
    panels = -(-out // int(core.panel))
    memory = torch.zeros(panels * int(core.panel_bytes(kind, inputs)) + 4096, dtype=torch.uint8)
    core.pack(kind, rows.data_ptr(), out, inputs, memory.data_ptr())
    steps = torch.ones(panels * int(core.panel))
    if scale is not None:
        steps[:out] = scale
    linear = structs.Linear(panels=memory.data_ptr(), inputs=inputs, outputs=out, kind=kind)
    if scale is not None:
        linear.scale = steps.data_ptr()
    return Packed(core, linear, (memory, steps))


def packed(core: structs.Core, weight: StoredTensor) -> Packed:
    return pack(core, weight.format.number, packable(weight).contiguous(), (weight.shape[0], weight.shape[1]))


def rows(count: int, inputs: int, seed: int = 1) -> Tensor:
    """Activations as they are: most small, some large."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy((draw.standard_t(3, (count, inputs)) * 2).astype(np.float32))


def codes(x_NK: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Round inputs as products do: whole numbers of eight bits, and what they are worth, each ``[N, K]``."""
    x = x_NK.numpy()
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(blocks * inverse).astype(np.int64)
    worth = np.broadcast_to(largest / np.float32(127), whole.shape)
    return whole.reshape(len(x), -1)[:, : x.shape[1]], worth.reshape(len(x), -1)[:, : x.shape[1]]


def assert_product(y: Tensor, x_NK: Tensor, weight: Tensor) -> None:
    """Within what adding up in float32 may lose, of the same codes times exact weights in float64."""
    whole, worth = codes(x_NK)
    x, w = whole * worth.astype(np.float64), weight.double().numpy()
    assert (np.abs(y.numpy() - x @ w.T) <= 1e-6 * (np.abs(x) @ np.abs(w.T)) + 1e-30).all()


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_packing_changes_no_value(core: structs.Core, format: Format) -> None:
    for shape in shapes_of(format):
        weight = stored(format, shape)
        read, expected = packed(core, weight).read(), dense(weight)
        assert torch.equal(read.view(torch.int32) * (read != 0), expected.view(torch.int32) * (expected != 0)), shape


@pytest.mark.parametrize("format", [Format.F32, Format.F16, Format.BF16], ids=str)
def test_embeddings_of_plain_numbers_are_read_where_they_lie(core: structs.Core, format: Format) -> None:
    weight = stored(format, (7, 50))
    linear = structs.Linear(panels=weight.data.data_ptr(), inputs=50, outputs=7, kind=format.number)
    assert torch.equal(Packed(core, linear, (weight.data,)).read(), dense(weight))


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_products_are_those_of_the_codes(core: structs.Core, format: Format) -> None:
    for shape in shapes_of(format):
        weight, x_NK = stored(format, shape, seed=2), rows(5, shape[1])
        assert_product(packed(core, weight).multiply(x_NK), x_NK, dense(weight))


@pytest.mark.parametrize("format", [Format.F32, Format.F16, Format.BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_plain_numbers(core: structs.Core, format: Format, shape: tuple[int, int]) -> None:
    """Weights of sixteen bits count in full; bfloat16 rounds its inputs likewise."""
    weight, x_NK = stored(format, shape, seed=3), rows(9, shape[1])
    x, w = (x_NK.bfloat16() if format is Format.BF16 else x_NK).double(), dense(weight).double()
    y = packed(core, weight).multiply(x_NK)
    assert ((y - x @ w.T).abs() <= 2e-6 * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("shape", [(37, 576), (19, 50), (64, 1000)], ids=str)
def test_int8_weights_count_in_full(core: structs.Core, shape: tuple[int, int]) -> None:
    """Up to -128, and in rows that end within a block."""
    draw = np.random.default_rng(0)
    numbers = torch.from_numpy(draw.integers(-128, 128, shape, dtype=np.int8))
    numbers[:, ::3], numbers[:, 1::7] = -128, 127
    scale, x_NK = torch.from_numpy(draw.random(shape[0], dtype=np.float32)), rows(6, shape[1])
    assert_product(pack(core, INT8, numbers, shape, scale).multiply(x_NK), x_NK, numbers * scale[:, None].double())


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_the_largest_codes_do_not_saturate(core: structs.Core, format: Format) -> None:
    """Neighbours that all have the largest code, against inputs that are all as large as can be."""
    shape = (33, 512)
    data = stored(format, shape).data.numpy().copy()
    blocks = data.reshape(-1, format.block_bytes)
    places = [2 * place + byte for place in HALVES.get(format, (0,)) for byte in (0, 1)]
    kept = blocks[:, places].copy()
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        blocks[:] = fill
        blocks[:, places] = kept
        if format is Format.MXFP4:
            blocks[:, 0] = 120
        if format is Format.IQ1_M:
            put_scattered(blocks, np.full(len(blocks), 0.01, dtype=np.float16))
        weight = StoredTensor(format, shape, torch.from_numpy(data))
        for sign in (1.0, -1.0):
            x_NK = torch.full((3, shape[1]), sign * 5.0)
            assert_product(packed(core, weight).multiply(x_NK), x_NK, dense(weight))


@pytest.mark.parametrize("format", list(Format), ids=str)
def test_rows_have_the_same_bits_in_any_company(core: structs.Core, format: Format) -> None:
    shape = (70, 768)
    matrix, x_NK = packed(core, stored(format, shape, seed=4)), rows(40, shape[1])
    whole = matrix.multiply(x_NK)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 31, 33):
        for start in (0, 40 - count):
            assert torch.equal(matrix.multiply(x_NK[start : start + count]), whole[start : start + count])
    order = torch.from_numpy(np.random.default_rng(5).permutation(40))
    assert torch.equal(matrix.multiply(x_NK[order]), whole[order])


@pytest.mark.parametrize("format", BLOCKS, ids=str)
def test_a_row_that_holds_no_number_gives_none_and_spares_its_mates(core: structs.Core, format: Format) -> None:
    shape = (40, 512)
    matrix, x_NK = packed(core, stored(format, shape, seed=6)), rows(3, shape[1])
    expected = matrix.multiply(x_NK)
    for wrong in (float("nan"), float("inf"), float("-inf")):
        x_NK[1, 100] = wrong
        y = matrix.multiply(x_NK)
        assert not y[1].isfinite().any()
        assert torch.equal(y[[0, 2]], expected[[0, 2]])


def test_inputs_of_any_size_keep_their_worth(core: structs.Core) -> None:
    """Zeros, tiny and huge blocks beside each other."""
    shape = (16, 160)
    weight = stored(Format.Q8_0, shape, seed=7)
    x_NK = rows(4, shape[1])
    x_NK[:, :32], x_NK[:, 32:64], x_NK[:, 64:96] = 0, x_NK[:, 32:64] * 1e-30, x_NK[:, 64:96] * 1e30
    assert_product(packed(core, weight).multiply(x_NK), x_NK, dense(weight))
