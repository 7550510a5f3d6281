"""Comparing systems: the same work for all, measured side by side, failures and differing texts in the open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.figures import summary
from benchmarks.figures.compare import Comparison
from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Results, Row
from benchmarks.figures.systems import System, Timed

TEXT = tuple(range(100, 140))
LOOPING = TEXT + TEXT


def system(name: str, text: tuple[int, ...] = TEXT, seconds: float = 1.0, calls: list[str] | None = None) -> System:
    """Writes ``text``, as far as it may, in so many seconds."""

    def decode(prompt: Prompt, most: int) -> Timed:
        if calls is not None:
            calls.append(name)
        return Timed(text[:most], 1, 0.1, seconds, steps=20)

    return System(name, decode)


def broken(prompt: Prompt, most: int) -> Timed:
    raise RuntimeError("no such cache\nsecond line")


def comparison(prompts: int = 2, rounds: int = 2) -> Comparison:
    drawn = [Prompt("edit", number, "", (1, 2, 3)) for number in range(prompts)]
    return Comparison(part="lookup", model="m", prompts={"edit": drawn}, most_tokens=80, rounds=rounds)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    return Results(tmp_path / "figures.jsonl", {})


def of(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row.system == name]


def test_a_ratio_is_that_of_the_speeds(results: Results) -> None:
    comparison().run(results, system("plain", seconds=3.0), [system("fast")])
    ratio = summary.ratio(results.rows, "fast", "plain")
    assert ratio is not None
    assert (ratio.middle, ratio.low, ratio.high) == pytest.approx((3.0, 3.0, 3.0))
    assert summary.same(of(results.rows, "fast")) == "4/4"
    assert summary.tokens_per_step(of(results.rows, "fast")) == 2.0


def test_texts_that_differ_from_plain_decoding_are_counted_as_such(results: Results) -> None:
    comparison().run(results, system("plain"), [system("wrong", text=(*TEXT[:-1], 7))])
    assert summary.same(of(results.rows, "wrong")) == "0/4"


def test_tokens_after_the_first_loop_count_for_nobody(results: Results) -> None:
    comparison().run(results, system("plain", LOOPING), [system("fast", LOOPING)])
    assert {row.tokens for row in results.rows} == {len(TEXT)}
    assert {row.looped for row in results.rows} == {0.5}


def test_a_text_that_loops_at_once_is_left_out_and_says_so(results: Results) -> None:
    comparison().run(results, system("plain", (7,) * 40), [system("fast", (7,) * 40)])
    assert all("repeats itself" in row.note for row in results.rows)
    assert summary.ratio(results.rows, "fast", "plain") is None


def test_a_system_that_fails_is_a_row_that_says_so(results: Results) -> None:
    comparison().run(results, system("plain"), [System("broken", broken), system("fast")])
    assert {row.error for row in of(results.rows, "broken")} == {"RuntimeError: no such cache"}
    assert summary.same(of(results.rows, "fast")) == "4/4"


def test_the_systems_of_a_round_take_turns_and_the_first_changes(results: Results) -> None:
    calls: list[str] = []
    comparison(prompts=1).run(results, system("plain", calls=calls), [system("fast", calls=calls)])
    assert calls[-4:] == ["plain", "fast", "fast", "plain"]


def test_measured_blocks_are_not_measured_again(results: Results) -> None:
    comparison(prompts=1).run(results, system("plain"), [])
    calls: list[str] = []
    longer = comparison(prompts=2)
    assert [block.prompt for block in longer.pending(results)] == [1, 1]
    longer.run(results, system("plain", calls=calls), [])
    assert longer.pending(results) == []
    assert len(calls) == 2 + 1 + 2  # warm-up, the text, two rounds


def test_the_mean_over_kinds_of_text_is_geometric() -> None:
    rows = [
        Row(part="draft", kind=kind, system=name, decode_tokens=10, decode_seconds=seconds)
        for kind, name, seconds in (("a", "n", 4.0), ("a", "s", 1.0), ("b", "n", 1.0), ("b", "s", 1.0))
    ]
    mean = summary.geometric_ratio(rows, "s", "n")
    assert mean is not None
    assert mean.middle == pytest.approx(2.0)
