"""One sequence's part in one step, from its pending tokens to what joined the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.engine.isolation import named
from parlay.engine.sequence import Sequence
from parlay.types import (
    NO_DRAFT,
    NOTHING_COMMITTED,
    CommittedTokens,
    Draft,
    Fault,
    FinishReason,
    Observation,
    Output,
    Verdict,
)

logger = logging.getLogger(__name__)

_NO_OUTPUT = Output(torch.empty(0, 0), (0,))
_NO_VERDICT = Verdict((), ())


class Commit(NamedTuple):
    """What joined one sequence in one step, how much of the verdict's path that was, and whether it ended."""

    committed: CommittedTokens = NOTHING_COMMITTED
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


_NO_COMMIT = Commit()


@dataclass(slots=True, eq=False)
class Turn:
    """One sequence's part in one step. Each stage of the step reads what the stages before it wrote here.

    The scheduler sets the first five fields. A turn with a ``fault`` takes no part in the stages that follow, and its
    request ends with that reason.
    """

    sequence: Sequence
    start: int
    """Position of the first pending token."""
    pending: tuple[int, ...]
    prefill: bool
    """Whether no step of this sequence has committed yet."""
    at_root: bool
    """Whether the pending tokens reach the root, so that this turn commits. An early prefill chunk does not."""
    fault: Fault | None = None

    budget: int = 0
    """Propose: how many nodes its drafter may draft, probes not counted. With 0 it is not asked."""
    active: bool = False
    """The policy gave it a budget (which limits may have cut to 0), so its drafter may see the step."""
    draft: Draft = NO_DRAFT

    out: Output = _NO_OUTPUT
    """Verify: the output of the forward that ran this turn. Other turns of the step have rows in it too."""
    first_row: int = -1
    """The row of ``out.taps`` that belongs to the first pending token. The draft's rows follow the pending tokens'."""
    first_logits: int = -1
    """The first row of ``out.logits_RV`` that belongs to this turn."""
    root: int = -1
    """The row of ``out.logits_RV`` that belongs to the root. Those of the draft's nodes follow it."""

    verdict: Verdict = _NO_VERDICT
    """Accept: what the rule decided. An early prefill chunk keeps the empty verdict."""
    choices: tuple[tuple[int, ...], ...] = ()
    """The tokens that the sampler prefers at the root and at each node, if the drafter of an active turn wants them."""

    draft_seconds: float = 0.0
    """Wall time of what was done for its drafter in this step: its share of proposing, tapping, ranking, observing."""

    done: Commit = _NO_COMMIT
    """Commit: what joined the sequence."""

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """The request ends here, with this reason."""
        logger.warning("request %s ends: %s", self.sequence.request.id, reason, exc_info=error)
        self.fault = Fault(reason)

    def drop_drafter(self, error: Exception) -> None:
        """Its drafter or its policy has failed: the request goes on plainly."""
        self.sequence.drop_drafter()
        logger.warning(
            "the drafter of strategy %s failed (%s): request %s goes on without drafts, its text unchanged",
            self.sequence.strategy.name, named(error), self.sequence.request.id,
        )  # fmt: skip

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes that were committed. A stop may have cut the verdict's path."""
        return self.verdict.path[: self.done.accepted]

    def observation(self) -> Observation:
        """What the drafter sees of this step."""
        return Observation(self.sequence, self.draft, self.verdict, self._states(), self.choices, self.start)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers to tap: what its drafter asks for, if it drafts or text is fed to the target.

        So a sequence that decodes plainly, because its policy does not let it draft, is not slowed by taps.
        """
        taps = self.sequence.needs.taps
        return taps if taps and (self.budget or self.prefill or not self.at_root or len(self.pending) > 1) else ()

    def _states(self) -> dict[int, Tensor]:
        """The hidden states of the tokens that became cached: ``[T, H]`` for each tapped layer."""
        if not self.taps:
            return {}
        first_node = self.first_row + len(self.pending)
        rows = [*range(self.first_row, first_node), *(first_node + node for node in self.path)]
        return {layer: self.out.taps[layer][rows] for layer in self.taps}


def charge(turns: list[Turn], seconds: float) -> None:
    """Charge seconds of work that was done for the drafters of these turns together."""
    for turn in turns:
        turn.draft_seconds += seconds / len(turns)


def grouped(turns: list[Turn], key: Callable[[Turn], Hashable]) -> Iterable[list[Turn]]:
    """The turns that share a key, in lists. Order is kept."""
    if len(turns) < 2:
        return [turns] if turns else []
    groups: dict[Hashable, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(key(turn), []).append(turn)
    return groups.values()
