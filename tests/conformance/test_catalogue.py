"""Every entry of the catalogue passes the universal tests; a new one is enrolled by being listed."""

from __future__ import annotations

import pytest

from parlay.testing.conformance import (
    CHECKS,
    applies,
    catalogue_specs,
    default_stages,
    run_check,
    subject_of,
)

SPECS = catalogue_specs()
FIRST = {spec.partition(":")[0]: spec for spec in reversed(SPECS)}.values()
"""Each entry's first toy: counting draws takes longest, and their law does not hang on a drafter's parameters."""

CASES = [
    pytest.param(spec, stage, check, id=f"{spec}-{stage}-{check}")
    for spec in SPECS
    for stage in default_stages()
    for check in CHECKS
    if applies(check, default_stages()[stage]) and (check != "law" or spec in FIRST)
]


@pytest.mark.parametrize(("spec", "stage", "check"), CASES)
def test_short_form(spec: str, stage: str, check: str) -> None:
    finding = run_check(check, subject_of(spec), default_stages()[stage])
    assert finding.passed, str(finding)
