"""The page made of the rows, and the prompts that ship: what a reader is shown."""

from pathlib import Path

import pytest

from benchmarks.figures.compare import LEFT_OUT
from benchmarks.figures.prompts import KINDS, Prompt, built_in
from benchmarks.figures.report import report
from benchmarks.figures.results import Row
from benchmarks.figures.theirs import COMBINATIONS
from parlay.bench.provenance import ROOT, provenance
from parlay.models.loading import load_tokenizer
from parlay.models.resolving import resolve

HEADER = provenance("python -m benchmarks.figures")


def row(part: str, system: str, seconds: float, kind: str = "edit", *, note: str = "", error: str = "") -> Row:
    return Row(
        part=part,
        model="m",
        kind=kind,
        system=system,
        tokens=30,
        decode_tokens=29,
        decode_seconds=0.0 if error else seconds,
        steps=10,
        draft_tokens=40,
        accepted_tokens=20,
        same=None if error else True,
        note=note,
        error=error,
    )


def test_plain_decoding_names_the_default_and_the_combinations_that_failed() -> None:
    rows = [
        row("plain", "parlay none", 1.0),
        row("plain", str(COMBINATIONS[0]), 2.0),
        row("plain", str(COMBINATIONS[1]), 0.0, error="RuntimeError: no compiler"),
        Row(part="plain-default", model="m", note=str(COMBINATIONS[0])),
    ]
    page = report(HEADER, rows)
    assert f"| {COMBINATIONS[0]} | 14.5 | 2.00 (2.00-2.00) | 1/1 | default |" in page
    assert f"| {COMBINATIONS[1]} |  |  |  | failed: RuntimeError: no compiler |" in page


def test_each_workload_is_held_against_the_fastest_that_transformers_has() -> None:
    rows = [
        row("versus", "parlay none", 3.0),
        row("versus", "parlay prompt-lookup", 1.0),
        row("versus", "transformers plain", 4.0, note="transformers bf16 sdpa dynamic"),
        row("versus", "transformers prompt lookup", 2.0, note="transformers bf16 sdpa dynamic"),
        row("versus", "transformers assisted", 0.0, error="ValueError: no"),
    ]
    line = next(line for line in report(HEADER, rows).splitlines() if line.startswith("| edit"))
    assert "| 3.00 (3.00-3.00) | 2.00 (2.00-2.00) | 1/1 | 3.00 | prompt lookup (bf16 sdpa dynamic), same 1/1 |" in line


def test_strategies_have_a_line_for_each_kind_and_the_mean() -> None:
    rows = [row("draft", name, seconds, kind) for kind in ("edit", "code") for name, seconds in
            (("parlay none", 2.0), ("parlay draft-model", 1.0))]  # fmt: skip
    page = report(HEADER, rows)
    assert "| edit | 2.00 (2.00-2.00) | 3.00 | 0.50 | 1/1 | 30 | 0.00 |" in page
    assert "**2.00 (2.00-2.00)**" in page


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[Prompt]]:
    return built_in(load_tokenizer(resolve("parlay-mini")), count=3)


def test_prompts_that_ship_cover_every_kind(prompts: dict[str, list[Prompt]]) -> None:
    assert list(prompts) == list(KINDS)
    assert all(len(drawn) == 3 for drawn in prompts.values())
    assert all(8 <= len(prompt.ids) < 512 for drawn in prompts.values() for prompt in drawn)


def test_committed_results_name_no_folder_of_the_machine() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.*"):
        text = path.read_text(encoding="utf-8")
        assert not any(str(folder) in text for folder in (ROOT, Path.home()))


def test_prompts_left_out_are_counted_on_the_page() -> None:
    names = ("parlay none", "parlay prompt-lookup")
    rows = [row("lookup", name, 1.0, note="" if kind == "edit" else f"{LEFT_OUT} after 1 tokens", kind=kind,
                error="" if kind == "edit" else "x") for kind in ("edit", "copy") for name in names]  # fmt: skip
    assert "Left out, since their text loops at once: 1 of 2 prompts." in report(HEADER, rows)
