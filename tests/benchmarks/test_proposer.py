"""The page of vLLM with Parlay's drafters: each ratio within its round, each text against plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.proposer import NGRAM, PLAIN, TOGETHER, Prompt, Row, jobs, line, measure, parse, ratio


def row(mode: str, number: int, seconds: float, *, kind: str = "spec-bench/qa", requests: int = 1) -> Row:
    return Row(number, mode, kind, requests, 100, seconds, seconds, requests, 10, 4)


def test_a_ratio_is_the_median_of_those_within_rounds() -> None:
    rows = [row(PLAIN, 0, 2), row("parlay", 0, 1), row(PLAIN, 1, 40), row("parlay", 1, 10), row(PLAIN, 2, 1)]
    rows += [row("parlay", 2, 0.25), row(NGRAM, 0, 2), row(NGRAM, 1, 20), row(NGRAM, 2, 1)]
    assert ratio("parlay", PLAIN, rows) == 4
    cells = line("parlay", rows)
    assert cells[0] == "parlay"
    assert cells[2:] == ("4.00", "2.00", "4.00", "12 of 30", "3/3")


class Played:
    """An engine that writes the same whatever it drafts, but for one text."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def decode(self, prompts: list[list[int]], most: int) -> dict[str, Any]:
        texts = [[*ids, most] for ids in prompts]
        if self.wrong:
            texts[0] = [0]
        return {"texts": texts, "seconds": 1.0, "wall": 1.0, "drafted": 0, "accepted": 0}


@pytest.mark.parametrize(("count", "at_once"), [(3, [3]), (TOGETHER + 2, [TOGETHER, TOGETHER + 2])])
def test_every_engine_decodes_each_prompt_alone_and_then_all_at_once(count: int, at_once: list[int]) -> None:
    options = parse(["--vllm", "python", "--rounds", "2", "--tokens", "5"])
    prompts = [Prompt("spec-bench/qa", [number]) for number in range(count)]
    engines: Any = {PLAIN: Played(), "parlay": Played(wrong=True)}
    rows = list(measure(engines, prompts, options))
    assert [each.requests for each in rows if each.mode == PLAIN] == [*[1] * count, *at_once] * 2
    assert [each.same for each in rows if each.mode == "parlay"] == [*[0] * count, *(most - 1 for most in at_once)] * 2


def test_vllm_is_told_which_class_drafts_and_how() -> None:
    told = jobs(parse(["--vllm", "p"]).vllm, parse(["--vllm", "p", "--strategies", "prompt-lookup", "--nodes", "12"]))
    own = told["parlay prompt-lookup"]
    assert own["speculative"] == {
        "method": "custom_class",
        "model": "parlay.vllm.Proposer",
        "num_speculative_tokens": 12,
    }
    assert own["additional"] == {"parlay": {"strategy": "prompt-lookup", "log_seconds": 0.0}}
    assert own["together"] == TOGETHER
