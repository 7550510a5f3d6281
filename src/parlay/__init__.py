"""Parlay: parallel decoding for LLMs. Several tokens per forward pass, the same text as plain decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlay.aio import AsyncLLM
    from parlay.llm.adapters import LoRARequest
    from parlay.llm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from parlay.llm.llm import LLM
    from parlay.llm.outputs import CompletionOutput, Logprob, RequestFailed, RequestOutput, StreamEvent
    from parlay.llm.request_options import RequestOptions
    from parlay.llm.voting import VoteOutput, VoteParams
    from parlay.options import Ensemble, Nest
    from parlay.text.prompts import TextPrompt, TokensPrompt
    from parlay.types import ParlayError, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Ensemble",
    "LoRARequest",
    "Logprob",
    "Nest",
    "ParlayError",
    "RequestFailed",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "VoteOutput",
    "VoteParams",
]

_HOMES = {
    "parlay.aio": ("AsyncLLM",),
    "parlay.llm.adapters": ("LoRARequest",),
    "parlay.llm.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "parlay.llm.llm": ("LLM",),
    "parlay.llm.outputs": ("CompletionOutput", "Logprob", "RequestFailed", "RequestOutput", "StreamEvent"),
    "parlay.llm.request_options": ("RequestOptions",),
    "parlay.llm.voting": ("VoteOutput", "VoteParams"),
    "parlay.options": ("Ensemble", "Nest"),
    "parlay.text.prompts": ("TextPrompt", "TokensPrompt"),
    "parlay.types": ("ParlayError", "SamplingParams", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `parlay --help` does not load torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'parlay' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those not yet imported too."""
    return [*__all__, "__version__"]
