"""The engine: `Engine.step` is the one loop through which every strategy decodes, plain decoding included."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from parlay.engine.commit import collect_prompt_logprobs, commit
from parlay.engine.denoise import fill, lay
from parlay.engine.drafting import DraftAdmission, Drafting
from parlay.engine.request_table import RequestTable
from parlay.engine.scheduler import Limits, Scheduler
from parlay.engine.sequence_step import SequenceStep, charge, isolated
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
    Output,
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
    one_forward: bool = False
    """True if one forward verified all sequences of the step, so its time may teach the cost model."""
    spent: Spent = NOTHING_SPENT
    before_pause: float = 0.0
    """Seconds from the beginning of the step until `pause`. ``began`` is then when the step went on."""

    @property
    def overhead(self) -> float:
        return max(0.0, self.before_pause + since(self.began, self.clock) - self.draft - self.verify)

    def pause(self) -> None:
        """Stop counting seconds until the step goes on."""
        self.before_pause = since(self.began, self.clock)

    def count(self, steps: list[SequenceStep], verified: list[SequenceStep], spec: RunnerSpec) -> None:
        """Work out the rows and the mean context of the forward, after draft and verify.

        ``verified`` are the steps without a fault. Rows of a canvas's block that ran again count as rows.
        """
        if not verified:
            return
        rows = tokens = 0
        outs: list[Output] = []
        for step in verified:
            rows += len(step.pending) + len(step.draft.tree.tokens)
            tokens += len(step.sequence.tokens)
            if spec.canvas is not None and spec.fills_only and not step.stale:
                rows += spec.again(step.start)
            if not outs or step.out is not outs[-1]:  # one forward ran all steps, or each step had its own
                outs.append(step.out)
                rows += step.out.beside
        self.one_forward = len(outs) == 1 and len(verified) == len(steps)
        context = tokens // len(verified)
        self.spent = Spent(0.0, self.verify, rows, context)  # each policy gets its own draft seconds


@dataclass(slots=True)
class _Group:
    """The sequences' steps that share one forward in flight. ``alone``: no other forward was in flight when it began.

    ``asked``: policies were asked for this step.
    """

    steps: list[SequenceStep]
    seconds: _StepSeconds
    asked: bool
    alone: bool
    begun: Begun | None


class Engine:
    """Decodes requests together, each under its own strategy. Not thread-safe: one thread adds and steps.

    ``requests`` holds the requests under way, and `step` is the loop over them. All seconds that costs are learned from
    come from ``clock``; a simulation passes a clock of its own. ``moving`` is the runner itself if it can move cached
    keys, and ``guiding`` if it can run negative prompts.
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
        self._spec = runner.spec
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
        """Count requests, tokens and steps, now and since the engine was made; see `RequestTable.stats`."""
        return self.requests.stats()

    @property
    def idle(self) -> bool:
        return not self.requests

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output together, that context and memory allow a request."""
        return self.requests.longest

    def step(self) -> list[Event]:
        """Run one forward of the target over the scheduled sequences, and commit the tokens that follow.

        A runner that takes several forwards at once begins all of them, and the step ends with the first one's commits.
        """
        with torch_on_one():
            if self._spec.in_flight > 1:
                return self._step_in_groups()
            seconds = _StepSeconds(self._clock, self._clock())
            steps = self.scheduler.next()
            asked = self._propose(steps, seconds)
            self._verify(steps, seconds)
            return self._end(steps, seconds, asked)

    def _end(self, steps: list[SequenceStep], seconds: _StepSeconds, asked: bool) -> list[Event]:
        """Finish a step whose forward is over: accept, commit, observe. ``asked``: policies were asked in this step."""
        if seconds.spent.rows:
            self._charge_beside(steps, seconds)
        self._accept(steps, seconds)
        self._commit(steps)
        self._observe(steps, seconds, asked)
        self._count_seconds(steps, seconds)
        return self.requests.events(steps)

    # ---------------------------------------------------------------------------------------------- several in flight

    def _step_in_groups(self) -> list[Event]:
        """Fill the runner with forwards, one for each group of sequences, then finish the step of the oldest group."""
        while len(self._in_flight) < self.scheduler.groups and (group := self._begin_group()) is not None:
            self._in_flight.append(group)
        events = self._end_group(self._in_flight.popleft()) if self._in_flight else []
        self._drain()
        return events

    def _begin_group(self) -> _Group | None:
        """Propose for sequences that are in no group yet, and begin their forward. None if every sequence is in one."""
        seconds = _StepSeconds(self._clock, self._clock())
        steps = self.scheduler.next()
        if not steps:
            return None
        asked = self._propose(steps, seconds)
        began = self._clock()
        begun = begin(self.runner, _without_fault(steps))
        seconds.verify = since(began, self._clock)
        self.scheduler.depart(steps)
        seconds.pause()
        return _Group(steps, seconds, asked, not self._in_flight, begun)

    def _end_group(self, group: _Group) -> list[Event]:
        """Wait for a group's forward, and commit tokens for those of its requests that are still under way."""
        seconds, steps = group.seconds, self.scheduler.arrive(group.steps)
        seconds.began = began = self._clock()
        tapping = plausible(finish(self.runner, due := _without_fault(steps), group.begun))
        seconds.verify += max(0.0, since(began, self._clock) - tapping)
        seconds.draft += tapping
        seconds.count(due, _without_fault(due), self._spec)
        if seconds.spent.rows and not any(step.prefill for step in steps):
            self.scheduler.learn_group(seconds.spent.rows / len(steps), seconds.draft + seconds.overhead)
        seconds.one_forward &= group.alone and not self._in_flight and len(steps) == len(group.steps)
        return self._end(steps, seconds, group.asked)

    def _drain(self) -> None:
        """Wait for forwards whose requests have all ended. Their output and their errors no longer matter."""
        while self._in_flight and not self.requests:
            group = self._in_flight.popleft()
            with suppress(Exception):
                finish(self.runner, [], group.begun)

    # ------------------------------------------------------------------------------------------- the parts of a step

    def _propose(self, steps: list[SequenceStep], seconds: _StepSeconds) -> bool:
        """Let drafters propose, and lay out canvases. Returns whether policies were asked."""
        began = self._clock()
        canvases = [] if self._spec.canvas is None else [step for step in steps if step.sequence.canvas is not None]
        asked = self._drafting.propose(_without_canvas(steps) if canvases else steps)
        if canvases:
            lay(canvases)
        seconds.draft = since(began, self._clock)
        return asked

    def _verify(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Run the target over the steps without a fault. A step with which the target fails gets a fault."""
        began = self._clock()
        tapping = plausible(verify(self.runner, due := _without_fault(steps)))
        seconds.verify = max(0.0, since(began, self._clock) - tapping)
        seconds.draft += tapping
        seconds.count(due, _without_fault(due), self._spec)
        self.scheduler.turns.learn(steps)

    def _charge_beside(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Charge drafters that ran during the forward for the time by which they slowed it."""
        beside = [
            (step, number) for step in steps for number in step.watching
            if step.sequence.needs and step.sequence.needs[number].beside
            and isinstance(drafter := step.sequence.strategy.drafters[number], BesideDrafter) and drafter.is_drafting
        ]  # fmt: skip
        if beside:
            usual = self.cost.forward(seconds.spent.rows, seconds.spent.context)
            longer, seconds.one_forward = max(0.0, seconds.verify - usual), False
            charge(beside, longer)
            seconds.draft, seconds.verify = seconds.draft + longer, seconds.verify - longer
            seconds.spent = seconds.spent._replace(verify_seconds=seconds.verify)

    def _accept(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Let accept rules judge drafts, and selectors fill canvases. Early prefill chunks have neither."""
        due = [step for step in _without_fault(steps) if step.at_root]
        canvases = [] if self._spec.canvas is None else [step for step in due if step.sequence.canvas is not None]
        accept(drafting := _without_canvas(due) if canvases else due)
        if spoilt := [step for step in drafting if step.fault is not None and is_spoilt(step)]:
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
        """Verify and accept these steps again without drafts. The time of both forwards teaches no cost of rows."""
        seconds.one_forward = False
        for step in steps:
            step.fault, step.draft = None, NO_DRAFT
        verify(self.runner, steps)
        accept(_without_fault(steps))

    def _commit(self, steps: list[SequenceStep]) -> None:
        for step in _without_fault(steps):
            try:
                self._commit_one(step)
            except Exception as error:  # a stop checker, for example: only its own request ends
                step.fail_by(error)

    def _commit_one(self, step: SequenceStep) -> None:
        """Append the accepted tokens to the sequence, and keep their rows in the cache. Nothing else does either.

        If no token was committed, the root's row was cached too. It is cut off again, because the next step must run
        the root.
        """
        sequence = step.sequence
        path: tuple[int, ...] = ()
        if sequence.request.params.prompt_logprobs is not None:
            collect_prompt_logprobs(step)
        if step.at_root:
            step.commit = commit(step, self.max_context)
            path, committed = step.path, len(step.commit.committed.tokens)
            if committed or sequence.canvas is not None:  # max_tokens=0 commits nothing, which is no step
                sequence.tally.count_step(step.draft, path, committed)
        sequence.cached = self.runner.keep(sequence.sequence, path)
        if sequence.cached == len(sequence.tokens):
            sequence.cached = self.runner.truncate(sequence.sequence, len(sequence.tokens) - 1)

    def _observe(self, steps: list[SequenceStep], seconds: _StepSeconds, asked: bool) -> None:
        """Show the step to drafters, and tell policies what it cost if they were ``asked`` in this step."""
        began = self._clock()
        self._drafting.observe(_without_fault(steps))
        seconds.draft += since(began, self._clock)
        if asked:
            self._drafting.learn(steps, seconds.spent)

    def _count_seconds(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        overhead, spent = seconds.overhead, seconds.spent
        if seconds.one_forward and seconds.verify:  # more rows also make commits longer: their cost includes that
            self.cost.record(spent.rows, spent.context, seconds.verify + overhead)
        self.requests.count(_without_fault(steps), seconds.draft + seconds.verify + overhead, spent.rows)
        for step in steps:
            step.sequence.tally.count_seconds(step.prefill, seconds.draft, seconds.verify, overhead)


def _without_fault(steps: list[SequenceStep]) -> list[SequenceStep]:
    """The steps without a fault."""
    return [step for step in steps if step.fault is None]


def _without_canvas(steps: list[SequenceStep]) -> list[SequenceStep]:
    """The steps whose sequence has no canvas."""
    return [step for step in steps if step.sequence.canvas is None]
