"""One sample while it is decoded: its tokens, how many of them are cached, its request and its strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parlay.engine.chosen_keys import ChosenKeys
from parlay.engine.tally import Tally
from parlay.types import (
    NOTHING_NEEDED,
    AcceptRule,
    BesideDrafter,
    Canvas,
    Ends,
    Exactness,
    Layers,
    Metrics,
    Move,
    Needs,
    Origin,
    Request,
    Strategy,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way; the `SequenceView` that drafters, rules and policies see.

    Invariant: the runner holds ``tokens[:cached]``, so ``tokens[cached:]`` is pending and ends with the root. There is
    always a pending token.
    """

    sequence: int
    request: Request
    strategy: Strategy
    exactness: Exactness
    tokens: list[int]
    prompt_length: int
    needs: tuple[Needs, ...] = ()
    """What each drafter of its strategy wants from each step; nothing, if it failed here."""
    layers: Layers | None = None
    canvas: Canvas | None = None
    """The places that follow its tokens, if its strategy has a selector."""
    moves: list[Move] = field(default_factory=list)
    """What is still to be moved to its cached text, in order, from ``moved_text``."""
    moved_text: list[int] = field(default_factory=list)
    cached: int = 0
    is_open: bool = False
    admitted: bool = False
    """Whether it has run before, even if it was preempted since."""
    preempted: bool = False
    """Whether it ever was. What it finds cached afterwards is no gain, so nobody counts it."""
    drafting: bool = True
    """False after its policy or all of its drafters raised."""
    lost: set[int] = field(default_factory=set)
    """The drafters that raised."""
    tally: Tally = field(default_factory=Tally)
    chosen: ChosenKeys = field(default_factory=ChosenKeys)
    """Cached keys that its own drafts see, where a drafter asks for that."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    rule: AcceptRule = field(init=False)
    """The strategy's, until the text escapes from it."""
    confidence: float = 0.0
    """Sum over the output of p(token) / max p, while the strategy has an escape and it was not taken."""
    escaped_at: int | None = None
    reads_ahead: bool = False
    """Whether its last step read on in its negative prompt and decided nothing."""
    beside: BesideDrafter | None = None
    """Who was asked for it in its last step, if that drafter goes on during forwards."""
    lost_members: tuple[str, ...] = ()
    origin: Origin | None = None
    """Of its last token, where the target mixes its law with a datastore's."""

    def __post_init__(self) -> None:
        self.rule = self.strategy.rule

    def escape(self) -> None:
        """Go on under the rule that the strategy names for this."""
        assert self.strategy.escape is not None
        self.rule, self.escaped_at = self.strategy.escape.rule, self.output_length

    def lose_members(self, names: tuple[str, ...]) -> None:
        """Note the models of an ensemble without which its text goes on: nothing is promised of it any more."""
        self.lost_members = tuple(dict.fromkeys((*self.lost_members, *names)))  # after a preemption others may be
        self.exactness = Exactness.LOSSY

    def drop_drafter(self, number: int) -> None:
        """Go on without this drafter of the strategy; without any, plainly."""
        self.needs = tuple([NOTHING_NEEDED if each == number else need for each, need in enumerate(self.needs)])
        self.lost.add(number)
        self.drafting = self.drafting and len(self.lost) < len(self.needs)
        self.tally.drafter_faults += 1

    def drop_policy(self) -> None:
        """Decode plainly from now on."""
        self.drafting, self.needs = False, ()
        self.tally.drafter_faults += 1

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def places(self) -> int:
        """How many rows its canvas takes."""
        return 0 if self.canvas is None else len(self.canvas.places)

    @property
    def ends(self) -> Ends | None:
        """How its canvas ends, if that is its answer."""
        return None if self.canvas is None else self.canvas.spec.ends

    @property
    def progress(self) -> int:
        """How far it is: its tokens, and places of its canvas that are decided."""
        return len(self.tokens) + (0 if self.canvas is None else len(self.canvas.places) - len(self.canvas.open))

    @property
    def decodes(self) -> bool:
        """Whether its pending tokens are those of the last step, and not a prompt's."""
        if self.reads_ahead:
            return False
        return len(self.tokens) - self.cached <= (1 if self.canvas is None else max(1, self.canvas.size))

    def room(self, max_context: int) -> int:
        """How many tokens ``max_tokens`` (a number by now) and the context still allow."""
        limit = self.request.params.max_tokens
        assert limit is not None
        return max(0, min(self.prompt_length + limit, max_context) - len(self.tokens))

    def metrics(self) -> Metrics:
        tally, nodes = self.tally, self.tally.nodes()
        return Metrics(
            strategy=self.strategy.name,
            exactness=self.exactness,
            prompt_tokens=self.prompt_length,
            cached_tokens=tally.cached_tokens,
            completion_tokens=self.output_length - len(self.request.written),
            first_step_tokens=tally.first_step_tokens,
            steps=tally.steps,
            rows=tally.rows,
            draft_steps=tally.draft_steps,
            draft_tokens=nodes.drafted_by_source.total(),
            accepted_tokens=nodes.accepted_by_source.total(),
            accepted_by_source=dict(+nodes.accepted_by_source),
            drafted_by_source=dict(nodes.drafted_by_source),
            accepted_by_depth=_by_depth(+nodes.accepted_by_depth),
            drafted_by_depth=_by_depth(nodes.drafted_by_depth),
            outcomes=dict(+nodes.outcomes),
            drafter_faults=tally.drafter_faults,
            layer_rows=tally.layer_rows,
            layer_seconds=tally.layer_seconds,
            prefill_seconds=tally.prefill_seconds,
            draft_seconds=tally.draft_seconds,
            verify_seconds=tally.verify_seconds,
            overhead_seconds=tally.overhead_seconds,
            lost_members=self.lost_members,
        )


def _by_depth(counts: Counter[int]) -> tuple[int, ...]:
    """From depth 1 on."""
    return tuple(counts[depth] for depth in range(1, max(counts, default=0) + 1))
