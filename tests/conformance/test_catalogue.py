"""Every entry of the catalogue passes the universal tests; a new one is enrolled by being listed.

Three things are independent here: the entry, the stage and the check. The short form has every pair of them, the long
form (``make conformance``) every three: each entry passes each check on the toy, where it is cheap, and a mixed batch
on each stage that no other test has it on; on a stage with a cache of its own the other checks go round, so that each
is passed there by a part of the entries.
"""

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
FIRST = list({spec.partition(":")[0]: spec for spec in reversed(SPECS)}.values())
COUNTED = {"none", *(spec for spec in SPECS if subject_of(spec).rule().exactness is Exactness.DISTRIBUTION)}
"""Plain decoding, and those that promise a distribution alone. Counting draws takes longest, and all others must give
plain decoding's own tokens for the same seed, so its distribution too: the other checks compare every one of them."""

IN_TURN = {
    "native float32": ("chunks", "continuing", "forks", "preemption"),
    "native bfloat16": (),
    "toy recurrent": ("forks", "preemption"),
    "toy draftless": (),
}
"""What these stages are here for besides ``mixed``: the rest hangs on no decoder, no dtype, and not on how state is cut
back. An entry passes one of them, the next entry the next. Texts written alone in bfloat16 are compared on the built-in
model, and endings on recurrent models by the adapter's tests. On a native decoder an entry's mixed batch is that of the
built-in model, where it promises bits; plain decoding and the default have theirs here, too. ``sampled`` and ``greedy``
have the parameters and the budgets of ``mixed``, one by one: alone they are compared on the toy."""
FURTHER = {"toy": frozenset({"mixed", "constrained"})}
"""Further toys of an entry differ from its first in how trees are drawn or grown, which these cases show: how a prompt
or a reference is read, and how sequences are forked and preempted, does not hang on that. In a real decoder each of
them is compared on the built-in model, in a mixed batch."""
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
        return spec == "none" and check == "mixed"
    if stage == "native float32" and SAME_IN_BFLOAT16 and check == "mixed":
        return spec in ("none", "auto")
    if spec not in FIRST:
        return check in FURTHER.get(stage, ())
    return stage not in IN_TURN or check == "mixed" or check in turn(spec, stage)


def turn(spec: str, stage: str) -> tuple[str, ...]:
    """The check whose turn it is with this entry. Plain decoding and the default pass all of them."""
    checks = IN_TURN[stage]
    if not checks or spec in ("none", "auto"):
        return checks
    place = FIRST.index(spec) + list(IN_TURN).index(stage)
    return (checks[place % len(checks)],)


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
