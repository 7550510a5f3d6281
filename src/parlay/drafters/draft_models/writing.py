"""The protocol of writers: they turn draft jobs into drafts of some shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from parlay.drafters.draft_models.draft_sequences import DraftJob
from parlay.types import Draft


class DraftWriter(Protocol):
    """Writes all jobs at once, forward by forward."""

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]: ...
