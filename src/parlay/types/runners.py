"""A model with its cache: what is fed to it, what comes back, and the protocol every runner keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from parlay.types.base import Exactness
from parlay.types.drafts import NO_TREE, Tree

if TYPE_CHECKING:
    from torch import Tensor


Sublayer = tuple[Literal["attention", "mlp"], int]
"""Half of a layer, and the layer's number from 0."""

Skip = frozenset[Sublayer]


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner is and can do, as data. ``exactness`` is the level its shared-noise verification reaches."""

    name: str
    vocab_size: int
    max_context: int
    tree: Literal["tree", "chain", "none"]
    exactness: Exactness
    hidden_size: int
    num_layers: int
    device: str
    dtype: str
    kernels: str
    """One line: which kernels run and why."""
    eos_ids: tuple[int, ...] = ()
    layer_skip: bool = False
    """Whether the runner is a `LayerSkipper` too."""

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """All halves of layers, in the order in which a row passes them."""
        return tuple(half for layer in range(self.num_layers) for half in (("attention", layer), ("mlp", layer)))


class Segment(NamedTuple):
    """What one sequence feeds into one forward: its pending tokens, then a tree below the last of them.

    Rows are numbered pending first, then tree nodes. Logits are computed for the rows from ``logits_from`` on, so an
    early prefill chunk says ``len(pending)``, plain decoding ``len(pending) - 1``, prompt logprobs 0.
    """

    sequence: int
    pending: tuple[int, ...]
    tree: Tree = NO_TREE
    logits_from: int = 0

    @property
    def rows(self) -> int:
        return len(self.pending) + len(self.tree.tokens)


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward over segments.

    ``logits_RV`` holds the wanted rows of all segments in order; those of segment i are
    ``logits_RV[starts[i]:starts[i + 1]]``. ``taps[layer]`` ``[N, H]`` is the hidden state that enters that layer
    (``num_layers``: the final hidden state, which the LM head reads), for every row of every segment.
    """

    logits_RV: Tensor
    starts: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chain:
    """What one sequence feeds into a forward that skips sub-layers: ``tokens`` at the positions from ``start`` on.

    Keys and values before ``start`` are read as they are: the cached ones, and behind these the scratch rows that the
    latest such forward of the sequence wrote. ``logits_from`` is that of a `Segment`.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    logits_from: int


class Runner(Protocol):
    """A model with its cache. Draft models, cascade levels and targets are all runners."""

    @property
    def spec(self) -> RunnerSpec: ...

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence and return how many of ``tokens`` are cached already (fewer than all of them).

        ``salt`` scopes prefix reuse. The name must be free.
        """
        ...

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Make room for the sequence to hold ``tokens`` in all, scratch included; False when it can't be had now.

        Raises OutOfRoom when even an empty cache could not hold so many.
        """
        ...

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        """Run the rows of all segments. Changes no committed state: `keep` does. No sequence appears twice."""
        ...

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Cache the last forward's pending rows and the nodes of ``path``, drop its other rows.

        Returns how many tokens are cached now; a runner that had to cut its state back may return less than
        expected, and the engine then feeds the rest again as pending.
        """
        ...

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on; returns how many are cached now (never more than ``length``)."""
        ...

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cached tokens of ``sequence``."""
        ...

    def release(self, sequence: int) -> None:
        """End a sequence; its cached prefix may stay reusable. Unknown names are ignored."""
        ...

    def room(self) -> int:
        """How many more tokens could be reserved now."""
        ...

    def capacity(self) -> int:
        """How many tokens all sequences together could ever hold."""
        ...

    def check(self) -> None:
        """Prove the cache's own invariants; AssertionError names the broken one."""
        ...


class LayerSkipper(Runner, Protocol):
    """A runner that can leave sub-layers out, so that the target drafts for itself. Its spec says so."""

    def skip_forward(self, chains: Sequence[Chain], skip: Skip) -> Tensor:
        """Run the chains through all sub-layers but those of ``skip``; the wanted rows' logits in order, ``[R, V]``.

        Commits nothing and can't be kept: what was cached is the same afterwards, to the last bit, and the next
        `forward` writes every row anew. Rows beyond those cached must be reserved. No sequence appears twice.
        """
        ...
