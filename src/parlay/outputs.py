"""Public path of what `LLM` and `AsyncLLM` return (vLLM's module name)."""

from parlay.llm.outputs import (
    CompletionOutput,
    Logprob,
    Logprobs,
    Piece,
    PredictionUse,
    PromptLogprobs,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    Spell,
    StreamEvent,
    joined,
)

__all__ = [
    "CompletionOutput",
    "Logprob",
    "Logprobs",
    "Piece",
    "PredictionUse",
    "PromptLogprobs",
    "RequestFailed",
    "RequestOutput",
    "RequestOutputs",
    "Spell",
    "StreamEvent",
    "joined",
]
