"""Divides the engine evenly among owners, however many requests an owner sends and whatever their priorities.

With one owner, nothing here has an effect.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from parlay.cost.prompt_rows import most_rows
from parlay.engine.owner_latency import Paces
from parlay.engine.sequence import Sequence
from parlay.engine.tally import plausible
from parlay.types import Cost


class WaitingQueue(list[Sequence]):
    """Waiting sequences, sorted by rank. It counts those of each owner, so that nobody has to search a long queue.

    Sequences enter by `add` and leave by `leave`.
    """

    def __init__(self, rank: Callable[[Sequence], tuple[int, int]]) -> None:
        super().__init__()
        self.owners: Counter[str] = Counter()
        self._rank = rank

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self, sequence, key=self._rank)
        self.owners[_owner(sequence)] += 1

    def leave(self, sequence: Sequence) -> None:
        self.remove(sequence)
        owner = _owner(sequence)
        self.owners[owner] -= 1
        if not self.owners[owner]:
            del self.owners[owner]


def first_waiting(waiting: WaitingQueue, running: Iterable[Sequence]) -> Sequence:
    """The waiting sequence that starts next: the first one of the owner with the fewest running."""
    if len(waiting.owners) == 1:
        return waiting[0]
    there = Counter(_owner(sequence) for sequence in running)
    first: dict[str, Sequence] = {}
    for sequence in waiting:
        first.setdefault(_owner(sequence), sequence)
        if len(first) == len(waiting.owners):
            break
    return min(first.values(), key=lambda sequence: there[_owner(sequence)])


def victim(running: Seq[Sequence]) -> Sequence:
    """The sequence of ``running`` (by rank) to preempt: the last one of the owner with the most running."""
    there = Counter(_owner(sequence) for sequence in running)
    return max(enumerate(running), key=lambda entry: (there[_owner(entry[1])], entry[0]))[1]


def is_new(sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Whether the owner of the sequence has nothing running."""
    return all(other.request.owner != sequence.request.owner for other in running)


def gives_way(running: Iterable[Sequence]) -> bool:
    """Whether an owner has more than one sequence running, so that one can be preempted for a new owner."""
    return max(Counter(map(_owner, running)).values(), default=0) > 1


_TIMED_EVERY = 16
"""Steps for each step that is timed, while one owner has the same sequences running."""


@dataclass(slots=True)
class _Step:
    """How one step is divided among owners."""

    owners: dict[str, list[Sequence]]
    """The running sequences of each owner, in the scheduler's order."""
    rows: int
    left: dict[str, int] = field(default_factory=dict)
    """Rows that each owner may still take. Empty with one owner."""
    streams_left: dict[str, int] = field(default_factory=dict)
    """How many of these rows decoding sequences may take."""
    alone: str | None = None
    """The owner that has the step alone, although others have sequences running."""
    taken: int = 0
    """Rows taken so far; not counted with one owner."""
    feeds: bool = False
    """Whether the step has a part of a prompt. Only set if the step is timed."""
    watched: dict[str, list[tuple[Sequence, int]]] = field(default_factory=dict)
    """The owners for which the step is timed, because they want no more than their share.

    Each with its decoding sequences, and how far each was before the step.
    """


