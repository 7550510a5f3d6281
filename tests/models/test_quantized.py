"""Checkpoints of few bits from the Hub: every layout is read to its maker's very numbers, or refused in one line."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parlay import models
from parlay.models.config import DecoderConfig, Experts, LayerForm, UnsupportedModel
from parlay.models.loading import load_weights, read_config
from parlay.models.lora_layout import EXPERT_PRODUCTS, PRODUCTS, WEIGHTS
from parlay.models.native import NativeRunner
from parlay.models.quantized.affine import Affine
from parlay.models.random_decoder import save_decoder
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import QuantizeRefused, in_eight_bits
from parlay.models.weights.regrouped import mxfp4
from parlay.models.weights.shapes import Weight, weight_shapes
from parlay.models.weights.stored import StoredTensor
from parlay.options import LoadOptions
from parlay.testing.adapters import save_adapter
from parlay.types import Adapter, ParlayError, Segment
from tests.models import quantized_files as files

AWQ = {"quant_method": "awq", "bits": 4, "group_size": files.GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": files.GROUP}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": None}},
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 40]}
FLOATS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}
MLX = {"group_size": files.GROUP, "bits": 4}
CASES: Mapping[str, tuple[Mapping[str, Any], files.Writer, Format | None]] = {
    "awq": (AWQ, files.awq, Format.Q4_Z),
    "gptq": (GPTQ, files.gptq(), Format.Q4_Z),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, files.gptq(version=2), Format.Q4_Z),
    "gptq-symmetric": (GPTQ, files.gptq(symmetric=True), Format.Q4_0),
    "gptq-8": ({**GPTQ, "bits": 8}, files.gptq(bits=8, symmetric=True), Format.Q8_0),
    "gptq-desc-act": ({**GPTQ, "desc_act": True}, files.gptq(act_order=True), Format.Q4_Z),
    "gptq-8-desc-act": ({**GPTQ, "bits": 8}, files.gptq(bits=8, symmetric=True, act_order=True), Format.Q8_0),
    "w4a16": (PACKED, files.compressed_tensors(), Format.Q4_0),
    "w4a16-zeros": (PACKED, files.compressed_tensors(symmetric=False), Format.Q4_Z),
    "w4a16-channel": (PACKED, files.compressed_tensors(channel=True), Format.Q4_0),
    "w8a16": (PACKED, files.compressed_tensors(bits=8), Format.Q8_0),
    "mxfp4": ({**PACKED, "format": "mxfp4-pack-quantized"}, files.mxfp4, Format.MXFP4),
    "fp8": (FP8, files.float8(block=(48, 40)), None),
    "fp8-whole": ({"quant_method": "fp8", "activation_scheme": "static"}, files.float8_whole, None),
    "fp8-channel": (FLOATS, files.float8(scale="weight_scale"), None),
    "nf4": (NF4, files.nf4(double=False), None),
    "nf4-double": (NF4, files.nf4(double=True), None),
}
"""What a config says, how the matrices are written, and the blocks that they are multiplied in; None: as numbers."""


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_makers_formula(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks hold them exactly; what no block holds has them rounded once to the checkpoint's own type."""
    said, write, format = CASES[name]
    numbers = files.save(tmp_path, {"quantization_config": said}, write)
    with caplog.at_level(logging.WARNING):
        weights = load_weights(tmp_path, read_config(tmp_path))
    for matrix, expected in numbers.items():
        found = weights[matrix]
        if format is None:
            assert isinstance(found, torch.Tensor)
            assert found.equal(expected.to(found.dtype))
        else:
            assert isinstance(found, StoredTensor)
            whole = name == "w4a16-channel" and expected.shape[1] == 128
            assert found.format is (Format.Q4_Z128 if whole else format)
            assert dense(found).double().equal(expected)
    assert len(caplog.records) == (format is None)


