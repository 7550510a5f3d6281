"""Chooses which sequences run in the next step: those that decode first, then prefill, by priority and arrival."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from functools import partial

from parlay.cost.prompt_rows import PromptRows, Seconds
from parlay.engine import fair_share as shares
from parlay.engine.moving import Moves
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep
from parlay.engine.tally import Clock
from parlay.engine.turns import Turns
from parlay.types import Cost, GuidingRunner, MovingRunner, OutOfRoom, Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one step may do: sequences at once, rows of pending tokens, and rows of drafts on top.

    ``max_context`` limits prompt and output together; the runner's own limit holds too. ``patience``: a sequence that
    is one level of priority more urgent may overtake this many earlier ones; with two levels, twice as many.
    """

    max_sequences: int = 32
    max_rows: int = 512
    max_draft_rows: int = 256
    max_context: int | None = None
    patience: int = 32

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or self.max_rows < self.max_sequences or self.max_draft_rows < 0:
            raise ValueError(
                f"limits need max_sequences >= 1, max_rows >= max_sequences and max_draft_rows >= 0, got {self}"
            )
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")


_NEWEST = 0.1
"""Weight of the newest step in the running means."""
_HEADROOM = 16
"""Free tokens that the cache must have per running sequence before another starts. With less, it would soon be
preempted."""


