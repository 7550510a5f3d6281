"""The protocols of drafter, accept rule, budget policy and cost, and the data that they exchange with the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from parlay.types.base import DraftKind, Exactness, FieldError
from parlay.types.canvas import ONE_CANVAS, CanvasLayout, Selector
from parlay.types.drafts import Draft, Fault, Verdict
from parlay.types.requests import SequenceView
from parlay.types.results import RouterRecord

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """A drafter's needs from the engine. The cost of providing it is charged to the drafter, as its proposals are.

    ``taps``: it reads the hidden states that enter these layers (``num_layers``: those that the LM head reads), as in
    `Observation`, and computes missing ones by `SequenceView.layers`. ``top_k``: how many of the sampler's best tokens
    it sees at the root and at each node, rejected ones and probes included. ``layers``: it drafts with the target's own
    layers, through `SequenceView.layers`. ``outcomes`` False: it learns all it needs from the committed tokens, so
    `Drafter.observe` need not be called. ``expected``: the share of its first guesses that were right on held-out
    texts; 0: unknown. ``beside``: it drafts on during the target's forwards, as a `BesideDrafter`; time by which these
    take longer is charged to it.
    """

    taps: tuple[int, ...] = ()
    top_k: int = 0
    layers: bool = False
    outcomes: bool = True
    expected: float = 0.0
    beside: bool = False


NOTHING_NEEDED = Needs(outcomes=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of a sequence as its drafters see it, after its tokens are committed.

    ``taps``: hidden states ``[T, H]`` of the tokens at positions ``start`` to ``start + T - 1``, which the step
    computed and committed: pending tokens, then the path. A position may come twice, as after a preemption. Some
    positions never come: those cached before (a prefix hit, a fork), and those of decoding steps in which the policy
    did not let the drafter draft. `Layers.states` computes the missing ones. ``top_k``: for the root and then each
    node, the tokens that the request's own sampler ranks highest there, noise included; the first is what plain
    decoding would commit after that path. Both are given only if the drafter's needs name them, and ``top_k`` only in
    steps in which the policy is active.
    """

    view: SequenceView
    draft: Draft
    verdict: Verdict
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    top_k: tuple[tuple[int, ...], ...] = ()
    start: int = 0


class Drafter(Protocol):
    """Proposes drafts.

    Its state is a cache of the sequence's tokens: `propose` compares it with the sequence, and truncates or catches up.
    So forks, preemption, skipped steps and failures need no calls of their own.
    """

    @property
    def needs(self) -> Needs:
        """The drafter's needs, constant for its lifetime, so a class attribute will do."""
        ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Return one draft per view, of at most its budget of nodes without probes. `NO_DRAFT` proposes nothing."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from committed tokens, and from rejected rows if the needs ask for them.

        Called for the first step of a sequence, for steps in which the policy gives the drafter a budget, and for steps
        that are tapped for it.
        """
        ...

    def release(self, sequence: int) -> None:
        """Free the state of a sequence that has ended. Unknown names are ignored."""
        ...


@runtime_checkable
class BesideDrafter(Drafter, Protocol):
    """A drafter that drafts on during the target's forwards: its needs say ``beside``."""

    @property
    def is_drafting(self) -> bool:
        """Whether it is drafting right now."""
        ...

    def halves_pay(self, views: Sequence[SequenceView], whole: float, half: float, *, now: bool) -> bool:
        """Whether these sequences, for which it was asked last, should be verified in two halves in turn.

        It would then draft for one half while the other is verified. ``whole`` and ``half``: seconds of a forward over
        all of them and over half of them. ``now``: whether they are verified in halves at present.
        """
        ...

    def look_ahead(self, views: Sequence[SequenceView]) -> None:
        """Note the sequences that sit out the next forward and are asked for after it. Empty: none sits out.

        The next `propose` starts drafting for them.
        """
        ...


class AcceptRule(Protocol):
    """Decides which drafted nodes are accepted: a pure function from logits to verdicts, for some kinds of drafts."""

    @property
    def exactness(self) -> Exactness: ...

    @property
    def kinds(self) -> frozenset[DraftKind]: ...

    def matches(self, view: SequenceView) -> bool:
        """Whether the sequence's text under this rule is exactly plain decoding's, whatever is drafted."""
        ...

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """Return a verdict, or a fault, for each sequence.

        Row ``roots[i]`` of ``logits_RV`` belongs to the root of sequence i, and row ``roots[i] + 1 + node`` to a node
        of its draft. Other rows are not for this rule. A fault ends only its own sequence.
        """
        ...


