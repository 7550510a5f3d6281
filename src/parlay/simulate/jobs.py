"""The state of requests while servers decode them, and the limits of a server."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.options import Options, option
from parlay.simulate.drafting import Drafting, Drafts, uniforms
from parlay.simulate.traffic import Arrival
from parlay.types import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits(Options):
    """Limits of one server: sequences and rows of a step, rows of drafts besides these, and tokens of the KV cache.

    Raises UsageError for a value out of range.
    """

    max_num_seqs: int = option(32, "most sequences in a step", low=1, high=1 << 16, metavar="N")
    max_num_batched_tokens: int = option(512, "most rows of prompts and answers in a step", low=1, metavar="N")
    max_draft_rows: int = 256
    cache_tokens: int = 1 << 30

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise FieldError(
                "max_num_batched_tokens",
                f"={self.max_num_batched_tokens}: must be at least max_num_seqs, {self.max_num_seqs}",
                "max_num_seqs",
            )


USUAL_LIMITS = ReplicaLimits()


@dataclass(slots=True, eq=False)
class Job:
    """A request that a server decodes. ``written`` tokens of its answer existed when the server took it.

    ``number`` is its place in the traffic. ``rank`` is the order in which the server took it. The server must read
    ``text`` tokens (prompt and written answer), and has read ``fed`` of them. ``tries`` counts how often the request
    started on a server, and ``failures`` how many of its servers died. ``first`` and ``last`` are the times of its
    first and last token, below 0 before there are any.
    """

    request: Arrival
    number: int = 0
    written: int = 0
    rank: int = 0
    text: int = 0
    fed: int = 0
    tries: int = 0
    failures: int = 0
    first: float = -1.0
    last: float = -1.0
    right: Sequence[int] = ()
    """Which drafted token is right at each place of the answer, as in `Drafts.right`; empty until drafts begin."""
    lane: Lane | None = None
    """The lane in which the request decodes, if it does."""
    began: int = 0
    path: Sequence[int] = ()
    """The number of written tokens at the lane's step ``began`` and after each later one."""
    held: int = 0
    """Number of tokens for which it had memory before ``began``. It keeps memory that it reserved for drafts."""
    skips: bool = False
    """Whether the step under way leaves out its draft, for which there is no memory."""

    @property
    def left(self) -> int:
        """Number of answer tokens that are not yet written."""
        return self.request.output - self.written


