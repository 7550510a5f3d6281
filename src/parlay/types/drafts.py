"""Drafts, the inputs that their probes may read in place of tokens, and what an accept rule decided."""

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
    """Keys and values ``[L, 2, K, P, D]`` of P rows that have no position: of each layer, keys first, for its K heads.

    Runners keep what they make of it for as long as it lives, so a drafter has one.
    """

    states: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Join:
    """Rows that begin at the input of ``layer``, from the state x there of their anchor, as x + down(x) up.

    Both matrices are float32 and contiguous. The anchor is the last of their ancestors that runs from the first layer
    on.
    """

    layer: int
    down_RH: Tensor
    up_RH: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Inputs ``[K, H]`` of the last K rows that a segment runs.

    The model reads them in place of the embeddings of these rows' tokens or, with ``added``, adds them to these. With a
    ``prefix`` the rows see that, too, and no other row does. With a ``join`` they are added to what the rows begin
    with; layers before that do not run them, and taps of such layers hold nothing for them. No row descends from one
    that has a prefix or joins, unless it has, too.
    """

    rows_KH: Tensor
    added: bool = False
    prefix: Prefix | None = None
    join: Join | None = None

    def __len__(self) -> int:
        return len(self.rows_KH)

    def of(self, rows: Sequence[int]) -> Features:
        """Pick some rows, numbered from the first of these."""
        return replace(self, rows_KH=self.rows_KH[list(rows)])


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
    place of their tokens' embeddings, for runners that take features. The last ``together`` of the probes see
    those of their own chain, and run with ``mask_adapter``, as `Segment` says. ``places`` are the positions of the
    last probes, too, and ``guesses`` what the rows of ``together`` read besides.
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