KeptCost = Mapping[str, tuple[float, ...]]
"""What was learned about the cost of steps, as numbers for later processes, by the longest context they hold for."""

NO_COST: KeptCost = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PowerModel:
    """The power that a machine draws while it decodes.

    ``watts``: while anything decodes or drafts. ``row_joules``: what each row of a forward adds. ``source``: one line
    on how these are known, beginning with "measured" or "modelled".
    """

    watts: float
    row_joules: float
    source: str

    def mean(self, rows: int, seconds: float) -> float:
        """Mean watts over a forward of these rows and seconds."""
        return self.watts + self.row_joules * rows / seconds

    def __str__(self) -> str:
        return f"{self.watts:.3g} W and {1000 * self.row_joules:.3g} mJ a row, {self.source}"


class Cost(Protocol):
    """Seconds of steps, measured or modelled: the forward and the engine's own work, but no work done for drafters."""

    @property
    def revision(self) -> int:
        """Raised when an estimate has changed enough to matter.

        Until then, prices derived from `forward` stay valid.
        """
        ...

    def forward(self, rows: int, context: int) -> float:
        """Seconds of a step with ``rows`` rows in all, over sequences of ``context`` tokens on average."""
        ...

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        ...


class Spent(NamedTuple):
    """The cost of one step of a sequence: its share of drafting, and the forward that verified its draft.

    ``draft_seconds``: planning, proposing, ranking tokens for drafters, and showing them the step. ``context``: mean
    length of the batch's texts before the forward's commits. ``by_drafter``: seconds of each of the strategy's
    drafters; ``planning_seconds``: those of its policy; both for all its sequences together. ``called``: whether each
    drafter's ``propose`` was called; empty: every drafter that was asked. A drafter is asked but
    not called if no draft has room.
    """

    draft_seconds: float
    verify_seconds: float
    rows: int
    context: int
    by_drafter: tuple[float, ...] = ()
    planning_seconds: float = 0.0
    called: tuple[bool, ...] = ()


NOTHING_SPENT = Spent(0.0, 0.0, 0, 0)


class Budgets(NamedTuple):
    """How many nodes each sequence may draft in this step. 0 is always allowed and costs nothing.

    ``drafters``: by sequence, which of the strategy's drafters is asked now; empty: the first. ``watching``: by
    sequence, which other drafters observe the step, so that they need not catch up later. ``inactive``: if all budgets
    are 0, for how many more steps they stay 0. In these steps the policy is not called, as long as the same sequences
    run.
    """

    nodes: Sequence[int]
    inactive: int = 0
    drafters: Sequence[int] = ()
    watching: Sequence[tuple[int, ...]] = ()


class Policy(Protocol):
    """Sets budgets and chooses among drafters. There is one per strategy, which keeps its own state per sequence.

    If several groups of sequences are in flight, it plans for one group before it has learned from another's step.
    """

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        """Set budgets for a step. Called before each step in which the policy is not inactive."""
        ...

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        """Set budgets for the next drafter, given the drafts just proposed: None from a drafter that failed.

        Called after each drafter that was asked. If all budgets are 0, no further drafter is asked.
        """
        return Budgets([0] * len(views))

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        """Cut drafts down to the nodes that pay. ``drafts``: the last one proposed for each sequence.

        A policy that asked several drafters may return an earlier proposal of this step instead.
        """
        ...

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        """Learn from a step, after its tokens are committed.

        ``accepted``: accepted nodes of each draft, empty drafts included.
        """
        ...

    def report(self, sequence: int) -> RouterRecord | None:
        """Return the router's record of this sequence; None if the policy does not choose among drafters."""
        return None

    def release(self, sequence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Escape:
    """When a lossy text changes to another ``rule``: just before its running score would fall below ``floor``.

    The score is the mean of p(token) / max p over the output's tokens, by the target's unedited logits.
    """

    floor: float
    rule: AcceptRule


@dataclass(frozen=True, slots=True)
class Strategy:
    """Drafters (mostly one, or none), accept rule and budget policy under one name.

    With a ``selector``, text is written on canvases with this ``layout``; then there are no drafters, and the rule is
    not used. Raises ValueError for a selector together with drafters.
    """

    name: str
    drafters: tuple[Drafter, ...]
    rule: AcceptRule
    policy: Policy
    escape: Escape | None = None
    selector: Selector | None = None
    layout: CanvasLayout = ONE_CANVAS

    def __post_init__(self) -> None:
        if self.selector is not None and self.drafters:
            raise FieldError("strategy", f"{self.name} has a selector and drafters: give it one of the two")

    @property
    def exactness(self) -> Exactness:
        return (self.selector or self.rule).exactness
