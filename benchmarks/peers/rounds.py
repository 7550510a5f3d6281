"""Entrants on the same prompts: warmed up, in turn, prompt by prompt, round by round; failures are rows that say so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.figures.compare import LEFT_OUT
from benchmarks.figures.prompts import Prompt
from benchmarks.figures.systems import Timed
from benchmarks.peers.worker import Failed
from parlay.bench.loops import FEWEST_TOKENS, first_loop, lasts, looped
from parlay.bench.records import Cell, Results, Row

PAUSE_SECONDS = 0.02
"""Between turns, so that the threads of one process have stopped spinning when the next begins."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine in one mode. ``decode`` raises Failed; ``version`` is known once it has run.

    Entrants that share a ``process`` start one after the other.
    """

    engine: str
    mode: str
    process: str
    decode: Callable[[Sequence[int], int], Timed]
    version: Callable[[], str] = str

    def __str__(self) -> str:
        return f"{self.engine} {self.mode}"


@dataclass(frozen=True, slots=True)
class Goal:
    """A prompt, the text of plain decoding as far as it counts, what share of the uncut text is looped, and whether
    enough of it is left to time."""

    prompt: Prompt
    text: tuple[int, ...]
    looped: float
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What is measured on one model. The first entrant is Parlay's plain decoding, whose text is everyone's goal.

    No round begins that would end after ``seconds``, as long as the last one took, but for the first.
    """

    model: str
    prompts: Mapping[str, Sequence[Prompt]]
    entrants: Sequence[Entrant]
    tokens: int
    rounds: int
    seconds: float

    def pending(self, results: Results) -> list[tuple[int, str]]:
        """Rounds and workloads that ``results`` lacks for some entrant."""
        done = {(row.cell, row.round) for row in results.rows}
        return [
            (turn, workload)
            for turn in range(self.rounds)
            for workload in self.prompts
            if any((self.cell(entrant, workload), turn) not in done for entrant in self.entrants)
        ]

    def cell(self, entrant: Entrant, workload: str) -> Cell:
        return Cell(engine=entrant.engine, model=self.model, strategy=entrant.mode, workload=workload)

    def run(self, results: Results) -> None:
        """Measure what is pending. Raises ValueError when plain decoding by Parlay fails: nothing can be compared."""
        pending = self.pending(results)
        if not pending:
            return
        ends = time.monotonic() + self.seconds
        self._warm_up()
        goals = self._goals({workload for _, workload in pending})
        took = 0.0
        for turn in sorted({turn for turn, _ in pending}):
            began = time.monotonic()
            if took and began + took > ends:
                logger.info("%s: %d rounds are what there was time for", self.model, turn)
                return
            for workload in (workload for number, workload in pending if number == turn):
                results.add(self._measure(turn, workload, goals[workload]))
                logger.info("%s: round %d, %s", self.model, turn + 1, workload)
            took = time.monotonic() - began

    def _warm_up(self) -> None:
        """Start all processes: the first alone, for Parlay measures what forwards cost it, the others two at a time."""
        processes: dict[str, list[Entrant]] = {}
        for entrant in self.entrants:
            processes.setdefault(entrant.process, []).append(entrant)
        first, *others = processes.values()
        self._start(first)
        pool = ThreadPoolExecutor(2)
        try:
            list(pool.map(self._start, others))
        finally:  # when interrupted, don't wait for them
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, entrants: Sequence[Entrant]) -> None:
        """Each twice, untimed: compiled ones compile in the first run, and may again in the second."""
        longest = max((each for drawn in self.prompts.values() for each in drawn), key=lambda each: len(each.ids))
        for entrant in entrants:
            logger.info("%s: starting %s", self.model, entrant)
            try:
                for _ in range(2):
                    entrant.decode(longest.ids, FEWEST_TOKENS)
            except Failed as error:
                logger.warning("%s: %s: %s", self.model, entrant, error)

    def _goals(self, workloads: set[str]) -> dict[str, list[Goal]]:
        return {workload: [self._goal(prompt) for prompt in self.prompts[workload]] for workload in workloads}

    def _goal(self, prompt: Prompt) -> Goal:
        try:
            text = self.entrants[0].decode(prompt.ids, self.tokens).tokens
        except Failed as error:
            raise ValueError(f"{self.entrants[0]} can't run on {self.model}: {error}") from error
        return Goal(prompt, text[: first_loop(text)], looped(text), lasts(text))

    def _measure(self, turn: int, workload: str, goals: Sequence[Goal]) -> list[Row]:
        """One row per entrant, over all prompts; who begins changes from prompt to prompt."""
        counted = [goal for goal in goals if goal.counts]
        answers: dict[str, list[Timed]] = {str(entrant): [] for entrant in self.entrants}
        errors: dict[str, str] = {}
        for number, goal in enumerate(counted):
            shift = (turn + number) % len(self.entrants)
            for entrant in (*self.entrants[shift:], *self.entrants[:shift]):
                time.sleep(PAUSE_SECONDS)
                try:
                    answers[str(entrant)].append(entrant.decode(goal.prompt.ids, len(goal.text)))
                except Failed as error:
                    errors[str(entrant)] = str(error)
        rows = []
        for entrant in self.entrants:
            cell, name = self.cell(entrant, workload), str(entrant)
            if name in errors:
                rows.append(Row(cell=cell, round=turn, error=errors[name]))
            else:
                rows.append(row(cell, turn, counted, answers[name], note(entrant, answers[name], len(goals))))
        return rows


def row(cell: Cell, turn: int, goals: Sequence[Goal], answers: Sequence[Timed], note: str) -> Row:
    """The sums of one entrant's answers."""
    after_first = [len(timed.tokens) - timed.first_tokens for timed in answers]
    return Row(
        cell=cell,
        round=turn,
        requests=len(answers),
        tokens=sum(len(timed.tokens) for timed in answers),
        fresh_tokens=sum(first_loop(timed.tokens) for timed in answers),
        decode_tokens=sum(after_first),
        decode_seconds=sum(timed.decode_seconds for timed in answers),
        seconds=sum(timed.first_seconds + timed.decode_seconds for timed in answers),
        ttft=tuple(timed.first_seconds for timed in answers),
        itl=tuple(timed.decode_seconds / count for timed, count in zip(answers, after_first, strict=True) if count),
        steps=sum(timed.steps for timed in answers),
        looped=sum(goal.looped for goal in goals) / len(goals) if goals else None,
        same=sum(timed.tokens == goal.text for timed, goal in zip(answers, goals, strict=True)),
        of=len(answers),
        note=note,
    )


def note(entrant: Entrant, answers: Sequence[Timed], drawn: int) -> str:
    """Version and precision, and how many of the prompts drawn were left out."""
    parts = [entrant.version(), *dict.fromkeys(timed.note for timed in answers)]
    if drawn > len(answers):
        parts.append(f"{LEFT_OUT} ({drawn - len(answers)} of {drawn} prompts)")
    return "; ".join(filter(None, parts))
