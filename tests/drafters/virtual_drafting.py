"""Helpers for tests of drafting during forwards: a virtual clock, a drafter on it, and runs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from parlay.drafters.draft_models.beside import Chain, Written
from parlay.drafters.options import ParallelDraftOptions
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_drafters import ToyDrafter
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_SKIP,
    Drafter,
    NoiseKey,
    Output,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Strategy,
)
from tests.drafters.sight import no_runner
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB

ALWAYS = toy_drafters.oracle(ANSWER)
NEVER = toy_drafters.sometimes(ANSWER, VOCAB, [False])
MOSTLY = toy_drafters.sometimes(ANSWER, VOCAB, [True, True, False, True, True, True, True])


class Time:
    """A virtual clock, which the work itself advances. ``slower``: the factor on the time of forwards at present."""

    def __init__(self) -> None:
        self.now, self.slower = 0.0, 1.0


class VirtualDrafting:
    """A `DraftResource` whose tokens take a given number of virtual seconds each.

    Drafting and forwards that run at the same time take ``contention`` times as long as alone.
    """

    def __init__(self, toy: ToyDrafter, time: Time, token: float, contention: float = 1.0) -> None:
        self._toy, self._time, self._token, self._contention = toy, time, token, contention
        self._chains: dict[int, Chain] = {}
        self._began, self._longest = 0.0, 0

    def seconds(self) -> float:
        return self._time.now

    def beside(self, view: SequenceView) -> bool:
        return True

    def write(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> Written:
        self._time.now += self._token * max(lengths)
        return Written(self._continued(views, lengths), seconds=self._token)

    def _continued(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> dict[int, Chain]:
        drafts = self._toy.propose(views, lengths)
        return {view.sequence: Chain(draft.tree.tokens) for view, draft in zip(views, drafts, strict=True)}

    def begin(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> None:
        self._chains, self._began, self._longest = self._continued(views, lengths), self._time.now, max(lengths)
        self._time.slower = self._contention

    def end(self, *, stop: bool) -> Written:
        apart, token = self._time.now - self._began, self._token * self._contention
        done = min(self._longest, int(apart / token + 1e-9) + 1) if stop else self._longest
        self._time.now, self._time.slower = max(self._time.now, self._began + done * token), 1.0
        chains = {sequence: Chain(chain.tokens[:done]) for sequence, chain in self._chains.items()}
        return Written(chains, seconds=token)

    def release(self, sequence: int) -> None:
        """Holds nothing."""


class TimedRunner(ToyRunner):
    """A runner whose forwards take a given number of virtual seconds, plus ``row`` for each row. ``sizes``: the number
    of texts in each forward."""

    def __init__(self, time: Time, seconds: float, row: float = 0.0) -> None:
        super().__init__(LOGITS, VOCAB)
        self._time, self._seconds, self._row = time, seconds, row
        self.sizes: list[int] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.sizes.append(len(segments))
        rows = sum(segment.rows for segment in segments)
        self._time.now += (self._seconds + self._row * rows) * self._time.slower
        return super().forward(segments, taps, skip)


def toy_resources(stack: ExitStack | None = None) -> Resources:
    return Resources(VOCAB, no_runner, closing=stack or ExitStack())


def options(**values: object) -> ParallelDraftOptions:
    """Return options, those of PEARL unless another form is named."""
    return ParallelDraftOptions(**{"form": "pearl"} | values)  # type: ignore[arg-type]


def request(name: str = "one", seed: int = 0, tokens: int = 60, temperature: float = 0.9) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    return Request(id=name, prompt=(1 + seed % 9, 2, 3), params=params, key=NoiseKey(seed))


def strategy(drafter: Drafter, budget: int = 12) -> Strategy:
    return Strategy("parallel-draft", (drafter,), SharedNoise(), Fixed(budget))


def run(engine: Engine, asked: Sequence[tuple[Request, Strategy]]) -> dict[str, list[int]]:
    """Decode requests, and return their texts."""
    for one, how in asked:
        engine.add(one, how)
    texts: dict[str, list[int]] = {one.id: [] for one, _ in asked}
    while not engine.idle:
        for event in engine.step():
            texts[event.request] += [each.token for each in event.committed]
            assert event.error is None
    return texts


def plain(asked: Sequence[Request]) -> dict[str, list[int]]:
    return run(Engine(ToyRunner(LOGITS, VOCAB), Steady()), [(one, PLAIN) for one in asked])
