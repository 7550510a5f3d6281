"""Picks a few entries out of a row as long as the vocabulary, without sorting it.

To find several, a row is cut into blocks of 128 and the maximum of each block is taken first, which is fast on every
device. Later steps look only at blocks that can matter. Ties always go to the lowest index. Only `argmax` accepts NaN.

Suffixes: R rows, V the vocabulary, B blocks of a row, C chosen entries, N examined entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 128
_SMALL = 1 << 13  # up to this size a plain pass over all values is as fast
_LARGE = 1 << 22  # from this many values on, several threads are faster
_NUMPY = (torch.float16, torch.float32, torch.float64)  # NumPy has no bfloat16


def block_maxima(values_RV: Tensor) -> Tensor:
    """The largest value of each run of 128 neighbours, ``[R, ceil(V / 128)]``."""
    size = values_RV.shape[-1]
    whole = size - size % _BLOCK
    maxima_RB = values_RV.unfold(-1, _BLOCK, _BLOCK).amax(-1) if whole else values_RV[:, :0]
    if whole < size:
        maxima_RB = torch.cat([maxima_RB, values_RV[:, whole:].amax(-1, keepdim=True)], -1)
    return maxima_RB


def argmax(values_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its first index, ``[R]`` each. For a row with a NaN, the value is NaN."""
    if not (values_RV.is_cpu and values_RV.dtype in _NUMPY):
        top = values_RV.max(-1)
        return top.values, top.indices
    if values_RV.numel() >= _LARGE:
        return _argmax_by_blocks(values_RV)
    array_RV = values_RV.numpy()  # many times faster than torch
    places_R = array_RV.argmax(-1)
    return torch.from_numpy(array_RV[np.arange(len(places_R)), places_R]), torch.from_numpy(places_R)


def _argmax_by_blocks(values_RV: Tensor) -> tuple[Tensor, Tensor]:
    blocks_R = argmax(block_maxima(values_RV))[1]
    ids_RB = blocks_R[:, None] * _BLOCK + torch.arange(_BLOCK)
    ids_RB.clamp_(max=values_RV.shape[-1] - 1)  # copies of the last value come after it, so ties still go to the first
    values_R, places_R = argmax(values_RV.gather(-1, ids_RB))
    return values_R, ids_RB.gather(-1, places_R[:, None])[:, 0]


def at_least(values_V: Tensor, threshold: float, maxima_B: Tensor | None = None) -> Tensor:
    """Indices ``[N]`` of the values that reach ``threshold``, rising.

    ``maxima_B``: the row's block maxima, if known.
    """
    if values_V.numel() <= _SMALL:
        return _true(values_V >= threshold)
    maxima_B = block_maxima(values_V[None])[0] if maxima_B is None else maxima_B
    whole = values_V.numel() - values_V.numel() % _BLOCK
    blocks = _true(maxima_B[: whole // _BLOCK] >= threshold)
    places = _true((values_V[:whole].reshape(-1, _BLOCK)[blocks] >= threshold).flatten())
    ids = blocks[places // _BLOCK] * _BLOCK + places % _BLOCK
    return torch.cat([ids, _true(values_V[whole:] >= threshold) + whole])


def _true(mask_N: Tensor) -> Tensor:
    """Indices where a mask is true, rising. NumPy finds them many times faster on CPUs."""
    return torch.from_numpy(np.flatnonzero(mask_N.numpy())) if mask_N.is_cpu else mask_N.nonzero()[:, 0]


def leading_rows(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the ``count`` largest values of each row, rising, ``[R, count]``, and which rows are certain, ``[R]``.

    A row is not certain if equal values compete for the last place. ``count`` is at most the size of a row. The result
    for a row does not depend on the other rows.
    """
    size = values_RV.shape[-1]
    if size <= _SMALL or count * _BLOCK > size:
        return _largest(values_RV, count)
    # `count` blocks reach the count-th largest maximum, so at least `count` values do. Other blocks can't matter.
    blocks_RC, clear_R = _largest(block_maxima(values_RV), count)
    ids_RN = (blocks_RC[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=values_RV.device)).flatten(1)
    values_RN = values_RV.gather(1, ids_RN.clamp(max=size - 1)).masked_fill_(ids_RN >= size, -torch.inf)
    places_RC, sure_R = _largest(values_RN, count)
    return ids_RN.gather(1, places_RC), sure_R & clear_R


def _largest(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`leading_rows` by examining every value."""
    top = values_RV.topk(count)
    return top.indices.sort(1).values, (values_RV >= top.values[:, -1:]).sum(1) == count


def leading_finite(values_V: Tensor, count: int) -> list[int]:
    """`leading` without values of -inf, so perhaps fewer."""
    ids = leading(values_V, min(count, values_V.numel()))
    return ids[values_V[ids] > -torch.inf].tolist()


def leading(values_V: Tensor, count: int) -> Tensor:
    """Indices ``[count]`` of the largest values, largest first, equal ones by rising index."""
    size = values_V.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values_V.device)
    if count >= size:
        ids = torch.arange(size, device=values_V.device)
    elif size <= _SMALL or count * _BLOCK > size:
        ids = at_least(values_V, values_V.topk(count).values[-1].item())
    else:
        maxima_B = block_maxima(values_V[None])[0]
        # `count` blocks reach the count-th largest maximum, so at least `count` values do.
        ids = at_least(values_V, maxima_B.topk(count).values[-1].item(), maxima_B)
    order = values_V[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]
