"""The load on the server: what is asked of the generator, and the page made of what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import lm_eval_run, load
from benchmarks.serving.load import MEASURES, PERCENTILES, plan, read
from benchmarks.serving.load_page import page
from parlay.bench.provenance import provenance
from parlay.strategies.entry import DEFAULT_STRATEGY

TOLD = {"completed": 12, "total_output_tokens": 1200, "total_input_tokens": 1500, "duration": 10.0} | {
    f"p{at}_{measure}_ms": 3.0 for measure in MEASURES for at in PERCENTILES
}


def test_strategies_meet_equal_prompts_and_no_cache_of_each_other() -> None:
    runs = [run.arguments("m", Path("t"), "http://x", Path("o/1.json")) for run in plan(quick=True)]
    without_extra = [[word for word in run if not word.startswith("{") and "json" not in word] for run in runs]
    assert without_extra[0::2] == without_extra[1::2]
    salts = [json.loads(run[run.index("--extra-body") + 1])["cache_salt"] for run in runs]
    assert len(set(salts)) == len(runs)


def test_a_request_that_failed_is_an_error(tmp_path: Path) -> None:
    run = next(plan(quick=False))
    out = tmp_path / "1.json"
    out.write_text(json.dumps(TOLD))
    assert read(run, "m", out).tokens_per_second == 120
    out.write_text(json.dumps(TOLD | {"completed": 11}))
    with pytest.raises(ValueError, match="1 of 12 requests failed"):
        read(run, "m", out)


def test_the_page_shows_every_run(tmp_path: Path) -> None:
    out = tmp_path / "1.json"
    rows = []
    for run in plan(quick=False):
        out.write_text(json.dumps(TOLD | {"completed": run.requests}))
        rows.append(read(run, "m", out))
    text = page(provenance("command"), rows)
    assert "| none | 32 | 96 | 120.0 | 3.0 / 3.0 | 3.0 / 3.0 | 3.0 / 3.0 |" in text
    assert f"| {DEFAULT_STRATEGY} | 40 | 3.0 / 3.0 | 3.0 / 3.0 |" in text


def test_a_missing_program_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["--vllm", "no/such/python"]) == 2
    assert "no/such/python has no vLLM: make an environment" in capsys.readouterr().err
    assert lm_eval_run.main(["--lm-eval", "no/such/lm_eval"]) == 2
    assert "no/such/lm_eval is not an lm-eval: make an environment" in capsys.readouterr().err
