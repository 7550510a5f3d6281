"""Which prompts are measured: those whose text lasts come first, in the order drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.setup import MINI, QUICK, Setup
from parlay import LLM, SamplingParams
from parlay.bench.loops import lasts
from parlay.bench.prepare import first_ids, lasting
from parlay.bench.workloads import Item, Workload

TOKENS = 48


def test_prompts_that_loop_at_once_come_last_and_those_without_room_after_them() -> None:
    drawn = Setup(QUICK, None, Path("nowhere")).drawn("prose", 6)
    again = Item(id="again", prompt="again and " * 40)
    endless = Item(id="endless", prompt="word " * 50_000)
    with LLM(MINI, strategy="none") as llm:
        found = lasting(llm, Workload("prose", (endless, again, *drawn.items)), 8, TOKENS)
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        prompts = [{"prompt_token_ids": first_ids(llm, item)} for item in found.items[:-1]]
        outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
    loops = [not lasts(output.outputs[0].token_ids) for output in outputs]
    assert loops == sorted(loops)
    assert any(loops)
    assert found.items[-1] == endless


def test_a_kind_of_text_is_a_published_set_where_there_is_data(tmp_path: Path) -> None:
    path = tmp_path / "editeval" / "edit_eval.jsonl"
    path.parent.mkdir()
    path.write_text('{"instruction": "do", "input": "a = 1", "output": "b = 1"}\n', encoding="utf-8")
    workload = Setup(QUICK, tmp_path, tmp_path).drawn("edit", 3)
    assert workload.name == "edit"
    assert workload.items[0].prediction == "a = 1"
    with pytest.raises(ValueError, match=r"needs humaneval/HumanEval.jsonl.gz, which is not in"):
        Setup(QUICK, tmp_path, tmp_path).drawn("code", 3)
