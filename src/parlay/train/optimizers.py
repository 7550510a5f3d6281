"""Optimizers for training (AdamW, and Muon for matrices), number types, learning rates, and the training clock."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

MUON_RATE = 0.012
EMBEDDING_RATE = 0.01
NORM_RATE = 3e-3
WEIGHT_DECAY = 0.03


def adam(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Make AdamW without weight decay."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def muon(matrices: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Make Muon (Jordan et al. 2024) with weight decay `WEIGHT_DECAY`."""
    return Muon(matrices, lr=rate, weight_decay=WEIGHT_DECAY)


class Optimizers:
    """A model's optimizers: Muon for the layers' matrices, AdamW for embeddings and norms. They step together."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
        embeddings = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." not in name]
        norms = [parameter for _, parameter in named if parameter.ndim == 1]
        self.parts = [
            (muon(matrices, MUON_RATE), MUON_RATE),
            (adam(embeddings, EMBEDDING_RATE), EMBEDDING_RATE),
            (adam(norms, NORM_RATE), NORM_RATE),
        ]

    def step(self, factor: float) -> None:
        """Take one step at ``factor`` times the peak learning rates, and clear the gradients."""
        for optimizer, peak in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = factor * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """Return the states of all optimizers."""
        return [optimizer.state_dict() for optimizer, _ in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Load states that `state_dict` returned."""
        for (optimizer, _), state in zip(self.parts, states, strict=True):
            optimizer.load_state_dict(state)


_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum whose update is replaced by the nearest orthogonal matrix, for matrices only.

    So each step changes all singular directions alike: by ``lr``, times the root of rows / columns for tall matrices.
    Weights decay by ``lr`` times ``weight_decay``.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"], group["weight_decay"])

    def _update(self, weight: nn.Parameter, rate: float, decay: float) -> None:
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"]
        momentum.lerp_(weight.grad, 1 - _MOMENTUM)
        ahead = weight.grad.lerp(momentum, _MOMENTUM)
        rows, columns = weight.shape
        weight.mul_(1 - rate * decay)
        weight.add_(orthogonal(ahead), alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix_NM: Tensor) -> Tensor:
    """Return the matrix with its singular values moved near 1, by Newton-Schulz iteration."""
    tall = matrix_NM.shape[0] > matrix_NM.shape[1]
    found: Tensor = (matrix_NM.T if tall else matrix_NM) / matrix_NM.norm().clamp(min=1e-7)
    found = found.bfloat16() if half_pays(matrix_NM.device.type) else found
    for _ in range(_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return (found.T if tall else found).to(matrix_NM.dtype)


AUTO, BFLOAT16 = "auto", "bfloat16"
PRECISIONS = (AUTO, BFLOAT16, "float32")
_SIZE, _CALLS = 512, 5


@cache
def half_pays(device: str) -> bool:
    """Whether matrix products on this device are faster in bfloat16 than in float32.

    CPUs without bfloat16 instructions are far slower at it, so both are timed there; CUDA is taken to be faster.
    """
    return device == "cuda" or _seconds(torch.bfloat16) < _seconds(torch.float32)


def mixed(precision: str = AUTO) -> torch.autocast:
    """Return a context in which products are in bfloat16, if ``precision`` says so, or is ``auto`` and that is faster
    here."""
    return torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=halves(precision))


def halves(precision: str = AUTO) -> bool:
    """Whether `mixed` computes products in bfloat16."""
    return half_pays(torch.get_default_device().type) if precision == AUTO else precision == BFLOAT16


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    least = float("inf")
    for _ in range(_CALLS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        least = min(least, time.perf_counter() - began)
    return least


WARM_UP = 0.03
DECAY_FROM = 0.45
LENGTHS = ((0.8, 512), (1.0, 2048))


def learning_rate(share: float) -> float:
    """Return the factor on the peak learning rate at a share of the run: linear warm-up, constant, linear decay to
    zero."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.02)
    return min(1.0, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def row_length(share: float, longest: int) -> int:
    """Return the tokens per row at a share of the run, at most ``longest``: short rows first, long ones at the end."""
    return next(min(length, longest) for until, length in LENGTHS if share <= until or until == 1.0)


GAP = 4.0


class TrainingClock:
    """Counts the seconds of training: laps, each up to a limit (see `GAP`), and work under `uncapped` in full."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed = elapsed
        self._laps: deque[float] = deque(maxlen=31)
        self._last = time.monotonic()

    def lap(self) -> float:
        """End a lap, and return the seconds counted for it."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if len(self._laps) >= 5:
            seconds = min(seconds, GAP * statistics.median(self._laps))
        self._laps.append(seconds)
        self.elapsed += seconds
        return seconds

    @contextmanager
    def uncapped(self) -> Iterator[None]:
        """Count the block's seconds in full and not as a lap: for long work such as compiling, checking and saving."""
        started = time.monotonic()
        yield
        self._last = time.monotonic()
        self.elapsed += self._last - started
