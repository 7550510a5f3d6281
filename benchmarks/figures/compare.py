"""Systems against each other on the same prompts: warmed up, interleaved, repeated, texts compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures.prompts import Prompt
from benchmarks.figures.results import Block, Results, Row
from benchmarks.figures.systems import System, Timed
from parlay.bench.loops import FEWEST_TOKENS, first_loop, lasts, looped

LEFT_OUT = "left out: the text repeats itself"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to measure: which prompts, how many tokens, how often.

    ``before_loops`` ends every text where the reference's begins to repeat itself, so that copying from a loop counts
    for nobody.
    """

    part: str
    model: str
    prompts: Mapping[str, Sequence[Prompt]]
    most_tokens: int
    rounds: int
    before_loops: bool = True

    def pending(self, results: Results) -> list[Block]:
        """The blocks that ``results`` lacks."""
        return [block for block in self._blocks() if not results.has(block)]

    def run(self, results: Results, reference: System, others: Sequence[System]) -> None:
        """Measure them. ``reference`` is plain decoding: its text is what the others' must equal."""
        systems = [reference, *others]
        failed = self._warm_up(systems)
        pending = self.pending(results)
        goals = self._goals(pending, reference)
        for done, block in enumerate(pending, start=1):
            results.add(self._measure(block, goals[block.kind, block.prompt], systems, failed))
            logger.info("%s: %d of %d", self.part, done, len(pending))

    def _blocks(self) -> Iterator[Block]:
        """Round by round over all prompts, so that a slow minute of the machine spoils no prompt alone."""
        for turn in range(self.rounds):
            for kind, prompts in self.prompts.items():
                for prompt in prompts:
                    yield Block(self.part, self.model, kind, prompt.number, turn)

    def _warm_up(self, systems: Sequence[System]) -> dict[str, str]:
        """Run each system twice, untimed; returns the errors of those that can't run, by name.

        Compiled systems compile in the first run and may compile again in the second.
        """
        prompt = max((prompt for prompts in self.prompts.values() for prompt in prompts), key=lambda one: len(one.ids))
        failed: dict[str, str] = {}
        for system in systems:
            logger.info("%s: warming up %s", self.part, system.name)
            try:
                for _ in range(2):
                    system.decode(prompt, FEWEST_TOKENS)
            except Exception as error:  # the row says so
                failed[system.name] = one_line(error)
        return failed

    def _goals(self, pending: Sequence[Block], reference: System) -> dict[tuple[str, int], Timed]:
        """The reference's text for each prompt, untimed."""
        wanted = {(block.kind, block.prompt) for block in pending}
        return {
            (kind, prompt.number): reference.decode(prompt, self.most_tokens)
            for kind, prompts in self.prompts.items()
            for prompt in prompts
            if (kind, prompt.number) in wanted
        }

    def _measure(self, block: Block, goal: Timed, systems: Sequence[System], failed: Mapping[str, str]) -> list[Row]:
        prompt = next(prompt for prompt in self.prompts[block.kind] if prompt.number == block.prompt)
        most = first_loop(goal.tokens) if self.before_loops else len(goal.tokens)
        share = looped(goal.tokens)
        if self.before_loops and not lasts(goal.tokens):
            note = f"{LEFT_OUT} after {most} tokens"
            return [Row(**block._asdict(), system=system.name, looped=share, note=note) for system in systems]
        shift = (block.round + block.prompt) % len(systems)
        rows: list[Row] = []
        for system in (*systems[shift:], *systems[:shift]):
            if system.name in failed:
                rows.append(Row(**block._asdict(), system=system.name, error=failed[system.name]))
                continue
            try:
                timed = system.decode(prompt, most)
                rows.append(timed_row(block, system.name, timed, goal.tokens[:most], share))
            except Exception as error:  # a row that says so is the result
                rows.append(Row(**block._asdict(), system=system.name, error=one_line(error)))
        return rows


def timed_row(block: Block, name: str, timed: Timed, goal: Sequence[int], share: float) -> Row:
    """One measurement."""
    return Row(
        **block._asdict(),
        system=name,
        tokens=len(timed.tokens),
        decode_tokens=len(timed.tokens) - timed.first_tokens,
        decode_seconds=timed.decode_seconds,
        first_seconds=timed.first_seconds,
        steps=timed.steps,
        draft_tokens=timed.draft_tokens,
        accepted_tokens=timed.accepted_tokens,
        same=timed.tokens == tuple(goal),
        looped=share,
        values=timed.values,
        note=timed.note,
    )


def one_line(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
