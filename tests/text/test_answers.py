"""Where the answer of a text stands, and patterns of users, which may never end."""

from __future__ import annotations

import pytest

from parlay.text.answers import CPU_SECONDS, PatternFailed, check_rule, find_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48 / 2 = 24, and 48 + 24 = 72.", "72"),
        ("She pays $1,000.00.", "1000"),
        ("It is 0.50 in all", "0.5"),
        ("so x = -3", "-3"),
        ("10-4=6", "6"),
        ("10-4", "4"),
        ("#### 18", "18"),
        ("version2", None),
        ("none at all", None),
        ("-0.0", "0"),
        ("about 12,34 or so", "34"),
    ],
)
def test_the_last_number_in_one_spelling(text: str, answer: str | None) -> None:
    assert find_answer("number", text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{$1,200.0}", "1200"),
        (r"\boxed{ a   or b }", "a or b"),
        (r"\boxed{never closed", None),
        (r"\boxed{}", None),
        ("18", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert find_answer("boxed", text) == answer


def test_a_pattern_takes_its_first_group_at_its_last_match() -> None:
    assert find_answer(r"(?i)answer: (\w+)", "Answer: B, or answer: C") == "C"
    assert find_answer("[A-D]", "A, no: D") == "D"
    assert find_answer(r"answer: (\S+)", "answer: 1,000.0") == "1000"
    assert find_answer("(a)?b", "b") is None


@pytest.mark.parametrize("pattern", ["(", "", "a" * 2000, "(?P<x>a)(?P<x>b)"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^vote\.answer .*") as raised:
        check_rule(pattern)
    assert "\n" not in str(raised.value)


def test_a_pattern_that_never_ends_is_ended() -> None:
    """By its computing, however long that takes on a busy machine."""
    with pytest.raises(PatternFailed, match=f"more than the {CPU_SECONDS:g} seconds of CPU time"):
        find_answer("(a+)+$", "a" * 40 + "b")
    assert find_answer("(a+)b", "aab") == "aa"
