"""Counting how often a target drafts right: answers are those of plain decoding, and the table adds up."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.self_drafts import Answer, answers, by_strategy, prompts
from parlay import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_drafts_are_counted_behind_a_long_text() -> None:
    words = " ".join(f"word{number} and {number * 7 % 13}" for number in range(120))
    strategy = "self-draft:window=256,sinks=0,keys=64,k=4,policy=fixed,min_p=0"
    with LLM("parlay-mini", strategy="none") as llm:
        (found,) = answers(llm, "words", words, [strategy], PARAMS)
    assert (found.strategy, found.tokens) == (strategy, 12)
    assert found.accepted + found.steps == 12
    assert 0 < found.accepted <= found.drafted


def test_the_table_adds_up_by_strategy() -> None:
    one = Answer("a", "x", 9, 8, 4, 10, 4, 2.0, 1.0)
    rows = list(
        by_strategy([one, Answer("b", "x", 9, 8, 4, 0, 0, 2.0, 3.0), Answer("a", "y", 9, 8, 8, 0, 0, 1.0, 1.0)])
    )
    assert rows == [("x", "2", "4 / 10", "0.400", "2.00", "1.00"), ("y", "1", "0 / 0", "-", "1.00", "1.00")]


def test_prompts_take_turns_by_kind(tmp_path: Path) -> None:
    lines = [
        {"category": kind, "turns": [f"{kind} {number}"]} for number in range(2) for kind in ("writing", "reasoning")
    ]
    (tmp_path / "spec-bench").mkdir()
    (tmp_path / "spec-bench" / "question.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(prompts(tmp_path, 2)) == [("writing 0", "writing 0"), ("reasoning 0", "reasoning 0")]
