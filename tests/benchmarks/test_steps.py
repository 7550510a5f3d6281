"""Pages of steps drafted ahead, of suggestions and of two models: what counts as a draft that greedy would write."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from benchmarks import steps, suggestions, two_models
from benchmarks.steps import WAYS, Written
from parlay import LLM, SamplingParams
from parlay.bench.records import Cell, Results, Row


def test_a_draft_counts_for_as_many_words_as_it_shares() -> None:
    drafts = ["the cat sat", "the dog ran far"]
    assert suggestions.begins(drafts, "the dog ran home", 3)
    assert not suggestions.begins(drafts, "the dog ran home", 4)
    assert not suggestions.begins(drafts, "the", 2)


def test_no_two_cases_share_the_luck_of_one_seed() -> None:
    seeds: list[int | None] = []

    class Noted:
        def generate(self, prompts: object, params: SamplingParams, *rest: object, **more: object) -> list[str]:
            seeds.append(params.seed)
            return [""]

    sample = suggestions.ways(None)["samples, temperature 1"]
    for prompt in ((1, 2, 3), (1, 2, 4)):
        sample(cast("LLM", Noted()), prompt, 4)
    assert len(set(seeds)) == 2


def test_a_page_holds_every_way_against_the_first(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", {})
    cell = {name: Cell(part="steps", model="m", strategy=name, workload="gsm8k") for name in ("none", "steps ahead")}
    plain = Written("The answer is 4", (1, 2, 3, 4), True, 4, 0, 0, 2.0)
    ahead = Written("The answer is 4", (1, 2, 3, 4), True, 2, 3, 2, 1.0)
    found = {"none": plain, "steps ahead": ahead}
    results.add([steps.row(cell[name], 7, one, "4", same=True) for name, one in found.items()])
    first, second = steps.page(results).splitlines()[2:]
    assert first == "| none | 1 | 1/1 | 100 % | 1.00 | 1.0 | 0 % |"
    assert second == "| steps ahead | 1 | 1/1 | 100 % | 0.50 | 2.0 | 67 % |"
    lossy = {"spec-reason", "steps ahead, the model judges"}
    assert {name for name, way in WAYS.items() if not way.keeps} == lossy


def test_a_page_of_suggestions_has_medians_and_shares(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", {})
    values = {**{f"words_{words}": 1.0 for words in suggestions.WORDS}, "different": 1.0}
    for name, seconds in ((suggestions.ONE, 2.0), ("superposed, the model alone", 2.1)):
        cell = Cell(part="suggest", model="m", strategy=name, workload="books-pd")
        results.add([Row(cell=cell, round=0, requests=1, tokens=10, seconds=seconds, values=values)])
    assert suggestions.page(results).splitlines()[3].startswith("| superposed, the model alone | 1 | 1.05 | 100 %")


def test_a_page_of_two_models_holds_each_way_against_the_large_one(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", {})
    rights = {two_models.LARGE: (1.0, 1.0), "big-little 0.6/2": (1.0, 0.0)}
    for name, right in rights.items():
        for part in ("answers", "seconds"):
            cell = Cell(part=part, model="m", strategy=name, workload="gsm8k")
            seconds = 2.0 if name == two_models.LARGE else 1.5
            values = [{"right": each, "small": 0.5} for each in right]
            results.add(
                [Row(cell=cell, round=place, requests=1, tokens=9, seconds=seconds, steps=9, values=each)
                 for place, each in enumerate(values)]
            )  # fmt: skip
    large, little = two_models.page(results).splitlines()[2:]
    assert large == "| the large model alone | 2 | 100.0 % |  | 50 % | 1.00 (2 problems) |"
    assert little == "| big-little 0.6/2 | 2 | 50.0 % | -50.0 (-685.3 to +585.3) | 50 % | 0.75 (2 problems) |"
    assert two_models.big_little(["0.4/3"]) == {
        "big-little 0.4/3": "big-little:fallback=0.4,rollback.nats=3,policy=fixed"
    }
