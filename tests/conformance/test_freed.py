"""A drafter that nobody uses any more is freed at once, not when the collector comes by: heads hold megabytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from parlay.strategies.catalogue import catalogue
from parlay.testing.conformance import default_stages, subject_of

STAGE = default_stages()["toy"]
ENTRIES = [name for name, entry in catalogue().items() if entry.factory]


@pytest.fixture
def uncollected() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    yield
    if was_on:
        gc.enable()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("uncollected")
def test_a_drafter_does_not_refer_to_itself(name: str) -> None:
    entry = catalogue()[name]
    made = subject_of(f"{name}:{entry.toys[0]}" if entry.toys[0] else name).strategy(STAGE, 7)
    drafters = [weakref.ref(drafter) for drafter in made.drafters]
    assert drafters
    del made
    assert [ref() for ref in drafters] == [None] * len(drafters)
