"""A model with its cache: what is fed to it, what comes back, and the protocol every runner keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from parlay.types.base import Exactness
from parlay.types.drafts import NO_TREE, Features, Prefix, Tree
from parlay.types.model_forms import NO_SKIP, CanvasSpec, ChosenPages, EncoderSpec, Skip, Sublayer
from parlay.types.results import Origin

if TYPE_CHECKING:
    from torch import Tensor

    from parlay.types.requests import Request


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """Facts and abilities of a runner, as data. ``exactness`` is the level its shared-noise verification reaches."""

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
    """Whether `Runner.forward` can leave sub-layers out."""
    features: bool = False
    """Whether a `Segment` may carry `Features`."""
    together: bool = False
    """Whether the last rows of a `Segment` may see each other, or have positions of their own."""
    hides: bool = False
    """Whether a `Segment` may hide cached tokens from its rows, and run with weights of fewer bits."""
    cheaper: bool = False
    """Whether it takes less time then."""
    chooses: bool = False
    """Whether a `Segment` may show some pages of hidden tokens, and vote for pages."""
    drops: bool = False
    """Whether a text may go on without a model of an ensemble, which loses its exactness."""
    canvas: CanvasSpec | None = None
    """How the model fills canvases, if it was trained to; their rows see each other."""
    encoder: EncoderSpec | None = None
    """How a prompt is divided, where an encoder reads its first part."""
    kv_heads: int = 0
    head_dim: int = 0
    """Heads of each layer's cache and their size, as prefixes have them; 0 where they take none."""
    in_flight: int = 1
    """How many forwards may be under way at once: see `Runner.begin`."""
    streamed_bytes: int = 0
    """Bytes of layers that every forward reads from disk or from the host, as quickly for many rows as for one."""

    @property
    def promised(self) -> Exactness:
        """The exactness that a request may count on before it runs."""
        return Exactness.LOSSY if self.drops or self.fills_only else self.exactness

    @property
    def fills_only(self) -> bool:
        """Whether no text can be written token by token: its rows see rows after them, or canvases are all there is."""
        canvas = self.canvas
        return canvas is not None and (canvas.text != "causal" or canvas.ends is not None or canvas.noise > 0)

    def again(self, cached: int) -> int:
        """Count the cached rows that run again with what follows them, because they see it."""
        if self.canvas is None or self.canvas.text == "causal":
            return 0
        return cached % self.canvas.block if self.canvas.text == "block" else cached

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """All halves of layers, in the order in which a row passes them."""
        return tuple(half for layer in range(self.num_layers) for half in (("attention", layer), ("mlp", layer)))

    def takes(self, prefix: Prefix) -> bool:
        """Whether the prefix holds keys and values of a model of this shape."""
        layers, two, heads, _, size = prefix.states.shape
        return (layers, two, heads, size) == (self.num_layers, 2, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A change of a model's products for some requests, which call it ``name``.

    ``salt`` is one for adapters of the same numbers: what is cached under one adapter is of no use to another.
    """

    name: str
    salt: str


class Segment(NamedTuple):
    """One sequence's part of a forward: its pending tokens, then a tree below the last of them.

    Rows are numbered pending first, then tree nodes. Those from ``base`` on run:

    - 0: all of them.
    - Above 0: the rows before ``base`` stay visible as the sequence's last forward left them, and do not run again.
      That forward was given the same pending tokens, the same nodes as far as ``base`` reaches, and the same sub-layers
      to skip. So a tree grows level by level, each level for the price of its own rows.
    - Below 0: so many of the last cached tokens run again, as rows -1, -2 and so on. What is cached of them is the same
      afterwards, bit for bit.

    Logits are computed for the rows from ``logits_from`` on, which is at least ``base``: an early prefill chunk says
    ``len(pending)``, plain decoding ``len(pending) - 1``, prompt logprobs 0.

    The last ``together`` rows are nodes in one chain or more, each below a row that is none of them. The rows of a
    chain see each other, those after them too. They all run, and are never kept. Of other rows only those see them
    whose model has them see rows after them, as `CanvasSpec.text` says. Cached rows that see what follows run again
    with it, unless the segment is ``stale``: then they stay as they were, and all that is computed is approximate.

    The last rows, as many as there are ``places``, are nodes whose positions are these, counted from the root's. They
    see their own path as others do, all run, and are never kept.

    ``guesses`` ``[together, V]`` are the distributions that the canvas's last forward gave, for models that read them.

    All rows of a sequence run with the same ``adapter``, or with none. But where there is a ``mask_adapter``, the
    ``together`` rows run with that one alone.

    Drafts may be approximate. From rows of a ``hidden`` span cached tokens are hidden, from its first number to before
    its second, which are multiples of `HIDDEN_STEP`; they see the ``chosen`` pages of it. With ``bits`` above 0, which
    all segments of a forward have alike, the weights are those rounded to so many. Like rows of a forward that skips
    sub-layers, these can't be kept.

    With ``votes``, `Output.votes` says where the attention of the rows goes.
    """

    sequence: int
    pending: tuple[int, ...]
    tree: Tree = NO_TREE
    logits_from: int = 0
    base: int = 0
    features: Features | None = None
    together: int = 0
    stale: bool = False
    adapter: Adapter | None = None
    mask_adapter: Adapter | None = None
    hidden: tuple[int, int] = (0, 0)
    bits: int = 0
    places: tuple[int, ...] = ()
    guesses: Tensor | None = None
    chosen: ChosenPages | None = None
    votes: bool = False

    @property
    def approximate(self) -> bool:
        """Whether its rows are not those of the model as it is."""
        return self.bits > 0 or self.hidden != (0, 0)

    @property
    def end(self) -> int:
        """One more than the number of the last row."""
        return len(self.pending) + len(self.tree.tokens)

    @property
    def rows(self) -> int:
        """How many rows run."""
        return self.end - self.base

    def follows(self, last: Segment) -> bool:
        """Whether the rows before ``base`` are rows of ``last``, too."""
        nodes = max(0, self.base - len(self.pending))
        return (
            self.pending == last.pending
            and (self.hidden, self.bits, self.chosen) == (last.hidden, last.bits, last.chosen)
            and nodes <= len(last.tree) - max(last.together, len(last.places))
            and self.tree.tokens[:nodes] == last.tree.tokens[:nodes]
            and self.tree.parents[:nodes] == last.tree.parents[:nodes]
        )


class Origins(Protocol):
    """Where in a datastore the tokens of a forward may be from."""

    def of(self, row: int, token: int, after: Origin | None = None) -> Origin | None:
        """Find the origin of a token that follows from a row of the logits; None: the model's alone.

        Of equals the one that goes on ``after`` the origin of the token before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward over segments.

    ``logits_RV`` holds the wanted rows of all segments in order; those of segment i are
    ``logits_RV[starts[i]:starts[i + 1]]``. ``taps[layer]`` ``[N, H]`` is the hidden state that enters that layer
    (``num_layers``: the final hidden state, which the LM head reads), for every row that ran, of all segments in order.
    """

    logits_RV: Tensor
    starts: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    tap_seconds: float = 0.0
    """What the forward took longer because of the taps. It is charged to the drafters that read them."""
    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By sequence, the models of an ensemble that failed for it or were late: they take no part in its logits now."""
    writers: tuple[str, ...] = ()
    """By row of logits, the model of an ensemble that decides there; empty where none does alone."""
    origins: Origins | None = None
    """Of the rows of the logits, where these are mixed with a datastore's law."""
    beside: int = 0
    """How many rows of negative prompts ran besides those of the segments."""
    votes: tuple[Tensor | None, ...] = ()
    """Of each segment with votes, float32 ``[L, K, T, P]``: of the attention of row T in a layer, summed over the query
    heads of a key head, what page P of the text gets. Pages are those before all rows that run. Layers that see the
    last keys alone give zeros. Empty where no segment votes."""


Finish = Callable[[], Output]
"""Waits for a forward that has begun, and returns its output."""


class Move(NamedTuple):
    """Tokens ``first`` to ``first + length`` of a text, which another text has from its place ``to`` on."""

    to: int
    first: int
    length: int


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

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run the rows of all segments. Changes no committed state: `keep` does. No sequence appears twice.

        Rows pass by the sub-layers of ``skip``. What such a forward wrote can't be kept; it serves as the ``base`` of
        the next one that skips the same. Raises ValueError for what the spec does not promise: skipping, features, or
        rows that see each other.
        """
        ...

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        """Begin a forward, and return what waits for its output. `RunnerSpec.in_flight` says how many are worth it.

        Until then its sequences may be forked and released, and all calls may be made for others, `forward` too.
        Outputs may be waited for in any order. Raises what `forward` raises, now or when its output is waited for.
        """
        out = self.forward(segments, taps, skip)
        return lambda: out

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

    def free_tokens(self) -> int:
        """How many more tokens could be reserved now."""
        ...

    def capacity(self) -> int:
        """How many tokens all sequences together could ever hold."""
        ...

    def check(self) -> None:
        """Prove the cache's own invariants; AssertionError names the broken one."""
        ...


class GuidingRunner(Runner, Protocol):
    """A runner that can guide sequences, each by its request's `Guidance`."""

    def guide(self, sequence: int, request: Request, tokens: Sequence[int], cached: int) -> None:
        """Guide a sequence that has just begun, whose text is ``tokens`` and of which ``cached`` are cached.

        Room that is reserved for it from now on is room for its negative prompt, too. A copy by `fork` is not guided.
        """
        ...

    def read_ahead(self, sequence: int, tokens: int, rows: int) -> int:
        """Say how many tokens of its negative prompt must be read before its text of ``tokens`` tokens can be guided.

        At most ``rows``: the next forward reads them, and nothing may be decided by its logits. 0: it may decide.
        """
        ...


class MovingRunner(Runner, Protocol):
    """A runner that can cache what it computed of one text at another place of another."""

    def move(self, sequence: int, text: Sequence[int], move: Move) -> int:
        """Go on with cached rows of ``text``, whose keys turn to their new positions; say how many tokens are cached.

        The sequence's cached text ends where the move goes to, and its salt is that of ``text``. Nothing is moved if
        some of these rows are no longer cached. The rows are not those that the model would compute: it is lossy.
        """
        ...
