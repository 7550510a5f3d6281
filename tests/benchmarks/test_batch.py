"""Plain decoding of many requests: what both engines are asked is the same work in every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import batch
from parlay import LLM
from parlay.llm.outputs import RequestOutput


def test_no_round_finds_its_prompts_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []

    class Watched(LLM):
        def generate(self, *arguments: Any, **options: Any) -> list[RequestOutput]:
            outputs = super().generate(*arguments, **options)
            cached.extend(output.outputs[0].metrics.cached_tokens for output in outputs)
            return outputs

    monkeypatch.setattr(batch, "LLM", Watched)
    monkeypatch.setattr(batch, "INPUT", 40)
    monkeypatch.setattr(batch, "OUTPUT", 2)
    decode = batch.ours(Path("parlay-mini"))
    for _ in range(2):
        assert decode(2) > 0
    assert cached == [0, 0, 0, 0]
