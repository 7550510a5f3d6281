"""README's snippets run on the built-in model in place of a download, and its table follows from committed rows."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from operator import truediv
from pathlib import Path
from statistics import geometric_mean, median

import pytest

from parlay.bench.records import OURS, PLAIN
from parlay.cli import main
from parlay.models.fetch.resolving import resolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- snippet: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL))
HUB_ID = "Qwen/Qwen3-0.6B"


def test_the_snippets_are_short() -> None:
    assert set(SNIPPETS) == {"cli", "llm", "transformers", "server"}
    assert all(len(snippet.strip().splitlines()) <= 6 for snippet in SNIPPETS.values())


def test_the_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    for line in SNIPPETS["cli"].replace(HUB_ID, "parlay-mini").strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "parlay"
        assert main(arguments) == 0
        assert capsys.readouterr().out.strip()


def test_the_python_api_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS["llm"].replace(HUB_ID, "parlay-mini"), "README llm", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_custom_generate_runs() -> None:
    names: dict[str, object] = {}
    code = SNIPPETS["transformers"].replace(HUB_ID, str(resolve("parlay-mini")))
    exec(compile(code, "README transformers", "exec"), names)
    assert names["ids"].shape[1] > 8  # type: ignore[attr-defined]


def test_the_first_screen_says_what_it_is_shows_a_picture_and_has_the_commands_from_a_clone_on() -> None:
    top = "\n".join(README.splitlines()[:17])
    assert "](docs/pictures/race.svg)" in top
    assert all(words in top for words in ("CPU", "speculative decoding", "the text of ordinary decoding"))
    assert all(command in top for command in ("git clone", "make demo", "parlay chat", "parlay serve"))


def test_the_table_follows_from_the_committed_rows() -> None:
    """Whole requests of `auto`, over plain decoding and over llama-server's."""
    lines = (ROOT / "benchmarks" / "results" / "beside-llama-256.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    speeds = defaultdict[tuple[str, str, str], list[float]](list)  # one for each round
    for row in map(json.loads, lines):
        system = row.get("engine", OURS), row["strategy"], row["workload"].removeprefix("spec-bench/")
        speeds[system].append(row["tokens"] / row["seconds"])
    kinds = {kind for *_, kind in speeds}
    against = [(OURS, PLAIN), (f"llama-server {PLAIN}", PLAIN)]
    ratios = {
        kind: [
            median(map(truediv, speeds[OURS, "auto", kind], speeds[engine, strategy, kind]))
            for engine, strategy in against
        ]
        for kind in kinds
    }
    shown = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+× \| [\d.]+×) \|$", README, re.MULTILINE))
    assert shown == {kind: " | ".join(f"{each:.2f}×" for each in ratios[kind]) for kind in kinds}
    means = [geometric_mean(ratios[kind][column] for kind in kinds) for column in range(len(against))]
    assert f"| **geometric mean** | {' | '.join(f'**{mean:.2f}×**' for mean in means)} |" in README


def test_it_takes_a_minute() -> None:
    assert len(README.splitlines()) <= 120


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"DEMO_OUTPUT|README_TABLE|FIGURES\n|NUMBER M|TBD|TODO|URL_OF", README)
