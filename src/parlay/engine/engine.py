"""The engine: `Engine.step` is the one loop through which every strategy decodes, plain decoding included."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from parlay import trees
from parlay.engine.commit import Commit, collect_prompt_logprobs, commit
from parlay.engine.constrained import drafters_part
from parlay.engine.drafting import Drafting
from parlay.engine.layers import TargetLayers
from parlay.engine.scheduler import Limits, Scheduler, Turn
from parlay.engine.sequence import Sequence
from parlay.sampling.processors import validate
from parlay.sampling.sampler import ranked
from parlay.types import (
    Cost,
    Event,
    Exactness,
    Fault,
    LayerSkipper,
    Needs,
    Observation,
    Output,
    Request,
    Rule,
    Runner,
    Segment,
    Spent,
    Strategy,
    Verdict,
)

_NOTHING = Verdict((), ())


@dataclass(slots=True)
class _Clock:
    """Wall time of one step by phase."""

    began: float = field(default_factory=time.perf_counter)
    draft: float = 0.0
    verify: float = 0.0

    @property
    def overhead(self) -> float:
        return time.perf_counter() - self.began - self.draft - self.verify


class Engine:
    """Decodes requests together, each under its own strategy. Not thread-safe: one thread adds and steps."""

    def __init__(self, runner: Runner, cost: Cost, limits: Limits | None = None) -> None:
        self.runner = runner
        self.cost = cost
        self.limits = limits or Limits()
        self.scheduler = Scheduler(runner, self.limits)
        self.max_context = min(runner.spec.max_context, self.limits.max_context or runner.spec.max_context)
        self._layers = TargetLayers(cast(LayerSkipper, runner)) if runner.spec.layer_skip else None
        self._drafting = Drafting(
            runner.spec,
            self.scheduler,
            self._layers,
            max_context=self.max_context,
            max_draft_rows=self.limits.max_draft_rows,
        )
        self._sequences: dict[str, Sequence] = {}
        self._next_sequence = 0

    def add(self, request: Request, strategy: Strategy) -> None:
        """Queue a request. Raises ValueError for one that could never run, naming what is wrong with it."""
        self._validate(request)
        needs = strategy.drafter.needs if strategy.drafter is not None else Needs()
        if needs.layers and self._layers is None:
            raise ValueError(
                f"strategy {strategy.name} drafts with the target's own layers, but the runner of "
                f"{self.runner.spec.name} can't skip any: choose another strategy"
            )
        sequence = Sequence(
            sequence=self._next_sequence,
            request=request,
            strategy=strategy,
            exactness=Exactness.weakest(strategy.rule.exactness, self.runner.spec.exactness),
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
            layers=self._layers if needs.layers else None,
        )
        self._next_sequence += 1
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> Event | None:
        """End a request now; its tokens so far stand. None when it is not under way."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, Commit(finish_reason="abort"))

    @property
    def idle(self) -> bool:
        return not self._sequences

    def step(self) -> list[Event]:
        """One forward of the target over everything that is due, and the tokens that come of it."""
        clock = _Clock()
        batch, failed = self.scheduler.next()
        events = [self._end(sequence, _failure(reason)) for sequence, reason in failed]
        if not batch:
            return events
        self._propose(batch, clock)
        out = self._verify(batch, clock)
        verdicts = self._accept(batch, out)
        choices = self._choices(batch, out)
        commits = self._commit(batch, out, verdicts, clock)
        self._observe(batch, out, verdicts, commits, choices)
        self._count_seconds(batch, clock)
        return events + [self._report(turn.sequence, done) for turn, done in zip(batch, commits, strict=True)]

    # ------------------------------------------------------------------------------------------- the parts of a step

    def _propose(self, batch: list[Turn], clock: _Clock) -> None:
        began = time.perf_counter()
        self._drafting.propose(batch)
        clock.draft = time.perf_counter() - began

    def _verify(self, batch: list[Turn], clock: _Clock) -> Output:
        """The only forward whose logits commit tokens."""
        segments = [_segment(turn) for turn in batch]
        taps = sorted({tap for turn in batch for tap in _needs(turn).taps})
        began = time.perf_counter()
        out = self.runner.forward(segments, taps)
        clock.verify = time.perf_counter() - began
        rows = sum(segment.rows for segment in segments)
        self.cost.record(rows, _mean_context(batch), clock.verify)
        return out

    def _accept(self, batch: list[Turn], out: Output) -> list[Verdict | Fault]:
        """Each rule walks the trees of its own sequences; an early prefill chunk has no verdict to give."""
        verdicts: list[Verdict | Fault] = [_NOTHING] * len(batch)
        groups: dict[int, tuple[Rule, list[int]]] = {}
        for index, turn in enumerate(batch):
            if turn.at_root:
                rule = turn.sequence.strategy.rule
                groups.setdefault(id(rule), (rule, []))[1].append(index)
        for rule, members in groups.values():
            turns = [batch[index] for index in members]
            roots = [_root(batch[index], out, index) for index in members]
            results = rule.accept([t.sequence for t in turns], [t.draft for t in turns], out.logits_RV, roots)
            for index, result in zip(members, results, strict=True):
                verdicts[index] = result
        return verdicts

    def _choices(self, batch: list[Turn], out: Output) -> list[tuple[tuple[int, ...], ...]]:
        """What the sampler prefers at the root and at each node, for drafters that want to see it."""
        return [
            _ranked(turn, out.logits_RV[_root(turn, out, index) : out.starts[index + 1]], count)
            if turn.at_root and (count := _needs(turn).choices)
            else ()
            for index, turn in enumerate(batch)
        ]

    def _commit(self, batch: list[Turn], out: Output, verdicts: list[Verdict | Fault], clock: _Clock) -> list[Commit]:
        commits: list[Commit] = []
        for index, (turn, verdict) in enumerate(zip(batch, verdicts, strict=True)):
            collect_prompt_logprobs(turn, out.logits_RV[out.starts[index] : out.starts[index + 1]])
            commits.append(self._commit_one(turn, verdict, out, index))
        self._learn(batch, commits, clock)
        return commits

    def _commit_one(self, turn: Turn, verdict: Verdict | Fault, out: Output, index: int) -> Commit:
        """The one place where tokens join a sequence and rows join the cache."""
        sequence = turn.sequence
        if isinstance(verdict, Fault):
            return _failure(verdict.reason)
        done = Commit()
        if turn.at_root:
            done = commit(turn, verdict, out.logits_RV, _root(turn, out, index), self.max_context)
            if done.committed:
                sequence.tally.count_step(turn.draft, verdict.path[: done.accepted], len(done.committed))
        sequence.cached = self.runner.keep(sequence.sequence, verdict.path[: done.accepted])
        return done

    def _learn(self, batch: list[Turn], commits: list[Commit], clock: _Clock) -> None:
        drafted = sum(1 for turn in batch if len(turn.draft)) or 1
        rows = sum(len(turn.pending) + len(turn.draft) for turn in batch)
        spent = Spent(clock.draft / drafted, clock.verify, rows, _mean_context(batch))
        for turn, done in zip(batch, commits, strict=True):
            sequence, draft = turn.sequence, drafters_part(turn.draft)
            if draft is not None and done.committed and sequence.drafting and sequence.strategy.drafter is not None:
                accepted = done.accepted if draft is turn.draft else 0
                sequence.strategy.policy.learn(sequence, draft, accepted, spent)

    def _observe(
        self,
        batch: list[Turn],
        out: Output,
        verdicts: list[Verdict | Fault],
        commits: list[Commit],
        choices: list[tuple[tuple[int, ...], ...]],
    ) -> None:
        """Tell each drafter what became of its sequences; one that raises here is dropped like one that can't draft."""
        told: list[tuple[Sequence, Observation]] = []
        rows = 0
        for index, (turn, verdict, done) in enumerate(zip(batch, verdicts, commits, strict=True)):
            if _drafter_watches(turn) and isinstance(verdict, Verdict):
                taps = _taps(turn, verdict.path[: done.accepted], out, rows)
                told.append((turn.sequence, Observation(turn.sequence, turn.draft, verdict, taps, choices[index])))
            rows += len(turn.pending) + len(turn.draft)
        self._drafting.observe(told)

    def _count_seconds(self, batch: list[Turn], clock: _Clock) -> None:
        overhead = clock.overhead
        for turn in batch:
            turn.sequence.tally.count_seconds(turn.prefill, clock.draft, clock.verify, overhead)

    def _report(self, sequence: Sequence, done: Commit) -> Event:
        if done.finish_reason is not None:
            return self._end(sequence, done)
        return Event(sequence.request.id, done.committed)

    def _end(self, sequence: Sequence, done: Commit) -> Event:
        request = sequence.request
        self.scheduler.remove(sequence)
        del self._sequences[request.id]
        sequence.strategy.policy.release(sequence.sequence)
        if sequence.strategy.drafter is not None:
            sequence.strategy.drafter.release(sequence.sequence)
        wanted = request.params.prompt_logprobs is not None
        return Event(
            request.id,
            done.committed,
            done.finish_reason,
            done.stop_reason,
            done.error,
            sequence.metrics(),
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
        validate(request.params, spec.vocab_size)


def _segment(turn: Turn) -> Segment:
    pending, wants_prompt = len(turn.pending), turn.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if turn.at_root else pending
    return Segment(turn.sequence.sequence, turn.pending, turn.draft.tree, logits_from)


def _root(turn: Turn, out: Output, index: int) -> int:
    """Row of the root's logits: the draft's rows, which are the segment's last, follow it."""
    return out.starts[index + 1] - len(turn.draft) - 1


def _mean_context(batch: list[Turn]) -> int:
    return sum(len(turn.sequence.tokens) for turn in batch) // len(batch)


def _failure(reason: str) -> Commit:
    return Commit(finish_reason="error", error=reason)


def _needs(turn: Turn) -> Needs:
    drafter = turn.sequence.strategy.drafter
    return drafter.needs if drafter is not None and turn.sequence.drafting else Needs()


def _ranked(turn: Turn, logits_RV: Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Root, then nodes, each on its own path."""
    tree = turn.draft.tree
    paths = [[], *([tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree)))]
    return tuple(ranked(logits_RV, [turn.sequence] * len(paths), paths, count))


def _drafter_watches(turn: Turn) -> bool:
    """Whether the drafter has anything to learn: a step that committed, or features of a prefill chunk."""
    drafter = turn.sequence.strategy.drafter
    return drafter is not None and turn.sequence.drafting and (turn.at_root or bool(drafter.needs.taps))


def _taps(turn: Turn, accepted: tuple[int, ...], out: Output, first_row: int) -> dict[int, Tensor]:
    """The tapped rows of the tokens that the step cached; a stop may have cut the verdict's path."""
    first_node = first_row + len(turn.pending)
    rows = [*range(first_row, first_node), *(first_node + node for node in accepted)]
    return {layer: out.taps[layer][rows] for layer in _needs(turn).taps}
