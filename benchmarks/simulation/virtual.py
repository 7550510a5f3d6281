"""Runs the real engine and scheduler in virtual time: the runner only counts, and a step takes what a cost model
says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parlay.bench.counting import CountingRunner
from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.simulate.costs import StepCost, forward_seconds
from parlay.simulate.drafting import Drafting, uniforms
from parlay.simulate.fleet import Outcome
from parlay.simulate.jobs import ReplicaLimits
from parlay.simulate.traffic import Arrival
from parlay.types import (
    NO_SKIP,
    Draft,
    Event,
    Needs,
    NoiseKey,
    Observation,
    OutOfRoom,
    Output,
    Policy,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Strategy,
    trees,
)

_VOCAB = 4
_RIGHT, _WRONG = 0, 1
_PAGE = 16


class KnownCost:
    """Implements `Cost` with what steps really cost here."""

    revision = 0

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def forward(self, rows: int, context: int) -> float:
        return forward_seconds(self._cost, rows, context)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Ignore the measurement."""


class CountedRunner(CountingRunner):
    """Implements a runner that always writes the same token. A forward moves ``now`` on by its cost; pages are
    counted."""

    def __init__(self, cost: StepCost, cache_tokens: int) -> None:
        super().__init__("counted", _VOCAB, kernels="none")
        self.now, self.rows, self.steps = 0.0, 0, 0
        self._cost, self._total = cost, cache_tokens // _PAGE
        self._pages: dict[int, int] = {}
        self._taken = 0

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        rows, keys, pairs, starts = 0, 0, 0, [0]
        for segment in segments:
            own = segment.rows
            read = self._cached[segment.sequence] + own
            rows, keys, pairs = rows + own, keys + read, pairs + own * read
            starts.append(starts[-1] + len(self.places(segment)))
        self.now += self._cost(len(segments), rows, starts[-1], keys, pairs)
        self.rows += rows
        self.steps += 1
        return Output(torch.zeros(starts[-1], _VOCAB), tuple(starts))

    def reserve(self, sequence: int, tokens: int) -> bool:
        pages = -(-tokens // _PAGE)
        if pages > self._total:
            raise OutOfRoom(f"{tokens} tokens")
        more = max(0, pages - self._pages.get(sequence, 0))
        if self._taken + more > self._total:
            return False
        self._pages[sequence] = self._pages.get(sequence, 0) + more
        self._taken += more
        return True

    def release(self, sequence: int) -> None:
        super().release(sequence)
        self._taken -= self._pages.pop(sequence, 0)

    def free_tokens(self) -> int:
        return (self._total - self._taken) * _PAGE

    def capacity(self) -> int:
        return self._total * _PAGE


class _Chains:
    """Drafts chains. Their tokens are right in the same places as the simulator's: both have the same `uniforms`."""

    needs = Needs(outcomes=False)

    def __init__(self, chance: float, seed: int) -> None:
        self._chance, self._seed = chance, seed

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [trees.chain(self._tokens(view, budget), "chains") for view, budget in zip(views, budgets, strict=True)]

    def _tokens(self, view: SequenceView, budget: int) -> list[int]:
        written = len(view.tokens) - view.prompt_length
        right = uniforms(self._seed, int(view.request.id), written + budget)[written:] < self._chance
        return [_RIGHT if each else _WRONG for each in right]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the observations."""

    def release(self, sequence: int) -> None:
        """Do nothing: it keeps no state."""


def run(
    arrivals: Sequence[Arrival], cost: StepCost, limits: ReplicaLimits, drafting: Drafting, *, seed: int = 0
) -> Outcome:
    """Decode all requests, each added to the engine at its time, and count what `simulate` counts."""
    runner = CountedRunner(cost, limits.cache_tokens)
    engine = Engine(runner, KnownCost(cost), _limits(limits), clock=lambda: runner.now)
    strategy = _strategy(drafting, seed)
    out = Outcome(requests=len(arrivals), most_replicas=1)
    firsts = [-1.0] * len(arrivals)
    begun = 0
    while begun < len(arrivals) or not engine.idle:
        if engine.idle:
            runner.now = max(runner.now, arrivals[begun].seconds)
        while begun < len(arrivals) and arrivals[begun].seconds <= runner.now:
            engine.add(request(begun, (_RIGHT,) * arrivals[begun].prompt, arrivals[begun].output), strategy)
            begun += 1
        before = runner.now
        for event in engine.step():
            count_event(out, event, arrivals, firsts, runner.now)
        out.busy += runner.now - before
    out.span = runner.now - arrivals[0].seconds
    out.paid, out.rows, out.steps = out.span, runner.rows, runner.steps
    out.preemptions = engine.stats().preemptions
    return out


def _limits(limits: ReplicaLimits) -> Limits:
    return Limits(
        max_sequences=limits.max_num_seqs,
        max_rows=limits.max_num_batched_tokens,
        max_draft_rows=limits.max_draft_rows,
    )


def _strategy(drafting: Drafting, seed: int) -> Strategy:
    if not drafting.nodes:
        return Strategy("none", (), SharedNoise(), Plain())
    policy: Policy = Fixed(drafting.nodes)
    return Strategy("chains", (_Chains(sum(drafting.chances("")), seed),), SharedNoise(), policy)


def request(number: int, prompt: tuple[int, ...], output: int) -> Request:
    """Make request ``number`` of the traffic, which writes ``output`` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(id=str(number), prompt=prompt, params=params, key=NoiseKey(0))


def count_event(out: Outcome, event: Event, arrivals: Sequence[Arrival], firsts: list[float], seconds: float) -> None:
    """Count an event of a step. ``firsts`` has the times of first tokens, below 0 until there is one."""
    number = int(event.request)
    if event.committed and firsts[number] < 0:
        firsts[number] = seconds
    if event.finish_reason:
        assert event.finish_reason == "length", event
        _count(out, arrivals[number], firsts[number], seconds)


def _count(out: Outcome, arrival: Arrival, first: float, last: float) -> None:
    out.finished += 1
    out.tokens += arrival.output
    out.first.append(first - arrival.seconds)
    out.whole.append(last - arrival.seconds)
    out.per_token.append((last - first) / (arrival.output - 1) if arrival.output > 1 else -1.0)
