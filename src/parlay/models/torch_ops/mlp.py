"""Feed-forwards in torch operators: one gated product for all rows, or experts for the rows that chose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.config import Activation, Experts
from parlay.models.part import Group
from parlay.models.torch_ops.adapters import DOWN, GATE_UP, RowAdapters
from parlay.models.torch_ops.attention_form import SERIAL
from parlay.models.torch_ops.linear import Linear, moved, padded, summed

_LIMIT, _STEEPNESS = 7.0, 1.702
"""Constants of gpt-oss's activation."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(activation(gate) * up)``; gate and up form one product.

    With a ``group``, each of its processes has some of the inner units.
    """

    gate_up: Linear
    down: Linear
    activation: Activation
    group: Group | None = None

    @property
    def linears(self) -> Sequence[Linear]:
        """All products of the feed-forward."""
        return (self.gate_up, self.down)

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> GatedMlp:
        """The same feed-forward with ``move`` applied to each matrix."""
        return replace(self, gate_up=moved(self.gate_up, move), down=moved(self.down, move))

    def __call__(self, x_NH: Tensor, adapters: RowAdapters, layer: int, expert: int | None = None) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``, for at least two rows, with the adapters of the layer or expert added to both
        products."""
        gate_up_NI = self.gate_up(x_NH)
        adapters.add((layer, expert, GATE_UP), x_NH, gate_up_NI)
        gated_NI = gated_product(gate_up_NI, self.activation)
        given_NH = self.down(gated_NI)
        adapters.add((layer, expert, DOWN), gated_NI, given_NH)
        return summed(given_NH, self.group)


