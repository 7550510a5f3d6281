"""A head that does far worse than on held-out texts is named, once; one that does not is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parlay.drafters.heads.watch import ENOUGH, AcceptanceWatch
from parlay.drafters.options import MEDUSA
from parlay.heads.artefact import HeadArtefact
from parlay.heads.layouts.layout import LAYOUT
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Observation, Tree, Verdict
from tests.drafters.sight import Sight

VOCAB = 24
TWO_FIRST = Draft(Tree((7, 8, 9), (-1, -1, 0)), sources=(MEDUSA,) * 3)


def held(expected: float | None) -> HeadArtefact:
    head = random_heads(ToyRunner(RandomLogits(VOCAB), VOCAB).spec)(MEDUSA, "")
    assert head is not None
    settings = dict(head.artefact.settings)
    return replace(head.artefact, settings=settings if expected is None else {**settings, "expected": expected})


def warnings(
    expected: float | None, right: int, caplog: pytest.LogCaptureFixture, draft: Draft = TWO_FIRST, steps: int = ENOUGH
) -> list[str]:
    watch = AcceptanceWatch(MEDUSA, held(expected))
    for step in range(steps):
        verdict = Verdict((1,), (8, 3)) if step < right else Verdict((), (3,))
        watch.see(Observation(Sight(), draft, verdict))
    return [record.getMessage() for record in caplog.records]


def test_a_head_that_is_never_right_is_named_once_with_both_shares(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warnings(0.5, 0, caplog, steps=3 * ENOUGH)
    assert MEDUSA in message
    assert "0 % of the head's first guesses were right, and 50 % on held-out texts" in message
    assert "another version of this model" in message


@pytest.mark.parametrize(("expected", "right"), [(0.5, ENOUGH // 4), (0.01, 1), (None, 0)])
def test_a_head_that_does_what_it_promises_is_left_alone(
    expected: float | None, right: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings(expected, right, caplog)


def test_steps_without_guesses_of_its_own_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(0.5, 0, caplog, NO_DRAFT, 2 * ENOUGH)
    assert not warnings(0.5, 0, caplog, replace(TWO_FIRST, sources=("prompt-lookup",) * 3), 2 * ENOUGH)
    assert not warnings(0.5, 0, caplog, replace(TWO_FIRST, probes=3), 2 * ENOUGH)


@pytest.mark.parametrize(("right", "told"), [(ENOUGH // 10, 0), (1, 1)])
def test_a_published_head_is_named_where_nearly_nothing_is_right(
    right: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such heads do not say how often they should be right."""
    head = held(None)
    watch = AcceptanceWatch(MEDUSA, replace(head, settings={**head.settings, LAYOUT: "Medusa"}))
    for step in range(2 * ENOUGH):
        verdict = Verdict((1,), (8, 3)) if step < right else Verdict((), (3,))
        watch.see(Observation(Sight(), TWO_FIRST, verdict))
    assert len(caplog.records) == told
    assert all("of a head in the layout of Medusa" in record.getMessage() for record in caplog.records)
