"""The table of what drafting costs: every strategy without a model is in it, the others with the reason why not."""

from pathlib import Path

import pytest

from benchmarks.drafters.propose import measure, page, without_model
from benchmarks.drafters.texts import VOCAB_SIZE, markov, of_file


def test_strategies_that_need_a_model_are_left_out_with_a_reason() -> None:
    found, left_out = without_model(["prompt-lookup", "draft-model", "none"])
    assert found == ["prompt-lookup"]
    assert "model" in left_out["draft-model"]
    assert left_out["none"] == "drafts nothing"


def test_a_line_per_strategy_and_budget_and_columns_per_history() -> None:
    text = markov(1210, seed=1)
    cells = [
        measure(spec, text[: history + 10], history, budget)
        for spec in ("prompt-lookup", "token-recycling")
        for budget in (2, 3)
        for history in (1000, 1200)
    ]
    assert all(cell.propose > 0 and cell.bytes_per_token >= 0 for cell in cells)
    result = page(cells, {"other": "no model"}, "command")
    assert "| strategy | k | propose @ 1k |" in result
    assert sum(line.startswith(("| prompt-lookup |", "| token-recycling |")) for line in result.splitlines()) == 4
    assert "- other: no model" in result


def test_the_random_text_is_the_same_each_time_and_repeats_itself() -> None:
    text = markov(5000, seed=1)
    assert text == markov(5000, seed=1) != markov(5000, seed=2)
    assert max(text) < VOCAB_SIZE
    eights = {tuple(text[at : at + 8]) for at in range(len(text) - 8)}
    assert len(eights) < 0.9 * (len(text) - 8)


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("Once upon a time there was a queen. " * 10, encoding="utf-8")
    assert len(of_file(path, 20)) == 20
    with pytest.raises(ValueError, match=r"text has \d+ tokens, and 100000 are needed"):
        of_file(path, 100_000)
