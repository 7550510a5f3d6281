"""Checkpoints in the layouts of AWQ, GPTQ, compressed-tensors, MLX and bitsandbytes, written by their specifications.

Each writer makes the parts of one matrix, and the numbers that they stand for by the maker's formula in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.random_decoder import save_decoder

GROUP = 32
TOY = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_context=128,
)
"""Rows of two groups and of four."""
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


class Written(NamedTuple):
    """Parts by what follows the matrix's name, and what they stand for, ``[O, I]``."""

    parts: Mapping[str, Tensor]
    numbers: Tensor


Writer = Callable[[int, int, torch.Generator], Written]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes ``[..., n]`` into int32 words ``[..., n * bits / 32]``, one after the other."""
    each = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // each, dtype=torch.int64)
    for place in range(each):
        words |= codes[..., place::each].long() << bits * place
    return words.to(torch.int32) if words.max() < 1 << 31 else ((words + (1 << 31)) % (1 << 32) - (1 << 31)).int()


def _drawn(outputs: int, inputs: int, bits: int, draw: torch.Generator, group: int = GROUP) -> tuple[Tensor, ...]:
    """Codes ``[O, I]``, float16 scales and whole zeros ``[O, G]``."""
    groups = inputs // group
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=draw)
    scales = (torch.rand(outputs, groups, generator=draw) * 0.02 + 0.001).half()
    return codes, scales, torch.randint(1, 1 << bits, (outputs, groups), generator=draw)


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    return scales.double()[:, group] * (codes.double() - zeros.double()[:, group])


def _in_order(inputs: int, group: int = GROUP) -> Tensor:
    return torch.arange(inputs) // group


def awq(outputs: int, inputs: int, draw: torch.Generator) -> Written:
    codes, scales, zeros = _drawn(outputs, inputs, 4, draw)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(numbers_NO: Tensor) -> Tensor:
        return packed(numbers_NO.view(len(numbers_NO), -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
    return Written(parts, _numbers(codes, scales, zeros, _in_order(inputs)))


def gptq(*, bits: int = 4, version: int = 1, symmetric: bool = False, act_order: bool = False) -> Writer:
    def write(outputs: int, inputs: int, draw: torch.Generator) -> Written:
        codes, scales, zeros = _drawn(outputs, inputs, bits, draw)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        group = _in_order(inputs)
        if act_order:  # inputs by the size of their squares: alike for all matrices that read the same rows
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        parts = {
            "qweight": packed(codes.t().contiguous().t(), bits).t().contiguous(),
            "qzeros": packed(zeros.t() - int(version == 1), bits),
            "scales": scales.t().contiguous(),
            "g_idx": group.int(),
        }
        return Written(parts, _numbers(codes, scales, zeros, group))

    return write


def compressed_tensors(*, bits: int = 4, symmetric: bool = True, channel: bool = False) -> Writer:
    def write(outputs: int, inputs: int, draw: torch.Generator) -> Written:
        group = inputs if channel else GROUP
        codes, scales, zeros = _drawn(outputs, inputs, bits, draw, group)
        scales = scales.bfloat16()
        parts = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if symmetric:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        else:
            parts["weight_zero_point"] = packed(zeros.t().contiguous(), bits).t().contiguous()
        return Written(parts, _numbers(codes, scales, zeros, _in_order(inputs, group)))

    return write


def mlx(outputs: int, inputs: int, draw: torch.Generator) -> Written:
    codes, scales, _ = _drawn(outputs, inputs, 4, draw)
    scales, biases = scales.bfloat16(), (torch.randn(scales.shape, generator=draw) * 0.1).bfloat16()
    group = _in_order(inputs)
    numbers = scales.double()[:, group] * codes.double() + biases.double()[:, group]
    return Written({"weight": packed(codes, 4).view(torch.uint32), "scales": scales, "biases": biases}, numbers)


def mxfp4(outputs: int, inputs: int, draw: torch.Generator) -> Written:
    codes = torch.randint(0, 16, (outputs, inputs), generator=draw)
    exponents = torch.randint(110, 130, (outputs, inputs // 32), generator=draw)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    numbers = torch.ldexp(table[codes], exponents[:, _in_order(inputs, 32)] - 127)
    packed_bytes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return Written({"weight_packed": packed_bytes, "weight_scale": exponents.to(torch.uint8)}, numbers)


def float8(*, block: tuple[int, int] | None = None, scale: str = "weight_scale_inv") -> Writer:
    """Scales of blocks of outputs and inputs, the last ones smaller; else of each output."""

    def write(outputs: int, inputs: int, draw: torch.Generator) -> Written:
        floats = torch.randn(outputs, inputs, generator=draw).to(torch.float8_e4m3fn)
        rows, columns = block or (1, inputs)
        shape = -(-outputs // rows), -(-inputs // columns)
        scales = (torch.rand(shape, generator=draw) * 0.02 + 0.001).bfloat16()
        by_number = scales.double()[torch.arange(outputs) // rows][:, torch.arange(inputs) // columns]
        return Written({"weight": floats, scale: scales}, floats.double() * by_number)

    return write


def float8_whole(outputs: int, inputs: int, draw: torch.Generator) -> Written:
    """Return a matrix with one scale, and one scale for its inputs."""
    floats = torch.randn(outputs, inputs, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(1, generator=draw).bfloat16()[0]
    parts = {"weight": floats, "weight_scale": scale, "input_scale": scale + 1}
    return Written(parts, floats.double() * scale.double())


def nf4(*, double: bool) -> Writer:
    def write(outputs: int, inputs: int, draw: torch.Generator) -> Written:
        count = outputs * inputs
        codes = torch.randint(0, 16, (count,), generator=draw)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        sizes = torch.rand(-(-count // 64), generator=draw) * 0.1
        parts = {"absmax": sizes}
        if double:
            table, coarse = torch.linspace(-1, 1, 256), torch.rand(-(-len(sizes) // 256), generator=draw) * 0.1
            fine = torch.randint(0, 256, sizes.shape, generator=draw).to(torch.uint8)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
            sizes = table[fine.int()] * coarse.repeat_interleave(256)[: len(fine)] + 0.05
            parts = {"absmax": fine, "nested_absmax": coarse, "nested_quant_map": table}
        parts |= {
            "quant_map": torch.tensor(NF4),
            "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        numbers = (torch.tensor(NF4)[codes] * sizes.repeat_interleave(64)[:count]).bfloat16().view(outputs, inputs)
        weight = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        named = {f"weight.{name}": part for name, part in parts.items()}
        return Written({"weight": weight, **named}, numbers.double())

    return write


def save(folder: Path, config: Mapping[str, Any], write: Writer) -> dict[str, Tensor]:
    """Write a toy whose layers have matrices of a writer's form; what they stand for, by name."""
    save_decoder(TOY, folder)
    draw = torch.Generator().manual_seed(0)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        written = write(*tensors.pop(name).shape, draw)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{kind}": part for kind, part in written.parts.items()}
        numbers[name] = written.numbers
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **config}))
    return numbers
