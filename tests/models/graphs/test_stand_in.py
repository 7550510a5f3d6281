"""The stand-in for CUDA graphs finds what these can't have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.graphs.stand_in import NotCapturable, StandIn

X, OUT = torch.arange(6.0), torch.zeros(6)


def item() -> None:
    OUT.mul_(X.sum().item())


def tolist() -> None:
    OUT.mul_(X[:1].tolist()[0])


def truth() -> None:
    if X[0] > 1:
        OUT.zero_()


def nonzero() -> None:
    OUT.copy_(X[(X > 2).nonzero()[:, 0]].sum())


def masked() -> None:
    OUT.copy_(X[X > 2].sum())


def from_host() -> None:
    OUT.add_(torch.tensor([1.0] * 6))


@pytest.mark.parametrize("call", [item, tolist, truth, nonzero, masked, from_host], ids=lambda call: call.__name__)
def test_numbers_that_move_to_the_host_or_from_it_are_refused(call: Callable[[], None]) -> None:
    with pytest.raises(NotCapturable):
        StandIn().record(call)


def changing(state: dict[str, Tensor | int]) -> None:
    OUT.copy_(state["x"][: state["rows"]].mul(state["factor"]).sum())


@pytest.mark.parametrize(
    "change", [{"x": X.clone()}, {"rows": 3}, {"factor": 2}], ids=["stale address", "another shape", "a number"]
)
def test_a_replay_that_would_do_something_else_is_refused(change: dict[str, Tensor | int]) -> None:
    state = {"x": X, "rows": 6, "factor": 1}
    replay, _ = StandIn().record(lambda: changing(state))
    replay()
    state |= change
    with pytest.raises(NotCapturable, match="a replay does"):
        replay()


def test_outputs_of_the_step_before_are_gone() -> None:
    replay, _ = StandIn().record(lambda: OUT.copy_(X + 1))
    kept = OUT[:2]
    assert kept.tolist() == [1, 2]

    def broken() -> None:
        OUT[3:].copy_(X[3:])

    replay, _ = StandIn().record(broken)
    OUT.fill_(7)
    replay()
    assert OUT.tolist() == [7, 7, 7, 3, 4, 5]
