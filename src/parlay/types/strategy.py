"""The parts of a strategy: protocols of drafter, accept rule, budget policy and cost, and the data that they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from parlay.types.base import DraftKind, Exactness
from parlay.types.canvas import ONE_CANVAS, CanvasLayout, Selector
from parlay.types.drafts import Draft, Fault, Verdict
from parlay.types.requests import SequenceView
from parlay.types.results import RouterRecord

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """A drafter's wishes of the engine: layers to tap, and how many of each verified row's best tokens to see.

    ``taps``: the drafter reads the hidden states that enter these layers (the number of layers stands for those that
    the LM head reads), as `Observation` says, and computes those that it lacks by `SequenceView.layers`. ``top_k``:
    the rows are the root's and all nodes', rejected ones and probes included. ``layers``: it drafts with the target's
    own layers, which it then finds as `SequenceView.layers`. ``outcomes`` False: the committed tokens tell it all that
    it wants to know: `Drafter.observe` need not be called. What a drafter sees is charged to it, as its proposals are.
    ``expected``: the share of its first guesses that were right on held-out texts; 0: not known.
    ``beside``: it goes on drafting during the target's forwards, as a `BesideDrafter`. What these take longer than
    usual is charged to it.
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
    """A step of one sequence as its drafters see it, when the tokens are already committed.

    ``taps`` holds the hidden states ``[T, H]`` of the tokens at positions ``start`` to ``start + T - 1``, which the
    step computed and committed: pending ones, then the path. Positions may come again, as after a preemption. Some
    never come: the step does not compute what was cached before (a prefix hit, a fork), and it is not tapped if it only
    decodes and the policy did not let the drafter draft. `Layers.states` gives what is lacking. ``top_k`` holds for
    the root and then each node the tokens that the request's own sampler prefers there, noise included, best first:
    the first is what plain decoding would commit after that path. Each only if the drafter's needs name it, and
    ``top_k`` only of steps in which the policy is active.
    """

    view: SequenceView
    draft: Draft
    verdict: Verdict
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    top_k: tuple[tuple[int, ...], ...] = ()
    start: int = 0


class Drafter(Protocol):
    """Proposes. Its state is a cache keyed by the tokens: `propose` compares what it holds with the sequence and
    truncates or catches up, so forks, preemption, skipped steps and failures need no further calls.
    """

    @property
    def needs(self) -> Needs:
        """Constant for each drafter: a class attribute will do."""
        ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """One draft per view, of at most its budget of nodes, probes not counted; `NO_DRAFT` for nothing to propose."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from committed tokens (and from rejected rows, if asked for).

        Called for the first step of a sequence, then for those in which the policy gives it a budget, and for those
        that are tapped for it.
        """
        ...

    def release(self, sequence: int) -> None:
        """The sequence is over: free what is held for it. Unknown names are ignored."""
        ...


@runtime_checkable
class BesideDrafter(Drafter, Protocol):
    """A drafter whose needs say ``beside``."""

    @property
    def is_drafting(self) -> bool:
        """Whether it drafts at this moment."""
        ...

    def halves_pay(self, views: Sequence[SequenceView], whole: float, half: float, *, now: bool) -> bool:
        """Whether these sequences, for which it was asked last, had better be verified in two halves, by turns.

        Then it drafts for one half while the other is verified. ``whole`` and ``half`` are the seconds of a forward of
        all and of half of them; ``now`` says whether they are verified in halves at present.
        """
        ...

    def look_ahead(self, views: Sequence[SequenceView]) -> None:
        """Note who takes no part in the next forward but is asked for after it. None: all take part again.

        The next `propose` begins to draft for them.
        """
        ...


class AcceptRule(Protocol):
    """Accepts: a pure function from logits to verdicts. It refuses drafts whose kind it can't handle."""

    @property
    def exactness(self) -> Exactness: ...

    @property
    def kinds(self) -> frozenset[DraftKind]: ...

    def matches(self, view: SequenceView) -> bool:
        """Whether the sequence's text is plain decoding's own under this rule, whatever is drafted."""
        ...

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """Row ``roots[i]`` of ``logits_RV`` is the root's of sequence i, and ``roots[i] + 1 + node`` that of a node.

        Rows outside these belong to nobody here. A fault stays with its sequence.
        """
        ...


