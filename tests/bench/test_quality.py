"""Quality under parallelism: tasks and their scores, laws against formulas and draws, and the numbers made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.bench.quality.curves import (
    Point,
    accuracy_under_parallelism,
    by_selector,
    frontier,
    kept,
    kept_lossy,
    most_parallel,
    over_tasks,
    points,
)
from parlay.bench.quality.laws import Law, success
from parlay.bench.quality.page import deviation, pictures_of, sections
from parlay.bench.quality.run import measure, setting_of, sweep
from parlay.bench.quality.scores import score
from parlay.bench.quality.tasks import ITEMS, TASKS, Problem, latin_squares, sudokus
from parlay.bench.quality.writers import OracleWriter
from parlay.bench.records import Cell, Results, Row
from parlay.sampling.selectors import Credit, EntropyBound, Factor, FixedCount, KLStability, MaskPredict, Threshold
from parlay.types import Selector

LISTED = [name for name, task in TASKS.items() if task.listed]
SMALL = [name for name in LISTED if len(TASKS[name].problems(1, 0)[0].answers) < 100]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "rows.jsonl", {"command": "parlay bench --quality"})


def law(task: str, seed: int = 0) -> Law:
    return Law(TASKS[task].problems(1, seed)[0].answers)


# -------------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
def test_problems_follow_from_the_seed_and_their_own_answers_are_right(name: str) -> None:
    task = TASKS[name]
    problems = task.problems(3, 7)
    assert problems == task.problems(3, 7)
    assert len({each.question for each in problems + task.problems(3, 8)}) > 3
    for problem in problems:
        assert len(set(problem.answers)) == len(problem.answers)
        for answer in problem.answers[:8]:
            found = score(problem, " ".join(answer))
            assert (found.right, found.loose, found.places) == (True, True, 1.0)
        assert not score(problem, "").right


def test_squares_are_counted_as_they_are_known_to_be() -> None:
    assert (len(latin_squares()), len(sudokus())) == (576, 288)
    assert len(TASKS["permutation"].problems(1, 0)[0].answers) == 720
    assert len(TASKS["shuffle"].problems(1, 0)[0].answers) == 719


def test_every_solution_of_a_sudoku_has_the_clues() -> None:
    for problem in TASKS["sudoku"].problems(10, 0):
        clues = problem.question.split()[1:]
        assert all(
            word in ("_", digit) for answer in problem.answers for word, digit in zip(clues, answer, strict=True)
        )


def test_the_prompt_solves_two_other_problems_first() -> None:
    task = TASKS["reverse"]
    (problem,) = task.problems(1, 0)
    prompt = task.prompt(problem)
    assert prompt.count("Answer:") == 3
    assert prompt.endswith(f"{problem.question}\nAnswer:")
    assert task.prompt(problem, 0) == f"{task.instruction}\n\n{problem.question}\nAnswer:"


TWO = Problem("?", (("Anna", "Ben", "Carla"), ("Carla", "Ben", "Anna")))
FACTS = Problem("?", (("Tom", "sold", "oars"),), frozenset({"Tom", "sold", "oars"}), 4)


@pytest.mark.parametrize(
    ("problem", "text", "expected"),
    [
        (TWO, " carla ben, ANNA.", (True, True, 1.0)),
        (TWO, "\nAnna Ben Carla\nmore", (True, True, 1.0)),
        (TWO, "Here it is:\nAnna Ben Carla", (False, True, 0.0)),
        (TWO, "Anna Ben Ben", (False, False, 2 / 3)),
        (TWO, "Anna Ben Carla Tom", (False, False, 3 / 4)),
        (TWO, "Anna", (False, False, 1 / 3)),
        (FACTS, "The oars Tom sold", (True, True, 1.0)),
        (FACTS, "All of the oars Tom sold", (False, False, 1.0)),
        (FACTS, "Tom sold it", (False, False, 2 / 3)),
    ],
)
def test_scores(problem: Problem, text: str, expected: tuple[bool, bool, float]) -> None:
    found = score(problem, text)
    assert (found.right, found.loose) == expected[:2]
    assert found.places == pytest.approx(expected[2])


# --------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", [name for name in LISTED if TASKS[name].closed and name != "permutation"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, ITEMS])
def test_formulas_are_the_sum_over_all_answers(name: str, k: int) -> None:
    """Whatever the order is, because all places are alike."""
    closed = TASKS[name].closed
    assert closed is not None
    for order in ("left-to-right", "confidence", "random"):
        assert success(law(name), FixedCount(order, k), 1, seed=k) == pytest.approx(closed(k), abs=1e-6)


def test_formulas_of_permutations_and_lists_are_those_of_the_literature() -> None:
    closed = TASKS["permutation"].closed
    assert closed is not None
    assert [closed(k) for k in (1, 2, 3, 6)] == pytest.approx([1.0, 0.3125, 0.1235, 0.0154], abs=1e-4)
    assert success(law("permutation"), FixedCount("left-to-right", 3), 1) == pytest.approx(closed(3))
    replace = TASKS["replace"].closed
    assert replace is not None
    assert replace(ITEMS) == pytest.approx((1 - 1 / ITEMS) ** (ITEMS - 1))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("selector", [FixedCount(), Threshold(1.0), Factor(0.3), EntropyBound(0.0)], ids=str)
def test_careful_selectors_lose_nothing(name: str, selector: Selector) -> None:
    assert success(law(name), selector, 1) == pytest.approx(1.0, abs=1e-6)


def test_the_condition_for_greedy_tokens_does_not_hold_for_drawn_ones() -> None:
    """A factor below 1 takes four of six places together, each 5/6 sure of its word, and two may draw the new one."""
    none, one = (5 / 6) ** 4, 4 * (1 / 6) * (5 / 6) ** 3
    assert success(law("replace"), Factor(0.99), 1) == pytest.approx(none + one, abs=1e-6)
    assert success(law("permutation"), Factor(0.99), 1) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["sentence", "grammar", "sudoku"])
def test_all_places_at_once_are_right_by_the_product_of_marginals(name: str) -> None:
    known = law(name)
    marginals = [answers.tolist() for answers in known.answers_AP.T]
    count = len(known.answers_AP)
    chances = (
        [column.count(word) / count for column, word in zip(marginals, answer, strict=True)]
        for answer in known.answers_AP.tolist()
    )
    expected = 0.0
    for chance in chances:
        product = 1.0
        for each in chance:
            product *= each
        expected += product
    assert success(known, Threshold(0.0), 1) == pytest.approx(expected, abs=1e-6)


def test_a_selector_that_opens_places_again_has_no_sum() -> None:
    with pytest.raises(ValueError, match="opens places again"):
        success(law("copy"), MaskPredict(), 1)


def test_an_oracle_needs_answers_of_one_length() -> None:
    with pytest.raises(ValueError, match="the same length"):
        Law([("a",), ("a", "b")])


STRATEGIES = (
    "none",
    "denoise:selector=confidence,k=2",
    "denoise:selector=random,k=3",
    "denoise:threshold=0.3",
    "denoise:selector=kl-stability,threshold=0.3,history=1",
    "denoise:selector=credit,threshold=0.7",
    "denoise:selector=factor,factor=1.6",
    "denoise:selector=entropy-bound,bound=2.0",
    "denoise:selector=mask-predict,steps=2",
)


@pytest.mark.parametrize("name", ["replace", "grammar"])
def test_draws_lie_within_three_sigma_of_the_law(name: str, results: Results) -> None:
    """Under each selector, and the rows say how many forwards that took."""
    measure(OracleWriter(80), [TASKS[name]], STRATEGIES, results)
    assert len(results.rows) == len(STRATEGIES)
    for row in results.rows:
        assert row.error == ""
        assert row.requests == 80
        if "expected" in row.values:
            assert abs(deviation(row)) <= (3 if row.values["sigma"] > 1e-9 else 1e-6), row.cell.strategy
    plain, pairs = results.rows[:2]
    assert plain.tokens_per_step == 1
    assert pairs.tokens_per_step > 1.6
    assert "expected" not in results.rows[-1].values


@pytest.mark.parametrize("samples", [1, 5])
def test_any_number_of_answers_is_drawn_of_a_task_with_several_laws(samples: int, results: Results) -> None:
    measure(OracleWriter(samples), [TASKS["sudoku"]], ("denoise:selector=random,k=16",), results)
    (row,) = results.rows
    assert (row.error, row.requests) == ("", samples)


def test_rows_that_are_there_are_not_measured_again(results: Results) -> None:
    for _ in range(2):
        measure(OracleWriter(4), [TASKS["copy"]], ("none",), results)
    assert len(results.rows) == 1


def test_what_fails_has_a_row_that_says_why(results: Results) -> None:
    measure(OracleWriter(4), [TASKS["copy"]], ("draft-model:model=x",), results)
    assert "an oracle has no draft model" in results.rows[0].error
    assert "an oracle has no draft model" in sections(results.rows)[-1].text


# ------------------------------------------------------------------------------------------------------------- curves


def test_the_area_under_a_curve_is_weighted_by_what_is_lost() -> None:
    plain = [Point(1.0, 1.0)]
    assert accuracy_under_parallelism(plain, 1.0) == pytest.approx(100)
    assert accuracy_under_parallelism([*plain, Point(4.0, 1.0)], 1.0) == pytest.approx(400)
    lost = 0.96 * 2.718281828**-0.12
    assert accuracy_under_parallelism([*plain, Point(3.0, 0.96)], 1.0) == pytest.approx(100 + 100 * (1 + lost))
    assert accuracy_under_parallelism([*plain, Point(3.0, 0.9)], 1.0) == pytest.approx(100)  # too far below
    assert accuracy_under_parallelism([Point(1.0, 0.0)], 0.0) == 0
    assert accuracy_under_parallelism([], 1.0) == 0


def test_a_plot_shows_settings_that_no_other_beats() -> None:
    best, worse, fast = Point(2.0, 0.9, "b"), Point(1.5, 0.8, "w"), Point(3.0, 0.2, "f")
    assert frontier(sorted([best, worse, fast, Point(3.0, 0.1, "d")])) == [best, fast]


def row(task: str, strategy: str, right: int, steps: int, exactness: str = "lossy") -> Row:
    cell = Cell(part="quality", model="m", strategy=strategy, workload=task)
    return Row(cell=cell, requests=10, tokens=60, steps=steps, exactness=exactness, values={"right": float(right)})


SAFE, FAST = "denoise:selector=confidence", "denoise:selector=confidence,k=3"
ROWS = [
    row("copy", "none", 10, 60, "bits"),
    row("copy", SAFE, 10, 60),
    row("copy", FAST, 10, 20),
    row("sort", "none", 4, 60, "bits"),
    row("sort", SAFE, 5, 60),
    row("sort", FAST, 4, 20),
    row("sudoku", SAFE, 0, 60),
]


def test_the_most_parallel_setting_that_keeps_its_quality_is_found() -> None:
    table = points(ROWS)
    assert {name: each.strategy for name, each in kept(table["m", "copy"]).items()} == {
        "exact": "none",
        "confidence": FAST,
    }
    assert {name: each.strategy for name, each in kept(table["m", "sort"]).items()} == {"confidence": SAFE}
    assert kept(table["m", "sudoku"]) == {}
    assert list(by_selector(table["m", "sort"])) == ["exact", "confidence"]


def test_what_was_kept_is_written_for_lossy_strategies_alone() -> None:
    found = [(one.task, one.strategy, one.right, one.tokens_per_forward) for one in kept_lossy(ROWS, "m")]
    assert found == [("copy", SAFE, 10, 1.0), ("copy", FAST, 10, 3.0), ("sort", SAFE, 5, 1.0)]


def test_means_are_over_tasks_and_of_settings_that_all_have() -> None:
    table = points(ROWS)
    means = over_tasks([table["m", "copy"], table["m", "sort"]])
    assert means == [Point(1.0, 0.7, "none"), Point(1.0, 0.75, SAFE), Point(3.0, 0.7, FAST)]
    assert most_parallel(means, 0.75) == 1.0
    assert most_parallel(means, 0.7) == 3.0
    assert most_parallel(means, 0.8) is None


def test_a_sweep_names_each_setting_of_its_selectors() -> None:
    names = sweep(["threshold", "kl-stability"])
    assert [setting_of(each) for each in names[:2]] == ["threshold=0", "threshold=0.3"]
    assert setting_of(names[-1]) == "threshold=0.3 history=1"
    assert len(set(names)) == 16
    with pytest.raises(ValueError, match="did you mean threshold"):
        sweep(["treshold"])


def test_tasks_of_small_laws_are_those_that_these_tests_think_of() -> None:
    assert set(LISTED) - set(SMALL) == {"shuffle", "permutation", "latin"}
    assert set(TASKS) - set(LISTED) == {"summary"}


def test_selectors_that_remember_have_a_sum_too() -> None:
    for selector in (KLStability(0.3, history=1), Credit(0.7)):
        assert 0 < success(law("sentence"), selector, 1) <= 1 + 1e-6


def test_plots_are_the_same_for_the_same_rows() -> None:
    pytest.importorskip("matplotlib")
    drawn = pictures_of(ROWS)
    assert sorted(drawn) == ["quality-tasks.svg", "quality.svg"]
    assert all(text.startswith("<svg") for text in drawn.values())
    assert drawn == pictures_of(ROWS)
