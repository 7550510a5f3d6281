"""A draft runner's sequences, each following one of the target's: caught up, cut back and evicted as needed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.per_sequence import History
from parlay.types import NO_TREE, OutOfRoom, Runner, Segment, SequenceView, Tree

_CHUNK = 256  # pending tokens of one sequence that are fed in one forward
_WHOLE = 1 << 40  # more than any text has


class DraftSequence:
    """One sequence in the draft runner. ``pending`` are the tokens to feed next; the last of them is the root."""

    __slots__ = ("history", "listed", "name", "pending")

    def __init__(self, name: int, history: History) -> None:
        self.name = name
        self.history = history  # the tokens that the runner has cached, drafted ones included
        self.pending: tuple[int, ...] = ()
        self.listed = 0  # tokens of the text that a short list of the model's tokens was told of

    def segment(self, tree: Tree = NO_TREE, rows: int = 1, together: int = 0) -> Segment:
        """Feed the pending tokens and a tree, and ask for the logits of the last ``rows`` of all these rows.

        The last ``together`` nodes see each other.
        """
        first = len(self.pending) + len(tree.tokens) - rows
        return Segment(self.name, self.pending, tree, first, together=together)

    def level(self, tree: Tree, rows: int) -> Segment:
        """Feed the last ``rows`` nodes of a tree and ask for their logits; all before them ran in the last forward.

        A tree without nodes: feed the pending tokens and ask for the root's logits.
        """
        segment = self.segment(tree, rows)
        return segment._replace(base=segment.logits_from) if tree.tokens else segment


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence to draft for, its sequence in the draft runner caught up, and the most nodes there may be."""

    view: SequenceView
    sequence: DraftSequence
    budget: int


class DraftSequences:
    """The sequences of one drafter in a runner that it may share with others."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._chunk = _chunk_of(runner)
        self._opened: dict[int, DraftSequence] = {}  # by the target's sequence, least recently used first

    def jobs(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, DraftJob]:
        """Sequences that can be drafted now, by place in ``views``. Each has at most one chunk left to feed.

        Sequences without a budget are left out, and those for which the runner has no room.
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
        """Cache the last forward's pending tokens. The root is fed again, and what the runner could not cache."""
        self.keep(job.sequence)
        self._rewind(job.view, job.sequence)

    def keep(self, opened: DraftSequence, path: Sequence[int] = (), tree: Tree = NO_TREE) -> None:
        """The pending tokens of the last forward are cached now, and the nodes of ``path`` with them."""
        cached = self._runner.keep(opened.name, path)
        opened.history.tokens += [*opened.pending, *(tree.tokens[node] for node in path)]
        opened.history.cut(cached)

    def _align(self, view: SequenceView) -> DraftSequence:
        """The view's draft sequence, now the most recently used, its cache cut back to what agrees with the view."""
        opened = self._opened.pop(view.sequence, None) or self._open(view)
        self._opened[view.sequence] = opened
        self._rewind(view, opened)
        return opened

    def _rewind(self, view: SequenceView, opened: DraftSequence) -> None:
        tokens, history = view.tokens, opened.history
        agreed = min(history.agree(tokens), len(tokens) - 1)  # the root runs again: its logits are wanted
        history.cut(self._runner.truncate(opened.name, agreed))  # less where the target needed the memory
        opened.pending = tuple(tokens[len(history.tokens) :])

    def _open(self, view: SequenceView) -> DraftSequence:
        # Drafters may share the runner, so names are drawn from a space too large to meet in.
        opened = DraftSequence(uuid.uuid4().int >> 66, History())
        cached = self._runner.open(opened.name, view.tokens, view.request.salt)
        opened.history.tokens += view.tokens[:cached]
        return opened

    def _reserve(self, opened: DraftSequence, tokens: int, busy: set[int]) -> bool:
        """Room for ``tokens``, if need be that of the sequences used least recently."""
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
        """One chunk of each, the root left out."""
        rest = [opened.pending for opened in late]
        for opened in late:
            opened.pending = opened.pending[:-1][: self._chunk]
        self._runner.forward([opened.segment(rows=0) for opened in late])
        for opened, pending in zip(late, rest, strict=True):
            before = len(opened.history.tokens)
            self.keep(opened)
            opened.pending = pending[len(opened.history.tokens) - before :]


def _chunk_of(runner: Runner) -> int:
    """Most tokens fed at once: all, where rows of the text all see each other, so that none stays cached."""
    canvas = runner.spec.canvas
    if canvas is None or canvas.text == "causal":
        return _CHUNK
    return max(_CHUNK, 2 * canvas.block) if canvas.text == "block" else _WHOLE
