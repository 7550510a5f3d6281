"""The state of a request while servers decode it, and the limits of a server."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option
from parlay.simulate.drafting import Lane
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

    ``rank`` is the order in which the server took it. The server must read ``text`` tokens (prompt and written answer),
    and has read ``fed`` of them. ``tries`` counts how often the request started on a server, and ``failures`` how many
    of its servers died. ``first`` and ``last`` are the times of its first and last token, below 0 before there are any.
    """

    request: Arrival
    written: int = 0
    rank: int = 0
    text: int = 0
    fed: int = 0
    tries: int = 0
    failures: int = 0
    first: float = -1.0
    last: float = -1.0
    lane: Lane | None = None
    """The lane in which the request decodes, if it does. It entered with ``entered`` tokens at the lane's progress
    ``began``, and ends at the progress ``began + span``."""
    began: float = 0.0
    span: float = 0.0
    entered: float = 0.0

    @property
    def left(self) -> int:
        """Number of answer tokens that are not yet written."""
        return self.request.output - self.written
