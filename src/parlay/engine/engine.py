"""The engine: `Engine.step` is the one loop through which every strategy decodes, plain decoding included."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from parlay import trees
from parlay.engine.commit import Commit, collect_prompt_logprobs, commit
from parlay.engine.drafting import Drafting
from parlay.engine.layers import TargetLayers
from parlay.engine.scheduler import Limits, Scheduler, Turn
from parlay.engine.sequence import NOTHING_NEEDED, Sequence
from parlay.engine.verify import NO_OUTPUT, verify
from parlay.sampling.processors import validate
from parlay.sampling.sampler import ranked
from parlay.types import (
    NOTHING_SPENT,
    Cost,
    EngineStats,
    Event,
    Exactness,
    Fault,
    FinishReason,
    LayerSkipper,
    Observation,
    Output,
    Request,
    Rule,
    Runner,
    Spent,
    Strategy,
    Verdict,
)

logger = logging.getLogger(__name__)

_NOTHING = Verdict((), ())


@dataclass(slots=True)
class _Clock:
    """Wall time of one step by phase."""

    began: float = field(default_factory=time.perf_counter)
    draft: float = 0.0
    verify: float = 0.0
    whole: bool = True
    """One forward did for all sequences."""
    spent: Spent = NOTHING_SPENT

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
        self._finished: Counter[FinishReason] = Counter()
        self._drafter_faults = 0

    def add(self, request: Request, strategy: Strategy) -> None:
        """Queue a request. Raises ValueError for one that could never run, naming what is wrong with it."""
        self._validate(request)
        needs = strategy.drafter.needs if strategy.drafter is not None else NOTHING_NEEDED
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
            needs=needs,
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

    def strategies(self) -> set[str]:
        """The names of the strategies of all requests under way."""
        return {sequence.strategy.name for sequence in self._sequences.values()}

    @property
    def longest(self) -> int:
        """How many tokens, prompt and output together, a request may have here: by its context, and by memory."""
        return min(self.max_context, self.runner.capacity() + 1)  # the last token is never cached

    def stats(self) -> EngineStats:
        """What the engine does and has done, counted up to now."""
        scheduler, total = self.scheduler, self.runner.capacity()
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            cache_tokens_used=total - self.runner.room(),
            cache_tokens_total=total,
            prefix_tokens_asked=scheduler.prefix_tokens_asked,
            prefix_tokens_found=scheduler.prefix_tokens_found,
            drafter_faults=self._drafter_faults + sum(s.tally.drafter_faults for s in self._sequences.values()),
        )

    def step(self) -> list[Event]:
        """One forward of the target over everything that is due, and the tokens that come of it."""
        clock = _Clock()
        batch, failed = self.scheduler.next()
        self._propose(batch, clock)
        batch, out, sick = self._verify(batch, clock)
        events = [self._end(sequence, _failure(reason)) for sequence, reason in (*failed, *sick)]
        if not batch:
            return events
        verdicts = self._accept(batch, out)
        choices = self._choices(batch, out, verdicts)
        commits = self._commit(batch, out, verdicts, clock)
        self._observe(batch, out, verdicts, commits, choices)
        self._count_seconds(batch, clock)
        return events + self._report(batch, commits)

    # ------------------------------------------------------------------------------------------- the parts of a step

    def _propose(self, batch: list[Turn], clock: _Clock) -> None:
        began = time.perf_counter()
        self._drafting.propose(batch)
        clock.draft = time.perf_counter() - began

    def _verify(self, batch: list[Turn], clock: _Clock) -> tuple[list[Turn], Output, list[tuple[Sequence, str]]]:
        """The turns that the target computed, what came out, and the sequences on which it failed."""
        if not batch:
            return batch, NO_OUTPUT, []
        taps = sorted({tap for turn in batch for tap in turn.sequence.needs.taps})
        began = time.perf_counter()
        done = verify(self.runner, batch, taps)
        clock.verify = time.perf_counter() - began
        clock.whole = len(done.batch) == len(batch)
        for turn, end in zip(done.batch, done.out.starts[1:], strict=True):
            turn.root = end - len(turn.draft) - 1  # the draft's rows are the segment's last
        clock.spent = _spent(done.batch, clock) if done.batch else clock.spent
        return done.batch, done.out, done.failed

    def _accept(self, batch: list[Turn], out: Output) -> list[Verdict | Fault]:
        """Each rule walks the trees of its own sequences; an early prefill chunk has no verdict to give."""
        verdicts: list[Verdict | Fault] = [_NOTHING] * len(batch)
        groups: dict[int, tuple[Rule, list[int]]] = {}
        for index, turn in enumerate(batch):
            if turn.at_root:
                rule = turn.sequence.strategy.rule
                groups.setdefault(id(rule), (rule, []))[1].append(index)
        for rule, members in groups.values():
            results = _judged(rule, [batch[index] for index in members], out.logits_RV)
            for index, result in zip(members, results, strict=True):
                verdicts[index] = result
        return verdicts

    def _choices(
        self, batch: list[Turn], out: Output, verdicts: list[Verdict | Fault]
    ) -> list[tuple[tuple[int, ...], ...]]:
        """What the sampler prefers at the root and at each node, for drafters that want to see it."""
        return [
            _ranked(turn, verdict, out.logits_RV[turn.root : end], count)
            if turn.at_root and (count := turn.sequence.needs.choices)
            else ()
            for turn, verdict, end in zip(batch, verdicts, out.starts[1:], strict=True)
        ]

    def _commit(self, batch: list[Turn], out: Output, verdicts: list[Verdict | Fault], clock: _Clock) -> list[Commit]:
        commits: list[Commit] = []
        for turn, verdict, start in zip(batch, verdicts, out.starts[:-1], strict=True):
            try:
                collect_prompt_logprobs(turn, out.logits_RV, start)
                commits.append(self._commit_one(turn, verdict, out.logits_RV))
            except Exception as error:  # a stop checker, say: it stays with its request
                commits.append(_failure(_fault(turn, error).reason))
        self._drafting.learn(batch, commits, clock.spent)
        return commits

    def _commit_one(self, turn: Turn, verdict: Verdict | Fault, logits_RV: Tensor) -> Commit:
        """The one place where tokens join a sequence and rows join the cache."""
        sequence = turn.sequence
        if isinstance(verdict, Fault):
            return _failure(verdict.reason)
        done = Commit()
        if turn.at_root:
            done = commit(turn, verdict, logits_RV, self.max_context)
            if done.committed:
                sequence.tally.count_step(turn.draft, verdict.path[: done.accepted], len(done.committed))
        sequence.cached = self.runner.keep(sequence.sequence, verdict.path[: done.accepted])
        return done

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
            needs = turn.sequence.needs
            if ((turn.at_root and needs.outcomes) or needs.taps) and isinstance(verdict, Verdict):
                taps = _taps(turn, verdict.path[: done.accepted], out, rows)
                told.append((turn.sequence, Observation(turn.sequence, turn.draft, verdict, taps, choices[index])))
            rows += len(turn.pending) + len(turn.draft)
        self._drafting.observe(told)

    def _count_seconds(self, batch: list[Turn], clock: _Clock) -> None:
        overhead, spent = clock.overhead, clock.spent
        if clock.whole:  # what drafts make the engine itself do is part of what they cost
            self.cost.record(spent.rows, spent.context, clock.verify + overhead)
        for turn in batch:
            turn.sequence.tally.count_seconds(turn.prefill, clock.draft, clock.verify, overhead)

    def _report(self, batch: list[Turn], commits: list[Commit]) -> list[Event]:
        return [
            Event(turn.sequence.request.id, done.committed)
            if done.finish_reason is None
            else self._end(turn.sequence, done)
            for turn, done in zip(batch, commits, strict=True)
        ]

    def _end(self, sequence: Sequence, done: Commit) -> Event:
        request = sequence.request
        self.scheduler.remove(sequence)
        del self._sequences[request.id]
        self._drafter_faults += sequence.tally.drafter_faults
        if done.finish_reason is not None:
            self._finished[done.finish_reason] += 1
        _let_go(sequence)
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


def _let_go(sequence: Sequence) -> None:
    """Policy and drafter forget the sequence. Where one can't, the log says so: the request ends all the same."""
    policy, drafter = sequence.strategy.policy, sequence.strategy.drafter
    for release in (policy.release, *([drafter.release] if drafter is not None else [])):
        try:
            release(sequence.sequence)
        except Exception:
            logger.exception("strategy %s can't let request %s go", sequence.strategy.name, sequence.request.id)


