"""The drafters that a router chooses from, and what it knows about each, over all requests and within each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from parlay.router.acceptance import TINY, Outcome, Record, ScoreCalibration, checked
from parlay.router.ledger import START, TRIALS, Account, Gains
from parlay.router.prices import DraftDepth, DraftSeconds, Reading, sizes
from parlay.router.saved_state import KeptArm
from parlay.types import Draft, trees

_log = logging.getLogger(__name__)
_TRIAL = 2  # fewest nodes of a trial
_GAIN_DECAY = 0.9  # decay of the mean gain of asking, per request within a sequence
_WHOLE_DECAY = 0.98  # the same, over all sequences
_FIRST = 4  # nodes of a sequence's first draft while the drafter is unknown
_FIRST_OWN = 2  # the same, if each node may cost a forward
_TESTED = 8  # drafts after which a drafter may read many prompts at once, if it is expected to pay
_KNOWN = 50  # drafts after which the drafter counts as known
_SLOWER, _SURELY = 2, 4  # slow proposals in a row after which a drafter counts as slow, and surely is
_FORGOTTEN = 1024  # steps after which a drafter that was not asked is tried again
_PRIOR = 16.0  # the most levels that tests in other sequences of a kind count for


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter as the router knows it.

    ``replayable``: its proposals follow from the committed text alone and cost little. So it is asked whenever that may
    pay, and each proposal is compared with the committed text, verified or not. Other arms cost time and memory, so
    they are asked only where they are expected to pay, and for trials.

    ``most``: the most nodes it is asked for. ``domain``: the one kind of requests that it was made for; empty: all
    kinds. ``expected``: the share of first guesses that were right on held-out texts; 0: unknown. ``sees_first``: it
    can draft only if it observed the step before, because it reads the target's hidden states. ``layers``: it drafts
    with the target's own layers. So it finds the prompt cached, and a node may cost a forward. ``predicts``: it drafts
    from predictions, so only requests with a prediction have this arm, or all if it was ``named``.
    """

    name: str
    most: int
    replayable: bool = False
    domain: str = ""
    expected: float = 0.0
    sees_first: bool = False
    layers: bool = False
    predicts: bool = False
    named: bool = False

    def suits(self, kind: str) -> bool:
        """Whether the arm is meant for requests of this kind."""
        return self.domain in ("", kind)


