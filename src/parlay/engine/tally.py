"""Counts of one sample while it is decoded: steps, drafts, nodes, and seconds by the engine's clock.

A clock that jumps can't make a figure absurd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.types import Draft, trees

Clock = Callable[[], float]
"""The time in seconds from any fixed point on, such as `time.perf_counter`."""

_MOST = 3600.0
"""Seconds. No part of a step takes so long; a machine that sleeps, or whose clock is set, seems to."""


def since(began: float, clock: Clock) -> float:
    """Seconds since ``began`` by the clock; see `plausible`."""
    return plausible(clock() - began)


def plausible(seconds: float) -> float:
    """Pass seconds on; 0 where the clock went back or leapt, so that nothing is known of them."""
    return seconds if 0.0 <= seconds < _MOST else 0.0


@dataclass(slots=True)
class Nodes:
    """Counts of drafted and accepted nodes; ``outcomes`` counts drafts by nodes proposed and nodes accepted."""

    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def copy(self) -> Nodes:
        return Nodes(
            self.drafted_by_source.copy(),
            self.accepted_by_source.copy(),
            self.drafted_by_depth.copy(),
            self.accepted_by_depth.copy(),
            self.outcomes.copy(),
        )

    def count(self, draft: Draft, path: tuple[int, ...], proposed: int) -> None:
        self.drafted_by_source.update(draft.sources[:proposed])
        self.accepted_by_source.update(trees.along(draft.sources, path))
        self.drafted_by_depth.update(trees.depths(draft.tree)[:proposed])
        self.accepted_by_depth.update(range(1, len(path) + 1))
        self.outcomes[proposed, len(path)] += 1

    def count_chains(self, source: str, proposed: int, accepted: int, drafts: int) -> None:
        self.drafted_by_source[source] += drafts * proposed
        self.accepted_by_source[source] += drafts * accepted
        for depth in range(1, proposed + 1):
            self.drafted_by_depth[depth] += drafts
            self.accepted_by_depth[depth] += drafts * (depth <= accepted)
        self.outcomes[proposed, accepted] += drafts


@dataclass(slots=True)
class Tally:
    """Counts and wall seconds of one sample's steps; nothing is counted elsewhere."""

    steps: int = 0
    rows: int = 0
    draft_steps: int = 0
    first_step_tokens: int = 0
    cached_tokens: int = 0
    drafter_faults: int = 0
    layer_rows: int = 0
    layer_seconds: float = 0.0
    chains: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Drafts by source, nodes proposed and nodes accepted: only those without branches and with one source, which
    most are."""
    others: Nodes = field(default_factory=Nodes)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def count_step(self, draft: Draft, path: tuple[int, ...], committed: int) -> None:
        """A forward committed ``committed`` tokens, the nodes of ``path`` among them."""
        if self.steps == 0:
            self.first_step_tokens = committed
        self.steps += 1
        self.rows += 1 + len(draft)
        proposed = len(draft) - draft.probes
        if not proposed:
            return
        self.draft_steps += 1
        sources = draft.sources
        if sources.count(sources[0]) == len(sources) and trees.is_chain(draft.tree):
            self.chains[sources[0], proposed, len(path)] += 1
        else:
            self.others.count(draft, path, proposed)

    def nodes(self) -> Nodes:
        """The counts of all drafts."""
        nodes = self.others.copy()
        nodes.outcomes[0, 0] += self.steps - self.draft_steps
        for (source, proposed, accepted), drafts in self.chains.items():
            nodes.count_chains(source, proposed, accepted, drafts)
        return nodes

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
