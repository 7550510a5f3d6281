"""Report of the kit: one line per check and stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check on one stage. ``detail`` says what was excused, or what went wrong."""

    check: str
    stage: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL"
        return f"{mark} {self.check:<12} {self.stage:<14} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one strategy or drafter."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)

    def __str__(self) -> str:
        return "\n".join([f"{self.subject}: {'passed' if self.passed else 'FAILED'}", *map(str, self.findings)])
