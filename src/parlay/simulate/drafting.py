"""Simulates drafting: how many tokens a step commits with drafts of each size, by kind of text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parlay.cost.speed import best_tree

DraftSeconds = Callable[[int, int, float], float]
"""Seconds of drafting in a step, by number of sequences, nodes of each sequence's draft, and mean context tokens."""


def no_seconds(sequences: int, nodes: int, context: float) -> float:
    """Return 0: the `DraftSeconds` of drafts that are looked up, which takes no time worth counting."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """A strategy, simulated: drafts of at most ``nodes`` nodes.

    ``ranks`` are the probabilities that drafted nodes are right, by kind of text, as `parlay.cost.speed.best_tree`
    takes them. A kind without an entry uses the entry of ``""``. With ``adapts``, each step drafts the number of nodes
    with the most tokens per second. Otherwise it drafts ``nodes``.
    """

    name: str = "none"
    nodes: int = 0
    ranks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    adapts: bool = True
    seconds: DraftSeconds = no_seconds

    def chances(self, kind: str) -> tuple[float, ...]:
        """Return the ``ranks`` of a kind of text."""
        return self.ranks.get(kind) or self.ranks.get("") or (0.0,)

    def tokens(self, kind: str) -> list[float]:
        """Return the mean tokens that a step commits with drafts of 0, 1, 2, ... ``nodes`` nodes."""
        return [best_tree(self.chances(kind), size).tokens for size in range(self.nodes + 1)]


PLAIN = Drafting()

_MAX_DRAWN = 64
"""Answers of at most this many tokens draw the result of each step. Longer ones draw only their number of steps."""


def steps_of(output: int, chance: float, nodes: int, draw: random.Random) -> int:
    """Draw the number of steps of an answer of ``output`` tokens. Drafts are chains of ``nodes`` nodes.

    ``chance`` is the probability that a node is right if the nodes before it are. A step commits the accepted nodes and
    one token more. Renewal theory gives the number of steps of a long answer with L tokens: its mean is L / E and its
    variance L V / E^3, where E and V are the mean and variance of a step's tokens.
    """
    if not nodes or not chance:
        return output
    if output > _MAX_DRAWN:
        mean, variance = _moments(chance, nodes)
        beyond = (variance + mean**2) / (2 * mean) - 0.5  # mean tokens by which the last step would pass the end
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
    """Return the mean and variance of a step's tokens, 1 + min(G, nodes), where G is geometrically distributed."""
    shares = [chance**count * (1 - chance) for count in range(nodes)] + [chance**nodes]
    mean = sum((1 + count) * share for count, share in enumerate(shares))
    return mean, sum((1 + count - mean) ** 2 * share for count, share in enumerate(shares))


class Lane:
    """The sequences of one kind that decode on a server. All of them draft the same number of nodes.

    Each step adds to ``progress`` the mean number of tokens that a step commits, ``each``. So the progress at which a
    sequence ends is known, and the lane need not visit its sequences in every step.
    """

    __slots__ = ("chance", "count", "each", "inverse_lengths", "nodes", "progress", "table")

    def __init__(self, drafting: Drafting, kind: str) -> None:
        self.table: Sequence[float] = drafting.tokens(kind)
        self.chance = min(1.0, sum(drafting.chances(kind)))
        self.nodes = 0 if drafting.adapts else drafting.nodes
        self.each = self.table[self.nodes]
        self.count = 0
        self.progress = 0.0
        self.inverse_lengths = 0.0
        """Sum of 1 / length over the answers, with lengths in tokens; `cut_rows` needs it."""

    @property
    def uncut_rows(self) -> int:
        """Rows of a step if every draft has all its nodes."""
        return self.count * (1 + self.nodes)

    @property
    def cut_rows(self) -> float:
        """Mean number of rows that a step saves because drafts do not go beyond the end of their answers.

        A draft that may commit r more tokens has at most r - 1 nodes. Let a step commit E tokens on average, and let
        drafts have k nodes. An answer passes each r with the probability 1 / E, so it saves k (k + 1) / 2E nodes in
        all. An answer of n tokens takes n / E steps, so it saves k (k + 1) / 2n nodes per step.
        """
        return self.nodes * (self.nodes + 1) / 2 * self.inverse_lengths

    def draft(self, nodes: int) -> None:
        """Draft ``nodes`` nodes from now on."""
        self.nodes, self.each = nodes, self.table[nodes]
