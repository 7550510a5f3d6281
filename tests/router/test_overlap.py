"""What goes on with earlier text is told token by token, wherever that text stands."""

from __future__ import annotations

import pytest

from parlay.cli.explaining import going_on

PROMPT = (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((9, 1, 2, 3, 4, 9), (0, 0, 0, 1, 1, 0)),
        ((7, 8, 9, 7, 8, 9), (0, 0, 0, 0, 0, 1)),
        ((), ()),
    ],
    ids=["copy of the prompt", "copy of itself", "nothing"],
)
def test_a_token_goes_on_with_a_match_of_two(output: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert going_on(output, PROMPT) == [*map(bool, expected)]


def test_a_match_may_begin_in_the_prompt_and_stand_in_a_reference() -> None:
    assert going_on((7, 8), PROMPT, [(5, 6, 7, 8)]) == [True, True]
    assert going_on((7, 8), PROMPT, [(5, 6), (7, 8)]) == [False, False], "nothing runs from one text into the next"


@pytest.mark.parametrize("prompt", [(), (1,)])
def test_behind_a_short_prompt_the_first_tokens_have_too_little_before_them(prompt: tuple[int, ...]) -> None:
    assert going_on((1, 1, 1, 1, 1), prompt) == [False] * (3 - len(prompt)) + [True] * (2 + len(prompt))
