"""One sample while it is decoded: its tokens, how many of them are cached, its request and its strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parlay.engine.tally import Tally
from parlay.types import Exactness, Layers, Metrics, Needs, Request, Strategy, TokenLogprobs

NOTHING_NEEDED = Needs(outcomes=False)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way; the `SequenceView` that drafters, rules and policies see.

    Invariant: the runner holds ``tokens[:cached]``, so ``tokens[cached:]`` is pending and ends with the root.
    """

    sequence: int
    request: Request
    strategy: Strategy
    exactness: Exactness
    tokens: list[int]
    prompt_length: int
    needs: Needs = NOTHING_NEEDED
    """What its drafter wants from each step."""
    layers: Layers | None = None
    cached: int = 0
    is_open: bool = False
    admitted: bool = False
    """Whether it has run before, even if it was preempted since."""
    drafting: bool = True
    """False after its drafter or its policy raised."""
    tally: Tally = field(default_factory=Tally)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    def drop_drafter(self) -> None:
        """Decode plainly from now on."""
        self.drafting, self.needs = False, NOTHING_NEEDED
        self.tally.drafter_faults += 1

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

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
            completion_tokens=self.output_length,
            first_step_tokens=tally.first_step_tokens,
            steps=tally.steps,
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
        )


def _by_depth(counts: Counter[int]) -> tuple[int, ...]:
    """From depth 1 on."""
    return tuple(counts[depth] for depth in range(1, max(counts, default=0) + 1))
