"""Drafts, the inputs that probes may read instead of tokens, and verdicts of accept rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from parlay.types.base import DraftKind

if TYPE_CHECKING:
    from torch import Tensor

    from parlay.types.runners import Adapter


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """Keys and values ``[L, 2, K, P, D]`` of P rows without a position, for K heads of each of L layers; keys first.

    Runners cache what they derive from a prefix for as long as it lives, so a drafter should make it once.
    """

    states: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Join:
    """Makes rows begin at the input of ``layer``: a row reads x + down(x) up, where x is its anchor's state there.

    The anchor of a row is its nearest ancestor that runs from the first layer on. Both matrices are float32 and
    contiguous.
    """

    layer: int
    down_RH: Tensor
    up_RH: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Inputs ``[K, H]`` of the last K rows that a segment runs.

    The model reads them instead of the embeddings of these rows' tokens; with ``added``, it adds them to the
    embeddings. With a ``prefix``, these rows attend to it, and no other row does. With a ``join``, the inputs are added
    to what the rows begin with; earlier layers do not run for these rows, and taps of those layers hold nothing for
    them. Descendants of a row with a prefix or a join must have it, too.
    """

    rows_KH: Tensor
    added: bool = False
    prefix: Prefix | None = None
    join: Join | None = None

    def __len__(self) -> int:
        return len(self.rows_KH)

    def of(self, rows: Sequence[int]) -> Features:
        """The features of some of the rows, numbered from the first of these K."""
        return replace(self, rows_KH=self.rows_KH[list(rows)])


@dataclass(frozen=True, slots=True)
class Tree:
    """Proposed tokens below the root: ``parents[i] < i`` is the index of node i's parent; -1 stands for the root.

    Node i attends to the committed text, its ancestors and itself; its position is the root's plus its depth.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


NO_TREE = Tree()


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of proposed tokens, with what accept rules and policies need to know about its nodes.

    ``sources``: for each node, the drafter that proposed it. ``scores``: the drafter's estimates, in [0, 1], that a
    node is accepted if its parent is; empty if it has none. ``probs`` ``[n, V]``: the distribution that each node was
    drawn from; drafts of kind ``point`` need none. The last ``probes`` nodes are computed only for the drafter and can
    never be accepted; no other node descends from a probe. ``inputs``: what probes read instead of their tokens'
    embeddings, for runners that take features. The last ``together`` probes see all of their own chain, and run with
    ``mask_adapter``; ``places`` are the positions of the last probes, and ``guesses`` the distributions that the
    ``together`` rows also read: see `Segment`.
    """

    tree: Tree = NO_TREE
    kind: DraftKind = "point"
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    probs: Tensor | None = None
    probes: int = 0
    inputs: Features | None = None
    together: int = 0
    mask_adapter: Adapter | None = None
    places: tuple[int, ...] = ()
    guesses: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tree.tokens)


NO_DRAFT = Draft()


class Verdict(NamedTuple):
    """A rule's decision for one sequence: the accepted path, from the root down, and the tokens to commit.

    ``sampled``: the token chosen at the root and at each accepted node. Its last entry is the correction or bonus
    token, so ``len(sampled) == len(path) + 1``. For a canvas the path is empty, and there may be any number of tokens,
    0 included.
    """

    path: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one sequence can't go on, such as NaN logits or a processor that raised. Other sequences are not affected."""

    reason: str
