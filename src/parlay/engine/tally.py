"""Counts of one sequence's steps, drafts, nodes and seconds. A clock that jumps can't make a figure absurd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.types import Draft, trees

Clock = Callable[[], float]
"""Returns the time in seconds since any fixed point, as `time.perf_counter` does."""

_MOST = 3600.0
"""Seconds: longer than any part of a step. If one seems longer, the machine slept or its clock was set."""


def since(began: float, clock: Clock) -> float:
    """Seconds since ``began`` by the clock; see `plausible`."""
    return plausible(clock() - began)


def plausible(seconds: float) -> float:
    """The seconds as given, or 0 if the clock went back or leapt."""
    return seconds if 0.0 <= seconds < _MOST else 0.0


@dataclass(slots=True)
class Nodes:
    """Counts of drafted and accepted nodes; ``outcomes`` counts drafts by (nodes proposed, nodes accepted)."""

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
        for source, depth in zip(draft.sources[:proposed], trees.depths(draft.tree), strict=False):
            self.drafted_by_source[source] += 1
            self.drafted_by_depth[depth] += 1
        for depth, node in enumerate(path, start=1):
            self.accepted_by_source[draft.sources[node]] += 1
            self.accepted_by_depth[depth] += 1
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
    """All counts and wall seconds of one sequence's steps."""

    steps: int = 0
    rows: int = 0
    draft_steps: int = 0
    first_step_tokens: int = 0
    cached_tokens: int = 0
    drafter_faults: int = 0
    layer_rows: int = 0
    layer_seconds: float = 0.0
    chains: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """How many drafts had this source, this many nodes proposed and this many accepted.

    Only chains with one source, which most drafts are; ``others`` counts the rest.
    """
    others: Nodes = field(default_factory=Nodes)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def count_step(self, draft: Draft, path: tuple[int, ...], committed: int) -> None:
        """Count a forward that committed ``committed`` tokens, the nodes of ``path`` among them."""
        if self.steps == 0:
            self.first_step_tokens = committed
        self.steps += 1
        nodes = len(draft.tree.tokens)
        self.rows += 1 + nodes
        proposed = nodes - draft.probes
        if not proposed:
            return
        self.draft_steps += 1
        sources = draft.sources
        if sources.count(sources[0]) == len(sources) and trees.is_chain(draft.tree):
            self.chains[sources[0], proposed, len(path)] += 1
        else:
            self.others.count(draft, path, proposed)

    def nodes(self) -> Nodes:
        """The counts of all drafts, chains and others."""
        nodes = self.others.copy()
        nodes.outcomes[0, 0] += self.steps - self.draft_steps
        for (source, proposed, accepted), drafts in self.chains.items():
            nodes.count_chains(source, proposed, accepted, drafts)
        return nodes

    def count_layers(self, rows: int, seconds: float) -> None:
        """Count rows of this sequence that a drafter ran through the target's own layers."""
        self.layer_rows += rows
        self.layer_seconds += seconds

    def count_seconds(self, prefill: bool, draft: float, verify: float, overhead: float) -> None:
        """Add one step's wall time. Before the first commit, all of it counts as prefill."""
        if prefill:
            self.prefill_seconds += draft + verify + overhead
            return
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.overhead_seconds += overhead
