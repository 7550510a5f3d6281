"""Counts the proposer's work for logs and Prometheus; vLLM counts drafted and accepted tokens, too."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

_log = logging.getLogger("vllm.parlay")

_HELP = {
    "calls": "Steps in which the proposer was asked.",
    "seconds": "Seconds that the proposer took.",
    "drafted_tokens": "Tokens that were drafted and verified.",
    "accepted_tokens": "Drafted tokens that were right.",
    "steps": "Steps of single requests.",
    "failures": "Calls that failed, and drafted nothing.",
}


@cache
def counters() -> dict[str, Counter]:
    """Return the process's counters by name, exported as ``parlay:proposer_NAME_total``; empty without
    prometheus_client.

    vLLM's ``/metrics`` includes the counters of its worker processes if PROMETHEUS_MULTIPROC_DIR is set.
    """
    try:
        from prometheus_client import Counter
    except ImportError:
        return {}
    return {name: Counter(f"parlay:proposer_{name}", text) for name, text in _HELP.items()}


@dataclass
class ProposerCounts:
    """Totals since the start, logged every ``log_seconds``; 0: never."""

    log_seconds: float
    calls: int = 0
    seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    failures: int = 0
    _logged_at: float = field(default=0.0, repr=False)
    _logged_steps: int = field(default=0, repr=False)

    def add(self, now: float, **counted: float) -> None:
        """Add the counts of one call at the time ``now``."""
        exported = counters()
        for name, count in counted.items():
            vars(self)[name] += count
            if exported:
                exported[name].inc(count)
        if self.log_seconds and now - self._logged_at >= self.log_seconds:
            if self._logged_at and self.steps > self._logged_steps:
                _log.info("%s", self)
            self._logged_at, self._logged_steps = now, self.steps

    def __str__(self) -> str:
        right = self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
        per_step = 1 + self.accepted_tokens / self.steps if self.steps else 1.0
        milliseconds = 1000 * self.seconds / self.calls if self.calls else 0.0
        return (
            f"{self.drafted_tokens} tokens drafted, {right:.0%} right; {per_step:.2f} tokens per step; "
            f"{milliseconds:.2f} ms per call; {self.failures} failures"
        )
