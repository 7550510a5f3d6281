"""Stages of the conformance kit: small targets whose logits can all be recomputed, and the loop that decodes on
them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from parlay.drafters.resources import Resources
from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing import reference
from parlay.testing.conformance.recorder import RecordingRunner, Texts
from parlay.testing.conformance.watched import WatchedDrafter, watched
from parlay.testing.reference import LogitsOf, ReferenceText
from parlay.testing.toy_constraint import ToyConstraint, ToyGrammar
from parlay.testing.toys import without
from parlay.types import (
    NO_DRAFT,
    AcceptRule,
    Budgets,
    Committed,
    Draft,
    Drafter,
    Event,
    Exactness,
    FinishReason,
    Metrics,
    NoiseKey,
    Request,
    Runner,
    SamplingParams,
    SequenceView,
    Strategy,
)


class Steady:
    """A cost that never changes, so that runs repeat exactly."""

    revision = 0

    def forward(self, rows: int, context: int) -> float:
        return 1.0 + 0.01 * rows

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Ignore the measurement."""


@dataclass(frozen=True)
class Stage:
    """A target to decode on.

    ``open_runner(capacity)`` makes a fresh runner whose cache holds ``capacity`` tokens. ``logits_of`` recomputes any
    logits without a cache. Drafters are built from ``resources``. ``noise_bound``: the largest difference between two
    computations of one logit on this model, dtype and device; 0 for runners whose exactness is ``bits``.
    """

    name: str
    open_runner: Callable[[int], Runner]
    logits_of: LogitsOf
    vocab_size: int
    resources: Resources
    noise_bound: float = 0.0
    checks: frozenset[str] = frozenset()
    """Names of the checks that apply to this stage; empty: all but ``distribution``."""
    known: dict[str, ReferenceText] = field(default_factory=dict, compare=False)
    """Texts that the reference decoder has already decoded on this stage."""

    def expected(self, ask: StageRequest, max_context: int | None = None) -> ReferenceText:
        """Return the text of plain decoding by the slow reference decoder, which decodes it once. ``max_context`` None:
        no limit."""
        name = ask.spelling if max_context is None else f"{ask.spelling} in {max_context}"
        if name not in self.known:
            self.known[name] = reference.decode(self.text_logits, ask.request("expected"), max_context or 1 << 30)
        return self.known[name]

    def text_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits after a text. A model that fills canvases never writes its mask, so the mask has no
        probability."""
        return self.logits_of(ids) if self.mask is None else without(self.mask, self.logits_of)(ids)

    @property
    def mask(self) -> int | None:
        """The mask's id, if the target fills canvases."""
        target = self.resources.target
        return None if target is None or target.canvas is None else target.canvas.mask_id


@dataclass(frozen=True)
class Subject:
    """The subject of a test: a function that makes a drafter (or None, for plain decoding), and the rule that accepts
    its drafts."""

    name: str
    make: Callable[[Resources], Drafter | None]
    rule: Callable[[], AcceptRule] = SharedNoise

    def strategy(self, stage: Stage, budget: int) -> Strategy:
        """Return a fresh strategy that always drafts ``budget`` nodes."""
        drafter = self.make(stage.resources)
        if drafter is None:
            return Strategy(self.name, (), self.rule(), Plain())
        return Strategy(self.name, (drafter,), self.rule(), Fixed(budget))


@dataclass(frozen=True)
class SeveralSubject(Subject):
    """A strategy of several drafters, which ``all_of`` makes."""

    all_of: Callable[[Resources], tuple[Drafter, ...]] = lambda _: ()

    def strategy(self, stage: Stage, budget: int) -> Strategy:
        """Return a fresh strategy whose drafters and numbers of nodes, up to ``budget``, change at random from step to
        step."""
        drafters = self.all_of(stage.resources)
        return Strategy(self.name, drafters, self.rule(), Shuffled(budget, len(drafters)))


