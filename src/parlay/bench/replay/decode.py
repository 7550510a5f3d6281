"""Decodes recorded answers again with a strategy, to count steps, drafts and acceptance.

The counts are the same as if the model that wrote the answers had decoded with this strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from parlay.bench.replay.runner import ReplayRunner
from parlay.bench.replay.tokens import Ids, Recorded, RecordedTokens
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.strategies.built import StrategyCache
from parlay.strategies.entry import POLICY
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Cost, Event, Exactness, Metrics, NoiseKey, Request, SamplingParams, Strategy

WHOLE, BY_COST = "fixed", "adaptive"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed answer: its tokens, the engine's counts, and the price of the forwards after the first step.

    ``forward_seconds`` is 0 if the replay has no prices.
    """

    tokens: Ids
    metrics: Metrics
    forward_seconds: float


class ReplayMeter:
    """Adds up the prices of forwards; implements `Cost`. The measured time of a replay's forwards is ignored."""

    def __init__(self, prices: Cost | None) -> None:
        self._prices = prices
        self.seconds = 0.0

    @property
    def revision(self) -> int:
        return self._prices.revision if self._prices is not None else 0

    def forward(self, rows: int, context: int) -> float:
        return self._prices.forward(rows, context) if self._prices is not None else 0.0

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Add the price of a forward, whatever ``seconds`` it took."""
        self.seconds += self.forward(rows, context)


class Replay:
    """Decodes recorded answers one after another with one strategy. Its stores learn from earlier answers.

    Without ``prices`` a policy can't weigh costs, so every draft is verified whole.
    """

    def __init__(self, text: str, tokens: RecordedTokens, prices: Cost | None = None) -> None:
        """Prepare the strategy ``text``. Raises ValueError, with the reason, if it can't be replayed."""
        self._meter = ReplayMeter(prices)
        self._runner = ReplayRunner(tokens.vocab_size)
        self._engine = Engine(self._runner, self._meter)
        resources = Resources(
            tokens.vocab_size,
            no_model,
            default_draft="any",
            tokenizer=tokens.base,
            open_tokenizer=no_model,
            target=self._runner.spec,
        )
        spec = parse(text)
        strategies = StrategyCache(resources, self._meter)
        self.strategy = strategies.get(spec if prices is not None else whole_drafts(spec))
        refuse_sight(self.strategy)

    def answer(self, number: int, record: Recorded) -> Replayed:
        """Decode one answer. Raises ValueError for an empty answer, and if the engine fails."""
        self._runner.expect(record.prompt, record.output)
        self._engine.add(_request(number, record), self.strategy)
        output: list[int] = []
        ends: list[Event] = []
        self._meter.seconds = first = 0.0
        while not self._engine.idle:
            for event in self._engine.step():
                first = first if output else self._meter.seconds
                output += [one.token for one in event.committed]
                ends += [event] if event.metrics is not None else []
        (end,) = ends
        if end.error or end.metrics is None:
            raise ValueError(f"answer {number + 1} ended early: {end.error}")
        return Replayed(tuple(output), end.metrics, self._meter.seconds - first)


def whole_drafts(spec: StrategySpec) -> StrategySpec:
    """Return the strategy with a policy that verifies every draft whole, if its own policy weighs costs."""
    return spec.changed(policy=WHOLE) if spec.settings.get(POLICY) == BY_COST else spec


def refuse_sight(strategy: Strategy) -> None:
    """Raise ValueError for a strategy that needs more from the target than its text, such as probabilities."""
    if strategy.rule.exactness not in (Exactness.BITS, Exactness.SEED):
        raise ValueError("its accept rule needs the target's probabilities, which were not recorded")
    needs = [drafter.needs for drafter in strategy.drafters]
    if any(each.top_k for each in needs):
        raise ValueError("needs the target's most likely tokens, which were not recorded")
    if any(each.layers or each.taps for each in needs):
        raise ValueError("needs the target's layers, but only its text was recorded")


def no_model(name: str) -> NoReturn:
    """Raise ValueError, because a replay has no model to draft with."""
    raise ValueError("needs a draft model, but a replay has only recorded tokens")


def _request(number: int, record: Recorded) -> Request:
    return Request(
        id=str(number),
        prompt=record.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=len(record.output)),
        key=NoiseKey(0),
        references=record.references,
    )


def replay(
    text: str, records: Sequence[Recorded], tokens: RecordedTokens, prices: Cost | None = None
) -> list[Replayed]:
    """Replay all answers in order. Raises ValueError for a strategy that can't be replayed."""
    run = Replay(text, tokens, prices)
    return [run.answer(number, record) for number, record in enumerate(records)]
