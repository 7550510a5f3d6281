"""Plain decoding of many requests: what both engines are asked is the same work in every round."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving import batch
from tests.benchmarks.cached import noting_llm


def test_no_round_finds_its_prompts_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    noting, cached = noting_llm()
    monkeypatch.setattr(batch, "LLM", noting)
    monkeypatch.setattr(batch, "INPUT", 40)
    monkeypatch.setattr(batch, "OUTPUT", 2)
    decode = batch.ours(Path("parlay-mini"))
    for _ in range(2):
        assert decode(2) > 0
    assert cached == [0, 0, 0, 0]