class Lane:
    """The sequences of one kind that decode on a server. All of them draft the same number of nodes.

    ``steps`` counts the server's steps. How many tokens a sequence has after each of them is known beforehand, so the
    lane need not visit its sequences in every step.
    """

    __slots__ = ("_drafts", "_followed", "_seed", "count", "each", "ends", "nodes", "steps", "table")

    def __init__(self, drafting: Drafting, kind: str, seed: int) -> None:
        self.table: Sequence[float] = drafting.tokens(kind)
        """Mean tokens that a step commits, by number of nodes."""
        self._drafts, self._seed = Drafts(drafting.chances(kind)), seed
        self.nodes = self._followed = 0 if drafting.adapts else drafting.nodes
        self.each = self.table[self.nodes]
        self.count = self.steps = 0
        self.ends: list[tuple[int, int, Job]] = []
        """A heap of the sequences, each with the step after which it ends and its rank."""

    @property
    def rows(self) -> int:
        """Rows of a step if every draft has all its nodes."""
        return self.count * (1 + self.nodes)

    def draft(self, nodes: int) -> None:
        """Suppose drafts of ``nodes`` nodes. Until `settle`, the sequences go on as before."""
        self.nodes, self.each = nodes, self.table[nodes]

    def settle(self) -> None:
        """Let the sequences draft as many nodes as supposed from now on."""
        if self.nodes != self._followed:
            for _, _, job in self.ends:
                self._follow(job, self._path(job, self.written(job)))
            self._followed = self.nodes
            self._sort()

    def skip(self, job: Job) -> None:
        """Let a request commit one token in the next step, which leaves out its draft. After it, call `enter` if the
        step read the prompt, else `skipped`."""
        job.skips = True
        if job.lane is not None:
            written = self.written(job)
            self._follow(job, [written, *self._path(job, written + 1)])
            self._sort()

    def skipped(self, job: Job) -> None:
        """Forget the last step of a request, which reserved no memory for a draft."""
        job.path, job.began, job.skips = job.path[1:], job.began + 1, False

    def enter(self, job: Job) -> bool:
        """Begin to decode a request whose prompt is read. False if the step that read it wrote the whole answer."""
        path, job.held = self._path(job, job.written)[1:], self.needed(job, job.written)
        if job.skips:
            path, job.held, job.skips = self._path(job, job.written + 1), job.text, False
        if len(path) == 1:
            return False
        job.lane, job.path, job.began = self, path, self.steps
        heapq.heappush(self.ends, (_end(job), job.rank, job))
        self.count += 1
        return True

    def remove(self, job: Job) -> None:
        """Forget a request that has not ended."""
        self.ends.remove((_end(job), job.rank, job))
        heapq.heapify(self.ends)
        self.count, job.lane = self.count - 1, None

    def pop_ended(self) -> Job | None:
        """Forget a request that has ended and return it; None if there is none."""
        if not self.ends or self.ends[0][0] > self.steps:
            return None
        job = heapq.heappop(self.ends)[2]
        self.count, job.lane = self.count - 1, None
        return job

    def written(self, job: Job, steps: int = 0) -> int:
        """Return how many tokens of the answer are written after ``steps`` further steps."""
        return job.path[self.steps - job.began + steps]

    def needed(self, job: Job, written: int) -> int:
        """Return for how many tokens a step with its draft needs memory, after ``written`` tokens of the answer."""
        return job.request.prompt + max(written, min(written + self.nodes, job.request.output - 1))

    def reserved(self, job: Job, steps: int = 0) -> int:
        """Return for how many tokens a request has or needs memory after ``steps`` further steps, without a draft."""
        at = self.steps - job.began + steps
        before = self.needed(job, job.path[at - 1]) if at else job.held
        return max(job.held, before, job.request.prompt + job.path[at])

    def grown(self, steps: int) -> int:
        """Return how many tokens all sequences write in the next ``steps`` steps."""
        if not self._followed:
            return self.count * steps
        now = self.steps
        return sum(job.path[now - job.began + steps] - job.path[now - job.began] for _, _, job in self.ends)

    def ahead(self, steps: int) -> tuple[float, float, float]:
        """Return means over the next ``steps`` steps, none of which ends a sequence before the last.

        The first is by how many tokens all sequences together are longer than now. The others are the rows, and the
        pairs of a row and a key, that are saved because no draft goes beyond the end of its answer: a draft that may
        commit r more tokens has at most r - 1 nodes. A request that skips its draft saves all of them.
        """
        if not self._followed:
            return self.count * (steps - 1) / 2, 0.0, 0.0
        longer = rows = pairs = 0
        for _, _, job in self.ends:
            first = self.steps - job.began
            written = job.path[first : first + steps]
            longer += sum(written) - steps * written[0]
            whole = job.request.output - 1 - self.nodes  # with more tokens written, a draft is cut
            if written[-1] > whole or job.skips:
                for each in written:
                    if (saved := self.nodes if job.skips else each - whole) > 0:
                        rows += saved
                        keys = job.request.prompt + each + self.nodes
                        pairs += (1 + self.nodes) * keys - (1 + self.nodes - saved) * (keys - saved)
        return longer / steps, rows / steps, pairs / steps

    def _path(self, job: Job, written: int) -> Sequence[int]:
        output = job.request.output
        if not self.nodes:
            return range(written, output + 1)
        if not job.right:
            job.right = self._drafts.right(uniforms(self._seed, job.number, output))
        return self._drafts.path(job.right, self.nodes, written)

    def _follow(self, job: Job, path: Sequence[int]) -> None:
        job.held, job.path, job.began = self.reserved(job), path, self.steps

    def _sort(self) -> None:
        self.ends = [(_end(job), job.rank, job) for _, _, job in self.ends]
        heapq.heapify(self.ends)


def _end(job: Job) -> int:
    return job.began + len(job.path) - 1
