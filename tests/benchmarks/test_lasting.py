"""Which prompts are measured: those whose text lasts come first, in the order drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import lasting, prompts
from benchmarks.figures.prompts import Prompt
from parlay import LLM, SamplingParams
from parlay.bench.loops import FEWEST_TOKENS, first_loop
from parlay.models.loading import load_tokenizer
from parlay.models.resolving import resolve

TOKENS = 48


def lasts(llm: LLM, prompt: Prompt) -> bool:
    (output,) = llm.generate([{"prompt_token_ids": prompt.ids}], SamplingParams(temperature=0.0, max_tokens=TOKENS))
    text = output.outputs[0].token_ids
    return first_loop(text) >= min(FEWEST_TOKENS, len(text))


def test_prompts_that_loop_at_once_come_last_and_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = resolve("parlay-mini")
    built_in = prompts.built_in(load_tokenizer(checkpoint), 6)
    drawn = {kind: built_in[kind] for kind in ("prose", "code")}
    drawn["prose"].append(Prompt("prose", len(drawn["prose"]), "", (5,) * 40))
    found = lasting.lasting_first(drawn, checkpoint, TOKENS, tmp_path)
    with LLM(str(checkpoint), strategy="none") as llm:
        for kind, own in found.items():
            marks = [(not lasts(llm, prompt), prompt.number) for prompt in own]
            assert marks == sorted(marks)
            assert {prompt.number for prompt in own} == {prompt.number for prompt in drawn[kind]}
    monkeypatch.setattr(lasting, "LLM", None)
    assert lasting.lasting_first(drawn, checkpoint, TOKENS, tmp_path) == found
