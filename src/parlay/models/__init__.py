"""The runners: models together with their caches. Names are imported on first use, so that finding files needs no
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlay.models.opening import USUAL, NativeRunner, UnsupportedModel, default_device, load

__all__ = ["USUAL", "NativeRunner", "UnsupportedModel", "default_device", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'parlay.models' has no attribute {name!r}")
    return getattr(import_module("parlay.models.opening"), name)
