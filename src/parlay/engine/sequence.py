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
    """A request under way; drafters, rules and policies see it as a `SequenceView`.

    Invariant: the runner's cache holds ``tokens[:cached]``. So ``tokens[cached:]`` are the pending tokens, at least
    one, and the last of them is the root.
    """

    sequence: int
    request: Request
    strategy: Strategy
    exactness: Exactness
    tokens: list[int]
    prompt_length: int
    needs: tuple[Needs, ...] = ()
    """What each drafter of the strategy needs from a step. A drafter that failed for this sequence needs nothing."""
    layers: Layers | None = None
    canvas: Canvas | None = None
    """The places after its tokens, if its strategy has a selector."""
    moves: list[Move] = field(default_factory=list)
    """Runs of ``moved_text`` whose cached keys are still to be moved into this sequence, in order of their places."""
    moved_text: list[int] = field(default_factory=list)
    cached: int = 0
    is_open: bool = False
    admitted: bool = False
    """Whether it has ever run."""
    preempted: bool = False
    """Whether it was ever preempted. Tokens that it finds cached afterwards are its own, so they are not counted as
    hits."""
    drafting: bool = True
    """False once its policy, or every one of its drafters, has raised: it then decodes plainly."""
    lost: set[int] = field(default_factory=set)
    """Numbers of the drafters that raised, by their place in the strategy."""
    tally: Tally = field(default_factory=Tally)
    chosen: ChosenKeys = field(default_factory=ChosenKeys)
    """The cached keys that a draft pass attends to, for drafters that draft with few keys."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    rule: AcceptRule = field(init=False)
    """The strategy's accept rule, or that of its `Escape` once the text has left the lossy rule."""
    confidence: float = 0.0
    """Sum of p(token) / max p over the output so far; only kept while the sequence may still escape."""
    escaped_at: int | None = None
    """Output length at which the sequence escaped."""
    reads_ahead: bool = False
    """Whether its last step fed more of its negative prompt and decoded nothing."""
    beside: BesideDrafter | None = None
    """The drafter that was asked for it in its last step, if that drafter drafts on during forwards."""
    lost_members: tuple[str, ...] = ()
    origin: Origin | None = None
    """Where in the datastore its last token is from, if the target mixes in a datastore's distribution."""

    def __post_init__(self) -> None:
        self.rule = self.strategy.rule

    def escape(self) -> None:
        """Decode from now on under the rule of the strategy's `Escape`."""
        assert self.strategy.escape is not None
        self.rule, self.escaped_at = self.strategy.escape.rule, self.output_length

    def lose_members(self, names: tuple[str, ...]) -> None:
        """Note models that its ensemble has lost: the text goes on without them, so it is no longer exact."""
        # After a preemption, other members may be lost.
        self.lost_members = tuple(dict.fromkeys((*self.lost_members, *names)))
        self.exactness = Exactness.LOSSY

    def drop_drafter(self, number: int) -> None:
        """Stop using this drafter of the strategy for the sequence. Without any drafter it decodes plainly."""
        self.needs = tuple([NOTHING_NEEDED if each == number else need for each, need in enumerate(self.needs)])
        self.lost.add(number)
        self.drafting = self.drafting and len(self.lost) < len(self.needs)
        self.tally.drafter_faults += 1

    def drop_policy(self) -> None:
        """Stop drafting for the sequence: it decodes plainly from now on."""
        self.drafting, self.needs = False, ()
        self.tally.drafter_faults += 1

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def places(self) -> int:
        """How many rows its canvas takes in a forward."""
        return 0 if self.canvas is None else len(self.canvas.places)

    @property
    def ends(self) -> Ends | None:
        """How its canvas tells where the answer ends, if the canvas is the whole answer."""
        return None if self.canvas is None else self.canvas.spec.ends

    @property
    def progress(self) -> int:
        """How far the sequence is: its tokens, and the decided places of its canvas."""
        return len(self.tokens) + (0 if self.canvas is None else len(self.canvas.places) - len(self.canvas.open))

    @property
    def decodes(self) -> bool:
        """Whether the next step decodes: its pending tokens are the last step's, not an uncached prompt's."""
        if self.reads_ahead:
            return False
        return len(self.tokens) - self.cached <= (1 if self.canvas is None else max(1, self.canvas.size))

    def room(self, max_context: int) -> int:
        """How many more tokens ``max_tokens`` (a number by now) and the context allow."""
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
    """The counts as a tuple that begins at depth 1."""
    return tuple(counts[depth] for depth in range(1, max(counts, default=0) + 1))
