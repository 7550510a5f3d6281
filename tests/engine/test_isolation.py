"""A call for many that fails is made again for each alone, so that only the guilty pay."""

from __future__ import annotations

from parlay.engine.sequence_step import isolated


class Calls:
    """Notes the calls, and raises for those in which a negative number takes part."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.failed: list[tuple[int, str]] = []

    def call(self, members: list[int]) -> None:
        self.seen.append(members)
        if min(members) < 0:
            raise ValueError(f"{len(members)} together")

    def fail(self, member: int, error: Exception) -> None:
        self.failed.append((member, str(error)))


def test_one_call_is_enough_where_nobody_fails() -> None:
    calls = Calls()
    isolated(calls.call, [1, 2, 3], calls.fail)
    assert (calls.seen, calls.failed) == ([[1, 2, 3]], [])


def test_those_that_fail_alone_have_failed_and_no_others() -> None:
    calls = Calls()
    isolated(calls.call, [1, -2, 3, -4], calls.fail)
    assert calls.seen == [[1, -2, 3, -4], [1], [-2], [3], [-4]]
    assert calls.failed == [(-2, "1 together"), (-4, "1 together")]


def test_a_call_for_one_is_not_made_twice() -> None:
    calls = Calls()
    isolated(calls.call, [-1], calls.fail)
    assert (calls.seen, calls.failed) == ([[-1]], [(-1, "1 together")])


def test_a_call_that_leaves_traces_is_made_once_and_fails_for_all() -> None:
    calls = Calls()
    isolated(calls.call, [1, -2], calls.fail, again=False)
    assert (calls.seen, calls.failed) == ([[1, -2]], [(1, "2 together"), (-2, "2 together")])
