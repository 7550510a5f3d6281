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
from parlay.types import Exactness

SPECS = catalogue_specs()
FIRST = {spec.partition(":")[0]: spec for spec in reversed(SPECS)}.values()
COUNTED = {"none", *(spec for spec in SPECS if subject_of(spec).rule().exactness is Exactness.DISTRIBUTION)}
"""Plain decoding, and those that promise a distribution alone. Counting draws takes longest, and all others must give
plain decoding's own tokens for the same seed, so its distribution too: the other checks compare every one of them."""

BRIEF = {
    "native float32": frozenset({"mixed", "chunks", "continuing", "forks", "preemption"}),
    "native bfloat16": frozenset({"mixed"}),
    "toy recurrent": frozenset({"mixed", "forks", "preemption"}),
    "toy draftless": frozenset({"mixed"}),
}
"""What these stages are here for: the rest hangs on no decoder, no dtype, and not on how state is cut back. The long
form runs everything everywhere. Texts written alone in bfloat16 are compared on the built-in model, and endings on
recurrent models by the adapter's tests. ``sampled`` and ``greedy`` have the parameters and budgets of ``mixed``, one by
one: alone they are compared on the toy."""
FURTHER = {"toy": frozenset({"sampled", "mixed", "references", "constrained"})}
"""Further toys of an entry differ from its first in how trees are drawn or grown, which these cases show: how a prompt
is read, and how sequences are forked and preempted, does not hang on that. In a real decoder each of them is compared
on the built-in model, in a mixed batch."""
SAME_IN_BFLOAT16 = default_stages()["native bfloat16"].open_runner(1).spec.exactness is Exactness.BITS
"""Then the built-in model in bfloat16 has every entry's texts be plain decoding's, and here plain decoding's are those
that are recomputed. On a machine that promises fewer bits the built-in model's tests are left out."""


def runs(spec: str, stage: str, check: str) -> bool:
    """Whether the short form has this case."""
    if not applies(check, default_stages()[stage]):
        return False
    if check == "distribution":
        return spec in COUNTED
    if stage == "native bfloat16" and SAME_IN_BFLOAT16:
        return spec == "none" and check in BRIEF[stage]
    return check in (BRIEF.get(stage, CHECKS) if spec in FIRST else FURTHER.get(stage, ()))


CASES = [
    pytest.param(spec, stage, check, id=f"{spec}-{stage}-{check}")
    for spec in SPECS
    for stage in default_stages()
    for check in CHECKS
    if runs(spec, stage, check)
]


@pytest.mark.parametrize(("spec", "stage", "check"), CASES)
def test_short_form(spec: str, stage: str, check: str) -> None:
    finding = run_check(check, subject_of(spec), default_stages()[stage])
    assert finding.passed, str(finding)
