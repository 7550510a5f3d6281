"""The bounds hold as often as they say, over many calibrations of known truth; the numbers are those of tables."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from parlay.certificates.bounds import agreement, at_least, contradicts, fixed_sequence, lower_bound

TRIALS = 1000
SLACK = 3.3
"""Standard errors by which a share of trials may lie above its limit: one true limit in 2,000 seems broken then."""


def most(share: float) -> float:
    """Failures in `TRIALS` that a chance of at most ``share`` lets be seen."""
    return TRIALS * share + SLACK * float(np.sqrt(TRIALS * share * (1 - share)))


def test_the_lower_bound_is_that_of_clopper_and_pearson() -> None:
    assert lower_bound(10, 10, 0.95) == pytest.approx(0.05**0.1)  # all good: in closed form
    assert lower_bound(95, 100, 0.95) == pytest.approx(0.8977, abs=1e-4)  # as in tables of the beta distribution
    assert lower_bound(0, 10, 0.95) == 0.0
    assert at_least(3, 3, 0.5) == pytest.approx(1 / 8)
    assert at_least(2, 3, 0.5) == pytest.approx(1 / 2)


@pytest.mark.parametrize("n", [30, 200])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("truth", [0.5, 0.9, 0.99])
def test_the_bound_of_a_calibration_fails_no_more_often_than_stated(n: int, confidence: float, truth: float) -> None:
    bound = cache(lambda good: lower_bound(good, n, confidence))
    counts = np.random.default_rng(1).binomial(n, truth, TRIALS)
    assert sum(bound(int(good)) > truth for good in counts) <= most(1 - confidence)


@pytest.mark.parametrize("n", [60, 400])
@pytest.mark.parametrize("floor", [0.7, 0.9])
def test_a_calibration_of_several_strategies_certifies_a_bad_one_no_more_often_than_stated(
    n: int, floor: float
) -> None:
    """Five strategies on the same prompts, so their answers go wrong together. The last three are just too bad."""
    truths = np.array([floor + 0.08, floor + 0.03, floor - 1e-9, floor - 1e-9, floor - 0.05])
    draws = np.random.default_rng(2).random((TRIALS, n, 1))
    goods = (draws < truths).sum(axis=1)
    p_value = cache(lambda good: at_least(good, n, floor))
    certified = [fixed_sequence([p_value(int(good)) for good in row], 0.95) for row in goods]
    assert sum(count > 2 for count in certified) <= most(0.05)
    assert n < 400 or sum(count >= 1 for count in certified) > TRIALS / 2  # and it does certify good ones


@pytest.mark.parametrize("floor", [0.5, 0.9, 0.99])
def test_audits_revoke_what_keeps_its_floor_no_more_often_than_stated_however_often_they_look(floor: float) -> None:
    bad = np.random.default_rng(3).random((TRIALS, 300)) >= floor
    counts = bad.cumsum(axis=1)
    refuted = cache(lambda count, n: contradicts(count, n, floor, 0.95))
    revoked = [any(refuted(int(count), n) for n, count in enumerate(row, start=1)) for row in counts]
    assert sum(revoked) <= most(0.05)


def test_audits_revoke_what_falls_well_below_its_floor() -> None:
    bad = (np.random.default_rng(4).random((100, 300)) >= 0.75).cumsum(axis=1)
    assert all(any(contradicts(int(count), n, 0.9, 0.95) for n, count in enumerate(row, 1)) for row in bad)


def test_a_single_bad_answer_refutes_a_floor_of_one() -> None:
    assert not contradicts(0, 1000, 1.0, 0.95)
    assert contradicts(1, 1000, 1.0, 0.95)


def test_agreement_counts_edits_of_tokens() -> None:
    assert agreement([1, 2, 3], [1, 2, 3]) == 1.0
    assert agreement([], []) == 1.0
    assert agreement([1, 2, 3, 4], [1, 9, 3, 4]) == pytest.approx(3 / 4)  # one replaced
    assert agreement([2, 3, 4], [1, 2, 3, 4]) == pytest.approx(3 / 4)  # one left out
    assert agreement(list(b"kitten"), list(b"sitting")) == pytest.approx(1 - 3 / 7)
    assert agreement([], [1, 2]) == 0.0
