"""`parlay bench --quality` from the outside, and `parlay calibrate` on what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.bench.quality.tasks import TASKS
from parlay.bench.records import read
from parlay.testing.diffusion import save_diffusion
from parlay.testing.toy_tokenizers import byte_level
from tests.cli.conftest import MINI, NO_MODEL, Cli

MISTAKES = {
    "no such task": (["--tasks", "copi", *NO_MODEL], "no task 'copi': did you mean copy?"),
    "a task without a name": (["--tasks", "", *NO_MODEL], "there is no task ''"),
    "no such selector": (["--oracle", "--selectors", "treshold"], "no selector 'treshold': did you mean threshold?"),
    "a threshold above 1": (
        ["--oracle", "--strategies", "denoise:threshold=1.5"],
        "threshold must be at most 1, got 1.5",
    ),
    "a threshold below 0": (
        ["--oracle", "--strategies", "denoise:threshold=-1"],
        "threshold must be at least 0, got -1",
    ),
    "an oracle and a model": (["--oracle", *MINI], "--model can't be used with --oracle"),
    "an oracle of summaries": (
        ["--oracle", "--tasks", "summary"],
        "task summary has too many right answers for --oracle",
    ),
    "more examples than fit": (["--examples", "9"], "--examples 9: choose one of 0, 1, 2"),
    "rounds": (["--rounds", "2"], "--rounds can't be used with --quality"),
    "prompts": (["mine.txt"], "files of prompts can't be used with --quality"),
    "selectors for a model in order": (
        ["--selectors", "threshold", *MINI],
        "is for diffusion models, and parlay-mini is not one",
    ),
    "canvases for a model in order": (
        ["--strategies", "denoise:threshold=1", *MINI],
        "is for diffusion models, and parlay-mini is not one",
    ),
    "an answer longer than the context": (
        ["--tasks", "copy", "--max-tokens", "99999", *MINI],
        "and a canvas of 99999 do not fit the context of 4096: lower --max-tokens",
    ),
}


def tiny_diffusion(folder: Path) -> None:
    """A model of random weights that reads text."""
    save_diffusion("sdar", folder, vocab=512)
    task = TASKS["copy"]
    byte_level([task.prompt(problem) for problem in task.problems(20, 0)], 500).save_pretrained(folder)


@pytest.mark.parametrize("case", MISTAKES)
def test_wrong_usage_is_one_line(cli: Cli, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words, named = MISTAKES[case]
    result = cli("bench", "--quality", *words)
    assert (result.code, result.out) == (2, "")
    assert named in result.err
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_flags_of_quality_mean_nothing_without_it(cli: Cli) -> None:
    result = cli("bench", "--tasks", "copy")
    assert (result.code, result.err) == (
        2,
        "parlay: error: --tasks works only with --quality: add it, or remove --tasks\n",
    )


def test_thresholds_of_0_and_1_are_one_forward_and_the_most_careful(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    strategies = "denoise:threshold=0,denoise:threshold=1"
    words = ["--oracle", "--tasks", "choose", "--strategies", strategies, "--prompts", "20", "--out", str(out)]
    result = cli("bench", "--quality", *words)
    assert result.code == 0, result.err
    at_once, careful = read(out)[1]
    assert at_once.tokens_per_step == 6
    assert at_once.values["expected"] == pytest.approx(1 / 32)
    assert careful.values["right"] == 20
    assert (
        read(out)[0]["command"]
        == f"parlay bench --quality --oracle --tasks choose --strategies {strategies} --prompts 20"
    )


def test_a_model_that_writes_in_order_has_its_exact_strategies_on_the_page(cli: Cli, tmp_path: Path) -> None:
    out, folder = tmp_path / "rows.jsonl", tmp_path / "page"
    words = [
        "--tasks",
        "copy,summary",
        "--prompts",
        "2",
        "--max-tokens",
        "6",
        "--examples",
        "1",
        "--out",
        str(out),
        "-o",
        str(folder),
    ]
    result = cli("bench", "--quality", "--no-plots", *words, *MINI)
    assert result.code == 0, result.err
    assert {row.cell.model for row in read(out)[1]} == {"parlay-mini"}
    assert len({row.values["right"] for row in read(out)[1] if row.cell.workload == "copy"}) == 1
    page = (folder / "quality.md").read_text()
    assert "parlay-mini: what each task allows" in page
    assert "| exact |" in page
    assert [path.name for path in folder.iterdir()] == ["quality.md"]  # nothing lossy was kept
    other = cli("bench", "--quality", "--no-plots", *words, *MINI, "--quantize", "int8")
    assert (other.code, other.out) == (2, "")
    assert "options: give another --out" in other.err


def test_a_diffusion_model_is_swept_and_nothing_is_kept_of_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    tiny_diffusion(tmp_path / "tiny")
    out = tmp_path / "rows.jsonl"
    words = ["--tasks", "copy", "--prompts", "1", "--max-tokens", "4", "--selectors", "threshold,margin"]
    result = cli("bench", "--quality", *words, "--out", str(out), "--model", str(tmp_path / "tiny"))
    assert result.code == 0, result.err
    rows = read(out)[1]
    assert len(rows) == 15
    assert {row.exactness for row in rows} == {"lossy"}
    assert cli("bench", "report", str(out), "-o", str(tmp_path / "page"), "--no-plots").code == 0
    assert "tiny: every setting" in (tmp_path / "page" / "quality.md").read_text()
    assert max(row.tokens_per_step for row in rows) > min(row.tokens_per_step for row in rows)
