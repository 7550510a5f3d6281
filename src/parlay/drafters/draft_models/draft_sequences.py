"""A drafter's sequences in a draft model: each follows one of the target's, and is caught up, cut back or evicted."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.per_sequence import History
from parlay.types import NO_TREE, OutOfRoom, Runner, Segment, SequenceView, Tree

_CHUNK = 256  # the most pending tokens of a sequence that are fed in one forward
_WHOLE = 1 << 40  # more than any text has


class DraftSequence:
    """One sequence in the draft runner. ``pending``: the tokens to feed next, of which the last is the root."""

    __slots__ = ("history", "listed", "name", "pending")

    def __init__(self, name: int, history: History) -> None:
        self.name = name
        self.history = history  # the tokens that the runner has cached, drafted ones included
        self.pending: tuple[int, ...] = ()
        self.listed = 0  # how many tokens the model's list of likely tokens has seen

    def segment(self, tree: Tree = NO_TREE, rows: int = 1, together: int = 0) -> Segment:
        """Feed the pending tokens and a tree; compute logits for the last ``rows`` of these rows.

        The last ``together`` nodes see each other.
        """
        first = len(self.pending) + len(tree.tokens) - rows
        return Segment(self.name, self.pending, tree, first, together=together)

    def level(self, tree: Tree, rows: int) -> Segment:
        """Feed the last ``rows`` nodes of a tree and compute their logits; the rows before them ran in the last
        forward.

        If the tree is empty, feed the pending tokens and compute the root's logits.
        """
        segment = self.segment(tree, rows)
        return segment._replace(base=segment.logits_from) if tree.tokens else segment


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence to draft for: its caught-up sequence in the draft runner, and the most nodes to draft."""

    view: SequenceView
    sequence: DraftSequence
    budget: int


class DraftSequences:
    """One drafter's sequences in a runner, which it may share with other drafters."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._chunk = _chunk_of(runner)
        self._opened: dict[int, DraftSequence] = {}  # by the target's sequence, least recently used first

    def jobs(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, DraftJob]:
        """The sequences that can be drafted for now, by index in ``views``. Each has at most one chunk left to feed.

        Left out are sequences without a budget, and those for which the runner has no room.
        """
        most = self._runner.spec.max_context
        limits = [min(budget, most - len(view.tokens)) for view, budget in zip(views, budgets, strict=True)]
        wanted = [place for place, limit in enumerate(limits) if limit > 0]
        busy = {views[place].sequence for place in wanted}
        jobs: dict[int, DraftJob] = {}
        for place in wanted:
            job = DraftJob(views[place], self._align(views[place]), limits[place])
            if self._reserve(job.sequence, len(job.view.tokens) + job.budget, busy):
                jobs[place] = job
        while late := [job.sequence for job in jobs.values() if len(job.sequence.pending) > self._chunk]:
            self._feed(late)
        return jobs

    def release(self, sequence: int) -> None:
        opened = self._opened.pop(sequence, None)
        if opened is not None:
            self._runner.release(opened.name)

    def run_again(self, job: DraftJob) -> None:
        """Cache the last forward's pending tokens. The root is fed again, with any tokens that were not cached."""
        self.keep(job.sequence)
        self._rewind(job.view, job.sequence)

    def keep(self, opened: DraftSequence, path: Sequence[int] = (), tree: Tree = NO_TREE) -> None:
        """Cache the pending tokens of the last forward and the nodes of ``path``."""
        cached = self._runner.keep(opened.name, path)
        opened.history.tokens += [*opened.pending, *(tree.tokens[node] for node in path)]
        opened.history.cut(cached)

    def _align(self, view: SequenceView) -> DraftSequence:
        """The view's draft sequence, cut back to the tokens that agree with the view, and marked as recently used."""
        opened = self._opened.pop(view.sequence, None) or self._open(view)
        self._opened[view.sequence] = opened
        self._rewind(view, opened)
        return opened

    def _rewind(self, view: SequenceView, opened: DraftSequence) -> None:
        tokens, history = view.tokens, opened.history
        agreed = min(history.agree(tokens), len(tokens) - 1)  # the root runs again: its logits are wanted
        history.cut(self._runner.truncate(opened.name, agreed))  # perhaps fewer: the target may have taken memory
        opened.pending = tuple(tokens[len(history.tokens) :])

    def _open(self, view: SequenceView) -> DraftSequence:
        # Drafters may share the runner, so names are random and too long to collide.
        opened = DraftSequence(uuid.uuid4().int >> 66, History())
        cached = self._runner.open(opened.name, view.tokens, view.request.salt)
        opened.history.tokens += view.tokens[:cached]
        return opened

    def _reserve(self, opened: DraftSequence, tokens: int, busy: set[int]) -> bool:
        """Reserve cache for ``tokens`` tokens, if need be by evicting the least recently used sequences."""
        try:
            while not self._runner.reserve(opened.name, tokens):
                idle = next((sequence for sequence in self._opened if sequence not in busy), None)
                if idle is None:
                    return False
                self.release(idle)
        except OutOfRoom:
            return False
        return True

    def _feed(self, late: Sequence[DraftSequence]) -> None:
        """Feed one chunk of each sequence, without the root."""
        rest = [opened.pending for opened in late]
        for opened in late:
            opened.pending = opened.pending[:-1][: self._chunk]
        self._runner.forward([opened.segment(rows=0) for opened in late])
        for opened, pending in zip(late, rest, strict=True):
            before = len(opened.history.tokens)
            self.keep(opened)
            opened.pending = pending[len(opened.history.tokens) - before :]


def _chunk_of(runner: Runner) -> int:
    """The most tokens fed at once: all, if rows of a text all see each other, because then none stays cached."""
    canvas = runner.spec.canvas
    if canvas is None or canvas.text == "causal":
        return _CHUNK
    return max(_CHUNK, 2 * canvas.block) if canvas.text == "block" else _WHOLE
