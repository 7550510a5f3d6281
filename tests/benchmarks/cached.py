"""An LLM that records how many tokens of each prompt it found in its cache."""

from __future__ import annotations

from typing import Any

from parlay import LLM
from parlay.llm.outputs import RequestOutput


def noting_llm() -> tuple[type[LLM], list[int]]:
    """Return the class, and the list in which all its objects record the cached tokens of each request."""
    cached: list[int] = []

    class Noting(LLM):
        def generate(self, *arguments: Any, **options: Any) -> list[RequestOutput]:
            outputs = super().generate(*arguments, **options)
            cached.extend(output.outputs[0].metrics.cached_tokens for output in outputs)
            return outputs

    return Noting, cached
