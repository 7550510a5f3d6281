"""One sequence's part in one step, from its pending tokens to what joined the text; and calls for many such parts."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

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
    ParlayError,
    RunnerLost,
    TokenLogprobs,
    Verdict,
)

Member = TypeVar("Member")

logger = logging.getLogger(__name__)

_NO_OUTPUT = Output(torch.empty(0, 0), (0,))
_NO_VERDICT = Verdict((), ())


class Commit(NamedTuple):
    """The tokens that joined one sequence in one step, how much of the path they were, and whether it ended."""

    committed: CommittedTokens = NOTHING_COMMITTED
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


_NO_COMMIT = Commit()


@dataclass(slots=True, eq=False)
class SequenceStep:
    """One sequence's part in one step. Each stage of the step reads what the stages before it wrote here.

    The scheduler sets the first six fields. A step with a ``fault`` takes no part in the stages that follow, and its
    request ends with that reason.
    """

    sequence: Sequence
    start: int
    """Position of the first pending token."""
    pending: tuple[int, ...]
    prefill: bool
    """Whether no step of this sequence has committed yet."""
    at_root: bool
    """Whether the pending tokens reach the root, so that this step decodes. An early prefill chunk does not."""
    ahead: int = 0
    """How many tokens of the negative prompt run beside them, where it must be read before the step can decode."""
    fault: Fault | None = None

    budget: int = 0
    """Propose: how many nodes the drafter asked last may draft, probes not counted. With 0 none is asked."""
    watching: tuple[int, ...] = ()
    """The drafters that may see the step: the policy gave them a budget, which limits may have cut to 0, or said so."""
    called: tuple[int, ...] = ()
    """Those of them that were called to propose."""
    draft: Draft = NO_DRAFT
    """The draft of the drafter asked last, in the end what the policy made of it."""

    out: Output = _NO_OUTPUT
    """Verify: the output of the forward that ran this step. Other steps of the step have rows in it too."""
    first_row: int = -1
    """The row of ``out.taps`` that belongs to the first pending token. The draft's rows follow the pending tokens'."""
    first_logits: int = -1
    """The first row of ``out.logits_RV`` that belongs to this step."""
    root: int = -1
    """The row of ``out.logits_RV`` that belongs to the root. Those of the draft's nodes follow it."""

    verdict: Verdict = _NO_VERDICT
    """Accept: what the rule or the selector decided. An early prefill chunk keeps the empty verdict."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of a canvas's tokens, if the request wants them: they are those of the steps that decided the tokens."""
    top_k: tuple[tuple[int, ...], ...] = ()
    """The tokens that the sampler prefers at the root and at each node, if a watching drafter wants them."""

    planning_seconds: float = 0.0
    """Its share of the wall time that its policy took before the forward."""
    seconds: list[float] = field(default_factory=list)
    """Its share of the wall time of what was done for each drafter in this step: proposing, tapping, ranking, showing.
    Empty: nothing was done."""

    done: Commit = _NO_COMMIT
    """Commit: what joined the sequence."""

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """The request ends here, with this reason. An error of Parlay's own says all in its line."""
        unknown = None if isinstance(error, ParlayError) else error
        logger.warning("request %s ends: %s", self.sequence.request.id, reason, exc_info=unknown)
        self.fault = Fault(reason)

    def drop_drafter(self, number: int, error: Exception) -> None:
        """A drafter has failed: the request goes on without it."""
        self.sequence.drop_drafter(number)
        self._log_loss("drafter", error)

    def drop_policy(self, error: Exception) -> None:
        """Drop the policy, which has failed: the request goes on plainly."""
        self.sequence.drop_policy()
        self._log_loss("policy", error)

    def _log_loss(self, part: str, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
        without = "without it" if self.sequence.drafting else "without drafts"
        logger.warning(
            "the %s of strategy %s failed%s (%s): request %s goes on %s, its text unchanged",
            part, self.sequence.strategy.name, place, named(error), self.sequence.request.id, without,
        )  # fmt: skip

    @property
    def stale(self) -> bool:
        """Whether cached rows that see its canvas stay as they were."""
        canvas = self.sequence.canvas
        return canvas is not None and not canvas.fresh and self.sequence.strategy.layout.stale

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes that were committed. A stop may have cut the verdict's path."""
        return self.verdict.path[: self.done.accepted]

    def observation(self, drafter: int) -> Observation:
        """Show a drafter this step: only what it asks for."""
        needs = self.sequence.needs[drafter]
        top_k = tuple([row[: needs.top_k] for row in self.top_k]) if drafter in self.wants_top_k else ()
        taps = needs.taps if drafter in self.tapped else ()
        return Observation(self.sequence, self.draft, self.verdict, self._states(taps), top_k, self.start)

    @property
    def rows(self) -> int:
        """How many rows of the forward its tokens take, without a draft."""
        if self.ahead:
            return len(self.pending) + self.ahead
        return self.sequence.request.rows_of(self.start, len(self.pending))

    @property
    def tapped(self) -> tuple[int, ...]:
        """The drafters for which layers are tapped: those that read them, if they may see the step or text is fed.

        So a sequence that decodes plainly, because its policy does not let it draft, is not slowed by taps.
        """
        needs = self.sequence.needs
        if not needs or self.sequence.layers is None:
            return ()
        fed = self.prefill or not self.at_root or len(self.pending) > 1
        seeing = range(len(needs)) if fed else self.watching
        return tuple([drafter for drafter in seeing if needs[drafter].taps])

    @property
    def taps(self) -> set[int]:
        """The layers that they read."""
        return {layer for drafter in self.tapped for layer in self.sequence.needs[drafter].taps}

    @property
    def wants_top_k(self) -> list[int]:
        """The drafters that watch and want to see the sampler's choices."""
        needs = self.sequence.needs
        return [drafter for drafter in self.watching if needs and needs[drafter].top_k]

    @property
    def observers(self) -> list[int]:
        """The drafters that are shown the step: a sequence's first, those in which they watch, and tapped ones."""
        needs, tapped = self.sequence.needs, self.tapped
        seeing = range(len(needs)) if self.prefill else self.watching
        seen = [drafter for drafter in seeing if needs[drafter].outcomes] if self.at_root and needs else []
        return sorted({*seen, *tapped}) if tapped else seen

    @property
    def draft_seconds(self) -> float:
        """Wall time of all that was done for drafts."""
        return self.planning_seconds + sum(self.seconds)

    def _states(self, taps: tuple[int, ...]) -> dict[int, Tensor]:
        """The hidden states of the tokens that became cached: ``[T, H]`` for each tapped layer."""
        if not taps:
            return {}
        first_node, path = self.first_row + len(self.pending), self.path
        if path == tuple(range(len(path))):  # as mostly: rows that follow each other need not be copied
            return {layer: self.out.taps[layer][self.first_row : first_node + len(path)] for layer in taps}
        rows = [*range(self.first_row, first_node), *(first_node + node for node in path)]
        return {layer: self.out.taps[layer][rows] for layer in taps}


def charge(shares: list[tuple[SequenceStep, int]], seconds: float) -> None:
    """Charge seconds of work that was done together for drafters of steps."""
    for step, drafter in shares:
        step.seconds = step.seconds or [0.0] * len(step.sequence.strategy.drafters)
        step.seconds[drafter] += seconds / len(shares)


def grouped(steps: list[SequenceStep], key: Callable[[SequenceStep], Hashable]) -> Iterable[list[SequenceStep]]:
    """The steps that share a key, in lists. Order is kept."""
    if len(steps) < 2:
        return [steps] if steps else []
    groups: dict[Hashable, list[SequenceStep]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return groups.values()


def isolated(
    call: Callable[[list[Member]], None],
    members: list[Member],
    failed: Callable[[Member, Exception], None],
    *,
    again: bool = True,
) -> None:
    """Make the call for all members together. If it raises, make it for each member alone.

    ``failed`` is called with each member that raises when it is alone. With ``again=False``, for calls that can't be
    repeated, there is one call only: if it raises, all members have failed. RunnerLost passes: nobody can go on then.
    """
    try:
        call(members)
    except RunnerLost:
        raise
    except Exception as error:
        if len(members) == 1 or not again:
            for member in members:
                failed(member, error)
            return
        logger.warning("a call for %d requests failed (%s): each is tried alone", len(members), named(error))
        for member in members:
            isolated(call, [member], failed)


def named(error: Exception) -> str:
    return str(error) if isinstance(error, ParlayError) else f"{type(error).__name__}: {error}"