class Shelf(Protocol):
    """Provides experts, some of which are not on the device."""

    def in_order(self, layer: int, chosen: Sequence[int]) -> Iterator[GatedMlp]:
        """Yield the chosen experts of a layer; each is valid until the next one is requested."""
        ...


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """Experts, each run for the rows that chose it. A row's outputs are summed in the order of expert numbers, so they
    don't depend on other rows with the same experts.

    ``router`` computes in float32 or float64. With a ``group``, each of its processes has some units of every expert.
    With a ``shelf``, experts come from there.
    """

    form: Experts
    router: Linear
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp | None
    choice_bias: Tensor | None = None
    scales: Tensor | None = None
    group: Group | None = None
    shelf: Shelf | None = None

    @property
    def linears(self) -> Sequence[Linear]:
        """All products of the feed-forward; those of one expert stand for all."""
        shared = () if self.shared is None else self.shared.linears
        return (self.router, *self.experts[0].linears, *shared)

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> MixtureMlp:
        """The same feed-forward with ``move`` applied to each matrix except the router's."""
        shared = None if self.shared is None else self.shared.with_weights(move)
        return replace(self, experts=tuple(each.with_weights(move) for each in self.experts), shared=shared)

    def __call__(self, x_NH: Tensor, adapters: RowAdapters, layer: int, routed_NH: Tensor | None = None) -> Tensor:
        """Map ``[N, H]`` to ``[N, H]``, for at least two rows, with the experts' adapters added. The router may read
        other inputs, ``routed_NH``."""
        logits_NE = self.router((x_NH if routed_NH is None else routed_NH).to(self.router.dtype))
        weights_NK, chosen_NK = self._choose(logits_NE[:, : self.form.count])
        if self.scales is not None:
            weights_NK = weights_NK * self.scales[chosen_NK]
        result_NH, runs = torch.zeros_like(x_NH), list(_by_expert(chosen_NK))
        chosen = [expert for expert, _, _ in runs]
        experts = map(self.experts.__getitem__, chosen) if self.shelf is None else self.shelf.in_order(layer, chosen)
        for (number, rows, (rows_R, places_R)), expert in zip(runs, experts, strict=True):
            given_RH = _run(expert, x_NH[rows_R], adapters.chosen(rows), layer, number)
            result_NH[rows_R] += given_RH.mul_(weights_NK[rows_R, places_R, None].to(given_RH.dtype))
        if self.shared is not None:
            given_NH = self.shared(x_NH, adapters, layer, self.form.count)
            if self.form.shared_gate:
                gates_N1 = torch.stack([logit.sigmoid() for logit in logits_NE[:, self.form.count :].unbind()])
                given_NH = given_NH.mul_(gates_N1.to(given_NH.dtype))
            result_NH += given_NH
        return summed(result_NH, self.group)

    def _choose(self, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and numbers of each row's experts, ``[N, K]`` each."""
        if self.choice_bias is not None:
            return self._choose_by_sigmoid(logits_NE, self.choice_bias)
        if self.form.normalized:
            best_NK, chosen_NK = logits_NE.topk(self.form.chosen, -1)
            return best_NK.softmax(-1) * self.form.scale, chosen_NK
        best_NK, chosen_NK = logits_NE.softmax(-1).topk(self.form.chosen, -1)
        return best_NK * self.form.scale, chosen_NK

    def _choose_by_sigmoid(self, logits_NE: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        scores_NE = torch.stack([row.sigmoid() for row in logits_NE.unbind()])  # alike whatever rows are beside it
        choice_NE = scores_NE + bias_E
        if self.form.top_groups < self.form.groups:
            choice_NGE = choice_NE.view(len(choice_NE), self.form.groups, -1)
            sums_NG = choice_NGE.topk(min(2, choice_NGE.shape[-1]), -1).values.sum(-1)
            closed_NG = torch.ones_like(sums_NG, dtype=torch.bool)
            closed_NG.scatter_(-1, sums_NG.topk(self.form.top_groups, -1).indices, value=False)
            choice_NE = choice_NGE.masked_fill(closed_NG[..., None], -torch.inf).flatten(-2)
        chosen_NK = choice_NE.topk(self.form.chosen, -1).indices
        weights_NK = scores_NE.gather(-1, chosen_NK)
        if self.form.normalized:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return weights_NK * self.form.scale, chosen_NK


def _run(expert: GatedMlp, x_RH: Tensor, adapters: RowAdapters, layer: int, number: int) -> Tensor:
    """Run an expert for one or more rows ``x_RH``, padded to a number that products allow."""
    count = len(x_RH)
    filled = F.pad(x_RH, (0, 0, 0, padded(count) - count))
    return expert(filled, adapters, layer, number)[:count]


def _by_expert(chosen_NK: Tensor) -> Iterator[tuple[int, Sequence[int], Tensor]]:
    """Yield the chosen experts in rising order with their rows: row numbers, and ``[2, R]`` with rows and places in
    ``chosen_NK``.

    This waits for the device once, not for each expert.
    """
    runs = sorted(
        (expert, row, place) for row, chosen in enumerate(chosen_NK.tolist()) for place, expert in enumerate(chosen)
    )
    at_2R, first = torch.tensor([run[1:] for run in runs], device=chosen_NK.device).t(), 0
    for expert, group in groupby(runs, key=itemgetter(0)):
        rows = [row for _, row, _ in group]
        yield expert, rows, at_2R[:, first : first + len(rows)]
        first += len(rows)


@dataclass(frozen=True, slots=True)
class MlpBesideExperts:
    """A dense feed-forward for every row next to experts, each with norms of its own; see `Experts.beside`."""

    dense: GatedMlp
    mixture: MixtureMlp
    router_norm: Callable[[Tensor], Tensor]
    experts_norm: Callable[[Tensor], Tensor]
    dense_out_norm: Callable[[Tensor], Tensor]
    experts_out_norm: Callable[[Tensor], Tensor]

    @property
    def linears(self) -> Sequence[Linear]:
        """All products of both; those of one expert stand for all."""
        return (*self.dense.linears, *self.mixture.linears)

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> MlpBesideExperts:
        """The same with ``move`` applied to each matrix except the router's."""
        return replace(self, dense=self.dense.with_weights(move), mixture=self.mixture.with_weights(move))

    def __call__(self, hidden_NH: Tensor, x_NH: Tensor, adapters: RowAdapters, layer: int) -> Tensor:
        """Map hidden states ``[N, H]`` to ``[N, H]``; ``x_NH`` are the states normed for the dense feed-forward."""
        given_NH = self.mixture(self.experts_norm(hidden_NH), adapters, layer, self.router_norm(hidden_NH))
        return self.dense_out_norm(self.dense(x_NH, adapters, layer)) + self.experts_out_norm(given_NH)


def gated_product(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up for ``gate_up`` ``[N, 2 I]``, whose rows have gate and up side by side.

    In float32 torch's activations differ in the last bit between vector and remainder lanes, so blocks of rows must be
    too small to be split between threads within a row.
    """
    width = gate_up.shape[1] // 2
    gate, up = gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT) + 1
    activate = _ACTIVATIONS[activation]
    if gate.numel() < SERIAL:
        return activate(gate).mul_(up)
    blocks = torch.split(gate, max(1, SERIAL // width))
    return torch.cat([activate(block) for block in blocks]).mul_(up)


def _steep(gate: Tensor) -> Tensor:
    """x * sigmoid(1.702 x) of ``gate`` ``[N, I]``, row by row, so that the bits don't depend on the number of rows."""
    return torch.stack([row * (row * _STEEPNESS).sigmoid() for row in gate.unbind()])


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "clamped_swiglu": _steep,
}
