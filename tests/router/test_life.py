"""What a router chose over a request's life is told in full and in little room."""

from __future__ import annotations

from collections import Counter

import pytest

from parlay.router.sequence_state import ChoiceHistory
from parlay.types import Routed, RouterRecord, Stretch


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 64, 65, 1000, 4097])
def test_every_step_is_in_one_stretch_of_at_most_thirty_two(steps: int) -> None:
    history = ChoiceHistory()
    for step in range(steps):
        history.add("copy" if step % 3 else "none", step % 5, 2.0)
    told = history.stretches()
    assert len(told) <= 32
    assert sum(each.steps for each in told) == steps
    assert sum(each.tokens for each in told) == sum(step % 5 for step in range(steps))
    assert sum(each.expected for each in told) == 2.0 * steps
    assert len({each.steps for each in told[:-1]}) <= 1, "all are as long, but for the last"
    choices = sum((Counter(each.choices) for each in told), Counter[str]())
    assert choices.total() == steps
    assert choices["none"] == len(range(0, steps, 3))


def test_numbers_are_told_to_four_digits() -> None:
    drafter = Routed("copy", asked=12345, expected=12.345678, seconds=0.000123456789, expected_seconds=1 / 3)
    told = RouterRecord((drafter,), {"trial": 3}, "edit", (Stretch(99999, 4, 2 / 3, {"copy": 1}),)).as_data(whole=True)
    expected = {"expected": 12.35, "seconds": 0.0001235, "expected_seconds": 0.3333}
    counts = {"drafter": "copy", "asked": 12345, "verified": 0, "trials": 0, "accepted": 0}
    assert list(told["drafters"]) == [counts | expected]
    assert list(told["life"]) == [{"steps": 99999, "tokens": 4, "expected": 0.6667, "choices": {"copy": 1}}]
