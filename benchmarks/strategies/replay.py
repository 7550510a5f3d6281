"""A target that emits recorded answers. Under the sampler's rule, the tokens per step of drafters that don't look at
the target are exact for those texts; seconds mean nothing here, except those of drafting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.figures.stub import StubCost
from benchmarks.strategies.recorded import Ids, Recorded
from parlay import trees
from parlay.drafters.catalogue import Resources
from parlay.engine import Engine
from parlay.strategies import StrategyBook
from parlay.types import Exactness, Metrics, NoiseKey, Output, Request, Runner, RunnerSpec, SamplingParams, Segment


class ReplayRunner:
    """Implements `Runner`: the logits of a row depend on its sequence and position alone."""

    def __init__(self, texts: Mapping[Ids, Ids], vocab_size: int) -> None:
        """``texts`` gives the answer for each prompt."""
        self.spec = RunnerSpec(
            name="replay",
            vocab_size=vocab_size,
            max_context=1 << 20,
            tree="tree",
            exactness=Exactness.BITS,
            hidden_size=1,
            num_layers=1,
            device="cpu",
            dtype="float32",
            kernels="none: the answers were recorded",
        )
        self._texts = texts
        self._open: dict[int, Ids] = {}
        self._cached: dict[int, int] = {}
        self._fed: dict[int, int] = {}

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        prompt = tuple(tokens)
        self._open[sequence] = prompt + self._texts[prompt]
        self._cached[sequence] = 0
        return 0

    def reserve(self, sequence: int, tokens: int) -> bool:
        return True

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        tokens: list[int] = []
        starts = [0]
        for segment in segments:
            text, cached = self._open[segment.sequence], self._cached[segment.sequence]
            self._fed[segment.sequence] = len(segment.pending)
            root = cached + len(segment.pending) - 1
            places = [*range(cached, root + 1), *(root + depth for depth in trees.depths(segment.tree))]
            tokens += [text[min(place + 1, len(text) - 1)] for place in places[segment.logits_from :]]
            starts.append(len(tokens))
        logits_RV = torch.zeros(len(tokens), self.spec.vocab_size)
        logits_RV[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)] = 20.0
        return Output(logits_RV, tuple(starts))

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        self._cached[sequence] += self._fed[sequence] + len(path)
        return self._cached[sequence]

    def truncate(self, sequence: int, length: int) -> int:
        self._cached[sequence] = min(length, self._cached[sequence])
        return self._cached[sequence]

    def fork(self, sequence: int, copy: int) -> None:
        self._open[copy], self._cached[copy] = self._open[sequence], self._cached[sequence]

    def release(self, sequence: int) -> None:
        self._cached.pop(sequence, None)
        self._open.pop(sequence, None)

    def room(self) -> int:
        return self.capacity()

    def capacity(self) -> int:
        return 1 << 30

    def check(self) -> None:
        """Nothing can be wrong with numbers of tokens."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one strategy made of a set of answers; ``propose_seconds`` is what drafting took in the mean step."""

    tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int
    propose_seconds: float
    same: bool


def replay(spec: str, records: Sequence[Recorded], vocab_size: int, measured_from: int = 0) -> Replayed:
    """Decode the answers one after another; those before ``measured_from`` only teach what learns across requests.

    Raises ValueError for a strategy that can't be replayed.
    """
    runner = ReplayRunner({record.prompt: record.answer for record in records}, vocab_size)
    engine = Engine(runner, StubCost())
    strategy = StrategyBook(Resources(vocab_size, no_model), engine.cost).get(spec)
    if strategy.drafter is not None and strategy.drafter.needs.choices:
        raise ValueError("looks at the target")
    total: list[Metrics] = []
    same = True
    for number, record in enumerate(records):
        engine.add(_request(number, record), strategy)
        tokens: list[int] = []
        while not engine.idle:
            for event in engine.step():
                tokens += [one.token for one in event.committed]
                if event.metrics is not None and number >= measured_from:
                    total.append(event.metrics)
        same = same and tuple(tokens) == record.answer
    steps = sum(one.steps for one in total)
    return Replayed(
        tokens=sum(one.completion_tokens for one in total),
        steps=steps,
        draft_tokens=sum(one.draft_tokens for one in total),
        accepted_tokens=sum(one.accepted_tokens for one in total),
        propose_seconds=sum(one.draft_seconds for one in total) / max(1, steps),
        same=same,
    )


def _request(number: int, record: Recorded) -> Request:
    return Request(
        id=str(number),
        prompt=record.prompt,
        params=SamplingParams(temperature=0.0, max_tokens=len(record.answer)),
        key=NoiseKey(0),
        references=record.references,
    )


def no_model(name: str) -> Runner:
    """Drafters that look at a model have no place here."""
    raise ValueError(f"a replay has no model {name}")
