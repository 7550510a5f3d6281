"""Triton's attention kernels in numpy, on the same memory addresses, for tests without a GPU or Triton.

A row's result does not depend on other rows. The arguments are those of the real kernels, so the code that launches
them is the code that runs on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

FACTORS = {torch.float32: None}


class Seen(NamedTuple):
    """A tensor as a CUDA graph stores it."""

    address: int
    shape: tuple[int, ...]


launched: list[tuple[object, ...]] = []
"""Kernel, grid and arguments of all launches since the list was cleared: what a CUDA graph records."""

OWN, BOUND, HIDDEN, PATH_FROM, PATH, PAGES, SLOT, PITCH = 0, 1, 2, 4, 5, 6, 8, 9
Numbers = np.ndarray[Any, np.dtype[Any]]


class Watched:
    """A kernel that records its launches. Modes that watch operators don't see what it does itself."""

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel, self._name = kernel, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: object, **constants: object) -> None:
            seen = [Seen(each.data_ptr(), tuple(each.shape)) if isinstance(each, Tensor) else each for each in given]
            launched.append((self._name, grid, *seen, *constants.items()))
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._kernel[grid](*given, **constants)

        return launch


class OverArrays:
    """Makes a function of arrays callable as Triton's kernels are, with a grid, which it ignores."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: object, **constants: object) -> None:
            self._run(*[each.numpy() if isinstance(each, Tensor) else each for each in given], **constants)

        return launch


def launch(run: Callable[..., None]) -> Watched:
    """Make a recording kernel of a function of arrays."""
    return Watched(OverArrays(run), run.__name__)


def _at(address: int, count: int, like: Numbers) -> Numbers:
    """Return ``count`` numbers at a memory address."""
    memory = (ctypes.c_char * (count * like.itemsize)).from_address(address)
    return np.frombuffer(memory, like.dtype)


@launch
def store(new, fields, lists, recent, place, *, HEADS, D, DP, PAGE) -> None:
    for own, states in zip(fields, new, strict=True):
        pitch, slot = int(own[PITCH + recent]), int(own[SLOT])
        base = int(lists[own[PAGES + recent] + slot // PAGE])
        for part in range(2):
            for head in range(HEADS):
                row = ((place * 2 + part) * HEADS + head) * pitch + slot % PAGE * D
                _at(base + row * new.itemsize, D, new)[:] = states[part, head]


def _low(own: Numbers, window: int) -> int:
    return max(int(own[OWN]) - window + 1, 0) if window else 0


@launch
def attend(  # noqa: PLR0917 (as Triton's)
    queries, mixed, peaks, sums, fields, lists, recent, place, window, spans, cap, **constants
) -> None:
    heads, group, padded, size = (constants[name] for name in ("HEADS", "G", "GP", "D"))
    page, capped = constants["PAGE"], constants["CAPPED"]
    parts = mixed.reshape(len(fields), heads, spans, padded, size)
    peak_parts, sum_parts = (each.reshape(parts.shape[:-1]) for each in (peaks, sums))
    for row, own in enumerate(fields):
        positions = np.arange(_low(own, window), own[BOUND])
        positions = positions[(positions < own[HIDDEN]) | (positions >= own[HIDDEN + 1])]
        ahead = positions - own[PATH_FROM]
        slots = np.where(ahead >= 0, lists[np.where(ahead >= 0, own[PATH] + ahead, 0)], positions)
        first, pitch = own[PAGES + recent], int(own[PITCH + recent])
        bases = lists[first : first + slots.max() // page + 1].tolist()
        for head in range(heads):
            at = (place * 2 * heads + head) * pitch
            keys, values = (
                np.concatenate(
                    [_at(base + (at + more) * queries.itemsize, page * size, queries) for base in bases]
                ).reshape(-1, size)[slots]
                for more in (0, heads * pitch)
            )
            scores = queries[row, head * group : (head + 1) * group] @ keys.T
            scores = cap * np.tanh(scores / cap) if capped else scores
            highest = scores.max(1)
            weights = np.exp(scores - highest[:, None])
            peak_parts[row, head, 0, :group] = highest
            sum_parts[row, head, 0, :group] = weights.sum(1)
            parts[row, head, 0, :group] = weights @ values


@launch
def combine(  # noqa: PLR0917 (as Triton's)
    mixed, peaks, sums, fields, sinks, out, window, spans, stride, **constants
) -> None:
    heads, group, padded, size = (constants[name] for name in ("HEADS", "G", "GP", "D"))
    parts = mixed.reshape(len(fields), heads, spans, padded, size)[:, :, 0, :group]
    peak_parts, sum_parts = (each.reshape(len(fields), heads, spans, padded)[:, :, 0, :group] for each in (peaks, sums))
    weights = sum_parts + (np.exp(sinks.reshape(1, heads, group) - peak_parts) if constants["SINKS"] else 0)
    out[:] = (parts / weights[..., None]).reshape(out.shape)
