"""Parlay: parallel decoding for LLMs. Several tokens per forward pass, the same text as plain decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlay.llm import LLM, RequestFailed
    from parlay.outputs import CompletionOutput, RequestOutput, StreamEvent
    from parlay.types import ParlayError, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "ParlayError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "parlay.llm",
    "RequestFailed": "parlay.llm",
    "CompletionOutput": "parlay.outputs",
    "RequestOutput": "parlay.outputs",
    "StreamEvent": "parlay.outputs",
    "ParlayError": "parlay.types",
    "SamplingParams": "parlay.types",
    "StructuredOutputsParams": "parlay.types",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `parlay --help` does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'parlay' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