KeptCost = Mapping[str, tuple[float, ...]]
"""What was learned of the cost of steps, as numbers for later processes: by the longest context they hold for."""

NO_COST: KeptCost = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PowerModel:
    """The power that a machine draws while it decodes.

    ``watts`` while anything decodes or drafts, and ``row_joules`` for each row of a forward beyond that. ``source``
    says in one line how these are known: it begins with "measured" or "modelled".
    """

    watts: float
    row_joules: float
    source: str

    def mean(self, rows: int, seconds: float) -> float:
        """Watts in the mean over a forward of so many rows and seconds."""
        return self.watts + self.row_joules * rows / seconds

    def __str__(self) -> str:
        return f"{self.watts:.3g} W and {1000 * self.row_joules:.3g} mJ a row, {self.source}"


class Cost(Protocol):
    """The seconds of steps: a forward and the engine's work around it, but nothing that is done for drafters.

    It is measured or modelled.
    """

    @property
    def revision(self) -> int:
        """Raised whenever an estimate has moved enough to matter: what was worked out from `forward` still holds until
        then.
        """
        ...

    def forward(self, rows: int, context: int) -> float:
        """Seconds of a step of ``rows`` rows in all, over sequences of ``context`` tokens on average."""
        ...

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a step that was taken."""
        ...


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one step of a sequence: its drafters' part, and the forward that verified its draft.

    ``draft_seconds`` go to planning, proposing, ranking what drafters want to see, and showing it. ``context`` is the
    mean length of the batch's texts in that forward, before it committed anything. ``by_drafter`` are the seconds of
    each of the strategy's drafters, and ``planning_seconds`` those of its policy, for all its sequences together.
    ``called`` says which drafters were called, empty: all that were asked. One that was asked where there is no room
    for a draft is not.
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
    """How many nodes each sequence may draft in this step; 0 is always allowed and costs nothing.

    Where all are 0, they are 0 for ``inactive`` more steps. In these the policy is not called, as long as the same
    sequences run. ``drafters`` says by sequence which of the strategy's drafters is asked now; empty: the first.
    ``watching`` says by sequence which others shall see the step, asked or not, so that they need not catch up later.
    """

    nodes: Sequence[int]
    inactive: int = 0
    drafters: Sequence[int] = ()
    watching: Sequence[tuple[int, ...]] = ()


class Policy(Protocol):
    """Sets budgets, and chooses among drafters. One per strategy; its state per sequence is its own.

    Where groups of sequences are in flight, it plans for one group before it has learned from another's step.
    """

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        """Called before each step, but for those in which it said it would be inactive."""
        ...

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        """Whom to ask next, now that these drafts were proposed; None where the drafter failed, for good.

        Called after each drafter that was asked. Budgets of 0: nobody any more.
        """
        return Budgets([0] * len(views))

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        """Cut drafts down to the nodes that pay. ``drafts``: what was proposed last for each sequence.

        A policy that asked several drafters may return an earlier proposal of this step instead.
        """
        ...

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        """One step is over: of each draft, empty ones too, so many nodes were accepted; their tokens are committed."""
        ...

    def report(self, sequence: int) -> RouterRecord | None:
        """Tell what it did in this sequence, if it chooses among drafters."""
        return None

    def release(self, sequence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Escape:
    """Where a lossy text goes on under another ``rule``: before its running score would fall below ``floor``.

    The score is the mean of p(token) / max p over the tokens of the output, by the target's logits as they are before
    anything edits them.
    """

    floor: float
    rule: AcceptRule


@dataclass(frozen=True, slots=True)
class Strategy:
    """Drafters (mostly one, or none), accept rule and budget policy under one name.

    With a ``selector`` the text is written on canvases, which have the ``layout``. Then there are no drafts, so no
    drafters, and the rule is not asked. Raises ValueError for a selector beside drafters.
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
            raise ValueError(f"strategy {self.name} has a selector and drafters: give it one of the two")

    @property
    def exactness(self) -> Exactness:
        return (self.selector or self.rule).exactness
