"""A draft runner's sequences, each following one of the target's: caught up, cut back and evicted as needed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.history import History
from parlay.types import NO_TREE, OutOfRoom, Runner, Segment, Tree, View

_CHUNK = 256  # pending tokens of one sequence that are fed in one forward


class Follower:
    """One sequence in the draft runner. ``pending`` are the tokens to feed next; the last of them is the root."""

    __slots__ = ("history", "name", "pending")

    def __init__(self, name: int, history: History) -> None:
        self.name = name
        self.history = history  # the tokens that the runner has cached, drafted ones included
        self.pending: tuple[int, ...] = ()

    def segment(self, tree: Tree = NO_TREE, rows: int = 1) -> Segment:
        """Feed the pending tokens and a tree, and ask for the logits of the last ``rows`` of all these rows."""
        return Segment(self.name, self.pending, tree, len(self.pending) + len(tree) - rows)

    def level(self, tree: Tree, rows: int) -> Segment:
        """Feed the last ``rows`` nodes of a tree and ask for their logits; all before them ran in the last forward.

        A tree without nodes: feed the pending tokens and ask for the root's logits.
        """
        segment = self.segment(tree, rows)
        return segment._replace(base=segment.logits_from) if tree.tokens else segment


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to draft for, its follower in the draft runner caught up, and the most nodes there may be."""

    view: View
    follower: Follower
    budget: int


class Followers:
    """The sequences of one drafter in a runner that it may share with others."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._followers: dict[int, Follower] = {}  # by the target's sequence, least recently used first

    def jobs(self, views: Sequence[View], budgets: Sequence[int]) -> dict[int, Job]:
        """What can be drafted now, by place in ``views``: each follower with one chunk at most left to feed.

        Sequences without a budget are left out, and those for which the runner has no room.
        """
        most = self._runner.spec.max_context
        limits = [min(budget, most - len(view.tokens)) for view, budget in zip(views, budgets, strict=True)]
        wanted = [place for place, limit in enumerate(limits) if limit > 0]
        busy = {views[place].sequence for place in wanted}
        jobs: dict[int, Job] = {}
        for place in wanted:
            job = Job(views[place], self._align(views[place]), limits[place])
            if self._reserve(job.follower, len(job.view.tokens) + job.budget, busy):
                jobs[place] = job
        while late := [job.follower for job in jobs.values() if len(job.follower.pending) > _CHUNK]:
            self._feed(late)
        return jobs

    def release(self, sequence: int) -> None:
        follower = self._followers.pop(sequence, None)
        if follower is not None:
            self._runner.release(follower.name)

    def keep(self, follower: Follower, path: Sequence[int] = (), tree: Tree = NO_TREE) -> None:
        """The pending tokens of the last forward are cached now, and the nodes of ``path`` with them."""
        cached = self._runner.keep(follower.name, path)
        follower.history.tokens += [*follower.pending, *(tree.tokens[node] for node in path)]
        follower.history.cut(cached)

    def _align(self, view: View) -> Follower:
        """The view's follower, now the most recently used, its cache cut back to what is still true of the sequence."""
        follower = self._followers.pop(view.sequence, None) or self._open(view)
        self._followers[view.sequence] = follower
        tokens, history = view.tokens, follower.history
        agreed = min(history.agree(tokens), len(tokens) - 1)  # the root runs again: its logits are wanted
        history.cut(self._runner.truncate(follower.name, agreed))  # less where the target needed the memory
        follower.pending = tuple(tokens[len(history.tokens) :])
        return follower

    def _open(self, view: View) -> Follower:
        # Drafters may share the runner, so names are drawn from a space too large to meet in.
        follower = Follower(uuid.uuid4().int >> 66, History())
        cached = self._runner.open(follower.name, view.tokens, view.request.salt)
        follower.history.tokens += view.tokens[:cached]
        return follower

    def _reserve(self, follower: Follower, tokens: int, busy: set[int]) -> bool:
        """Room for ``tokens``, if need be that of the sequences used least recently."""
        try:
            while not self._runner.reserve(follower.name, tokens):
                idle = next((sequence for sequence in self._followers if sequence not in busy), None)
                if idle is None:
                    return False
                self.release(idle)
        except OutOfRoom:
            return False
        return True

    def _feed(self, late: Sequence[Follower]) -> None:
        """One chunk of each, the root left out."""
        rest = [follower.pending for follower in late]
        for follower in late:
            follower.pending = follower.pending[:-1][:_CHUNK]
        self._runner.forward([follower.segment(rows=0) for follower in late])
        for follower, pending in zip(late, rest, strict=True):
            fed = len(follower.pending)
            self.keep(follower)
            follower.pending = pending[fed:]
