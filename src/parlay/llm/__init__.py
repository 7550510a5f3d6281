"""`LLM` joins a model, its strategies and the engine; the other modules hold its inputs and outputs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is first used, so that the other modules here load no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'parlay.llm' has no attribute {name!r}")
    return getattr(import_module("parlay.llm.llm"), name)
