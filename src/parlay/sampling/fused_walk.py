"""The shared-noise accept rule on the device that has the logits: one kernel launch and two transfers per step.

Token ids and trees are sent there; accepted paths and next tokens come back; logits stay. The sampler handles requests
with penalties, biases, masks, typical-p or processors, and rows that the kernel is not sure of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from parlay.compiled import triton_here
from parlay.sampling import noise
from parlay.sampling.processors import edits
from parlay.sampling.sampler import sample
from parlay.types import NO_DRAFT, Draft, NoiseKey, Request, SamplingParams, SequenceView, Verdict, trees
from parlay.types.requests import FixedText

_log = logging.getLogger(__name__)

_FIELDS = 9
"""Numbers per sequence: its root's row, the number of nodes in its tree, where the tree and its streams of noise by
depth begin, whether it is greedy, top-k, and, as bits of float64, temperature, top-p and the logarithm of min-p."""
_BLOCK = 1024
_TRIED = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, min_p=0.01),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9),
)


def runs_on(logits_RV: Tensor) -> bool:
    """Whether the kernel can read such logits, on their device."""
    if logits_RV.is_cpu and not triton_here.interpreted():  # asking for the device costs each step 20 us
        return False
    return triton_here.asked_for(logits_RV.device) and logits_RV.dtype == torch.float32 and _works(logits_RV.device)


def takes(view: SequenceView) -> bool:
    """Whether the kernel can do everything that this request does to logits."""
    return view.request.params.typical_p == 1 and not edits(view, ())


def follow(
    views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
) -> list[Verdict | None]:
    """The verdicts of sequences for which `takes` is true; None where the sampler must decide."""
    from parlay.sampling import walk_kernels  # here, as it needs Triton

    numbers, room = _numbers(views, drafts, roots)
    given = _send(numbers, logits_RV.device)
    size = 2 + 2 * room
    out = torch.empty(len(views) * size, dtype=torch.int64, device=logits_RV.device)
    walk_kernels.walk[(len(views),)](logits_RV, given, out, logits_RV.stride(0), room, logits_RV.shape[1], BLOCK=_BLOCK)
    return [_verdict(line, room) for line in np.split(_fetch(out), len(views))]


def _numbers(views: Sequence[SequenceView], drafts: Sequence[Draft], roots: Sequence[int]) -> tuple[list[int], int]:
    """Everything that the kernel reads besides logits, and the most tokens that a path may have."""
    fields, rest = list[int](), list[int]()
    most, behind = 1, _FIELDS * len(views)
    for view, draft, root in zip(views, drafts, roots, strict=True):
        params, nodes = view.request.params, len(draft) - draft.probes
        deepest = max(trees.depths(draft.tree)[:nodes], default=0)
        least = math.log(params.min_p) if params.min_p else -math.inf
        tree = behind + len(rest)
        rest += [*draft.tree.parents[:nodes], *draft.tree.tokens[:nodes]]
        fields += [root, nodes, tree, behind + len(rest), int(params.greedy), params.top_k]
        fields += np.array([1.0 if params.greedy else params.temperature, params.top_p, least]).view(np.int64).tolist()
        start = len(view.tokens)
        states = [0 if params.greedy else noise.stream(view.request.key, start + depth) for depth in range(deepest + 1)]
        rest += np.array(states, np.uint64).view(np.int64).tolist()
        most = max(most, deepest + 1)
    return [*fields, *rest], most


def _verdict(line: np.ndarray[tuple[int], np.dtype[np.int64]], room: int) -> Verdict | None:
    """The verdict in the kernel's output for one sequence."""
    unsure, count, *found = line.tolist()
    tokens, nodes = found[:count], found[room : room + count - 1]
    return None if unsure else Verdict(tuple(nodes), tuple(tokens))


def _send(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to the device in one transfer."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _fetch(out: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Copy ``out`` ``[n]`` from the device in one transfer."""
    return out.cpu().numpy()


@lru_cache
def _works(device: torch.device) -> bool:
    """Whether the kernel compiles, and draws a few tokens as the sampler does. If not, the log says why."""
    logits_RV = torch.randn(len(_TRIED), 2 * _BLOCK, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    requests = [Request(id="trial", prompt=(1,), params=params, key=NoiseKey(7)) for params in _TRIED]
    views = [FixedText(0, request, request.prompt, 1) for request in requests]
    try:
        triton_here.check()
        found = follow(views, [NO_DRAFT] * len(views), logits_RV, range(len(views)))
        wanted = sample(logits_RV, views, [()] * len(views))
        if [verdict and verdict.sampled for verdict in found] != [(token,) for token in wanted]:
            raise ArithmeticError("it draws other tokens than the sampler")
    except Exception as error:
        _log.warning("no walks by Triton: %s; the sampler chooses tokens instead", triton_here.reason(error))
        return False
    return True
