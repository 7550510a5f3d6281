"""The engine: `Engine.step` is the one loop through which every strategy decodes, plain decoding included."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace

from parlay.engine.accept import accept, rank
from parlay.engine.admission import DraftAdmission
from parlay.engine.clock import Clock, plausible, since
from parlay.engine.commit import collect_prompt_logprobs, commit
from parlay.engine.drafting import Drafting
from parlay.engine.isolation import isolated, named
from parlay.engine.scheduler import Limits, Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import Commit, SequenceStep, charge
from parlay.engine.target_layers import TargetLayers
from parlay.engine.verify import verify
from parlay.sampling.processors import validate
from parlay.system.threads import torch_on_one
from parlay.types import (
    NOTHING_SPENT,
    Cost,
    EngineStats,
    Event,
    Exactness,
    FinishReason,
    Needs,
    Request,
    Runner,
    Spent,
    Strategy,
)

logger = logging.getLogger(__name__)


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

    @property
    def overhead(self) -> float:
        return max(0.0, since(self.began, self.clock) - self.draft - self.verify)

    def count(self, steps: list[SequenceStep], verified: list[SequenceStep]) -> None:
        """Record the end of draft and verify. ``verified``: the steps without a fault."""
        if not verified:
            return
        out, rows, tokens = steps[0].out, 0, 0
        self.whole = len(verified) == len(steps)
        for step in verified:
            rows += len(step.pending) + len(step.draft.tree.tokens)
            tokens += len(step.sequence.tokens)
            self.whole &= step.out is out
        context = tokens // len(verified)
        self.spent = Spent(0.0, self.verify, rows, context)  # each policy gets its own draft seconds


class Engine:
    """Decodes requests together, each under its own strategy. Not thread-safe: one thread adds and steps.

    ``clock`` times everything that costs are learned from; a simulation gives one of known prices.
    """

    def __init__(
        self, runner: Runner, cost: Cost, limits: Limits | None = None, *, clock: Clock = time.perf_counter
    ) -> None:
        self.runner = runner
        self.cost = cost
        self.limits = limits or Limits()
        self._clock = clock
        self.scheduler = Scheduler(runner, self.limits, cost, clock)
        self.max_context = min(runner.spec.max_context, self.limits.max_context or runner.spec.max_context)
        self._layers = TargetLayers(runner, self.limits.max_rows, clock)
        admission = DraftAdmission(
            runner.spec, self.scheduler, max_context=self.max_context, max_draft_rows=self.limits.max_draft_rows
        )
        self._drafting = Drafting(admission, self.scheduler, self._layers, clock)
        self._sequences: dict[str, Sequence] = {}
        self._next_sequence = 0
        self._finished: Counter[FinishReason] = Counter()
        self._drafter_faults = 0
        self._step_tokens = 0
        self._steps: Counter[int] = Counter()

    def add(self, request: Request, strategy: Strategy) -> None:
        """Queue a request. Raises ValueError for one that could never run, naming what is wrong with it."""
        self._validate(request)
        needs = tuple([drafter.needs for drafter in strategy.drafters])
        for each in needs:
            self.check_needs(strategy.name, each)
        sequence = Sequence(
            sequence=self._next_sequence,
            request=request,
            strategy=strategy,
            exactness=Exactness.weakest(strategy.rule.exactness, self.runner.spec.exactness),
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
            needs=needs,
            layers=self._layers if any(each.layers or each.taps for each in needs) else None,
        )
        self._next_sequence += 1
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def check_needs(self, strategy: str, needs: Needs) -> None:
        """Raises ValueError where the runner can't give a strategy's drafter what it needs."""
        spec = self.runner.spec
        if needs.layers and not spec.layer_skip:
            raise ValueError(
                f"strategy {strategy} drafts with the target's own layers, but the runner of {spec.name} can't skip "
                "any: choose another strategy"
            )
        if any(not 0 <= layer <= spec.num_layers for layer in needs.taps):
            raise ValueError(
                f"strategy {strategy} reads the hidden states of layers {', '.join(map(str, needs.taps))}, but those "
                f"of {spec.name} are 0 to {spec.num_layers}: choose another strategy"
            )

    def abort(self, request_id: str) -> Event | None:
        """End a request now and keep its tokens so far. None if it is not under way."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, Commit(finish_reason="abort"))

    @property
    def idle(self) -> bool:
        return not self._sequences

    def strategies(self) -> set[str]:
        """The names of the strategies of all requests under way."""
        return {sequence.strategy.name for sequence in self._sequences.values()}

    @property
    def longest(self) -> int:
        """How many tokens, prompt and output together, context and memory allow a request."""
        return min(self.max_context, self.runner.capacity() + 1)  # the last token is never cached

    def stats(self) -> EngineStats:
        """What the engine is doing and has done so far."""
        scheduler, total = self.scheduler, self.runner.capacity()
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            cache_tokens_used=total - self.runner.free_tokens(),
            cache_tokens_total=total,
            prefix_tokens_asked=scheduler.prefix_tokens_asked,
            prefix_tokens_found=scheduler.prefix_tokens_found,
            drafter_faults=self._drafter_faults + sum(s.tally.drafter_faults for s in self._sequences.values()),
            step_tokens=self._step_tokens,
            steps=dict(self._steps),
        )

    def step(self) -> list[Event]:
        """Run one forward of the target over all that is due, and commit the tokens that follow."""
        with torch_on_one():
            seconds = _StepSeconds(self._clock, self._clock())
            steps = self.scheduler.next()
            self._propose(steps, seconds)
            self._verify(steps, seconds)
            self._accept(steps, seconds)
            self._commit(steps)
            self._observe(steps, seconds)
            self._count_seconds(steps, seconds)
            return self._report(steps)

    # ------------------------------------------------------------------------------------------- the parts of a step

    def _propose(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        began = self._clock()
        self._drafting.propose(steps)
        seconds.draft = since(began, self._clock)

    def _verify(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Run the steps without a fault; a step with which the target fails gets a fault."""
        began = self._clock()
        tapping = plausible(verify(self.runner, due := _without_fault(steps)))
        seconds.verify = max(0.0, since(began, self._clock) - tapping)
        seconds.draft += tapping
        seconds.count(due, _without_fault(due))

    def _accept(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Let the accept rules decide the drafts. Early prefill chunks have nothing to decide."""
        due = [step for step in _without_fault(steps) if step.at_root]
        accept(due)
        if wants_top_k := [step for step in due if step.fault is None and step.wants_top_k]:
            began = self._clock()
            isolated(rank, wants_top_k, SequenceStep.drop_policy)
            ranking = since(began, self._clock)
            charge([(step, drafter) for step in wants_top_k for drafter in step.wants_top_k], ranking)
            seconds.draft += ranking

    def _commit(self, steps: list[SequenceStep]) -> None:
        for step in _without_fault(steps):
            try:
                self._commit_one(step)
            except Exception as error:  # a stop checker, for example: only its own request ends
                step.fail(named(error), error)
        self._count_tokens(_without_fault(steps))

    def _count_tokens(self, steps: list[SequenceStep]) -> None:
        tokens = sum((len(step.pending) if step.prefill else 0) + len(step.done.committed) for step in steps)
        if tokens:
            self._step_tokens += tokens
            self._steps[1 << (tokens - 1).bit_length()] += 1

    def _commit_one(self, step: SequenceStep) -> None:
        """The one place where tokens join a sequence and rows join the cache."""
        sequence = step.sequence
        collect_prompt_logprobs(step)
        done = commit(step, self.max_context) if step.at_root else step.done
        path = step.verdict.path[: done.accepted]
        if done.committed:
            sequence.tally.count_step(step.draft, path, len(done.committed))
        sequence.cached = self.runner.keep(sequence.sequence, path)
        step.done = done

    def _observe(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        """Report the step to drafters, and to policies with its cost."""
        began = self._clock()
        self._drafting.observe(_without_fault(steps))
        seconds.draft += since(began, self._clock)
        self._drafting.learn(steps, seconds.spent)

    def _count_seconds(self, steps: list[SequenceStep], seconds: _StepSeconds) -> None:
        overhead, spent = seconds.overhead, seconds.spent
        if seconds.whole and seconds.verify:  # drafts lengthen commits too, so that time is part of the cost of rows
            self.cost.record(spent.rows, spent.context, seconds.verify + overhead)
        for step in steps:
            step.sequence.tally.count_seconds(step.prefill, seconds.draft, seconds.verify, overhead)

    def _report(self, steps: list[SequenceStep]) -> list[Event]:
        return [self._event(step) for step in steps]

    def _event(self, step: SequenceStep) -> Event:
        if step.fault is not None:
            return self._end(step.sequence, Commit(finish_reason="error", error=step.fault.reason))
        if step.done.finish_reason is not None:
            return self._end(step.sequence, step.done)
        return Event(step.sequence.request.id, step.done.committed)

    def _end(self, sequence: Sequence, done: Commit) -> Event:
        request = sequence.request
        self.scheduler.remove(sequence)
        del self._sequences[request.id]
        self._drafter_faults += sequence.tally.drafter_faults
        if done.finish_reason is not None:
            self._finished[done.finish_reason] += 1
        router = sequence.strategy.policy.report(sequence.sequence)
        metrics = replace(sequence.metrics(), router=router, escaped_at=sequence.escaped_at)
        _forget(sequence)
        wanted = request.params.prompt_logprobs is not None
        return Event(
            request.id,
            done.committed,
            done.finish_reason,
            done.stop_reason,
            done.error,
            metrics,
            tuple(sequence.prompt_logprobs) if wanted else None,
        )

    def _validate(self, request: Request) -> None:
        spec = self.runner.spec
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is under way already")
        if not request.prompt:
            raise ValueError("the prompt is empty: give it at least one token")
        if len(request.prompt) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, but the context of {spec.name} is {self.max_context} "
                "and must hold at least one more: shorten it"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= spec.vocab_size:
            raise ValueError(f"the prompt has a token id outside the vocabulary of {spec.vocab_size}")
        if request.params.max_tokens is None:
            raise ValueError("a request to the engine needs max_tokens as a number")
        self._refuse_what_never_fits(len(request.prompt), request.params.max_tokens)
        validate(request.params, spec.vocab_size)

    def _refuse_what_never_fits(self, prompt: int, most: int) -> None:
        text = max(prompt + 1, min(prompt + most, self.max_context))
        if text > self.longest:
            raise ValueError(
                f"the prompt's {prompt} tokens and max_tokens {most} make {text} tokens, but the cache of "
                f"{self.runner.spec.name} holds {self.longest}: shorten the prompt, lower max_tokens, or allow more "
                "memory"
            )


def _without_fault(steps: list[SequenceStep]) -> list[SequenceStep]:
    """The steps without a fault."""
    return [step for step in steps if step.fault is None]


def _forget(sequence: Sequence) -> None:
    """Policy and drafters drop their state of the sequence. An exception is logged, and the request still ends."""
    strategy = sequence.strategy
    for release in (strategy.policy.release, *[drafter.release for drafter in strategy.drafters]):
        try:
            release(sequence.sequence)
        except Exception:
            logger.exception("strategy %s failed to release request %s", sequence.strategy.name, sequence.request.id)
