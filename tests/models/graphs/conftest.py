"""Decoders with paged attention kernels but without Triton, and runners of them, with and without graphs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from parlay.cache import Budget
from parlay.models.config import DecoderConfig
from parlay.models.forward import LayerPages
from parlay.models.native import NativeRunner
from parlay.models.torch_ops import eager
from parlay.models.torch_ops.step_graphs import Recorder
from parlay.models.triton_ops.attention import PagedAttention
from parlay.testing.checkpoints import random_model
from parlay.testing.conformance.stages import tiny_llama
from tests.models.graphs import host_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def host_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the attention kernels of `host_kernels`."""

    def paged(config, kinds, ropes, sinks, *, dtype, device):
        pages = LayerPages.of(config)
        return PagedAttention(
            kinds, config.forms, ropes, sinks, pages=pages, kernels=host_kernels, dtype=dtype, device=device
        )

    monkeypatch.setattr(eager, "paged_attention", paged)


def open_runner(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    recorder: Recorder | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    paged: bool = True,
    tokens: int = 2048,
    budget: Budget | None = None,
) -> NativeRunner:
    """Make a runner. If there is a recorder, it records the runner's steps."""

    def make(config, weights, dtype, device, *, packed, cached):
        record = None if recorder is None else lambda: recorder
        made = eager.EagerForward(config, weights, dtype, device, paged=paged, recorder=record)
        return made, made.kernels.reason

    own = {name: each.to(dtype) for name, each in weights.items()}
    return NativeRunner(
        config, own, dtype=dtype, device=CPU, max_tokens_cached=tokens, budget=budget, make_forward=make
    )


def tiny_runner(recorder: Recorder | None = None, **how) -> NativeRunner:
    """Make a runner of a tiny Llama with random weights."""
    return open_runner(tiny_llama(4096), random_model("llama").state_dict(), recorder, **how)
