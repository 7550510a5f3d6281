"""Replaces a transformers model's linear layers by oneDNN's packed ones, on CPUs.

Only a model that nobody else holds is packed, as its own weights are dropped to save memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parlay.models.torch_ops.linear import PackedLinear, pack, padded

_numbers = itertools.count()
_layers: WeakValueDictionary[int, PackedLayer] = WeakValueDictionary()
"""Packed layers by number: a graph can't contain packed weights, but can call an operator that looks them up."""


@cache
def _operator() -> Callable[[Tensor, Tensor, int], Tensor]:
    """Define the operator ``parlay::packed_linear(x, number, outputs)`` for rows ``[..., I]``."""
    torch.library.define("parlay::packed_linear", "(Tensor x, Tensor number, int outputs) -> Tensor")
    torch.library.impl("parlay::packed_linear", "CPU", _multiply)
    torch.library.register_fake("parlay::packed_linear", _shaped)
    called: Callable[[Tensor, Tensor, int], Tensor] = torch.ops.parlay.packed_linear.default
    return called


def _multiply(x: Tensor, number: Tensor, outputs: int) -> Tensor:
    """Multiply ``x`` ``[..., I]`` by the weights of the layer with ``number`` ``[]``."""
    rows_NI, linear = x.reshape(-1, x.shape[-1]), _layers[int(number)].packed
    count = len(rows_NI)
    if more := padded(count) - count:
        rows_NI = torch.cat([rows_NI, rows_NI.new_zeros(more, x.shape[-1])])
    return linear(rows_NI)[:count].reshape(*x.shape[:-1], outputs).contiguous()


def _shaped(x: Tensor, number: Tensor, outputs: int) -> Tensor:
    """An empty result of the right shape, for ``x`` ``[..., I]`` and ``number`` ``[]``."""
    return x.new_empty(*x.shape[:-1], outputs)


class PackedLayer(nn.Module):
    """Replaces ``linear``; ``packed`` has its weights."""

    def __init__(self, linear: nn.Linear, packed: PackedLinear) -> None:
        super().__init__()
        self.packed, self.outputs, self._call = packed, linear.out_features, _operator()
        number = next(_numbers)
        _layers[number] = self
        self.number = nn.Buffer(torch.tensor(number), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., I]``."""
        return self._call(x, self.number, self.outputs)


class PackedLinears:
    """The packed linear layers of a model; `undo` restores its own while this object is kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own: list[tuple[nn.Module, str, nn.Linear]] = []
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _is_plain(child) and isinstance(packed := _packed(child), PackedLinear):
                    self._own.append((parent, name, child))
                    setattr(parent, name, PackedLayer(child, packed))

    def __len__(self) -> int:
        return len(self._own)

    def undo(self) -> None:
        """Restore the model's own layers."""
        for parent, name, child in self._own:
            setattr(parent, name, child)


def linear_bytes(model: PreTrainedModel) -> int:
    """Bytes that the linear layers' weights take."""
    return sum(child.weight.nbytes for child in model.modules() if _is_plain(child))


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is an unmodified linear layer with weights of its own on a CPU."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight, hooks = module.weight, (module._forward_hooks, module._forward_pre_hooks)
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and not any(hooks)


def _packed(linear: nn.Linear) -> object:
    bias = None if linear.bias is None else linear.bias.detach()
    return pack(linear.weight.detach(), bias)