class Shuffled(Fixed):
    """Asks two random drafters for each sequence, and keeps one of their drafts; a random drafter watches. The choice
    repeats exactly."""

    def __init__(self, budget: int, drafters: int) -> None:
        super().__init__(budget)
        self._chance = random.Random(0)
        self._drafters = drafters
        self._asked = 0
        self._offers: dict[int, list[Draft]] = {}

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self._asked, self._offers = 0, {view.sequence: [] for view in views}
        return self._ask(views)

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        for view, draft in zip(views, drafts, strict=True):
            self._offers[view.sequence] += [draft] if draft else []
        return self._ask(views) if self._asked < 2 else Budgets([0] * len(views))

    def _ask(self, views: Sequence[SequenceView]) -> Budgets:
        self._asked += 1
        drafters = [self._chance.randrange(self._drafters) for _ in views]
        watching = [(self._chance.randrange(self._drafters),) for _ in views]
        nodes = [self._chance.choice((0, 1, self.budget)) for _ in views]
        return Budgets(nodes, 0, drafters, watching)

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return [self._chance.choice(self._offers[view.sequence] or [NO_DRAFT]) for view in views]


PLAIN = Subject("none", lambda _: None)


class StopOnTokens:
    """A stop checker for token ids: stops when the last committed ids are the ids of ``stop``."""

    def __init__(self, stop: Sequence[int]) -> None:
        self._stop = list(stop)
        self._seen: list[int] = []

    def push(self, token: int) -> bool:
        self._seen.append(token)
        return self._seen[-len(self._stop) :] == self._stop


@dataclass(frozen=True)
class StageRequest:
    """The parameters of a request, without state. `request` makes a request of them for each run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_sequence: tuple[int, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    salt: str = ""
    group: str = ""
    grammar: ToyGrammar | None = None

    @cached_property
    def spelling(self) -> str:
        """A text that is the same for equal requests. It is cached, because drafters that know the text ask for it at
        each step."""
        return repr(self)

    def request(self, name: str) -> Request:
        return Request(
            id=name,
            prompt=self.prompt,
            params=self.params,
            key=NoiseKey(self.seed, self.sample_index),
            stop_ids=self.stop_ids,
            stop_checker=StopOnTokens(self.stop_sequence) if self.stop_sequence else None,
            constraint=ToyConstraint(self.grammar) if self.grammar else None,
            references=self.references,
            salt=self.salt,
            group=self.group,
        )


@dataclass(slots=True)
class StageSample:
    """The result of one request."""

    texts: Texts
    committed: list[Committed] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The number of tokens that each step committed."""
    last: Event | None = None
    drafters: tuple[WatchedDrafter, ...] = ()
    """The drafters of the request's strategy, which other samples may share."""

    @property
    def drafter_fault(self) -> str:
        """Describe the first thing that a drafter did wrong; empty if none is known to have failed."""
        return next((drafter.fault for drafter in self.drafters if drafter.fault), "")

    @property
    def tokens(self) -> list[int]:
        return [one.token for one in self.committed]

    @property
    def ending(self) -> tuple[FinishReason | None, int | str | None]:
        assert self.last is not None
        return self.last.finish_reason, self.last.stop_reason

    @property
    def metrics(self) -> Metrics:
        assert self.last is not None
        assert self.last.metrics is not None
        return self.last.metrics


def decode(
    runner: Runner, jobs: Sequence[tuple[StageRequest, Strategy]], limits: Limits | None = None
) -> list[StageSample]:
    """Run the jobs together to the end, and check the cache's invariants after each step."""
    recorder = RecordingRunner(runner)
    exact = runner.spec.exactness is Exactness.BITS
    engine = Engine(runner if exact else recorder, Steady(), limits)
    under = {id(strategy): watched(strategy) for _, strategy in jobs}
    samples = {
        str(index): StageSample(recorder.texts, drafters=under[id(strategy)][1])
        for index, (_, strategy) in enumerate(jobs)
    }
    for name, (ask, strategy) in zip(samples, jobs, strict=True):
        engine.add(ask.request(name), under[id(strategy)][0])
    for _ in range(100 + 20 * sum(len(ask.prompt) + (ask.params.max_tokens or 0) for ask, _ in jobs)):
        if engine.idle:
            return list(samples.values())
        for event in engine.step():
            _collect(samples[event.request], event)
        runner.check()
    stuck = [name for name, sample in samples.items() if sample.last is None]
    raise AssertionError(f"the engine makes no progress with requests {', '.join(stuck)}")


def _collect(sample: StageSample, event: Event) -> None:
    assert sample.last is None, "an event after the last one"
    sample.committed += event.committed
    if event.committed:
        sample.steps.append(len(event.committed))
    if event.finish_reason is not None:
        sample.last = event
