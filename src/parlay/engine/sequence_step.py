"""One sequence's part in one step, from its pending tokens to its commit; and helpers that call a function for many."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from parlay.engine.sequence import Sequence
from parlay.sampling.sampler import is_plain_greedy
from parlay.types import (
    NO_DRAFT,
    NOTHING_COMMITTED,
    CommittedTokens,
    Draft,
    Exactness,
    Fault,
    FinishReason,
    Observation,
    Output,
    ParlayError,
    RunnerLost,
    TokenLogprobs,
    Verdict,
    kind_and_message,
    place_of,
    rows_of,
)

Member = TypeVar("Member")

logger = logging.getLogger(__name__)

_NO_OUTPUT = Output(torch.empty(0, 0), (0,))
_NO_VERDICT = Verdict((), ())


class Commit(NamedTuple):
    """The tokens that one sequence committed in one step, how many of them are nodes, and whether it ended."""

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
    """Whether this sequence has not committed a token yet."""
    at_root: bool
    """Whether the pending tokens reach the root, so that this step decodes. An early prefill chunk does not."""
    ahead: int = 0
    """How many tokens of the negative prompt run too, because it must catch up before the sequence can decode."""
    fault: Fault | None = None

    budget: int = 0
    """Propose: how many nodes, without probes, the drafter asked last may draft. With 0 no drafter is asked."""
    watching: tuple[int, ...] = ()
    """Numbers of the drafters that may observe the step.

    The policy named them as watching, or gave them a budget, which limits may have cut to 0.
    """
    called: tuple[int, ...] = ()
    """Those of the watching drafters whose ``propose`` was called."""
    draft: Draft = NO_DRAFT
    """The last draft that was proposed, then what admission and the policy left of it."""

    out: Output = _NO_OUTPUT
    """Verify: the output of the forward that ran this step. It also has the rows of other sequences."""
    first_row: int = -1
    """The row of ``out.taps`` that belongs to the first pending token. The draft's rows follow the pending tokens'."""
    first_logits: int = -1
    """The first row of ``out.logits_RV`` that belongs to this step."""
    root: int = -1
    """The row of ``out.logits_RV`` that belongs to the root. Those of the draft's nodes follow it."""

    verdict: Verdict = _NO_VERDICT
    """Accept: what the rule or the selector decided. An early prefill chunk keeps the empty verdict."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of a canvas's tokens, if wanted, as they were when each token was decided."""
    top_k: tuple[tuple[int, ...], ...] = ()
    """The tokens that the sampler ranks highest at the root and at each node, if a watching drafter wants them."""

    planning_seconds: float = 0.0
    """This step's share of the seconds that its policy took before the forward."""
    seconds: list[float] = field(default_factory=list)
    """This step's share of the seconds spent for each drafter: proposing, tapping, ranking, observing. Empty without
    any."""

    commit: Commit = _NO_COMMIT
    """Commit: the tokens that joined the sequence."""

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """End the request with this reason. The log has a traceback unless the error is one of Parlay's own."""
        unknown = None if isinstance(error, ParlayError) else error
        logger.warning("request %s ends: %s", self.sequence.request.id, reason, exc_info=unknown)
        self.fault = Fault(reason)

    def fail_by(self, error: Exception) -> None:
        """End the request because of this error."""
        self.fail(message_of(error), error)

    def drop_drafter(self, number: int, error: Exception) -> None:
        """Go on without a drafter that has failed, and log why."""
        self.sequence.drop_drafter(number)
        self._log_loss("drafter", error)

    def drop_policy(self, error: Exception) -> None:
        """Decode plainly from now on because the policy has failed, and log why."""
        self.sequence.drop_policy()
        self._log_loss("policy", error)

    def _log_loss(self, part: str, error: Exception) -> None:
        place = "" if isinstance(error, ParlayError) else f" at {place_of(error)}"
        without = "without it" if self.sequence.drafting else "without drafts"
        logger.warning(
            "the %s of strategy %s failed%s (%s): request %s goes on %s, its text unchanged",
            part, self.sequence.strategy.name, place, message_of(error), self.sequence.request.id, without,
        )  # fmt: skip

    @property
    def stale(self) -> bool:
        """Whether the cached rows that see its canvas are used as they are, not computed again."""
        canvas = self.sequence.canvas
        return canvas is not None and not canvas.fresh and self.sequence.strategy.layout.stale

    @property
    def path(self) -> tuple[int, ...]:
        """The accepted nodes whose tokens were committed: a stop may cut the verdict's path."""
        return self.verdict.path[: self.commit.accepted]

    @property
    def walk(self) -> list[int]:
        """The rows of ``out.logits_RV`` at the root and at each node of the verdict's path."""
        return [self.root, *(self.root + 1 + node for node in self.verdict.path)]

    def observation(self, drafter: int) -> Observation:
        """The part of this step that a drafter sees: only what its needs name."""
        needs = self.sequence.needs[drafter]
        top_k = tuple([row[: needs.top_k] for row in self.top_k]) if drafter in self.wants_top_k else ()
        taps = needs.taps if drafter in self.tapped else ()
        return Observation(self.sequence, self.draft, self.verdict, self._states(taps), top_k, self.start)

    @property
    def rows(self) -> int:
        """How many rows of the forward this step takes, without its draft."""
        if self.ahead:
            return len(self.pending) + self.ahead
        return self.sequence.request.rows_of(self.start, len(self.pending))

    @property
    def tapped(self) -> tuple[int, ...]:
        """The drafters whose tapped layers the forward reports: all while text is fed, later only those that watch.

        So taps do not slow a sequence that decodes plainly because its policy does not let it draft.
        """
        needs = self.sequence.needs
        if not needs or self.sequence.layers is None:
            return ()
        fed = self.prefill or not self.at_root or len(self.pending) > 1
        seeing = range(len(needs)) if fed else self.watching
        return tuple([drafter for drafter in seeing if needs[drafter].taps])

    @property
    def taps(self) -> set[int]:
        """The layers that tapped drafters read."""
        return {layer for drafter in self.tapped for layer in self.sequence.needs[drafter].taps}

    @property
    def wants_top_k(self) -> list[int]:
        """The watching drafters that want the sampler's ranking."""
        needs = self.sequence.needs
        return [drafter for drafter in self.watching if needs and needs[drafter].top_k]

    @property
    def reads_likeliest(self) -> bool:
        """Whether nothing of its logits matters but the likeliest token of each row.

        Under an exact rule, a greedy request's verdict follows from these. Log-probabilities, drafters that want more
        of the ranking, and canvases read logits.
        """
        sequence, params = self.sequence, self.sequence.request.params
        if params.logprobs is not None or params.prompt_logprobs is not None or sequence.canvas is not None:
            return False
        exact = sequence.rule.exactness is Exactness.BITS
        return exact and is_plain_greedy(sequence, ()) and not self.wants_top_k

    @property
    def observers(self) -> list[int]:
        """The drafters that are shown this step: all in a sequence's first, later those that watch, and tapped ones."""
        needs, tapped = self.sequence.needs, self.tapped
        seeing = range(len(needs)) if self.prefill else self.watching
        seen = [drafter for drafter in seeing if needs[drafter].outcomes] if self.at_root and needs else []
        return sorted({*seen, *tapped}) if tapped else seen

    def _states(self, taps: tuple[int, ...]) -> Mapping[int, Tensor]:
        """Hidden states ``[T, H]`` of each tapped layer, for the T tokens that this step cached."""
        if not taps:
            return {}
        first_node, path = self.first_row + len(self.pending), self.path
        rows = [*range(self.first_row, first_node), *(first_node + node for node in path)]
        return rows_of(self.out.taps, taps, rows)


