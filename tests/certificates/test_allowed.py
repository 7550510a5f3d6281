"""What a request allows, as text."""

from __future__ import annotations

import pytest

from parlay.certificates.requirement import Allowed, Floor, parse
from parlay.options import UsageError
from parlay.types import Exactness


def test_levels_and_floors_are_read() -> None:
    assert parse("bits") == Allowed(Exactness.BITS)
    assert parse("lossy") == Allowed(Exactness.LOSSY)
    assert parse("lossy:floor=0.9") == Allowed(Exactness.LOSSY, Floor(floor=0.9))
    asked = Floor(floor=0.8, agreement=0.95, confidence=0.99)
    assert parse("lossy:floor=0.8,agreement=0.95,confidence=0.99") == Allowed(Exactness.LOSSY, asked)
    assert parse(f"lossy:{asked}").floor == asked


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bit", "did you mean bits"),
        ("", "is unknown"),
        ("bits:floor=1", "has no settings"),
        ("lossy:", "no floor is given"),
        ("lossy:agreement=0.5", "no floor is given"),
        ("lossy:floor=2", "at most 1"),
        ("lossy:floor=nan", "at least 0"),
        ("lossy:floor=0.9,confidence=1", "at most"),
        ("lossy:floor=0.9,floor=0.8", "given twice"),
        ("lossy:flor=0.9", "did you mean floor"),
        ("lossy:0.9", "expected key=value"),
    ],
)
def test_what_says_nothing_is_an_error_in_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        parse(text)
    assert "\n" not in str(error.value)
