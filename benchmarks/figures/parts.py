"""The parts of the measurement that compare systems on prompts. Each runs alone and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.figures.adversary import adversaries, plainly
from benchmarks.figures.compare import Comparison
from benchmarks.figures.ours import PLAIN, parlay
from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Block, Results, Row
from benchmarks.figures.setup import DRAFT, MINI, WIDE, Setup
from benchmarks.figures.systems import System
from benchmarks.figures.theirs import COMBINATIONS, Combination, Field, default_combination
from parlay.llm import DEFAULT_STRATEGY
from parlay.models.resolving import resolve

TRANSFORMERS_PLAIN = "transformers plain"
OPENING = 64
"""Tokens of the prompts on which plain decoding is timed: one length, so that nothing is compiled twice."""


def plain(setup: Setup, results: Results, model: str) -> None:
    """Plain decoding against `transformers` in every combination."""
    comparison = Comparison(
        part="plain",
        model=model,
        prompts=opening_prompts(setup, model),
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.rounds,
        before_loops=False,
    )
    if not comparison.pending(results):
        return
    directory = setup.directory(model)
    field = Field(directory, resolve(DRAFT), OPENING + setup.scale.tokens)
    note_default(results, model, default_combination(directory))
    with setup.llm(model) as llm:
        others = [field.plain(combination) for combination in COMBINATIONS]
        comparison.run(results, parlay(llm, PLAIN), others)


def opening_prompts(setup: Setup, model: str) -> Mapping[str, Sequence[Prompt]]:
    """A prompt of prose and one of code, cut to one length."""
    drawn = setup.prompts(model, ("prose", "code"))
    return {
        kind: [replace(prompt, ids=(prompt.ids * OPENING)[:OPENING]) for prompt in prompts[:1]]
        for kind, prompts in drawn.items()
    }


def note_default(results: Results, model: str, combination: Combination) -> None:
    """Store which combination `transformers` uses by default."""
    block = Block("plain-default", model, "", 0, 0)
    if not results.has(block):
        results.add([Row(part=block.part, model=model, note=str(combination))])


def lookup(setup: Setup, results: Results) -> None:
    """Prompt lookup on edits and copies."""
    comparison = Comparison(
        part="lookup",
        model=MINI,
        prompts=setup.prompts(MINI, ("edit", "copy")),
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.rounds,
    )
    run_strategies(setup, results, comparison, ("prompt-lookup",))


def draft(setup: Setup, results: Results) -> None:
    """The draft model, and the other strategies beside it, on every kind of text."""
    comparison = Comparison(
        part="draft",
        model=WIDE,
        prompts=setup.prompts(WIDE),
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.wide_rounds,
    )
    run_strategies(setup, results, comparison, ("draft-model", "prompt-lookup", "union"))


def run_strategies(setup: Setup, results: Results, comparison: Comparison, names: Iterable[str]) -> None:
    """Strategies of one model against plain decoding."""
    if comparison.pending(results):
        with setup.llm(comparison.model) as llm:
            comparison.run(results, parlay(llm, PLAIN), [parlay(llm, name) for name in names])


def adversary(setup: Setup, results: Results) -> None:
    """Drafters that are wrong on purpose, under the default policy, on a model whose forwards are dear and on one
    whose forwards take no longer than the engine's work for a draft."""
    for model in (MINI, WIDE):
        mislead(setup, results, model)


def mislead(setup: Setup, results: Results, model: str) -> None:
    """The same on one model."""
    prompts = setup.prompts(model, ("prose", "edit"))
    comparison = Comparison(
        part="adversary",
        model=model,
        prompts=prompts,
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.rounds if model == MINI else setup.scale.wide_rounds,
        before_loops=False,
    )
    if not comparison.pending(results):
        return
    with setup.llm(model) as llm:
        reference = plainly(llm)
        everything = [prompt for drawn in prompts.values() for prompt in drawn]
        comparison.run(results, reference, adversaries(llm, reference, everything, setup.scale.tokens))


def versus(setup: Setup, results: Results, model: str) -> None:
    """The default strategy against `transformers` at its best, by kind of text; runs `plain` first if it has to."""
    comparison = Comparison(
        part="versus",
        model=model,
        prompts={kind: drawn[: setup.scale.wide_prompts] for kind, drawn in setup.prompts(model).items()},
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.wide_rounds,
    )
    if not comparison.pending(results):
        return
    plain(setup, results, model)
    with setup.llm(model) as llm:
        others = [parlay(llm, DEFAULT_STRATEGY), *transformers_at_its_best(setup, results, comparison)]
        comparison.run(results, parlay(llm, PLAIN), others)


def transformers_at_its_best(setup: Setup, results: Results, comparison: Comparison) -> list[System]:
    """Its fastest plain combination, its prompt lookup and its assisted generation."""
    prompts = [prompt for drawn in comparison.prompts.values() for prompt in drawn]
    longest = max(len(prompt.ids) for prompt in prompts) + comparison.most_tokens
    field = Field(setup.directory(comparison.model), resolve(DRAFT), longest)
    combinations = fastest_first(results.of("plain", comparison.model))
    dynamic = next(combination for combination in combinations if combination.cache == "dynamic")
    return [
        replace(field.plain(combinations[0]), name=TRANSFORMERS_PLAIN),
        field.prompt_lookup(dynamic),  # neither takes a static cache
        field.assisted(dynamic),
    ]


def fastest_first(rows: Sequence[Row]) -> list[Combination]:
    """The combinations that ran, by their median tokens per second.

    Raises:
        ValueError: when none ran.
    """
    rates: dict[Combination, float] = {}
    for combination in COMBINATIONS:
        own = [
            row.decode_tokens / row.decode_seconds
            for row in rows
            if row.system == str(combination) and row.decode_seconds
        ]
        if own:
            rates[combination] = median(own)
    if not rates:
        raise ValueError("no combination of transformers ran: see the errors in the rows of the part `plain`")
    return sorted(rates, key=lambda combination: -rates[combination])
