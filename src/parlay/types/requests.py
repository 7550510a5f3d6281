"""One sample to decode, and the sight of it that drafters have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parlay.types.base import NoiseKey
from parlay.types.params import SamplingParams


class StopChecker(Protocol):
    """Watches the committed tokens of one sample for stop strings. Made at the edge, where text is known."""

    def push(self, token: int) -> bool:
        """Take one committed token; True when a stop string is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to decode: ids in, ids out.

    ``references`` are token texts worth copying from. ``salt`` names the tenant: neither cached prefixes nor what
    stores learn is shared with another. ``store=False``: no store may learn from this request.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: NoiseKey
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sample, `ignore_eos` already applied. Masked until ``min_tokens`` are out."""
    stop_checker: StopChecker | None = None
    references: tuple[tuple[int, ...], ...] = ()
    salt: str = ""
    store: bool = True
    group: str = ""
    """Samples of one prompt carry one name here: they may share its cache."""
    priority: int = 0
    """Lower is more urgent."""


class View(Protocol):
    """A drafter's read-only sight of a sequence. ``tokens`` is live: prompt, then committed output."""

    @property
    def sequence(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...
