"""The protocol of a runner, which is a model with its cache, and the data that goes in and comes out."""

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
    """A runner's facts and abilities, as data.

    ``exactness``: the level that its verification with shared noise reaches.
    """

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
    """Which kernels run, and why, in one line."""
    eos_ids: tuple[int, ...] = ()
    layer_skip: bool = False
    """Whether `Runner.forward` can leave sub-layers out."""
    features: bool = False
    """Whether a `Segment` may carry `Features`."""
    together: bool = False
    """Whether the last rows of a `Segment` may see each other, or have explicit positions."""
    hides: bool = False
    """Whether a `Segment` may hide cached tokens from its rows, and run with weights of fewer bits."""
    cheaper: bool = False
    """Whether hiding tokens and fewer bits make a forward faster."""
    chooses: bool = False
    """Whether a `Segment` may show chosen pages of hidden tokens, and vote for pages."""
    likeliest: bool = False
    """Whether a `Segment` may ask for the likeliest token of each row instead of logits. Not for a runner that reads
    another's logits, to mix them for example: its spec must not take this over."""
    drops: bool = False
    """Whether a text may go on without a model of an ensemble, and is then lossy."""
    canvas: CanvasSpec | None = None
    """How the model fills canvases, if it was trained to."""
    encoder: EncoderSpec | None = None
    """How a prompt is divided if an encoder reads its first part."""
    kv_heads: int = 0
    head_dim: int = 0
    """Number of key-value heads per layer and size of a head, as a `Prefix` must have them; 0 if it takes no prefix."""
    in_flight: int = 1
    """How many forwards may run at once: see `Runner.begin`."""
    streamed_bytes: int = 0
    """Bytes of weights that every forward reads from disk or from the host, whatever its number of rows."""

    @property
    def promised(self) -> Exactness:
        """The exactness that a request can count on before it runs."""
        return Exactness.LOSSY if self.drops or self.fills_only else self.exactness

    @property
    def fills_only(self) -> bool:
        """Whether the model can't write token by token: rows see later rows, or it only fills canvases."""
        canvas = self.canvas
        return canvas is not None and (canvas.text != "causal" or canvas.ends is not None or canvas.noise > 0)

    def again(self, cached: int) -> int:
        """How many of the ``cached`` rows run again in each forward, because they attend to what follows them."""
        if self.canvas is None or self.canvas.text == "causal":
            return 0
        return cached % self.canvas.block if self.canvas.text == "block" else cached

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """All halves of layers, in the order in which they run."""
        return tuple(half for layer in range(self.num_layers) for half in (("attention", layer), ("mlp", layer)))

    def takes(self, prefix: Prefix) -> bool:
        """Whether the prefix has the shape of this model's keys and values."""
        layers, two, heads, _, size = prefix.states.shape
        return (layers, two, heads, size) == (self.num_layers, 2, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Changes a model's products for the requests that name it.

    Adapters with equal numbers have the same ``salt``; prefixes are shared only within one salt, because another
    adapter's cached rows are of no use.
    """

    name: str
    salt: str


class Segment(NamedTuple):
    r"""One sequence's part of a forward: its pending tokens, then a tree below the last of them.

    Rows are numbered: pending tokens first, then nodes. The rows from ``base`` on run:

    - 0: all rows.
    - Above 0: the rows before ``base`` do not run again, but stay visible as the sequence's last forward left them.
      That forward must have had the same pending tokens, the same nodes before ``base``, and the same skipped
      sub-layers. So a tree grows level by level, and each level costs only its own rows.
    - Below 0: that many of the last cached tokens run again, as rows -1, -2 and so on. Their cached keys and values
      stay the same, bit for bit.

    Logits are computed for the rows from ``logits_from`` on, which is at least ``base``: ``len(pending)`` for an early
    prefill chunk, ``len(pending) - 1`` for plain decoding, 0 for prompt logprobs.

    The last ``together`` rows are nodes in one or more chains, each below a row outside of them. The rows of a chain
    attend to each other, also forward. All of them run, and none is kept. Other rows attend to them only in models
    whose rows see later ones, see `CanvasSpec.text`. Then cached rows that see what follows run again, unless the
    segment is ``stale``: in that case they stay as they were, and the results are approximate.

    The last ``len(places)`` rows are nodes at these positions, counted from the root's. They attend to their own path
    as usual; all run, and none is kept.

    ``guesses`` ``[together, V]``: the distributions that the canvas's last forward gave, for models that read them.

    All rows of a sequence run with the same ``adapter``, or with none. If there is a ``mask_adapter``, the ``together``
    rows run with that one alone.

    Drafts may be approximate. Rows do not attend to cached tokens of the span ``hidden`` (first, end), in multiples of
    `HIDDEN_STEP`, except to its ``chosen`` pages. With ``bits`` above 0, the same for all segments of a forward,
    weights are rounded to that many bits. Such rows can't be kept, like those of a forward that skips sub-layers.

    With ``votes``, `Output.votes` reports where the rows' attention goes.

    With ``likeliest`` nobody reads the segment's logits, only which token is likeliest at each row. If that is so for
    all segments of a forward, `Output.likeliest` may have these tokens in place of logits.
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
    likeliest: bool = False

    @property
    def approximate(self) -> bool:
        """Whether the rows differ from those that the full model would compute."""
        return self.bits > 0 or self.hidden != (0, 0)

    @property
    def end(self) -> int:
        """Number of the last row, plus one."""
        return len(self.pending) + len(self.tree.tokens)

    @property
    def rows(self) -> int:
        """How many rows run."""
        return self.end - self.base

    def follows(self, last: Segment) -> bool:
        """Whether the rows before ``base`` are also rows of ``last``."""
        nodes = max(0, self.base - len(self.pending))
        return (
            self.pending == last.pending
            and (self.hidden, self.bits, self.chosen) == (last.hidden, last.bits, last.chosen)
            and nodes <= len(last.tree) - max(last.together, len(last.places))
            and self.tree.tokens[:nodes] == last.tree.tokens[:nodes]
            and self.tree.parents[:nodes] == last.tree.parents[:nodes]
        )


class Origins(Protocol):
    """Finds where in a datastore the tokens of a forward may come from."""

    def of(self, row: int, token: int, after: Origin | None = None) -> Origin | None:
        """The origin of a token that follows a row of logits. None if only the model contributed to it.

        Among equally good places, the one that continues ``after``, the origin of the token before.
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
    """How much longer the forward took because of taps. The drafters that read them are charged."""
    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By sequence, the models of an ensemble that failed or were late, and no longer contribute to its logits."""
    writers: tuple[str, ...] = ()
    """By row of logits, the model of an ensemble that decided it; empty if they decide jointly."""
    origins: Origins | None = None
    """Finds the origins of tokens, if the logits are mixed with a datastore's distribution."""
    beside: int = 0
    """How many rows of negative prompts ran in addition to the segments' rows."""
    votes: tuple[Tensor | None, ...] = ()
    """For each segment with votes, float32 ``[L, K, T, P]``: the attention from row T to page P in each layer, summed
    over the query heads of key head K. Only pages before all rows that run are counted; layers with sliding windows
    give zeros. Empty if no segment votes."""
    likeliest: tuple[int, ...] = ()
    """For each wanted row the token of its largest logit, of equal ones the lowest, if all segments ask for these alone
    and every row has a usable one; ``logits_RV`` then has no rows. Else empty."""


Finish = Callable[[], Output]
"""Waits for a forward in flight and returns its output."""


class Move(NamedTuple):
    """A run of cached tokens: ``first`` to ``first + length`` of one text, which stand at ``to`` in another."""

    to: int
    first: int
    length: int


class Runner(Protocol):
    """A model with its cache. Draft models, cascade levels and targets are all runners."""

    @property
    def spec(self) -> RunnerSpec: ...

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence. Returns how many of ``tokens`` are cached already (fewer than all of them).

        Prefixes are reused only within one ``salt``. The name must not be in use.
        """
        ...

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Reserve cache for ``tokens`` tokens of the sequence in all, scratch included.

        False if there is not enough now. Raises OutOfRoom if even an empty cache would be too small.
        """
        ...

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run the rows of all segments. Changes no committed state; `keep` does that. No sequence may appear twice.

        Rows skip the sub-layers of ``skip``. Rows of such a forward can't be kept, but they can be the ``base`` of the
        next forward with the same skip. Raises ValueError for anything that the spec does not promise: skipping,
        features, or rows that see each other.
        """
        ...

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        """Start a forward, and return a function that waits for its output. See `RunnerSpec.in_flight`.

        Until the output is taken, its sequences may be forked and released, and all calls may be made for others,
        `forward` too. Outputs may be taken in any order. Raises what `forward` raises, now or when the output is taken.
        """
        out = self.forward(segments, taps, skip)
        return lambda: out

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Cache the last forward's pending rows and the nodes of ``path``; drop its other rows.

        Returns how many tokens are cached now. A runner that had to go back to an earlier state may return fewer than
        expected; the engine then feeds the missing ones again as pending.
        """
        ...

    def truncate(self, sequence: int, length: int) -> int:
        """Drop cached tokens from ``length`` on. Returns how many are cached now (never more than ``length``)."""
        ...

    def fork(self, sequence: int, copy: int) -> None:
        """Begin the sequence ``copy`` with the cached tokens of ``sequence``."""
        ...

    def release(self, sequence: int) -> None:
        """End a sequence. Its cached prefix may stay reusable. Unknown names are ignored."""
        ...

    def free_tokens(self) -> int:
        """How many more tokens could be reserved now."""
        ...

    def capacity(self) -> int:
        """How many tokens all sequences together could ever hold."""
        ...

    def check(self) -> None:
        """Check the cache's invariants. Raises AssertionError that names the broken one."""
        ...


class GuidingRunner(Runner, Protocol):
    """A runner that can run sequences with classifier-free guidance, each with its request's `Guidance`."""

    def guide(self, sequence: int, request: Request, tokens: Sequence[int], cached: int) -> None:
        """Guide a sequence that was just opened with ``tokens``, of which ``cached`` are cached.

        Memory reserved for it from now on includes memory for its negative prompt. A copy made by `fork` is not guided.
        """
        ...

    def read_ahead(self, sequence: int, tokens: int, rows: int) -> int:
        """How many tokens of the negative prompt the next forward must read before the sequence can be guided.

        ``tokens``: the length of the sequence's text. At most ``rows`` are read. Unless the result is 0, no token may
        be decided by the next forward's logits.
        """
        ...


class MovingRunner(Runner, Protocol):
    """A runner that can reuse cached rows of one text at other positions of another."""

    def move(self, sequence: int, text: Sequence[int], move: Move) -> int:
        """Append cached rows of ``text``, with keys turned to their new positions.

        Returns how many tokens are cached now. The sequence's cached tokens end where the move goes to, and it has the
        salt of ``text``. If some of the rows are no longer cached, nothing is moved. It is lossy: the model would
        compute other rows here.
        """
        ...
