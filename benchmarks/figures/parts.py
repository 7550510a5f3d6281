"""The parts of the measurement that compare systems on prompts. Each runs alone and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.figures.adversary import PATTERNS, Adversaries
from benchmarks.setup import DRAFT, MINI, WIDE, Setup
from parlay.bench.against import AS_IT_COMES, ASSISTED, ATTENTIONS, COMPILED, DTYPES, LOOKUP, NAME, Transformers
from parlay.bench.records import OURS, Results, Row, System
from parlay.bench.runner import Bench, BenchPlan, lacks
from parlay.bench.wave import Decoder
from parlay.llm import DEFAULT_STRATEGY, LLM
from parlay.models.resolving import resolve

COMBINATIONS = tuple(
    f"{dtype} {attention} {way}" for dtype in DTYPES for attention in ATTENTIONS for way in (AS_IT_COMES, COMPILED)
)
"""How `transformers` can decode plainly; beside them it runs as it comes, told nothing."""
ROOM = 512
"""Tokens of prompt and answer that its static caches hold."""

Decoders = Callable[[LLM], Mapping[str, Decoder]]


def run(setup: Setup, results: Results, plan: BenchPlan, decoders: Decoders = lambda llm: {}) -> None:
    """Measure what the results lack of the plan."""
    if lacks(results, plan):
        with setup.llm(plan.model) as llm:
            Bench(llm, plan, results, decoders(llm)).run()


def scaled(setup: Setup, part: str, model: str, kinds: tuple[str, ...] | None = None) -> BenchPlan:
    """A plan without strategies."""
    scale = setup.scale
    return BenchPlan(
        part=part,
        model=model,
        strategies=(),
        workloads=setup.workloads(model, kinds) if kinds else setup.workloads(model),
        rounds=scale.rounds if model == MINI else scale.wide_rounds,
        max_tokens=scale.tokens,
    )


def plain(setup: Setup, results: Results, model: str) -> None:
    """Plain decoding against `transformers` in every combination, on one prompt of prose and one of code."""
    plan = scaled(setup, "plain", model, ("prose", "code"))
    plan = replace(
        plan,
        workloads=tuple(replace(workload, items=workload.items[:1]) for workload in plan.workloads),
        against=tuple(System(NAME, way) for way in (AS_IT_COMES, *COMBINATIONS)),
        rounds=setup.scale.rounds,
        keep_loops=True,
    )
    run(setup, results, plan, transformers(setup, model))


def transformers(setup: Setup, model: str) -> Decoders:
    return lambda llm: {
        NAME: Transformers(setup.directory(model), llm.runner.spec.device, "auto", draft=resolve(DRAFT), longest=ROOM)
    }


def lookup(setup: Setup, results: Results) -> None:
    """Prompt lookup on edits and copies."""
    plan = scaled(setup, "lookup", MINI, ("edit", "copy"))
    run(setup, results, replace(plan, strategies=("prompt-lookup",)))


def draft(setup: Setup, results: Results) -> None:
    """The draft model, and the other strategies beside it, on every kind of text."""
    plan = scaled(setup, "draft", WIDE)
    run(setup, results, replace(plan, strategies=("draft-model", "prompt-lookup", "union")))


def adversary(setup: Setup, results: Results) -> None:
    """Drafters that are wrong on purpose, under the default policy, on a model whose forwards are dear and on one
    whose forwards take no longer than the engine's work for a draft."""
    for model in (MINI, WIDE):
        plan = replace(
            scaled(setup, "adversary", model, ("prose", "edit")), strategies=tuple(PATTERNS), keep_loops=True
        )
        run(setup, results, plan, lambda llm: {OURS: Adversaries(llm, setup.scale.tokens)})


def versus(setup: Setup, results: Results, model: str) -> None:
    """The default strategy against `transformers` at its best, by kind of text; runs `plain` first if it has to."""
    plain(setup, results, model)
    plan = scaled(setup, "versus", model)
    against = tuple(System(NAME, strategy) for strategy in at_its_best(results, model))
    plan = replace(plan, strategies=(DEFAULT_STRATEGY,), against=against, rounds=setup.scale.wide_rounds)
    run(setup, results, plan, transformers(setup, model))


def at_its_best(results: Results, model: str) -> tuple[str, str, str]:
    """The fastest plain combination of `transformers`, its prompt lookup and its assisted generation.

    Neither of these takes a static cache: they run in the fastest combination without one.
    Raises ValueError when none ran.
    """
    rows = [row for row in results.rows if (row.cell.part, row.cell.model) == ("plain", model)]
    rates = {strategy: speed([row for row in rows if row.cell.strategy == strategy]) for strategy in COMBINATIONS}
    rates = {strategy: rate for strategy, rate in rates.items() if rate}
    dynamic = [strategy for strategy in rates if strategy.endswith(AS_IT_COMES)]
    if not dynamic:
        raise ValueError("no combination of transformers ran: see the errors in the rows of the part `plain`")
    start = max(dynamic, key=lambda strategy: rates[strategy]).removesuffix(AS_IT_COMES)
    return max(rates, key=lambda strategy: rates[strategy]), f"{start}{LOOKUP}", f"{start}{ASSISTED}"


def speed(rows: Sequence[Row]) -> float:
    """Decoded tokens per second of all rows together; 0 of none."""
    seconds = sum(row.decode_seconds for row in rows)
    return sum(row.decode_tokens for row in rows) / seconds if seconds else 0.0
