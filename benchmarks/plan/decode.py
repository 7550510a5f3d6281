"""Decodes one cell with the real engine: every strategy decodes the same text, with the acceptance that the cell
states.

The drafters know the text from a plain run. The lengths of their correct stretches are shuffled quantiles of the
geometric distribution, so even a few tokens have the right acceptance.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan.cells import BUDGETS, PLAIN, WRITE_4, Cell
from parlay.cost.measured import MeasuredCost
from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.options import DraftModelOptions
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.types import (
    Draft,
    Drafter,
    Needs,
    NoiseKey,
    Observation,
    Request,
    Runner,
    SamplingParams,
    SequenceView,
    Strategy,
    trees,
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens and seconds between the step in which all sequences have begun to write and the one in which one of
    them ends."""

    text: tuple[int, ...]
    tokens: int
    seconds: float
    tokens_per_step: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Teller:
    """Drafts the known text with errors. A ``writer``, if there is one, drafts first, so that its cost counts."""

    needs = Needs()

    def __init__(self, text: Sequence[int], right: Sequence[bool], vocab_size: int, writer: Drafter | None) -> None:
        self._text, self._right, self._vocab_size, self._writer = text, right, vocab_size, writer

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if self._writer is not None:
            self._writer.propose(views, budgets)
        return [trees.chain(self._tell(view, budget), "teller") for view, budget in zip(views, budgets, strict=True)]

    def _tell(self, view: SequenceView, budget: int) -> list[int]:
        first = len(view.tokens) - view.prompt_length
        places = range(first, min(first + budget, len(self._text)))
        return [self._text[at] if self._right[at] else (self._text[at] + 1) % self._vocab_size for at in places]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the measurement."""

    def release(self, sequence: int) -> None:
        if self._writer is not None:
            self._writer.release(sequence)


def errors(chance: float, tokens: int, seed: int = 0) -> list[bool]:
    """Return which drafted tokens are right, each with probability ``chance``, for at least ``tokens`` tokens."""
    count = max(4, round(tokens * (1 - chance)))
    stretches = [math.floor(math.log((place + 0.5) / count) / math.log(chance)) for place in range(count)]
    random.Random(seed).shuffle(stretches)
    right: list[bool] = []
    while len(right) < tokens:
        for stretch in stretches:
            right += [True] * stretch + [False]
    return right


class Stage:
    """Runs a target and its draft model in the cells of one size."""

    def __init__(self, target: Runner, draft: Runner) -> None:
        self._target, self._draft = target, draft
        self._texts: dict[tuple[int, int], tuple[int, ...]] = {}

    def text(self, cell: Cell) -> tuple[int, ...]:
        """Return the text that the target writes in this cell. The first call finds it out and so warms up the
        target."""
        key = (cell.context, cell.tokens)
        if key not in self._texts:
            self._texts[key] = self._run(cell, Strategy(PLAIN, (), SharedNoise(), Plain()), 1).text
        return self._texts[key]

    def decode(self, cell: Cell, strategy: str) -> Decoded:
        """Decode the cell with one strategy."""
        if strategy == PLAIN:
            return self._run(cell, Strategy(PLAIN, (), SharedNoise(), Plain()), cell.batch)
        writer = self._writer() if strategy == WRITE_4 else None
        right = errors(cell.chance(strategy), cell.tokens)
        teller = Teller(self.text(cell), right, self._target.spec.vocab_size, writer)
        return self._run(cell, Strategy(strategy, (teller,), SharedNoise(), Fixed(BUDGETS[strategy])), cell.batch)

    def _writer(self) -> Drafter:
        vocab_size = self._target.spec.vocab_size
        resources = Resources(vocab_size=vocab_size, open_runner=lambda name: self._draft, default_draft="draft")
        return DraftModel(resources, DraftModelOptions(min_p=0.0))

    def _run(self, cell: Cell, strategy: Strategy, batch: int) -> Decoded:
        """Decode the cell. All sequences have the same prompt, which is computed once, and share its cache."""
        engine = Engine(self._target, MeasuredCost())
        prompt = tuple(random.Random(0).choices(range(self._target.spec.vocab_size), k=cell.context))
        params = SamplingParams(temperature=0.0, max_tokens=cell.tokens, ignore_eos=True)
        written: dict[str, list[int]] = {str(number): [] for number in range(batch)}
        for name in written:
            engine.add(Request(id=name, prompt=prompt, params=params, key=NoiseKey(0), group="all"), strategy)
        begun = done = 0.0
        tokens, steps, per_step = 0, 0, 0.0
        while not engine.idle:
            events = engine.step()
            now = time.perf_counter()
            for event in events:
                written[event.request] += [committed.token for committed in event.committed]
            if begun and not done:
                tokens += sum(len(event.committed) for event in events)
                steps += 1
                done = now if any(event.finish_reason is not None for event in events) else 0.0
            if not begun and all(written.values()):
                begun = now
            per_step = tokens / steps / batch if steps else 0.0
        return Decoded(tuple(written["0"]), tokens, done - begun, per_step)
