"""Matrices of few bits by the packages of their makers: values equal these packages' own. Skipped without them."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from parlay.models.quantized.layouts import Grouping, awq, compressed_tensors, mlx
from parlay.models.quantized.tables import nf4
from parlay.models.weights.dequantize import dense
from tests.models import quantized_files as files


@pytest.mark.parametrize(("bits", "symmetric", "group"), [(4, True, 128), (4, False, 32), (8, True, None)])
def test_values_equal_those_of_the_package_compressed_tensors(bits: int, symmetric: bool, group: int | None) -> None:
    """Its own compressor writes the parts, and its decompressor says what they stand for, rounded to bfloat16."""
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        num_bits=bits, symmetric=symmetric, group_size=group, strategy="channel" if group is None else "group"
    )
    scheme, draw = quantization.QuantizationScheme(targets=["Linear"], weights=args), torch.Generator().manual_seed(0)
    weight, groups = torch.randn(48, 256, generator=draw).bfloat16(), 1 if group is None else 256 // group
    parts = {"weight": weight, "weight_scale": torch.rand(48, groups, generator=draw).bfloat16() + 0.1}
    parts["weight_zero_point"] = (
        torch.zeros(48, groups, dtype=torch.int8)
        if symmetric
        else (torch.randint(-8, 8, (48, groups), generator=draw).to(torch.int8))
    )
    written = packing.PackedQuantizationCompressor.compress(parts, scheme)
    expected = packing.PackedQuantizationCompressor.decompress(dict(written), scheme)["weight"]
    found = dense(compressed_tensors("matrix", written, Grouping()).in_blocks())
    assert found.to(expected.dtype).equal(expected)


@pytest.mark.parametrize("double", [False, True])
def test_values_equal_those_of_bitsandbytes(double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    parts = {"": codes, **state.as_dict(packed=True)}
    found, expected = nf4("matrix", parts), functional.dequantize_4bit(codes, state)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert found.equal(expected)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_values_equal_those_of_mlx(group: int) -> None:
    """MLX computes in float32 here, and blocks hold scales in half precision: these are such."""
    core = pytest.importorskip("mlx.core")
    weight = core.array(np.random.default_rng(0).standard_normal((48, 256), np.float32))
    words, scales, biases = core.quantize(weight, group, 4)
    scales, biases = (each.astype(core.float16).astype(core.float32) for each in (scales, biases))
    parts = {
        name: torch.from_numpy(np.array(each))
        for name, each in (("weight", words), ("scales", scales), ("biases", biases))
    }
    found = dense(mlx("matrix", parts, Grouping(group)).in_blocks())
    expected = torch.from_numpy(np.array(core.dequantize(words, scales, biases, group, 4)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_values_equal_those_of_autoawq() -> None:
    """Its function alone: the package itself needs others, and is kept up no more."""
    package = find_spec("awq")
    if package is None or package.origin is None:
        pytest.skip("autoawq is not installed")
    unpack = runpy.run_path(str(Path(package.origin).parent / "utils" / "packing_utils.py"))["dequantize_gemm"]
    parts = files.awq(64, 128, torch.Generator().manual_seed(0)).parts
    expected = unpack(parts["qweight"], parts["qzeros"], parts["scales"], 4, files.GROUP)
    found = dense(awq("matrix", parts, Grouping(files.GROUP)).in_blocks())
    assert found.to(expected.dtype).equal(expected.t())
