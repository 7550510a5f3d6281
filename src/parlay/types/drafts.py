"""Drafts, and what an accept rule decided about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from parlay.types.base import DraftKind
from parlay.types.features import Features

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Proposed tokens below the root: ``parents[i] < i`` is the index of a node, or -1 for a child of the root.

    Node i sees the committed text, its ancestors and itself; its position is that of the root plus its depth.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


NO_TREE = Tree()


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree and what rules and policies must know of its nodes.

    ``sources`` names, per node, the drafter that proposed it. ``scores`` are the drafter's own estimates of each
    node's conditional acceptance, in [0, 1]; empty when it has none. ``probs`` ``[n, V]`` is the distribution that a
    node was drawn from; rules that accept fixed guesses (``point``) need none. The last ``probes`` nodes are computed
    for the drafter's sake and can never be accepted; no other node descends from one. ``inputs`` is what they read in
    place of their tokens' embeddings, for runners that take features. The last ``together`` of the probes see each
    other, as `Segment` says.
    """

    tree: Tree = NO_TREE
    kind: DraftKind = "point"
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    probs: Tensor | None = None
    probes: int = 0
    inputs: Features | None = None
    together: int = 0

    def __len__(self) -> int:
        return len(self.tree.tokens)


NO_DRAFT = Draft()


class Verdict(NamedTuple):
    """A rule's decision for one sequence: the accepted nodes, root side first, and one more token after them.

    ``sampled`` gives, per row of the walk (root, then each accepted node), the token chosen there; its last entry is
    the correction or bonus, so ``len(sampled) == len(path) + 1``. A canvas has an empty path, and any number of tokens,
    which may be 0.
    """

    path: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one sequence can't go on (NaN logits, a processor that raised); the others do."""

    reason: str
