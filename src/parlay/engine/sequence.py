"""One sample while it is decoded: its tokens, what of them is cached, and what has been counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parlay import trees
from parlay.types import Draft, Exactness, Layers, Metrics, Request, Strategy, TokenLogprobs


@dataclass(slots=True)
class Tally:
    """What the engine counts for one sample; the only counter there is. Seconds are wall time of its steps."""

    steps: int = 0
    draft_steps: int = 0
    first_step_tokens: int = 0
    cached_tokens: int = 0
    drafter_faults: int = 0
    layer_rows: int = 0
    layer_seconds: float = 0.0
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    branched_by_depth: Counter[int] = field(default_factory=Counter)
    chains: Counter[int] = field(default_factory=Counter)
    """Drafts without branches, by length: the nodes of all others are counted by depth."""
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def count_step(self, draft: Draft, path: tuple[int, ...], committed: int) -> None:
        """A forward committed ``committed`` tokens, the nodes of ``path`` among them."""
        if self.steps == 0:
            self.first_step_tokens = committed
        self.steps += 1
        proposed = len(draft) - draft.probes
        self.outcomes[proposed, len(path)] += 1
        if proposed:
            self.draft_steps += 1
            self._count_sources(draft, path, proposed)
            if trees.is_chain(draft.tree):
                self.chains[proposed] += 1
            else:
                self.branched_by_depth.update(trees.depths(draft.tree)[:proposed])

    def _count_sources(self, draft: Draft, path: tuple[int, ...], proposed: int) -> None:
        """Mostly one drafter proposed all nodes."""
        sources = draft.sources
        first = sources[0]
        if sources.count(first) == len(sources):
            self.drafted_by_source[first] += proposed
            if path:
                self.accepted_by_source[first] += len(path)
        else:
            self.drafted_by_source.update(sources[:proposed])
            self.accepted_by_source.update(trees.along(sources, path))

    @property
    def drafted_by_depth(self) -> tuple[int, ...]:
        """Nodes proposed at each depth, from 1 on."""
        deepest = max(max(self.branched_by_depth, default=0), max(self.chains, default=0))
        levels = range(1, deepest + 1)
        return tuple(_reaching(self.chains, depth) + self.branched_by_depth[depth] for depth in levels)

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """Nodes accepted at each depth: a path of so many has one at each depth up to that."""
        paths: Counter[int] = Counter()
        for (_, accepted), steps in self.outcomes.items():
            paths[accepted] += steps
        return tuple(_reaching(paths, depth) for depth in range(1, max(paths, default=0) + 1))

    def count_layers(self, rows: int, seconds: float) -> None:
        """Drafting ran rows of this sequence through the target's own layers."""
        self.layer_rows += rows
        self.layer_seconds += seconds

    def count_seconds(self, prefill: bool, draft: float, verify: float, overhead: float) -> None:
        """Add one step's wall time; until a step has committed, all of it is prefill."""
        if prefill:
            self.prefill_seconds += draft + verify + overhead
            return
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.overhead_seconds += overhead


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way; the `View` that drafters, rules and policies see.

    Invariant: the runner holds ``tokens[:cached]``, so ``tokens[cached:]`` is pending and ends with the root.
    """

    sequence: int
    request: Request
    strategy: Strategy
    exactness: Exactness
    tokens: list[int]
    prompt_length: int
    layers: Layers | None = None
    cached: int = 0
    is_open: bool = False
    admitted: bool = False
    """It has been running, if only until it was preempted."""
    drafting: bool = True
    """False once its drafter raised: the request goes on plainly."""
    tally: Tally = field(default_factory=Tally)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed under ``max_tokens``; the engine has made that a number."""
        limit = self.request.params.max_tokens
        assert limit is not None
        return limit - self.output_length

    def metrics(self) -> Metrics:
        tally = self.tally
        return Metrics(
            strategy=self.strategy.name,
            exactness=self.exactness,
            prompt_tokens=self.prompt_length,
            cached_tokens=tally.cached_tokens,
            completion_tokens=self.output_length,
            first_step_tokens=tally.first_step_tokens,
            steps=tally.steps,
            draft_steps=tally.draft_steps,
            draft_tokens=tally.drafted_by_source.total(),
            accepted_tokens=tally.accepted_by_source.total(),
            accepted_by_source=dict(tally.accepted_by_source),
            drafted_by_source=dict(tally.drafted_by_source),
            accepted_by_depth=tally.accepted_by_depth,
            drafted_by_depth=tally.drafted_by_depth,
            outcomes=dict(tally.outcomes),
            drafter_faults=tally.drafter_faults,
            layer_rows=tally.layer_rows,
            layer_seconds=tally.layer_seconds,
            prefill_seconds=tally.prefill_seconds,
            draft_seconds=tally.draft_seconds,
            verify_seconds=tally.verify_seconds,
            overhead_seconds=tally.overhead_seconds,
        )


def _reaching(lengths: Counter[int], depth: int) -> int:
    """How many, counted by length, are at least so long."""
    return sum(count for length, count in lengths.items() if length >= depth)
