"""What a router chose for a sample, and why, as `parlay generate --explain` prints it."""

from __future__ import annotations

import dataclasses

from parlay.types import Metrics, Routed

PAUSED = "paused"


def explained(metrics: Metrics) -> str:
    """A line per drafter with what was expected of it and what it came to, then steps by the reason of the choice."""
    record = metrics.router
    if record is None:
        return f"{metrics.strategy} has one drafter or none: there was nothing to choose"
    reasons = dict(record.reasons)
    paused = metrics.steps - sum(reasons.values())
    if paused > 0:
        reasons[PAUSED] = paused
    steps = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda each: -each[1]))
    return "\n".join([*map(_line, record.drafters), f"steps: {steps or 'none'}"])


def as_data(metrics: Metrics) -> dict[str, object] | None:
    """The same as plain data; None where there was nothing to choose."""
    record = metrics.router
    if record is None:
        return None
    return {"drafters": [dataclasses.asdict(each) for each in record.drafters], "reasons": dict(record.reasons)}


def _line(each: Routed) -> str:
    trials = f", {each.trials} of them trials" if each.trials else ""
    return (
        f"{each.drafter}: asked in {each.asked} steps, verified in {each.verified}{trials}; "
        f"{each.accepted} tokens accepted ({each.expected:.1f} expected); "
        f"{1000 * each.seconds:.1f} ms ({1000 * each.expected_seconds:.1f} expected)"
    )
