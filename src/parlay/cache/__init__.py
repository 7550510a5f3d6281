"""Keys and values of past tokens: one store for all sequences of a runner, with prefix reuse."""

from parlay.cache.entry import Shape
from parlay.cache.store import Rows, Store

__all__ = ["Rows", "Shape", "Store"]