def test_mlx_matrices_and_embeddings_are_read_exactly(tmp_path: Path) -> None:
    """MLX rounds embeddings, too, and its config is called quantization; single matrices may have other groups."""
    numbers = files.save(tmp_path, {"quantization": MLX}, files.mlx)
    tensors = load_file(tmp_path / "model.safetensors")
    written = files.mlx(*tensors.pop("model.embed_tokens.weight").shape, torch.Generator().manual_seed(1))
    tensors |= {f"model.embed_tokens.{kind}": part for kind, part in written.parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = load_weights(tmp_path, read_config(tmp_path))
    for name, expected in {**numbers, "model.embed_tokens.weight": written.numbers}.items():
        found = weights[name]
        assert isinstance(found, StoredTensor)
        assert found.format is Format.Q4_1
        torch.testing.assert_close(dense(found).double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [128, 256])
def test_groups_of_128_inputs_share_a_scale_and_a_zero(size: int) -> None:
    """As most checkpoints have them, symmetric or not: 4.25 bits a weight, and exact."""
    draw = torch.Generator().manual_seed(0)
    matrix = Affine(
        codes_OI=torch.randint(0, 16, (5, 512), generator=draw).to(torch.uint8),
        scales_OG=torch.rand(5, 512 // size, generator=draw).bfloat16(),
        zeros_OG=torch.randint(0, 17, (5, 512 // size), generator=draw),
    )
    assert matrix.obstacle() is None
    blocks = matrix.in_blocks()
    assert (blocks.format, blocks.format.bits) == (Format.Q4_Z128, 4.25)
    assert dense(blocks).equal(matrix.dense(torch.float32))


def _by_group(
    config: DecoderConfig, *, together: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Matrices of codes whose inputs are grouped out of order, and their numbers; ``together`` as GPTQ orders them."""
    draw, blocks, numbers = torch.Generator().manual_seed(0), dict[str, Weight](), dict[str, Weight]()
    for name, shape in weight_shapes(config).items():
        blocks[name] = numbers[name] = torch.ones(shape) + torch.randn(shape, generator=draw) * 0.3
        if len(shape) > 1:
            blocks[name] = numbers[name] = torch.randn(shape, generator=draw) * shape[-1] ** -0.5
        if "_proj" in name:
            reads = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
            own = torch.Generator().manual_seed(zlib.crc32((reads if together else name).encode()))
            matrix = Affine(
                codes_OI=torch.randint(0, 16, shape, generator=draw).to(torch.uint8),
                scales_OG=((torch.rand(shape[0], shape[1] // 32, generator=draw) + 0.5) * shape[1] ** -0.5 / 4).half(),
                zeros_OG=torch.randint(6, 10, (shape[0], shape[1] // 32), generator=draw),
                group_I=torch.arange(shape[1])[torch.randperm(shape[1], generator=own)] // 32,
            )
            blocks[name], numbers[name] = matrix.in_blocks(), matrix.dense(torch.float32)
            assert dense(matrix.in_blocks(), dtype).equal(matrix.dense(dtype))
    return blocks, numbers


_MIXTURE = replace(
    files.TOY, layers=(LayerForm(experts=Experts(count=4, chosen=2, size=64, shared=96, shared_gate=True)),) * 2
)
_ALL_CHOSEN = replace(
    files.TOY, layers=(LayerForm(experts=Experts(count=4, chosen=4, size=64, shared=96, shared_gate=True)),) * 2
)
"""No row can choose other experts where logits are nearly equal."""
_KEYS_AS_VALUES = replace(files.TOY, layers=(LayerForm(keys_as_values=True),) * 2)
IDS = (5, 6, 7, 8, 9, 10)


def _products(config: DecoderConfig) -> tuple[str, ...]:
    """The products of attention that have matrices, and those of feed-forwards."""
    known = weight_shapes(config)
    return (*EXPERT_PRODUCTS, *(each for each in PRODUCTS[:4] if f"model.layers.0.{each}.weight" in known))


def _runner(config: DecoderConfig, weights: Mapping[str, Weight], dtype: torch.dtype = torch.float32) -> NativeRunner:
    return NativeRunner(config, weights, dtype=dtype, device=torch.device("cpu"), max_tokens_cached=512, name="toy")


def _logits(runner: NativeRunner, *parts: Sequence[int], adapter: Adapter | None = None) -> torch.Tensor:
    """Of all rows of a text that is fed in these parts."""
    runner.open(0, ())
    assert runner.reserve(0, sum(len(part) for part in parts))
    found = []
    for part in parts:
        found.append(runner.forward([Segment(0, part, adapter=adapter)]).logits_RV)
        runner.keep(0, ())
    runner.release(0)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("config", "together"),
    [
        (files.TOY, True),
        (replace(files.TOY, num_heads=2, num_kv_heads=1, head_dim=32), True),
        (_MIXTURE, True),
        (_KEYS_AS_VALUES, True),
        (files.TOY, False),
    ],
    ids=["half-blocks", "whole-blocks", "experts", "keys-as-values", "orders-of-their-own"],
)
def test_inputs_in_the_order_of_their_groups_stay_in_blocks(config: DecoderConfig, together: bool) -> None:
    """GPTQ's desc_act: logits are those of the numbers, rows don't depend on each other, and adapters fit."""
    blocks, numbers = (_runner(config, weights) for weights in _by_group(config, together=together))
    found, expected = _logits(blocks, IDS), _logits(numbers, IDS)
    assert (found - expected).square().mean() < 1e-3 * expected.square().mean()  # inputs have eight bits beside blocks
    assert found.equal(_logits(blocks, *((token,) for token in IDS)))


@pytest.mark.parametrize("config", [files.TOY, _MIXTURE, _KEYS_AS_VALUES], ids=["dense", "experts", "keys-as-values"])
def test_adapters_fit_matrices_whose_inputs_are_in_another_order(config: DecoderConfig, tmp_path: Path) -> None:
    """What leads out of the feed-forward has its units moved, and so have the adapter's matrices."""
    folder = save_adapter(tmp_path, config, products=_products(config))
    logits = []
    for weights in _by_group(config):
        runner = _runner(config, weights)
        logits.append(_logits(runner, IDS, adapter=runner.read_adapter(folder, "one")))
    found, expected = logits
    assert (found - expected).square().mean() < 1e-3 * expected.square().mean()


@pytest.mark.parametrize(
    "config", [files.TOY, _ALL_CHOSEN, _KEYS_AS_VALUES], ids=["dense", "experts", "keys-as-values"]
)
@pytest.mark.parametrize("rank", [5, 20, 40])
def test_adapters_beside_blocks_have_eight_bits_and_rows_of_their_own(
    config: DecoderConfig, rank: int, tmp_path: Path
) -> None:
    """In bfloat16: what they add is near that of the numbers, for matrices of tiny numbers too, whatever is beside."""
    folder = save_adapter(tmp_path, config, products=_products(config), rank=rank, alpha=2 * rank)
    tensors = load_file(folder / WEIGHTS)
    tensors = {name: tensor * (1e-4 if "lora_B" in name else 1e4) for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    blocks, numbers = _by_group(config)
    found, exact = _runner(config, blocks, torch.bfloat16), _runner(config, numbers)
    adapter, plain = found.read_adapter(folder, "one"), exact.read_adapter(folder, "one")
    changed, expected = _logits(found, IDS, adapter=adapter), _logits(exact, IDS, adapter=plain)
    errors_N = (changed - expected).square().mean(1) / expected.square().mean(1)
    assert errors_N.median() < 3e-3
    assert errors_N.max() < 1e-2  # codes of eight bits; what adapters change is ten times that, as the next line shows
    assert (expected - _logits(exact, IDS)).square().mean() > 0.1 * expected.square().mean()
    assert changed.equal(_logits(found, *((token,) for token in IDS), adapter=adapter))
    assert changed.equal(_logits(found, IDS[:3], IDS[3:5], IDS[5:], adapter=adapter))


@pytest.mark.parametrize("codes", [(0, 255), (3, 40)])
def test_codes_of_eight_bits_stay_exact_or_become_numbers(codes: tuple[int, int]) -> None:
    """Codes less their zeros that take more than eight bits are no block's."""
    codes_OI = torch.tensor([codes * 16], dtype=torch.uint8)
    matrix = Affine(codes_OI, torch.ones(1, 1), zeros_OG=torch.tensor([[3]]))
    assert (matrix.obstacle() is None) == (max(codes) - 3 <= 127)
    if matrix.obstacle() is None:
        assert dense(matrix.in_blocks()).equal(matrix.dense(torch.float32))


def test_mxfp4_blocks_of_experts_keep_their_values() -> None:
    """Only places of nibbles change between gpt-oss's files and the blocks of GGUF files."""
    draw = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (2, 8, 3, 16), generator=draw).to(torch.uint8)
    exponents = torch.randint(110, 135, (2, 8, 3), generator=draw).to(torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]
    expected = torch.ldexp(values, exponents[..., None].int() - 127).flatten(-2)
    assert dense(mxfp4("experts", packed, exponents)).equal(expected)


def test_a_rounded_checkpoint_decodes_as_its_numbers_do(tmp_path: Path) -> None:
    """The decoder multiplies the blocks themselves, and its logits are those of the plain matrices."""
    numbers = files.save(tmp_path / "awq", {"quantization_config": AWQ}, files.awq)
    save_decoder(files.TOY, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors |= {name: matrix.float() for name, matrix in numbers.items()}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    ids = (5, 6, 7, 8, 9, 10)
    found = []
    for name in ("awq", "plain"):
        runner = models.load(str(tmp_path / name), LoadOptions(dtype="float32", device="cpu"), cache_tokens=64)
        runner.open(0, ids)
        assert runner.reserve(0, len(ids))
        found.append(runner.forward([Segment(0, ids)]).logits_RV)
        assert ("Q4_Z" in runner.spec.kernels) == (name == "awq")
    blocks, plain = found
    assert (blocks - plain).square().mean() < 1e-3 * plain.square().mean()  # inputs have eight bits beside blocks


def _change(folder: Path, change: Mapping[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


_QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{_QUERY}.scales": torch.ones(3, 64).half()}, r"q_proj.scales has the shape \[3, 64\].*asks for \[2, 64\]"),
        ({f"{_QUERY}.qzeros": None}, "q_proj.qzeros is missing"),
        ({f"{_QUERY}.qweight": torch.ones(4, 4).int()}, "qzeros has the shape"),
        ({f"{_QUERY}.qweight": torch.ones(64)}, "is not a matrix of 32-bit words"),
    ],
)
def test_parts_that_do_not_fit_are_named_in_one_line(
    change: Mapping[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    """Scales of another shape, missing zeros, words of another shape."""
    files.save(tmp_path, {"quantization_config": AWQ}, files.awq)
    _change(tmp_path, change)
    with pytest.raises(ParlayError, match=message) as failure:
        load_weights(tmp_path, read_config(tmp_path))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        ("mxfp4", "weight_scale", lambda scales: scales[:-1].contiguous(), "parts don't fit each other"),
        ("nf4", "weight", torch.Tensor.double, "parts don't fit each other"),
        ("gptq", "qzeros", lambda zeros: zeros.to(torch.int8), "parts don't fit each other"),
        ("w4a16", "weight_shape", lambda shape: shape[0].clone(), "parts don't fit each other"),
        ("gptq", "qweight", torch.Tensor.float, "is not a matrix of 32-bit words"),
        ("awq", "scales", lambda scales: scales * torch.nan, "some scales are not finite"),
        ("w4a16", "weight_scale", lambda scales: scales[:, :0].clone(), "parts don't fit each other"),
        ("nf4", "weight.absmax", lambda sizes: sizes / 0, "some sizes of blocks are not finite"),
        ("fp8", "weight_scale_inv", lambda scales: scales * torch.nan, "some scales are not finite"),
        ("fp8", "weight_scale_inv", lambda scales: scales[:1].clone(), "are not those of blocks"),
    ],
)
def test_parts_of_any_layout_that_do_not_fit_are_one_line(
    case: str, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    said, write, _ = CASES[case]
    files.save(tmp_path, {"quantization_config": said}, write)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{_QUERY}.{part}"] = change(tensors[f"{_QUERY}.{part}"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParlayError, match=f"q_proj.*{message}") as failure:
        load_weights(tmp_path, read_config(tmp_path))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "groups", [torch.full((64,), 0.5), torch.full((64,), torch.nan), torch.full((64,), 2), torch.zeros(63).int()]
)
def test_groups_of_inputs_that_are_none_are_named(groups: torch.Tensor, tmp_path: Path) -> None:
    files.save(tmp_path, {"quantization_config": {**GPTQ, "desc_act": True}}, files.gptq(act_order=True))
    _change(tmp_path, {f"{_QUERY}.g_idx": groups})
    with pytest.raises(ParlayError, match=r"q_proj.*(whole numbers from 0 to 1|bits hold)") as failure:
        load_weights(tmp_path, read_config(tmp_path))
    assert "\n" not in str(failure.value)


def test_groups_of_uneven_numbers_become_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No block has inputs of two groups; one line says so, and the decoder runs."""
    files.save(tmp_path, {"quantization_config": {**GPTQ, "desc_act": True}}, files.gptq(act_order=True))
    _change(tmp_path, {f"{_QUERY}.g_idx": torch.tensor([0] * 20 + [1] * 44).int()})
    with caplog.at_level(logging.WARNING):
        weights = load_weights(tmp_path, read_config(tmp_path))
    assert isinstance(weights[f"{_QUERY}.weight"], torch.Tensor)
    assert "groups have different numbers of inputs" in caplog.text


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**AWQ, "version": "gemv"}, "layout 'gemv'"),
        ({**AWQ, "bits": 3}, "with 3 bits"),
        ({**GPTQ, "bits": 3}, "with 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "group_size": -3}, "group_size -3"),
        ({**PACKED, "format": "int-quantized"}, "format int-quantized"),
        ({**PACKED, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({**FP8, "fmt": "e3m4"}, "form 'e3m4'"),
        ({**FP8, "weight_block_size": [0, 8]}, "blocks of 0 outputs"),
        ({**PACKED, "config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}}, "rounded activations"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "'fp4'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits"),
        ({**MLX, "mode": "mxfp8"}, "mode 'mxfp8'"),
        ("awq", "is not an object"),
    ],
)
def test_forms_that_cannot_be_read_are_refused_by_name(said: object, message: str, tmp_path: Path) -> None:
    """Each refusal is one line that names the value; transformers is not asked for what it needs other packages for."""
    save_decoder(files.TOY, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": said}))
    with pytest.raises(ParlayError, match=message) as failure:
        read_config(tmp_path)
    assert "\n" not in str(failure.value)


def test_an_unknown_method_is_left_to_transformers(tmp_path: Path) -> None:
    """The native decoder names the methods that it reads."""
    save_decoder(files.TOY, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(UnsupportedModel, match="quant_method 'quip' can't be read: awq, gptq"):
        read_config(tmp_path)


def test_what_such_files_leave_in_sixteen_bits_can_be_rounded_to_eight(tmp_path: Path) -> None:
    """As AWQ's LM heads are. Matrices in blocks stay."""
    files.save(tmp_path, {"quantization_config": AWQ}, files.awq)
    found = []
    for quantize in (None, "int8"):
        options = LoadOptions(dtype="float32", device="cpu", quantize=quantize)
        runner = models.load(str(tmp_path), options, cache_tokens=64)
        assert isinstance(runner, NativeRunner)
        assert ("int8" in runner.spec.kernels, "Q4_Z" in runner.spec.kernels) == (quantize is not None, True)
        found.append(_logits(runner, IDS))
    plain, rounded = found
    assert 0 < (rounded - plain).square().mean() < 1e-3 * plain.square().mean()
    blocks = [
        weight for weight in load_weights(tmp_path, read_config(tmp_path)).values() if isinstance(weight, StoredTensor)
    ]
    with pytest.raises(QuantizeRefused, match="the weights are in Q4_Z already; remove it"):
        in_eight_bits({"model.embed_tokens.weight": blocks[0], "lm_head.weight": blocks[1]})