class ArmState:
    """The knowledge about one drafter, over all sequences."""

    def __init__(self, spec: Arm, number: int) -> None:
        self.spec = spec
        self.number = number
        self.sizes = sizes(spec.most)
        self.calibration = ScoreCalibration()
        self.record = Record(expected=spec.expected)
        self.seconds = DraftSeconds()
        self.gains = Gains(proved=spec.expected > 0)
        self.prompts = Account(TRIALS)
        """Pays for the first proposal in a sequence, for which the drafter must read the prompt."""
        self.reading = Reading()
        self.gain = START
        """Tokens that one proposal of a replayable drafter gains beyond the next best choice."""
        self.kinds: dict[str, KindState] = {}
        self.depth = DraftDepth()
        self.probes = 0
        """How many rows of probes its latest draft had beside its nodes; see `Draft`."""
        self.row = 0.0
        """Seconds of a forward of one row when it was asked last; 0 before."""
        self.unasked = 0
        """Steps since any sequence asked it."""
        self.is_opening = False
        """Whether some sequence makes it read a prompt in this step."""
        self._slow = 0  # how many proposals in a row took far longer than usual
        self._before: DraftSeconds | None = None  # the estimate before it became slow, until that is certain

    @property
    def trial(self) -> int:
        """Nodes of a trial: at least as many as probes, whose rows then cost at most as much as the test."""
        return min(self.spec.most, max(_TRIAL, self.probes))

    @property
    def trial_rows(self) -> int:
        """Rows of a trial: nodes and probes."""
        return self.trial + self.probes

    @property
    def is_forgotten(self) -> bool:
        """Whether it was asked so long ago that it is tried again, in case what is known about it is outdated."""
        return self.unasked >= _FORGOTTEN

    def levels(self, nodes: float) -> float:
        """Levels by which the time of a proposal of ``nodes`` nodes is estimated.

        A drafter that searches mostly finds nothing, in about the same time. Its proposals count by what was asked for.
        """
        return nodes if self.spec.replayable else self.depth.of(nodes)

    def levels_drafted(self, requested: int, drafts: Sequence[Draft]) -> float:
        """The same of what it drafted in a sequence's step, asked for ``requested`` nodes: one draft or none."""
        return requested if self.spec.replayable else max(map(levels_of, drafts), default=0)

    def drafting(self, nodes: float) -> float:
        """Seconds that a proposal of ``nodes`` nodes usually takes."""
        return self.seconds.of(self.levels(nodes))

    def kept(self) -> KeptArm:
        """The learned state, to keep for other routers on this machine."""
        kinds = {kind: (known.gain, *known.record.kept()) for kind, known in self.kinds.items()}
        return KeptArm(
            calibration=self.calibration.kept(),
            record=self.record.kept(),
            seconds=self.seconds.kept(),
            reading=self.reading.kept(),
            gain=self.gain,
            depth=self.depth.share,
            row=self.row,
            kinds=kinds,
        )

    def restore(self, kept: KeptArm, row: float) -> None:
        """Start from what another router learned; ``row``: seconds of a forward of one row here.

        Raises ValueError if the numbers are malformed.
        """
        self.gain, self.depth.share, self.row = checked((kept.gain, min(kept.depth, 1.0), kept.row), 3)
        if 0 < self.row < TINY:
            raise ValueError("a forward that takes no time")
        for part, numbers in (
            (self.calibration, kept.calibration),
            (self.record, kept.record),
            (self.seconds, kept.seconds),
            (self.reading, kept.reading),
        ):
            part.restore(numbers)
        for kind, (gain, *record) in kept.kinds.items():
            known = self.of_kind(kind)
            known.record.restore(record)
            (known.gain,) = checked((gain,), 1)
        if self.row:
            self.seconds.scale(row / self.row)
            self.reading.scale(row / self.row)
            self.row = row

    def of_kind(self, kind: str) -> KindState:
        """The knowledge about the drafter in sequences of one kind."""
        if kind not in self.kinds:
            self.kinds[kind] = KindState(self.record.of_kind(), self.gain)
        return self.kinds[kind]

    def may_open(self, token: float, *, pays: bool) -> bool:
        """Whether the drafter may read another prompt: one at a time, when the last one is paid off.

        If it is known, from drafts or held-out texts, and expected to pay, it may read any number. ``token``: seconds
        in which each sequence of the batch gains one token.
        """
        free = not self.is_opening and self.prompts.tokens_left(token) <= 0
        return free or (pays and (self.spec.expected > 0 or self.calibration.drafts >= _TESTED))

    def learn_seconds(
        self, levels: float, seconds: float, slowdown: float, forward: float, *, read: int, target: float
    ) -> None:
        """Learn from proposals of ``levels`` levels that took ``seconds`` each.

        ``slowdown``: how many times its usual seconds the step's ``forward`` took. ``read``: tokens of prompts that the
        drafter read for its first proposals in these sequences, which would take the target ``target`` seconds. That
        time is charged to `prompts` and teaches nothing about later proposals. It counts for at most 4 times the usual
        plus ``target``, so a drafter that was held up once, by a disk or a machine that sleeps, may still read other
        prompts.

        After two proposals in a row that took far longer than usual, the drafter counts as slow; after four, that is
        certain. If it is quick again before that, the machine had been held up.
        """
        known = self._before or self.seconds
        usual = known.of(levels)
        if read:
            most = 4 * self.reading.of(read) + target
            self.reading.learn(read, min(seconds / slowdown - usual, most))
            self.prompts.debt = max(self.prompts.debt, min(seconds - usual, most))
            return
        own = known.own_work(
            levels, seconds, slowdown, forward, forward * max(1.0, levels if self.spec.layers else 1.0)
        )
        self._slow = self._slow + 1 if usual and seconds / slowdown > 4 * usual + 0.25 * forward else 0
        if self._slow == _SLOWER:
            self._before, self.seconds = known, DraftSeconds(known.revision + 1)
        if not self._slow and self._before is not None:
            known.revision = self.seconds.revision + 1
            self.seconds = known
        if self._slow in (0, _SURELY):
            self._before = None
        self.seconds.learn(levels, seconds / slowdown if self._slow >= _SLOWER else own, forward)

    def booked(self, nodes: float) -> float:
        """Seconds charged for a proposal of ``nodes`` nodes. A slowness that may be an accident is not charged."""
        return (self._before or self.seconds).of(self.levels(nodes))


@dataclass(slots=True)
class KindState:
    """The knowledge about one drafter in sequences of one kind; the next such sequence starts from it."""

    record: Record
    gain: float
    """Like `ArmState.gain`."""