def _judged(rule: Rule, turns: Seq[Turn], logits_RV: Tensor) -> list[Verdict | Fault]:
    """The rule's verdicts; where it raises, each turn is judged alone, and the guilty ones get a fault."""
    views, drafts = [turn.sequence for turn in turns], [turn.draft for turn in turns]
    try:
        return rule.accept(views, drafts, logits_RV, [turn.root for turn in turns])
    except Exception as error:
        if len(turns) == 1:
            return [_fault(turns[0], error)]
    return [_judged(rule, [turn], logits_RV)[0] for turn in turns]


def _fault(turn: Turn, error: Exception) -> Fault:
    reason = f"{type(error).__name__}: {error}"
    logger.warning("request %s ends: %s", turn.sequence.request.id, reason, exc_info=error)
    return Fault(reason)


def _spent(batch: list[Turn], clock: _Clock) -> Spent:
    nodes = [len(turn.draft) for turn in batch]
    drafted = len(nodes) - nodes.count(0) or 1
    rows = sum(nodes) + sum([len(turn.pending) for turn in batch])
    context = sum([len(turn.sequence.tokens) for turn in batch]) // len(batch)
    return Spent(clock.draft / drafted, clock.verify, rows, context)


def _failure(reason: str) -> Commit:
    return Commit(finish_reason="error", error=reason)


def _ranked(turn: Turn, verdict: Verdict | Fault, logits_RV: Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Root, then nodes, each on its own path."""
    exact = turn.sequence.strategy.rule.exactness is Exactness.BITS
    if count == 1 and exact and not len(turn.draft) and isinstance(verdict, Verdict):
        return (verdict.sampled[:1],)  # what plain decoding commits is what the sampler prefers
    tree = turn.draft.tree
    paths = [[], *([tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree)))]
    return tuple(ranked(logits_RV, [turn.sequence] * len(paths), paths, count))


def _taps(turn: Turn, accepted: tuple[int, ...], out: Output, first_row: int) -> dict[int, Tensor]:
    """The tapped rows of the tokens that the step cached; a stop may have cut the verdict's path."""
    first_node = first_row + len(turn.pending)
    rows = [*range(first_row, first_node), *(first_node + node for node in accepted)]
    return {layer: out.taps[layer][rows] for layer in turn.sequence.needs.taps}