class Shares:
    """Divides steps among owners: with n owners, a token may take n times as long as it would alone.

    By the measured cost, no step has more rows than that allows. Rows that one owner does not want go to the others. If
    an owner that wants no more than its share is still slower than that, it gets steps alone: see `Paces`. With
    ``timed=False``, where groups of sequences take steps in turn, no step is timed and no owner is alone.
    """

    def __init__(self, cost: Cost, max_rows: int, *, timed: bool = True) -> None:
        self._cost = cost
        self._max_rows = max_rows
        self._timed = timed
        self._paces = Paces()
        self._step = _Step({}, max_rows)
        self._began = 0.0
        self._steps = 0
        self._one_owners: list[Sequence] = []
        """The sequences of the last step, if all of them were one owner's."""
        self._served: dict[Sequence, int] = {}
        """The last step in which each sequence had a step; only kept with several owners."""

    def begin(self, ordered: list[Sequence], now: float) -> list[Sequence]:
        """Begin a step at time ``now`` (seconds of any clock). Returns sequences in the order in which they get rows.

        Of the decoding sequences, the one that waited longest goes first; prompts are fed one after the other. While
        one owner has the same sequences running, one step in `_TIMED_EVERY` is timed.
        """
        if self._step.watched:
            self._learn(ordered, plausible(now - self._began))
        self._began = now
        self._steps += 1
        if ordered and ordered == self._one_owners and self._steps % _TIMED_EVERY:
            self._step.watched = {}
            return ordered
        self._step = step = _Step(_by_owner(ordered), self._max_rows)
        self._one_owners = ordered if len(step.owners) == 1 else []
        if len(step.owners) > 1:
            self._divide(step)
        if self._timed:
            self._watch(step)
        if len(step.owners) < 2:
            self._served.clear()
            return ordered
        self._served = {sequence: self._served.get(sequence, 0) for sequence in ordered}
        step.alone = self._paces.first(step.watched)
        if step.alone is not None:
            return step.owners[step.alone]
        decoding = [sequence for sequence in ordered if sequence.decodes]
        return sorted(decoding, key=self._served.__getitem__) + [one for one in ordered if not one.decodes]

    def rows(self, sequence: Sequence, room: int) -> int:
        """How many rows the sequence may have, out of the ``room`` rows left in the step.

        An owner whose first sequence starts during a step has a share from the next step on.
        """
        step, owner = self._step, sequence.request.owner
        if len(step.owners) < 2:
            return room if owner in step.owners or not step.owners else 0
        if step.alone is not None:
            return room if owner == step.alone else 0
        left = step.left.get(owner, 0)
        return min(room, left, step.streams_left[owner]) if left and sequence.decodes else min(room, left)

    def take(self, sequence: Sequence, rows: int) -> None:
        """Note how many rows the sequence was given."""
        step = self._step
        if step.watched and not sequence.decodes:
            step.feeds = True
        if step.left:
            owner = sequence.request.owner
            step.taken += rows
            step.left[owner] -= rows
            step.streams_left[owner] -= rows if sequence.decodes else 0
            self._served[sequence] = self._steps

    def draft_rows(self, limit: int) -> int:
        """How many rows of drafts the step may have: in a shared step, those that no owner has taken."""
        step = self._step
        return limit if len(step.owners) < 2 or step.alone is not None else min(limit, max(0, step.rows - step.taken))

    def _divide(self, step: _Step) -> None:
        """Give each owner its rows.

        If an owner has both prompts and decoding sequences, half of its rows are for prompts.
        """
        step.rows = self._most_rows(step.owners)
        step.left = divided(step.rows, {owner: sum(map(pending_rows, own)) for owner, own in step.owners.items()})
        for owner, own in step.owners.items():
            feeds = not all(sequence.decodes for sequence in own)
            step.streams_left[owner] = step.left[owner] - (step.left[owner] // 2 if feeds else 0)

    def _most_rows(self, owners: Mapping[str, list[Sequence]]) -> int:
        """The most rows for which a step takes at most n times as long as any of the n owners' streams would alone."""
        streams = [own for own in map(_streams, owners.values()) if own]
        if not streams:
            return self._max_rows
        bound = len(owners) * min(self._seconds(own) for own in streams)
        context = mean_context([sequence for own in owners.values() for sequence in own])
        return most_rows(lambda rows: self._cost.forward(rows, context), bound, len(owners), self._max_rows)

    def _seconds(self, streams: list[Sequence]) -> float:
        """Expected seconds of a step with these streams alone."""
        return self._cost.forward(sum([sequence.request.copies for sequence in streams]), mean_context(streams))

    def _watch(self, step: _Step) -> None:
        for owner, own in step.owners.items():
            streams = _streams(own)
            if streams and sum(map(pending_rows, own)) <= step.left.get(owner, self._max_rows):
                self._paces.know(owner, self._seconds(streams))
                step.watched[owner] = [(sequence, sequence.progress) for sequence in streams]

    def _learn(self, ordered: list[Sequence], seconds: float) -> None:
        """Learn from the last step, unless all its sequences have ended: the engine may have been idle since."""
        step = self._step
        if all(sequence not in ordered for own in step.owners.values() for sequence in own):
            return
        for owner, streams in step.watched.items():
            tokens = sum(sequence.progress - before for sequence, before in streams) / len(streams)
            alone = owner == step.alone or (len(step.owners) == 1 and not step.feeds)
            self._paces.learn(owner, seconds, tokens, owners=len(step.owners), alone=alone)


def divided(rows: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide ``rows`` among owners: each gets what it wants, up to an even share of the rows that others leave."""
    shares: dict[str, int] = {}
    for place, owner in enumerate(sorted(wanted, key=wanted.__getitem__)):
        shares[owner] = min(wanted[owner], rows // (len(wanted) - place))
        rows -= shares[owner]
    return shares


def _by_owner(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    owners: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        owners.setdefault(sequence.request.owner, []).append(sequence)
    return owners


def _streams(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.decodes]


def mean_context(sequences: Seq[Sequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences) // len(sequences)


def _owner(sequence: Sequence) -> str:
    return sequence.request.owner


def pending_rows(sequence: Sequence) -> int:
    """How many rows the sequence's pending tokens take."""
    return sequence.request.rows_of(sequence.cached, len(sequence.tokens) - sequence.cached)