def charge(shares: list[tuple[SequenceStep, int]], seconds: float) -> None:
    """Divide seconds of shared work evenly among the (step, drafter) pairs that it was done for."""
    for step, drafter in shares:
        step.seconds = step.seconds or [0.0] * len(step.sequence.strategy.drafters)
        step.seconds[drafter] += seconds / len(shares)


def grouped(steps: list[SequenceStep], key: Callable[[SequenceStep], Hashable]) -> Iterable[list[SequenceStep]]:
    """Lists of steps that have the same key, in order."""
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
    """Call ``call`` for all members together. If it raises, call it for each member alone.

    ``failed`` is called for each member whose own call raises. With ``again=False``, for calls that can't be repeated,
    there is only the first call: if it raises, all members have failed. RunnerLost is passed on, because no request can
    go on.
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
        logger.warning("a call for %d requests failed (%s): each is tried alone", len(members), message_of(error))
        for member in members:
            isolated(call, [member], failed)


def listed(result: Iterable[Member], kinds: tuple[type, ...], count: int, name: str) -> list[Member]:
    """List the result of the method ``name`` of a drafter or rule.

    Raises ParlayError if it is not ``count`` objects of the ``kinds``, of which the first is the usual one.
    """
    found = list(result) if isinstance(result, Iterable) else []  # it may be of a class that no type checker has seen
    if len(found) != count or not all(isinstance(each, kinds) for each in found):
        wanted = kinds[0].__name__
        raise ParlayError(f"{name} must return one {wanted} for each sequence, got {reprlib.repr(result)}")
    return found


def message_of(error: Exception) -> str:
    return str(error) if isinstance(error, ParlayError) else kind_and_message(error)
