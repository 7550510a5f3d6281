"""The measure of verbatim repetition."""

import pytest

from parlay.bench.loops import first_loop, looped


def test_text_that_never_repeats_has_no_loop() -> None:
    assert first_loop(range(100)) == 100
    assert looped(range(100)) == 0


def test_a_second_copy_is_looped_and_the_first_is_not() -> None:
    output = [*range(20), *range(100, 110), *range(20), *range(200, 210)]
    assert first_loop(output) == 30
    assert looped(output) == pytest.approx(20 / 60)


def test_a_repeat_one_token_too_short_is_no_loop() -> None:
    assert looped([*range(15), 99, *range(15)]) == 0
    assert looped([*range(16), 99, *range(16)]) == pytest.approx(16 / 33)


def test_a_short_cycle_loops_after_its_first_round() -> None:
    output = [1, 2, 3] * 20
    assert first_loop(output) == 3
    assert looped(output) == pytest.approx(57 / 60)


def test_empty_output_has_no_loop() -> None:
    assert first_loop([]) == 0
    assert looped([]) == 0
