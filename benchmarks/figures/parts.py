"""The parts of the measurement that compare systems on prompts. Each runs alone and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.figures.adversary import adversaries
from benchmarks.figures.compare import Comparison
from benchmarks.figures.ours import PLAIN, parlay
from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Block, Results, Row
from benchmarks.figures.setup import DRAFT, MINI, WIDE, Setup
from benchmarks.figures.theirs import COMBINATIONS, Combination, Field, default_combination
from parlay.llm import DEFAULT_STRATEGY, LLM
from parlay.models.loading import resolve

TRANSFORMERS_PLAIN = "transformers plain"
OPENING = 64
"""Tokens of the prompts on which plain decoding is timed: one length, so that nothing is compiled twice."""


def plain(setup: Setup, results: Results, model: str) -> None:
    """Plain decoding against `transformers` in every combination."""
    prompts = opening_prompts(setup, model)
    directory = setup.directory(model)
    field = Field(directory, resolve(DRAFT), OPENING + setup.scale.tokens)
    note_default(results, model, default_combination(directory))
    with setup.llm(model) as llm:
        Comparison(
            part="plain",
            model=model,
            reference=parlay(llm, PLAIN),
            others=[field.plain(combination) for combination in COMBINATIONS],
            prompts=prompts,
            most_tokens=setup.scale.tokens,
            rounds=setup.scale.rounds,
            before_loops=False,
        ).run(results)


def opening_prompts(setup: Setup, model: str) -> Mapping[str, Sequence[Prompt]]:
    """Two prompts of plain text and code, cut to one length: they are long enough to be continued at any length."""
    drawn = setup.prompts(model, ("prose", "code"))
    return {
        kind: [replace(prompt, ids=(prompt.ids * OPENING)[:OPENING]) for prompt in prompts[:2]]
        for kind, prompts in drawn.items()
    }


def note_default(results: Results, model: str, combination: Combination) -> None:
    """Store which combination `transformers` uses by default."""
    block = Block("plain-default", model, "", 0, 0)
    if not results.has(block):
        results.add([Row(part=block.part, model=model, note=str(combination))])


def lookup(setup: Setup, results: Results) -> None:
    """Prompt lookup on edits and copies."""
    prompts = setup.prompts(MINI, ("edit", "copy"))
    with setup.llm(MINI) as llm:
        strategies(setup, llm, ("prompt-lookup",), part="lookup", model=MINI, prompts=prompts).run(results)


def draft(setup: Setup, results: Results) -> None:
    """The draft model, and the other strategies beside it, on every kind of text."""
    names = ("draft-model", "prompt-lookup", "union")
    with setup.llm(WIDE) as llm:
        strategies(setup, llm, names, part="draft", model=WIDE, prompts=setup.prompts(WIDE)).run(results)


def strategies(
    setup: Setup, llm: LLM, names: Iterable[str], *, part: str, model: str, prompts: Mapping[str, Sequence[Prompt]]
) -> Comparison:
    """Strategies of one model against plain decoding."""
    return Comparison(
        part=part,
        model=model,
        reference=parlay(llm, PLAIN),
        others=[parlay(llm, name) for name in names],
        prompts=prompts,
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.rounds,
    )


def adversary(setup: Setup, results: Results) -> None:
    """Drafters that are wrong on purpose, under the default policy."""
    prompts = setup.prompts(MINI, ("prose", "edit"))
    with setup.llm(MINI) as llm:
        reference = parlay(llm, PLAIN)
        everything = [prompt for drawn in prompts.values() for prompt in drawn]
        Comparison(
            part="adversary",
            model=MINI,
            reference=reference,
            others=adversaries(llm, reference, everything, setup.scale.tokens),
            prompts=prompts,
            most_tokens=setup.scale.tokens,
            rounds=setup.scale.rounds,
            before_loops=False,
        ).run(results)


def versus(setup: Setup, results: Results, model: str) -> None:
    """The default strategy against `transformers` at its best, by kind of text; runs `plain` first if it has to."""
    plain(setup, results, model)
    prompts = setup.prompts(model)
    longest = max(len(prompt.ids) for drawn in prompts.values() for prompt in drawn) + setup.scale.tokens
    field = Field(setup.directory(model), resolve(DRAFT), longest)
    combinations = fastest_first(results.of("plain", model))
    dynamic = next(combination for combination in combinations if combination.cache == "dynamic")
    with setup.llm(model) as llm:
        Comparison(
            part="versus",
            model=model,
            reference=parlay(llm, PLAIN),
            others=[
                parlay(llm, DEFAULT_STRATEGY),
                replace(field.plain(combinations[0]), name=TRANSFORMERS_PLAIN),
                field.prompt_lookup(dynamic),  # neither takes a static cache
                field.assisted(dynamic),
            ],
            prompts=prompts,
            most_tokens=setup.scale.tokens,
            rounds=max(1, setup.scale.rounds - 1),
        ).run(results)


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
