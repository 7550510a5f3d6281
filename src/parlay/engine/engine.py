"""The engine: `Engine.step` is the one loop through which every strategy decodes, plain decoding included."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from parlay.engine.commit import collect_prompt_logprobs, commit
from parlay.engine.denoise import fill, lay
from parlay.engine.drafting import DraftAdmission, Drafting
from parlay.engine.request_table import RequestTable
from parlay.engine.scheduler import Limits, Scheduler
from parlay.engine.sequence_step import SequenceStep, charge, isolated, named
from parlay.engine.tally import Clock, plausible, since
from parlay.engine.target_layers import TargetLayers
from parlay.engine.verify import Begun, accept, begin, finish, is_spoilt, rank, verify
from parlay.system.threads import torch_on_one
from parlay.types import (
    NO_DRAFT,
    NOTHING_SPENT,
    BesideDrafter,
    Cost,
    EngineStats,
    Event,
    FinishReason,
    GuidingRunner,
    MovingRunner,
    Request,
    Runner,
    RunnerSpec,
    Spent,
    Strategy,
)


@dataclass(slots=True)
class _StepSeconds:
    """Wall time of one step by phase."""

    clock: Clock
    began: float
    draft: float = 0.0
    verify: float = 0.0
    whole: bool = False
    """One forward ran all steps."""
    spent: Spent = NOTHING_SPENT
    before: float = 0.0
    """Until the step was put off; it went on when it ``began``."""

    @property
    def overhead(self) -> float:
        return max(0.0, self.before + since(self.began, self.clock) - self.draft - self.verify)

    def put_off(self) -> None:
        """Count no more seconds until the step goes on."""
        self.before = since(self.began, self.clock)

    def count(self, steps: list[SequenceStep], verified: list[SequenceStep], spec: RunnerSpec) -> None:
        """Record the end of draft and verify. ``verified``: the steps without a fault. Rows that ran again count."""
        if not verified:
            return
        out, tokens = steps[0].out, 0
        rows = sum({id(step.out): step.out.beside for step in verified}.values())
        self.whole = len(verified) == len(steps)
        for step in verified:
            rows += len(step.pending) + len(step.draft.tree.tokens)
            tokens += len(step.sequence.tokens)
            if spec.fills_only and not step.stale:
                rows += spec.again(step.start)
            self.whole &= step.out is out
        context = tokens // len(verified)
        self.spent = Spent(0.0, self.verify, rows, context)  # each policy gets its own draft seconds


@dataclass(slots=True)
class _Group:
    """The steps of one forward that is under way; ``alone``: it began while no other one was."""

    steps: list[SequenceStep]
    seconds: _StepSeconds
    asked: bool
    alone: bool
    begun: Begun | None


class Engine:
    """Decodes requests together, each under its own strategy. Not thread-safe: one thread adds and steps.

    ``requests`` holds those under way; `step` is the loop over them. ``clock`` times everything that costs are learned
    from; a simulation gives one of known prices. ``moving`` is the runner, if it can move cached keys, and ``guiding``
    if it can guide.
    """

    def __init__(
        self,
        runner: Runner,
        cost: Cost,
        limits: Limits | None = None,
        *,
        clock: Clock = time.perf_counter,
        moving: MovingRunner | None = None,
        guiding: GuidingRunner | None = None,
    ) -> None:
        self.runner = runner
        self.cost = cost
        self.limits = limits or Limits()
        self.max_context = min(runner.spec.max_context, self.limits.max_context or runner.spec.max_context)
        self.scheduler = Scheduler(runner, self.limits, cost, clock, moving=moving, guiding=guiding)
        layers = TargetLayers(runner, self.limits.max_rows, clock)
        most = self.limits.max_draft_rows
        self.requests = RequestTable(runner, self.scheduler, layers, max_context=self.max_context, max_canvas=most)
        admission = DraftAdmission(runner.spec, self.scheduler, max_context=self.max_context, max_draft_rows=most)
        self._drafting = Drafting(admission, self.scheduler, layers, clock)
        self._clock = clock
        self._groups = runner.spec.in_flight
        self._in_flight: deque[_Group] = deque()

    def add(self, request: Request, strategy: Strategy) -> None:
        """Queue a request; see `RequestTable.add`."""
        self.requests.add(request, strategy)

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> Event | None:
        """End a request now; see `RequestTable.abort`."""
        event = self.requests.abort(request_id, reason, error)
        self._drain()
        return event

    def stats(self) -> EngineStats:
        """Count what is under way and was done; see `RequestTable.stats`."""
        return self.requests.stats()

    @property
    def idle(self) -> bool:
        return not self.requests

    @property
    def longest(self) -> int:
        """How many tokens, prompt and output together, context and memory allow a request."""
        return self.requests.longest

    def step(self) -> list[Event]:
        """Run one forward of the target over all that is due, and commit the tokens that follow.

        If the runner takes several forwards at once, begin as many, and commit what follows from the first of them.
        """
        with torch_on_one():
            if self._groups > 1:
                return self._step_in_groups()
            seconds = _StepSeconds(self._clock, self._clock())
            steps = self.scheduler.next()
            asked = self._propose(steps, seconds)
            self._verify(steps, seconds)
            return self._end(steps, seconds, asked)

    def _end(self, steps: list[SequenceStep], seconds: _StepSeconds, asked: bool) -> list[Event]:
        """End a step whose forward is over. ``asked``: policies were asked before it."""
        if seconds.spent.rows:
            self._charge_beside(steps, seconds)
        self._accept(steps, seconds)
        self._commit(steps)
        self._observe(steps, seconds, asked)
        self._count_seconds(steps, seconds)
        return self.requests.events(steps)

    # ---------------------------------------------------------------------------------------------- several in flight

    def _step_in_groups(self) -> list[Event]:
        """Begin a forward for each group of sequences that may be in flight, then end the step of the first."""
        while len(self._in_flight) < self.scheduler.groups and (group := self._begin_group()) is not None:
            self._in_flight.append(group)
        events = self._end_group(self._in_flight.popleft()) if self._in_flight else []
        self._drain()
        return events

    def _begin_group(self) -> _Group | None:
        """Propose for sequences that are in no group yet, and begin their forward. None if there are none."""
        seconds = _StepSeconds(self._clock, self._clock())
        steps = self.scheduler.next()
        if not steps:
            return None
        asked = self._propose(steps, seconds)
        began = self._clock()
        begun = begin(self.runner, _without_fault(steps))
        seconds.verify = since(began, self._clock)
        self.scheduler.depart(steps)
        seconds.put_off()
        return _Group(steps, seconds, asked, not self._in_flight, begun)

    def _end_group(self, group: _Group) -> list[Event]:
        """Wait for the forward of a group, and commit what follows for the requests that are still there."""
        seconds, steps = group.seconds, self.scheduler.arrive(group.steps)
        seconds.began = began = self._clock()
        tapping = plausible(finish(self.runner, due := _without_fault(steps), group.begun))
        seconds.verify += max(0.0, since(began, self._clock) - tapping)
        seconds.draft += tapping
        seconds.count(due, _without_fault(due), self.runner.spec)
        if seconds.spent.rows and not any(step.prefill for step in steps):
            self.scheduler.learn_group(seconds.spent.rows / len(steps), seconds.draft + seconds.overhead)
        seconds.whole &= group.alone and not self._in_flight and len(steps) == len(group.steps)
        return self._end(steps, seconds, group.asked)

    def _drain(self) -> None:
        """Wait for forwards whose requests are all over. If one fails, nobody asked for it."""
        while self._in_flight and not self.requests:
            group = self._in_flight.popleft()
            with suppress(Exception):
                finish(self.runner, [], group.begun)

    # ------------------------------------------------------------------------------------------- the parts of a step

    def _propose(self, steps: list[SequenceStep], seconds: _StepSeconds) -> bool:
        """Let drafters propose, and lay out canvases. Returns whether policies were asked."""
        began = self._clock()
        canvases = [step for step in steps if step.sequence.canvas is not None]
        asked = self._drafting.propose(_without_canvas(steps) if canvases else steps)
        if canvases:
            lay(canvases)
        seconds.draft = since(began, self._clock)
        return asked

    def _verify(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Run the steps without a fault; a step with which the target fails gets a fault."""
        began = self._clock()
        tapping = plausible(verify(self.runner, due := _without_fault(steps)))
        seconds.verify = max(0.0, since(began, self._clock) - tapping)
        seconds.draft += tapping
        seconds.count(due, _without_fault(due), self.runner.spec)
        self.scheduler.turns.learn(steps)

    def _charge_beside(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Charge what the forward took longer than usual to drafters that went on beside it."""
        beside = [
            (step, number) for step in steps for number in step.watching
            if step.sequence.needs and step.sequence.needs[number].beside
            and isinstance(drafter := step.sequence.strategy.drafters[number], BesideDrafter) and drafter.is_drafting
        ]  # fmt: skip
        if beside:
            usual = self.cost.forward(seconds.spent.rows, seconds.spent.context)
            longer, seconds.whole = max(0.0, seconds.verify - usual), False
            charge(beside, longer)
            seconds.draft, seconds.verify = seconds.draft + longer, seconds.verify - longer
            seconds.spent = replace(seconds.spent, verify_seconds=seconds.verify)

    def _accept(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Let accept rules decide drafts, and selectors places. Early prefill chunks have nothing to decide."""
        due = [step for step in _without_fault(steps) if step.at_root]
        canvases = [step for step in due if step.sequence.canvas is not None]
        accept(drafting := _without_canvas(due) if canvases else due)
        if spoilt := [step for step in drafting if is_spoilt(step)]:
            self._accept_without_drafts(spoilt, seconds)
        if canvases:
            fill(canvases, self.max_context, self.limits.max_draft_rows)
        if wants_top_k := [step for step in due if step.watching and step.fault is None and step.wants_top_k]:
            began = self._clock()
            isolated(rank, wants_top_k, SequenceStep.drop_policy)
            ranking = since(began, self._clock)
            charge([(step, drafter) for step in wants_top_k for drafter in step.wants_top_k], ranking)
            seconds.draft += ranking

    def _accept_without_drafts(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Run and decide steps anew as if nobody had drafted. What that costs is nobody's price of rows."""
        seconds.whole = False
        for step in steps:
            step.fault, step.draft = None, NO_DRAFT
        verify(self.runner, steps)
        accept(_without_fault(steps))

    def _commit(self, steps: list[SequenceStep]) -> None:
        for step in _without_fault(steps):
            try:
                self._commit_one(step)
            except Exception as error:  # a stop checker, for example: only its own request ends
                step.fail(named(error), error)
        self.requests.count(_without_fault(steps))

    def _commit_one(self, step: SequenceStep) -> None:
        """The one place where tokens join a sequence and rows join the cache.

        If nothing was committed, the root is cached too. It runs again, for what follows hangs on it.
        """
        sequence = step.sequence
        path: tuple[int, ...] = ()
        collect_prompt_logprobs(step)
        if step.at_root:
            step.done = commit(step, self.max_context)
            path, committed = step.path, len(step.done.committed)
            if committed or sequence.canvas is not None:  # a text of length 0 took no step
                sequence.tally.count_step(step.draft, path, committed)
        sequence.cached = self.runner.keep(sequence.sequence, path)
        if sequence.cached == len(sequence.tokens):
            sequence.cached = self.runner.truncate(sequence.sequence, len(sequence.tokens) - 1)

    def _observe(self, steps: list[SequenceStep], seconds: _StepSeconds, asked: bool) -> None:
        """Report the step to drafters, and to policies, if they were ``asked``, with its cost."""
        began = self._clock()
        self._drafting.observe(_without_fault(steps))
        seconds.draft += since(began, self._clock)
        if asked:
            self._drafting.learn(steps, seconds.spent)

    def _count_seconds(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        overhead, spent = seconds.overhead, seconds.spent
        if seconds.whole and seconds.verify:  # drafts lengthen commits too, so that time is part of the cost of rows
            self.cost.record(spent.rows, spent.context, seconds.verify + overhead)
        self.requests.count_step(seconds.draft + seconds.verify + overhead, spent.rows)
        for step in steps:
            step.sequence.tally.count_seconds(step.prefill, seconds.draft, seconds.verify, overhead)


def _without_fault(steps: list[SequenceStep]) -> list[SequenceStep]:
    """The steps without a fault."""
    return [step for step in steps if step.fault is None]


def _without_canvas(steps: list[SequenceStep]) -> list[SequenceStep]:
    """The steps whose sequence has no canvas."""
    return [step for step in steps if step.sequence.canvas is None]
