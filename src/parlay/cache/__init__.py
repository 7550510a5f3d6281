"""The KV cache: one store for all sequences of a runner, with prefix reuse, within a shared memory budget."""

from parlay.cache.budget import Budget, MemoryBounds, parse_bytes
from parlay.cache.pages import BLOCK, CacheShape, Spread
from parlay.cache.prefixes import Rows
from parlay.cache.recent import RecentShape, Room
from parlay.cache.store import Store

__all__ = [
    "BLOCK",
    "Budget",
    "CacheShape",
    "MemoryBounds",
    "RecentShape",
    "Room",
    "Rows",
    "Spread",
    "Store",
    "parse_bytes",
]
