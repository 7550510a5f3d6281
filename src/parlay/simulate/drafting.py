"""Drafting as a simulation sees it: how many tokens a step commits, by kind of text, and how many nodes pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parlay.cost.speed import best_tree

DraftSeconds = Callable[[int, int, float], float]
"""Seconds of drafting in a step, given the sequences, the nodes of each, and the tokens before them."""


def no_seconds(sequences: int, nodes: int, context: float) -> float:
    """The `DraftSeconds` of drafts that are looked up."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """A strategy: drafts of at most ``nodes`` nodes, right as ``ranks`` say, by kind of text.

    ``ranks`` are probabilities as `parlay.cost.speed.best_tree` takes them; a kind without an entry uses that of
    ``""``. With ``adapts`` as many nodes are drafted as pay, else always ``nodes``.
    """

    name: str = "none"
    nodes: int = 0
    ranks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    adapts: bool = True
    seconds: DraftSeconds = no_seconds

    def chances(self, kind: str) -> tuple[float, ...]:
        return self.ranks.get(kind) or self.ranks.get("") or (0.0,)

    def tokens(self, kind: str) -> list[float]:
        """Mean tokens of a step with 0, 1, 2, ... ``nodes`` nodes."""
        return [best_tree(self.chances(kind), size).tokens for size in range(self.nodes + 1)]


PLAIN = Drafting()

_FEW = 64
"""Up to so many tokens steps are drawn one by one; beyond, their number is drawn by its mean and variance."""


def steps_of(output: int, chance: float, nodes: int, draw: random.Random) -> int:
    """How many steps an answer takes whose drafts are chains of ``nodes`` nodes, each right with this chance.

    A step commits one token more than it accepts. Their number is random, as renewals are: of a long answer it has the
    mean L / E and the variance L V / E^3, where E and V are those of the tokens of a step.
    """
    if not nodes or not chance:
        return output
    if output > _FEW:
        mean, variance = _moments(chance, nodes)
        beyond = (variance + mean**2) / (2 * mean) - 0.5  # by which the last step passes the end
        drawn = round(draw.gauss((output + beyond) / mean, (output * variance / mean**3) ** 0.5))
        return min(output, max(-(-output // (nodes + 1)), drawn))
    steps = done = 0
    while done < output:
        steps += 1
        done += 1
        left = nodes
        while left and draw.random() < chance:
            done, left = done + 1, left - 1
    return steps


def _moments(chance: float, nodes: int) -> tuple[float, float]:
    """Mean and variance of a step's tokens: 1 + min(G, nodes), where G is geometric."""
    shares = [chance**count * (1 - chance) for count in range(nodes)] + [chance**nodes]
    mean = sum((1 + count) * share for count, share in enumerate(shares))
    return mean, sum((1 + count - mean) ** 2 * share for count, share in enumerate(shares))


class Lane:
    """The sequences of one kind that decode on a server: all of them draft alike.

    Progress is counted in tokens that a step commits in the mean, so that a sequence's end is a number.
    """

    __slots__ = ("brevity", "chance", "count", "each", "nodes", "progress", "table")

    def __init__(self, drafting: Drafting, kind: str) -> None:
        self.table: Sequence[float] = drafting.tokens(kind)
        self.chance = min(1.0, sum(drafting.chances(kind)))
        self.nodes = 0 if drafting.adapts else drafting.nodes
        self.each = self.table[self.nodes]
        self.count = 0
        self.progress = 0.0
        self.brevity = 0.0
        """Sum of 1 / tokens of the answers."""

    @property
    def uncut_rows(self) -> int:
        """Rows of a step if no draft is cut."""
        return self.count * (1 + self.nodes)

    @property
    def cut_rows(self) -> float:
        """The mean number of rows that drafts lack because none goes beyond the end of its answer.

        A draft with room for r tokens has at most r - 1 nodes. A share 1 / E of the answers comes by each r, so an
        answer lacks k (k + 1) / 2 E nodes in its n / E steps: E cancels out.
        """
        return self.nodes * (self.nodes + 1) / 2 * self.brevity

    def draft(self, nodes: int) -> None:
        """Draft so many nodes from now on."""
        self.nodes, self.each = nodes, self.table[nodes]
