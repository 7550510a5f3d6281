"""Layouts of quantized matrices in safetensors files: codes packed into 32-bit words, and separate scales.

O outputs, I inputs, G groups of inputs. Words hold codes from the lowest bits on, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.models.quantized.affine import Affine
from parlay.models.weights.shapes import BadCheckpoint

Parts = Mapping[str, Tensor]
"""The tensors of one matrix, by their suffix."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight outputs


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a checkpoint groups inputs: ``size`` inputs share a scale; -1: all inputs of a row.

    ``zero_offset`` is added to stored zeros.
    """

    size: int = -1
    zero_offset: int = 0

    def count(self, inputs: int) -> int:
        """The number of groups that ``inputs`` inputs have."""
        return 1 if self.size == -1 else -(-inputs // self.size)


def awq(name: str, parts: Parts, grouping: Grouping) -> Affine:
    """AWQ's gemm layout (Lin et al. 2023): words of eight outputs in a special order."""
    inputs, words = _matrix(name, parts, "qweight")
    groups, outputs = grouping.count(inputs), 8 * words
    zeros_GW = _shaped(name, parts, "qzeros", (groups, words))
    scales_GO = _shaped(name, parts, "scales", (groups, outputs))
    return Affine(
        codes_OI=_awq_codes(parts["qweight"]).t().contiguous(),
        scales_OG=scales_GO.t(),
        zeros_OG=_awq_codes(zeros_GW).t(),
    )


def _awq_codes(words: Tensor) -> Tensor:
    """Unpack ``words`` ``[..., W]`` to codes ``[..., 8 W]``."""
    codes = unpacked(words, 4)
    return codes.view(*words.shape, 8)[..., list(_AWQ_PLACES)].flatten(-2)


def gptq(name: str, parts: Parts, grouping: Grouping) -> Affine:
    """GPTQ's layout (Frantar et al. 2022): words of neighbouring inputs, and each input's group.

    Files of its first version store zeros minus one.
    """
    words, outputs = _matrix(name, parts, "qweight")
    inputs = _part(name, parts, "g_idx").numel() if "g_idx" in parts else 8 * words
    bits = _bits(name, 32 * words, inputs)
    groups = grouping.count(inputs)
    zeros_GW = _shaped(name, parts, "qzeros", (groups, -(-outputs * bits // 32)))
    return Affine(
        codes_OI=unpacked(parts["qweight"].t().contiguous(), bits),
        scales_OG=_shaped(name, parts, "scales", (groups, outputs)).t(),
        zeros_OG=unpacked(zeros_GW, bits)[:, :outputs].t().to(torch.int16) + grouping.zero_offset,
        group_I=_order(name, parts.get("g_idx"), inputs, groups),
    )


def compressed_tensors(name: str, parts: Parts, grouping: Grouping) -> Affine:
    """The layout pack-quantized of compressed-tensors: words of neighbouring inputs, with signed codes and zeros
    shifted to start at 0."""
    rows, words = _matrix(name, parts, "weight_packed")
    shape = _part(name, parts, "weight_shape").tolist()
    if len(shape) != 2 or shape[0] != rows:
        raise BadCheckpoint(f"{name}.weight_shape says {shape}, and weight_packed has {rows} rows")
    outputs, inputs = shape
    bits = next((bits for bits in (4, 8) if words == -(-inputs * bits // 32)), 0) or _bits(name, 32 * words, inputs)
    scales = _part(name, parts, "weight_scale")
    groups = scales.shape[1] if scales.dim() == 2 else 1
    whole = scales.numel() == 1
    scales_OG = scales.expand(outputs, 1) if whole else _shaped(name, parts, "weight_scale", (outputs, groups))
    middle = 1 << bits - 1
    return Affine(
        codes_OI=unpacked(parts["weight_packed"], bits)[:, :inputs],
        scales_OG=scales_OG,
        zeros_OG=_zero_points(name, parts, (outputs, groups), bits)
        if "weight_zero_point" in parts
        else torch.full((outputs, groups), middle, dtype=torch.int16),
        group_I=_order(name, parts.get("weight_g_idx"), inputs, groups),
    )


def _zero_points(name: str, parts: Parts, shape: tuple[int, int], bits: int) -> Tensor:
    """Zeros ``[O, G]`` in the codes' units, from words of outputs, or from signed integers in older files."""
    outputs, groups = shape
    if parts["weight_zero_point"].dtype == torch.int8:
        return _shaped(name, parts, "weight_zero_point", shape).to(torch.int16) + (1 << bits - 1)
    words_WG = _shaped(name, parts, "weight_zero_point", (-(-outputs * bits // 32), groups))
    return unpacked(words_WG.t().contiguous(), bits)[:, :outputs].t()


def mlx(name: str, parts: Parts, grouping: Grouping) -> Affine:
    """MLX's affine layout: words of neighbouring inputs, and a bias per group."""
    outputs, words = _matrix(name, parts, "weight")
    scales_OG = _part(name, parts, "scales")
    inputs = scales_OG.shape[-1] * grouping.size
    return Affine(
        codes_OI=unpacked(parts["weight"], _bits(name, 32 * words, inputs)),
        scales_OG=_shaped(name, parts, "scales", (outputs, grouping.count(inputs))),
        minimums_OG=_shaped(name, parts, "biases", (outputs, grouping.count(inputs))),
    )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack 32-bit ``words`` ``[..., W]`` to ``[..., 32 / bits * W]`` uint8 codes of 2, 4 or 8 bits."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets >> low & (1 << bits) - 1 for low in range(0, 8, bits)], -1).flatten(-2)


def _bits(name: str, stored: int, inputs: int) -> int:
    """Bits per code, if ``stored`` bits hold the codes of ``inputs`` inputs."""
    bits = stored // inputs if inputs and stored % inputs == 0 else 0
    if bits not in (2, 4, 8):
        raise BadCheckpoint(
            f"{name}: {stored} bits hold {inputs} codes of each output; codes of 2, 4 and 8 bits can be read"
        )
    return bits


def _order(name: str, group_I: Tensor | None, inputs: int, groups: int) -> Tensor | None:
    """The group of each input; None if groups are of neighbouring inputs, in order."""
    if group_I is None or group_I.numel() == 0:
        return None
    whole = not group_I.dtype.is_floating_point
    if tuple(group_I.shape) != (inputs,) or not whole or group_I.min() < 0 or group_I.max() >= groups:
        raise BadCheckpoint(
            f"{name}: the groups of {inputs} inputs must be {inputs} whole numbers from 0 to {groups - 1}"
        )
    in_order = torch.arange(inputs, device=group_I.device) // -(-inputs // groups)
    return None if group_I.long().equal(in_order) else group_I.long()


def _part(name: str, parts: Parts, kind: str) -> Tensor:
    if kind not in parts:
        raise BadCheckpoint(f"{name}.{kind} is missing, and {', '.join(sorted(parts))} are there")
    return parts[kind]


def _shaped(name: str, parts: Parts, kind: str, shape: tuple[int, ...]) -> Tensor:
    part = _part(name, parts, kind)
    if tuple(part.shape) != shape:
        raise BadCheckpoint(f"{name}.{kind} has the shape {list(part.shape)}, and the config asks for {list(shape)}")
    return part


def _matrix(name: str, parts: Parts, kind: str) -> tuple[int, int]:
    part = _part(name, parts, kind)
    if part.dim() != 2 or part.element_size() != 4 or part.is_floating_point():
        raise BadCheckpoint(f"{name}.{kind} is not a matrix of 32-bit words: it is {part.dtype} {list(part.shape)}")
    return part.shape[0], part.shape[1]
