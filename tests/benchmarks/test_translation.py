"""The table of translators: which cases there are, how texts are scored, and what a row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.translation import Scored, cases, page, scores, written
from tests.benchmarks.cached import noting_llm


def test_models_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "translator").mkdir()
    (tmp_path / "ctc").mkdir()
    (tmp_path / "verifier").mkdir()
    assert [name for name, _ in cases(tmp_path)] == ["translator", "ctc", "verifier"]
    (tmp_path / "gad").mkdir()
    assert sum("canvas-draft" in strategy for _, strategy in cases(tmp_path)) == 4


def test_texts_are_scored_against_all_references_of_a_source() -> None:
    pytest.importorskip("sacrebleu")
    text = "das ist ein ganz kleines Haus"
    chrf, bleu, signatures = scores([text, text], [["etwas ganz anderes", text], [text]])
    assert (chrf, bleu) == (pytest.approx(100), pytest.approx(100))
    assert all("version" in signature for signature in signatures)


def test_no_turn_finds_its_sources_in_the_cache() -> None:
    noting, cached = noting_llm()
    sources = ["The dog waits outside.", "Nobody asked why it rained until noon."]
    with noting("parlay-mini", max_model_len=128) as llm:
        for at_once in (1, 2):
            assert len(written(llm, sources, "none", at_once).texts) == 2
    assert len(cached) == 4
    assert max(cached) <= 1  # the token before every text


def test_a_row_shows_quality_beside_time() -> None:
    row = Scored("ctc", "denoise:selector=ctc", 10, 1, 300, 30.25, 9.5, 12.0, 7, 1.25, 0.5, ("a", "b"))
    line = "| ctc | `denoise:selector=ctc` | 30.2 | 9.5 | 12.00 | 7/300 | 1.2 | 0.5 |"
    assert page([row]).splitlines()[-1] == line
