"""A model's layers as regions of its graph: torch traces and compiles identical ones once.

So a start with everything on disk takes a third to a half of the time of tracing every layer.
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

_KINDS = 64  # most kinds of layers in a model; torch gives up beyond that


class _OneLayer(NamedTuple):
    """A layer's part of the cache: keys and values ``[1, H, K, D]``, and the slots to which rows are written.

    It ignores the layer's number, which would make torch treat layers as different.
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
    """A model's layers, each of which is a region while its graph is made or run.

    Torch compares what a trace depends on, so different layers are traced separately.
    """

    def __init__(self, layers: Sequence[nn.Module], argument: str) -> None:
        nested = torch.compiler.nested_compile_region(_run, max_reuse_entries=_KINDS)
        self._forwards = [(layer, _in_region(nested, layer, number, argument)) for number, layer in enumerate(layers)]

    @staticmethod
    def of(model: PreTrainedModel) -> LayerRegions | None:
        """The regions of a model's layers; None if no layers are alike, or if their forwards have been replaced."""
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
            except TypeError:  # an earlier torch, which traces each region again
                return None
        return None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which the model calls its layers as regions."""
        for layer, forward in self._forwards:
            vars(layer)["forward"] = forward  # bypasses `nn.Module`'s checks, which take longer than the rest
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del vars(layer)["forward"]


def _in_region(nested: Callable[..., Any], layer: nn.Module, number: int, argument: str) -> Callable[..., Any]:
    """The forward of a layer; ``number`` is that of its cache."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        slots = kwargs.pop(argument).layers[number]
        return nested(layer, (argument, slots.keys, slots.values, slots.slots_N), args, kwargs)

    return forward
