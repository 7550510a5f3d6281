"""A model's layers as regions of its graph: torch traces one that is like another once, and compiles it once.

So a start with everything on disk takes a third to a half of the time that it takes to trace every layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parlay.models.transformers_adapter.call import CACHE_ARGUMENTS

_KINDS = 64  # of layers in one model; torch gives up beyond it


class _OneLayer(NamedTuple):
    """A layer's part of the cache: its keys and values ``[1, H, K, D]``, and the slots that rows are written to.

    It ignores which layer asks, so that torch need not know either: a number would tell the layers apart.
    """

    keys: Tensor
    values: Tensor
    slots_N: Tensor

    def update(self, keys_BHND: Tensor, values_BHND: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write rows ``[1, H, N, D]``, and return all slots, as `SlotLayer.update` does."""
        self.keys[:, :, self.slots_N] = keys_BHND
        self.values[:, :, self.slots_N] = values_BHND
        return self.keys, self.values


def _run(
    layer: nn.Module, cache: tuple[str, Tensor, Tensor, Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    argument, keys, values, slots_N = cache
    return type(layer).forward(layer, *args, **kwargs, **{argument: _OneLayer(keys, values, slots_N)})


class LayerRegions:
    """The layers of a model, each of which is a region while its graph is made or run.

    Torch compares what a trace hangs on, so layers that differ are traced apart.
    """

    def __init__(self, layers: Sequence[nn.Module], argument: str) -> None:
        nested = torch.compiler.nested_compile_region(_run, max_reuse_entries=_KINDS)
        self._forwards = [(layer, _in_region(nested, layer, number, argument)) for number, layer in enumerate(layers)]

    @staticmethod
    def of(model: PreTrainedModel) -> LayerRegions | None:
        """Find a model's layers; None where nothing is alike, or each has a forward that somebody has put there."""
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        found = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count > 1]
        if len(found) != 1 or any("forward" in vars(layer) for layer in found[0]):
            return None
        arguments = [
            set(CACHE_ARGUMENTS).intersection(inspect.signature(layer.forward).parameters) for layer in found[0]
        ]
        if arguments[0] and arguments.count(arguments[0]) == count:
            try:
                return LayerRegions(list(found[0]), min(arguments[0]))
            except TypeError:  # an earlier torch, which traces each region anew
                return None
        return None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let the model call its layers as regions within the block."""
        for layer, forward in self._forwards:
            vars(layer)["forward"] = forward  # past `nn.Module`'s own checks, which take longer than all else here
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del vars(layer)["forward"]


def _in_region(nested: Callable[..., Any], layer: nn.Module, number: int, argument: str) -> Callable[..., Any]:
    """The forward of a layer, whose cache is the one of this number."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        slots = kwargs.pop(argument).layers[number]
        return nested(layer, (argument, slots.keys, slots.values, slots.slots_N), args, kwargs)

    return forward
