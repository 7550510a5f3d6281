"""The cost of a step besides its forward: the stub decodes its own text, and the parts add up to the whole."""

import pytest

from benchmarks.figures.overhead import PARAMS, measure
from benchmarks.figures.stub import PERIOD, StubRunner


@pytest.fixture(scope="module")
def runner() -> StubRunner:
    return StubRunner(vocab_size=512)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_parts_of_a_step_add_up_to_it(runner: StubRunner, batch: int) -> None:
    values = measure(runner, "none", PARAMS["greedy"], batch, steps=12)
    parts = [values[name] for name in ("propose", "verify", "accept", "commit", "observe", "rest")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(values["besides"], rel=0.5)  # medians of parts, median of sums
    assert values["tokens"] == 1.0


def test_drafts_copied_from_the_stubs_text_are_accepted(runner: StubRunner) -> None:
    values = measure(runner, "prompt-lookup:policy=fixed,k=8", PARAMS["greedy"], batch=2, steps=12)
    assert values["tokens"] == 9.0


def test_the_stubs_text_comes_back_after_its_period(runner: StubRunner) -> None:
    text = runner.text(2 * PERIOD)
    assert text[:PERIOD] == text[PERIOD:]
    assert len(set(text)) == PERIOD
