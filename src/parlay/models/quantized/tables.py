"""Matrices whose codes index a table of numbers: nf4 of bitsandbytes, and eight-bit floats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parlay.models.weights.shapes import BadCheckpoint

NF4_STATE = "quant_state.bitsandbytes__nf4"
"""The tensor with shape, dtype and block size of an nf4 matrix, as JSON in bytes."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def nf4(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Dequantize an nf4 matrix to its own dtype (Dettmers et al. 2023), as no table of eight-bit numbers holds its
    values.

    ``parts`` are named by their suffix; "" is the matrix itself, whose bytes hold the first of two codes in the high
    nibble. The blocks' largest magnitudes may be quantized to eight bits themselves.
    """
    state = _state(name, parts[NF4_STATE])
    shape, block, dtype = [int(size) for size in state["shape"]], int(state["blocksize"]), _DTYPES[state["dtype"]]
    count = math.prod(shape)
    packed = _counted(name, parts, "", -(-count // 2)).view(-1)
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1)[:count]
    numbers = _counted(name, parts, "quant_map", 16).float()[codes.int()]
    sizes = _largest_sizes(name, parts, state, -(-count // block))
    if not (sizes.isfinite().all() and numbers.isfinite().all()):
        raise BadCheckpoint(f"{name}: some sizes of blocks are not finite: download or copy the checkpoint again")
    found = (numbers * sizes.repeat_interleave(min(block, count))[:count]).to(dtype)
    if not found.isfinite().all():
        raise BadCheckpoint(f"{name}: some of its numbers are beyond {state['dtype']}: download or copy it again")
    return found.view(shape)


def float8(name: str, parts: Mapping[str, Tensor], block: tuple[int, int]) -> Tensor:
    """Dequantize a matrix of eight-bit floats to float32 ``[O, I]``.

    There is one scale for all, one per output, or one per ``block`` of outputs and inputs. The scales' names differ
    (``weight_scale_inv`` as in DeepSeek-V3, ``weight_scale``), but all are factors.
    """
    floats_OI = parts["weight"].float()
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if scales is None:
        raise BadCheckpoint(f"{name}.weight_scale is missing")
    scales, (outputs, inputs) = scales.float(), floats_OI.shape
    if not scales.isfinite().all():
        raise BadCheckpoint(f"{name}: some scales are not finite: download or copy the checkpoint again")
    blocks = -(-outputs // block[0]), -(-inputs // block[1])
    if scales.numel() == 1:
        return floats_OI * scales.flatten()
    if scales.numel() == outputs != blocks[0] * blocks[1] or tuple(scales.shape) == (outputs, 1):
        return floats_OI * scales.view(outputs, 1)
    if tuple(scales.shape) != blocks:
        raise BadCheckpoint(f"{name}: scales {list(scales.shape)} are not those of blocks, which are {list(blocks)}")
    by_row_OK = scales.repeat_interleave(block[0], 0)[:outputs]
    return floats_OI * by_row_OK.repeat_interleave(block[1], 1)[:, :inputs]


def _state(name: str, part: Tensor) -> dict[str, Any]:
    """Parse the JSON in the bytes of ``part`` ``[n]``."""
    try:
        state = json.loads(bytes(part.tolist()))
        if state["blocksize"] > 0 and state["dtype"] in _DTYPES and len(state["shape"]) == 2:
            return dict(state)
    except (ValueError, KeyError, TypeError):
        pass
    raise BadCheckpoint(f"{name}.{NF4_STATE} says no shape, block size and dtype that can be read")


def _largest_sizes(name: str, parts: Mapping[str, Tensor], state: Mapping[str, Any], blocks: int) -> Tensor:
    """The largest magnitude of each block, float32 ``[blocks]``."""
    sizes = _counted(name, parts, "absmax", blocks)
    if sizes.dtype != torch.uint8:
        return sizes.float()
    each = int(state.get("nested_blocksize") or 0)
    if each < 1 or "nested_offset" not in state:
        raise BadCheckpoint(f"{name}.{NF4_STATE} says no block size and offset of the sizes in eight bits")
    coarse = _counted(name, parts, "nested_absmax", -(-blocks // each)).float()
    coarse = coarse.repeat_interleave(min(each, blocks))[:blocks]
    table = _counted(name, parts, "nested_quant_map", 256).float()
    return table[sizes.int()] * coarse + float(state["nested_offset"])


def _counted(name: str, parts: Mapping[str, Tensor], kind: str, count: int) -> Tensor:
    shown = f"{name}.{kind}" if kind else name
    if kind not in parts:
        raise BadCheckpoint(f"{shown} is missing")
    if parts[kind].numel() != count:
        raise BadCheckpoint(f"{shown} has {parts[kind].numel()} numbers, and {count} are needed")
    return parts[kind]
