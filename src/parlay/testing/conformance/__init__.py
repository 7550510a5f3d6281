"""The conformance kit: proves that a strategy gives plain decoding's text, whatever it drafts.

`check_strategy` takes a strategy by name, as on the command line; `check_drafter` takes a function that makes a
drafter, and optionally an accept rule. Both run the universal tests (U1 to U8) on toys with known logits and on a tiny
native decoder in fp32 and bf16, in well under a minute on two cores, and return a `Report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType

import torch

from parlay.drafters.resources import Resources
from parlay.sampling.rules import SharedNoise
from parlay.strategies.building import build, build_rule
from parlay.strategies.candidates import build_all, drafters_of
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.spelling import parse
from parlay.testing.conformance.compare import Divergence, Excuse, Finding, Report
from parlay.testing.conformance.distribution import distribution
from parlay.testing.conformance.runners import check_runner
from parlay.testing.conformance.stage import SeveralSubject, Stage, Subject
from parlay.testing.conformance.stages import native_stage, runner_stage, toy_stage
from parlay.testing.conformance.strain import (
    chunks,
    context,
    continuing,
    failures,
    forks,
    interruptions,
    preemption,
    references,
)
from parlay.testing.conformance.universal import LONG, SHORT, KitLength, constrained, endings, greedy, mixed, sampled
from parlay.types import AcceptRule, Drafter

__all__ = [
    "CHECKS",
    "LONG",
    "SHORT",
    "Divergence",
    "Finding",
    "KitLength",
    "Report",
    "Stage",
    "Subject",
    "applies",
    "catalogue_specs",
    "check_drafter",
    "check_runner",
    "check_strategy",
    "default_stages",
    "native_stage",
    "run_check",
    "runner_stage",
    "subject_of",
    "toy_stage",
]

Check = Callable[[Subject, Stage, KitLength], list[Excuse]]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "greedy": greedy,
        "sampled": sampled,
        "distribution": distribution,
        "continuing": continuing,
        "mixed": mixed,
        "endings": endings,
        "context": context,
        "forks": forks,
        "chunks": chunks,
        "preemption": preemption,
        "references": references,
        "failures": failures,
        "interruptions": interruptions,
        "constrained": constrained,
    }
)
"""The checks by name. ``greedy`` and ``sampled`` are the universal tests U1 and U8, ``distribution`` is U3,
``continuing`` U5, ``mixed`` U6, and ``endings`` U7. The others test the end of the context, little memory, failures,
and texts under a constraint."""

DISTRIBUTION_STAGE = "toy distribution"


def check_strategy(
    spec: str, *, effort: KitLength = SHORT, stages: Iterable[Stage] | None = None, checks: Iterable[str] = CHECKS
) -> Report:
    """Test the strategy ``NAME[:key=value,...]``; third-party names work. Raises UsageError for a strategy that does
    not exist."""
    return _check(subject_of(spec), effort, stages, checks)


def check_drafter(
    make: Callable[[Resources], Drafter],
    *,
    rule: Callable[[], AcceptRule] = SharedNoise,
    name: str = "drafter",
    effort: KitLength = SHORT,
    stages: Iterable[Stage] | None = None,
    checks: Iterable[str] = CHECKS,
) -> Report:
    """Test the drafter that ``make`` builds, under ``rule``. Properties that the rule does not promise are not
    compared."""
    return _check(Subject(name, make, rule), effort, stages, checks)


def catalogue_specs() -> list[str]:
    """List every catalogue entry under each of its toy settings, so that a new entry is tested once the catalogue has
    it."""
    entries = catalogue().values()
    return [f"{entry.name}:{toys}" if toys else entry.name for entry in entries for toys in entry.toys]


def subject_of(spec: str) -> Subject:
    parsed = parse(spec)
    if find(parsed.name).routes:
        return SeveralSubject(
            spec,
            lambda _: None,
            lambda: build_rule(parsed),
            lambda resources: build_all(drafters_of(parsed, resources), resources),
        )
    return Subject(spec, lambda resources: build(parsed, resources), lambda: build_rule(parsed))


@cache
def default_stages() -> Mapping[str, Stage]:
    """Make the stages once: a toy that takes trees, a recurrent toy that takes chains, a toy without drafts, a toy for
    the distribution, and a tiny native model in two dtypes."""
    stages = (
        toy_stage("toy"),
        toy_stage("toy recurrent", tree="chain", cut=4),
        toy_stage("toy draftless", tree="none", checks=frozenset({"greedy", "mixed"})),
        toy_stage(DISTRIBUTION_STAGE, vocab_size=5, checks=frozenset({"distribution"})),
        native_stage(torch.float32),
        native_stage(torch.bfloat16),
    )
    return MappingProxyType({stage.name: stage for stage in stages})


def applies(check: str, stage: Stage) -> bool:
    """Whether the check means anything on this stage."""
    return check in stage.checks if stage.checks else check != "distribution"


def run_check(check: str, subject: Subject, stage: Stage, effort: KitLength = SHORT) -> Finding:
    """Run one check on one stage. Any exception becomes a failed finding."""
    began = time.perf_counter()
    try:
        excuses = CHECKS[check](subject, stage, effort)
    except Exception as error:
        return Finding(check, stage.name, False, f"{type(error).__name__}: {error}", time.perf_counter() - began)
    return Finding(check, stage.name, True, _excused(excuses), time.perf_counter() - began)


def _excused(excuses: list[Excuse]) -> str:
    if not excuses:
        return ""
    return f"{len(excuses)} texts differ within numerical noise, by at most {max(one.gap for one in excuses):.3g}"


def _check(subject: Subject, effort: KitLength, stages: Iterable[Stage] | None, checks: Iterable[str]) -> Report:
    where = list(default_stages().values() if stages is None else stages)
    wanted = list(checks)
    pairs = [(check, stage) for stage in where for check in wanted if applies(check, stage)]
    return Report(subject.name, tuple(run_check(check, subject, stage, effort) for check, stage in pairs))