@dataclass(slots=True)
class ArmCounts:
    """How one drafter was used in one sequence, in the order of the fields of `Routed`."""

    asked: int = 0
    verified: int = 0
    trials: int = 0
    expected: float = 0.0
    accepted: int = 0
    expected_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class ArmInSequence:
    """The knowledge about one drafter in one sequence."""

    state: ArmState
    kind: KindState
    limit: int
    """Most nodes of the next draft. It doubles with each draft of which a node was right."""
    record: Record
    gain: float
    requested_at: int = 0
    """Length of the sequence, in tokens, when it was asked last."""
    won: float = 0.0
    """Seconds that its drafts have lately gained here beyond their cost."""
    is_open: bool = False
    """Whether it was asked here, and so has read the prompt."""
    is_lost: bool = False
    """Whether it failed here."""
    is_ready: bool = True
    """Whether it can draft in this step; see `Arm`."""
    tested: float = 0
    """How many levels of its drafts were tested here; it starts with a few from other sequences of this kind."""
    counts: ArmCounts = field(default_factory=ArmCounts)

    @staticmethod
    def of(state: ArmState, kind: str) -> ArmInSequence:
        """The arm in a sequence of this kind; empty: of no kind."""
        known = state.of_kind(kind)
        tested = _PRIOR if state.spec.expected else min(_PRIOR, known.record.weight)
        first = _FIRST_OWN if state.spec.layers and not state.seconds.is_known else _FIRST
        limit = state.spec.most if state.calibration.drafts >= _KNOWN else min(max(first, state.trial), state.spec.most)
        return ArmInSequence(state, known, limit, known.record.of_sequence(), known.gain, tested=tested)

    def restart(self, nodes: int) -> None:
        """Begin with short drafts again, of at most ``nodes`` or those of a trial.

        A right token or two of a long proposal do not show that the rest is right.
        """
        self.limit = min(self.limit, max(nodes, self.state.trial))

    def stake(self, token: float) -> float:
        """Seconds that a proposal longer than a trial may cost: what its drafts have gained, here or elsewhere.

        At least the credit with which a sequence begins.
        """
        return max(self.won, token * max(START, self.state.gains.tokens))

    def book(self, loss: float, token: float) -> None:
        """Book a proposal's loss in seconds. Plain decoding takes ``token`` seconds per token."""
        self.won = max(0.0, self.won - loss)
        self.state.gains.book(loss, token)

    def charge(self, seconds: float, length: int) -> int:
        """Add the seconds of a proposal. Returns how many of the sequence's tokens the drafter read for the first time.

        A first proposal reads all of them, unless it drafts with the target's layers.
        """
        self.counts.seconds += seconds
        was_open, self.is_open = self.is_open, True
        return 0 if was_open or self.state.spec.layers else length

    def learn(self, outcome: Outcome, expected: float) -> None:
        """Learn from a proposal, compared with what its step committed."""
        draft, path, tested = outcome
        nodes = len(draft) - draft.probes
        if not nodes or not tested:
            return
        chained = isinstance(tested, range)
        last = len(tested) > len(path) and (chained or not path or draft.tree.parents[tested[-1]] == path[-1])
        self.record.learn(len(path), last, len(tested), expected)
        self.tested += len(path) + last
        self.state.depth.learn(nodes, nodes if chained else levels_of(draft))
        if path:
            self.limit = min(2 * self.limit, self.state.spec.most)

    def learn_gain(self, tokens: float) -> None:
        """Learn that a proposal would gain ``tokens`` tokens beyond the next best choice."""
        self.gain += (1 - _GAIN_DECAY) * (tokens - self.gain)
        for known in (self.state, self.kind):
            known.gain += (1 - _WHOLE_DECAY) * (tokens - known.gain)


def levels_of(draft: Draft) -> int:
    """How many levels the nodes of a draft have, without its probes."""
    nodes = len(draft) - draft.probes
    return nodes if trees.is_chain(draft.tree) else max(trees.depths(draft.tree)[:nodes], default=0)


def restored(state: ArmState, kept: KeptArm | None, row: float) -> ArmState:
    """The arm with its kept state, if that is usable. ``row``: seconds of a forward of one row."""
    if kept is not None:
        try:
            state.restore(kept, row)
        except ValueError as error:
            _log.warning("what was kept of %s can't be used (%s): it is learned anew", state.spec.name, error)
            return ArmState(state.spec, state.number)
    return state