class Scheduler:
    """Holds waiting and running sequences. When memory runs out, it preempts the sequence that ranks last.

    A sequence's rank is its place of arrival, moved by ``patience`` places per level of priority. It never changes, so
    no sequence starves: of later sequences, only those that are d > 0 levels more urgent overtake it, fewer than
    ``patience * d`` of them. The sequence that ranks first is admitted first, gets rows in each step and is never
    preempted, so it ends, and the next one is first. All this holds among the requests of one owner: owners share
    places, rows and memory evenly (`parlay.engine.fair_share`). A preempted sequence loses its cache but not its
    tokens: it waits at its old rank, and is then computed again. A decoding sequence commits in each step, however long
    other prompts are, and the step then reads only so much of them as `PromptRows` allows.

    If the runner takes several forwards at once, `next` picks one group of sequences from those not in flight; all
    groups have the same size. A sequence in flight that is preempted or removed leaves its group. Each group costs
    drafts and engine time of its own, so where several groups would be slower there is one. On other runners a batch
    may be verified in two halves: see `Turns`.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        cost: Cost,
        clock: Clock,
        *,
        moving: MovingRunner | None = None,
        guiding: GuidingRunner | None = None,
    ) -> None:
        self._runner, self._guiding = runner, guiding
        self._moves = Moves(moving)
        self._limits = limits
        self._clock = clock
        self._rank = partial(_rank, limits.patience)  # not a bound method: the queue would keep the runner alive
        self.waiting = shares.WaitingQueue(self._rank)
        self.running: list[Sequence] = []
        """``waiting`` and ``running`` are sorted by rank."""
        self.preemptions = 0
        self.prefix_tokens_asked = self.prefix_tokens_found = 0
        self._refused: tuple[Sequence, int] | None = None
        self._canvas_rows = 0
        """How many rows of canvases the step has."""
        self._cost, self._most_groups = cost, runner.spec.in_flight
        self._rows_each = self._other_seconds = 0.0
        """Running means over the steps of groups: rows per sequence, and seconds besides the forward."""
        self._in_flight: dict[Sequence, SequenceStep] = {}
        self.turns = Turns(cost)
        self._prompt_rows, self._began = PromptRows(), clock()
        self._shares = shares.Shares(cost, limits.max_rows, timed=self._most_groups == 1)

    @property
    def guides(self) -> bool:
        """Whether the runner can run requests with a negative prompt."""
        return self._guiding is not None

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended: take it out of its queue and release its cache."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.leave(sequence)
        self._in_flight.pop(sequence, None)
        self._moves.remember(sequence)
        self._runner.release(sequence.sequence)

    def next(self) -> list[SequenceStep]:
        """Choose the sequences of the next step, and how many rows each gets.

        A sequence that can never go on is returned with the reason as its step's fault.
        """
        steps: list[SequenceStep] = []
        failed: list[SequenceStep] = []
        self._start_new_owners(failed)
        preemptions, self._canvas_rows, most = self.preemptions, 0, self._max_sequences()
        before, self._began = self._began, self._clock()
        self._prompt_rows.learn(self._began - before if self.running else 0.0)  # else the engine was idle since
        decoding, feeding = self._by_phase()
        ordered = decoding + feeding
        room, expected = self._rows_of_step(decoding, feeding)
        due = self.turns.due(ordered) if self._most_groups == 1 else ordered
        for sequence in self._shares.begin(due, self._began):
            rows = self._shares.rows(sequence, room) if len(steps) < most else 0
            if rows > 0 and sequence.is_open:
                step = self._step(sequence, rows)
                if self._has_room(step, failed):
                    steps.append(step)
                    self._shares.take(sequence, step.rows)
                    room = max(0, room - step.rows)
        if self.preemptions > preemptions:  # a sequence preempted above may already be in steps: leave it out
            return [step for step in steps if step.sequence.is_open] + failed
        while room and len(steps) < most and (admitted := self._admit(failed)) is not None:
            rows = self._shares.rows(admitted, room)
            if rows > 0:
                steps.append(self._step(admitted, rows))
                self._shares.take(admitted, steps[-1].rows)
                room = max(0, room - steps[-1].rows)
        if expected is not None and (read := sum([step.rows for step in steps if not step.sequence.decodes])):
            self._prompt_rows.begin(expected(read))
        if not steps and not failed and self.waiting and not self.running and self._has_all_memory():
            failed.append(_failed(self.waiting[0], "the runner refuses memory although nothing else holds any"))
            self.waiting.leave(self.waiting[0])
        return steps + failed

    def depart(self, steps: list[SequenceStep]) -> None:
        """Note that these steps are in flight, so that `next` leaves their sequences out."""
        self._in_flight.update((step.sequence, step) for step in steps)

    def arrive(self, steps: list[SequenceStep]) -> list[SequenceStep]:
        """Note that these steps are no longer in flight. Returns those whose sequences are still running."""
        there = [step for step in steps if self._in_flight.get(step.sequence) is step]
        for step in there:
            del self._in_flight[step.sequence]
        return there

    def learn_group(self, rows: float, seconds: float) -> None:
        """Learn from one group's step: rows per sequence, and seconds spent on anything but the forward."""
        share = _NEWEST if self._rows_each else 1.0
        self._rows_each += share * (rows - self._rows_each)
        self._other_seconds += share * (seconds - self._other_seconds)

    @property
    def groups(self) -> int:
        """How many groups should be in flight.

        With n groups, a forward has an n-th of the rows, but the work besides the forward is done n times.
        """
        most, running = self._most_groups, self.running
        if most == 1 or not running or not self._rows_each:
            return most
        rows, context = self._rows_each * len(running), sum(len(each.tokens) for each in running) // len(running)
        saved = self._cost.forward(round(rows), context) - self._cost.forward(-(-round(rows) // most), context)
        return most if saved >= (most - 1) * self._other_seconds else 1

    def rows_between_steps(self, most: int) -> int:
        """How many rows, at most ``most``, other texts may have in a forward between two steps: less beside streams."""
        streams = [sequence for sequence in self.running if sequence.decodes]
        if not streams:
            return most
        rows, context = sum(map(shares.pending_rows, streams)), shares.mean_context(streams)
        return self._prompt_rows.within(lambda more: self._cost.forward(max(rows, more), context), most)

    def draft_rows(self, limit: int) -> int:
        """How many rows of drafts the step may have, at most ``limit`` less the rows of its canvases."""
        return self._shares.draft_rows(limit - self._canvas_rows)

    def reserve_draft(self, sequence: Sequence, nodes: int) -> bool:
        """Reserve cache for ``nodes`` drafted tokens. False if that would need a preemption."""
        try:
            return self._runner.reserve(sequence.sequence, len(sequence.tokens) + nodes)
        except OutOfRoom:
            return False

    def _step(self, sequence: Sequence, room: int) -> SequenceStep:
        """Make the step of a sequence from the pending tokens that fit in ``room``, at least one.

        A canvas is never cut, because its text would then depend on what else runs. If its rows do not fit, it waits
        for another step; that of the first sequence always fits. If a negative prompt is far behind, the step only
        feeds more of it, decodes nothing, and the last pending token runs again in the next step.
        """
        if sequence.moves:
            self._moves.make(sequence)
        tokens = sequence.request.tokens_in(sequence.cached, room)
        if sequence.moves:
            tokens = self._moves.rows(sequence, tokens)
        pending = tuple(sequence.tokens[sequence.cached : sequence.cached + tokens])
        at_root, ahead = sequence.cached + len(pending) == len(sequence.tokens), 0
        if at_root and sequence.canvas is not None:
            at_root = self._canvas_rows + sequence.places <= self._limits.max_draft_rows
            self._canvas_rows += sequence.places if at_root else 0
        elif at_root and self._guiding is not None and sequence.request.guidance is not None:
            rest = max(1, room - len(pending))
            ahead = self._guiding.read_ahead(sequence.sequence, len(sequence.tokens), rest)
            sequence.reads_ahead = ahead > 0
        prefill, decodes = sequence.tally.steps == 0, at_root and not ahead
        return SequenceStep(sequence, sequence.cached, pending, prefill=prefill, at_root=decodes, ahead=ahead)

    def _has_room(self, step: SequenceStep, failed: list[SequenceStep]) -> bool:
        """Reserve cache for pending tokens and canvas. If there is too little, preempt the sequences that rank last.

        False if the sequence itself was preempted, or can never run.
        """
        sequence = step.sequence
        tokens = sequence.cached + len(step.pending)
        if step.at_root and sequence.canvas is not None:
            tokens += sequence.places
        try:
            while not self._runner.reserve(sequence.sequence, tokens):
                victim = shares.victim(self.running)
                self._preempt(victim)
                if victim is sequence:
                    return False
        except OutOfRoom as error:
            failed.append(_failed(sequence, str(error)))
            return False
        return True

    def _max_sequences(self) -> int:
        """How many sequences the step may have: with several groups, an even share of those that can run."""
        if self._most_groups == 1:
            return self._limits.max_sequences
        waiting = len(self.waiting)
        if waiting and self._is_refused(shares.first_waiting(self.waiting, self.running)):
            waiting = 0
        return -(-min(self._limits.max_sequences, len(self.running) + waiting) // self.groups)

    def _start_new_owners(self, failed: list[SequenceStep]) -> None:
        """Admit owners with nothing running before others take rows. If every place is taken, preempt a sequence."""
        while self.waiting and self.running:
            newcomer = shares.first_waiting(self.waiting, self.running)
            if not shares.is_new(newcomer, self.running):
                return
            if len(self.running) >= self._limits.max_sequences:
                if not shares.gives_way(self.running):
                    return
                self._preempt(shares.victim(self.running))
            if self._admit(failed) is None:
                return

    def _admit(self, failed: list[SequenceStep]) -> Sequence | None:
        """Start the sequence at the front of the queue, if a place is free and the cache has room for its tokens."""
        if not self.waiting or len(self.running) >= self._limits.max_sequences:
            return None
        sequence = shares.first_waiting(self.waiting, self.running)
        leader = self._leader(sequence)
        if leader is not None and leader.cached < leader.prompt_length:
            return None  # a sample of the same prompt is in prefill: wait, then fork it
        if self._is_refused(sequence):
            return None
        self._open(sequence, leader)
        try:
            fits = self._fits(sequence)
        except OutOfRoom as error:
            failed.append(_failed(sequence, str(error)))
            self._close(sequence)
            self.waiting.leave(sequence)
            return self._admit(failed)
        if not fits:
            self._close(sequence)
            self._refused = (sequence, self._runner.free_tokens())
            return None
        self.waiting.leave(sequence)
        bisect.insort(self.running, sequence, key=self._rank)
        self._count_prefix(sequence)
        return sequence

    def _has_all_memory(self) -> bool:
        """Whether the cache is all free. Embeddings may hold some between steps; those give it back soon."""
        return self._runner.free_tokens() >= self._runner.capacity()

    def _is_refused(self, sequence: Sequence) -> bool:
        """Whether the cache had no room for this sequence, and nothing was freed since."""
        refused = self._refused
        return refused is not None and refused[0] is sequence and self._runner.free_tokens() <= refused[1]

    def _fits(self, sequence: Sequence) -> bool:
        if not self._runner.reserve(sequence.sequence, len(sequence.tokens) + sequence.places):
            return False
        return self._runner.free_tokens() >= _HEADROOM * sum([one.request.copies for one in self.running])

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """A running sample of the same prompt, whose cache this sequence can share."""
        group = sequence.request.group
        if not group or sequence.request.params.prompt_logprobs is not None:
            return None
        return next((other for other in self.running if other.request.group == group), None)

    def _open(self, sequence: Sequence, leader: Sequence | None) -> None:
        name, request = sequence.sequence, sequence.request
        if leader is not None:
            self._runner.fork(leader.sequence, name)
            sequence.cached = self._runner.truncate(name, sequence.prompt_length - 1)
        else:
            sequence.cached = self._runner.open(name, _reusable(sequence), request.salt)
            if request.reuse:
                self._moves.plan(sequence)
        if request.guidance is not None and self._guiding is not None:
            self._guiding.guide(name, request, sequence.tokens, sequence.cached)
        sequence.is_open = True

    def _count_prefix(self, sequence: Sequence) -> None:
        """Count the tokens that a sequence found cached when it first started; not again after a preemption."""
        if sequence.admitted:
            return
        sequence.admitted = True
        sequence.tally.cached_tokens = min(sequence.cached, sequence.prompt_length)
        if sequence.request.params.prompt_logprobs is None:
            self.prefix_tokens_asked += sequence.prompt_length
            self.prefix_tokens_found += sequence.tally.cached_tokens

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preempted = True
        self.running.remove(sequence)
        self._close(sequence)
        if sequence.canvas is not None:
            sequence.canvas = replace(sequence.canvas, fresh=True)  # the cached rows of its group are lost
        self.add(sequence)

    def _close(self, sequence: Sequence) -> None:
        self._in_flight.pop(sequence, None)
        self._runner.release(sequence.sequence)
        sequence.cached = 0
        sequence.moves = []
        sequence.is_open = False

    def _rows_of_step(self, decoding: list[Sequence], feeding: list[Sequence]) -> tuple[int, Seconds | None]:
        """How many rows the step may have and, beside streams, its expected seconds by the rows of prompts in it."""
        most, rows = self._limits.max_rows, sum(map(shares.pending_rows, decoding))
        if not decoding or rows >= most or not (feeding or self.waiting):
            return most, None
        context = shares.mean_context(decoding + feeding[:1])  # as the engine counts it when it records the step

        def expected(more: int) -> float:
            return self._cost.forward(rows + more, context)

        return rows + self._prompt_rows.within(expected, most - rows), expected

    def _by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode, which go first so that a long prompt delays nobody, and those in prefill.

        Sequences in flight are left out.
        """
        running = [one for one in self.running if one not in self._in_flight] if self._in_flight else self.running
        decoding = [one for one in running if one.decodes]
        return decoding, [one for one in running if not one.decodes] if len(decoding) < len(running) else []


def _rank(patience: int, sequence: Sequence) -> tuple[int, int]:
    """Sort key of a sequence: lower goes first; see `Limits`."""
    return sequence.sequence + patience * sequence.request.priority, sequence.sequence


def _reusable(sequence: Sequence) -> list[int]:
    """The tokens that may come from the cache. Those whose prompt logprobs are missing must be computed."""
    collected = len(sequence.prompt_logprobs)
    if sequence.request.params.prompt_logprobs is None or collected >= sequence.prompt_length:
        return sequence.tokens
    return sequence.tokens[:collected]


def _failed(sequence: Sequence, reason: str) -> SequenceStep:
    step = SequenceStep(sequence, sequence.cached, (), prefill=sequence.tally.steps == 0, at_root=False)
    step.fail(reason)
    return step
