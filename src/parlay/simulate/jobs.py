"""A request on its way through servers, and what a server can do at once."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, UsageError, option
from parlay.simulate.drafting import Lane
from parlay.simulate.traffic import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits(Options):
    """Limits of one server: sequences at once, rows of a step, rows of drafts on top, and cached tokens in all.

    Raises UsageError for a value out of range.
    """

    max_num_seqs: int = option(32, "most sequences in a step", low=1, high=1 << 16, metavar="N")
    max_num_batched_tokens: int = option(512, "most rows of prompts and answers in a step", low=1, metavar="N")
    max_draft_rows: int = 256
    cache_tokens: int = 1 << 30

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least max_num_seqs, "
                f"{self.max_num_seqs}"
            )


USUAL_LIMITS = ReplicaLimits()


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. ``written`` tokens of its answer exist already when a server takes it.

    ``rank`` is its place on the server, ``text`` the tokens to be read there, ``fed`` those that are. ``tries`` counts
    starts, ``failures`` servers that it lost; ``first`` and ``last`` are times of tokens, below 0 before there are any.
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
    """Where it decodes; it ``began`` at that progress with ``entered`` tokens, and ends ``span`` later."""
    began: float = 0.0
    span: float = 0.0
    entered: float = 0.0

    @property
    def left(self) -> int:
        """The tokens still to write."""
        return self.request.output - self.written
