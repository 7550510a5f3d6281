"""The page on exported heads counts drafts as vLLM does."""

from __future__ import annotations

from benchmarks.peers.exported import NODES, Found, chains, lines
from parlay import LLM, SamplingParams


def test_chains_that_were_right_are_counted_up_to_each_depth() -> None:
    with LLM("parlay-mini") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate(["one two three one two three one two"], params, strategy=f"prompt-lookup:k={NODES}")
    sample = output.outputs[0]
    drafts, *right = chains([sample])
    assert 0 < drafts <= sample.metrics.steps
    assert sum(right) == sample.metrics.accepted_tokens
    assert right == sorted(right, reverse=True)


def test_a_line_gives_shares_of_drafts() -> None:
    (line,) = lines([Found("eagle3", 100, (50, 25, 5), 200, (90, 40, 10), 12, 13)])
    assert line == ("`eagle3`", "speculators", "100", "50.0 25.0 5.0 %", "45.0 20.0 5.0 %", "12/13")
