"""The interface between a native runner, which knows sequences, and the decoders, which compute rows."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import BLOCK, Budget, CacheShape, RecentShape, Room, Rows, Spread
from parlay.cache.pages import ALONE, PageTable, pages_for
from parlay.cache.prefixes import MoveRow
from parlay.cache.recent import most_pages
from parlay.compiled.structs import Linear
from parlay.models.config import DecoderConfig, KeyHeads, UnsupportedModel
from parlay.models.lookup import NgramTable
from parlay.models.lora import LowRankAdapter
from parlay.models.weights.fused import Operand
from parlay.types import NO_SKIP, Exactness, Features, Output, PickedRows, Segment, Skip, Tree


@dataclass(frozen=True, slots=True)
class LayerPages:
    """How layers share cache pages: ``recent`` says which layers have pages of the last ``window`` keys only, and
    ``place`` is each layer's index among the layers with the same kind of pages. A layer that uses an earlier layer's
    keys has that layer's index."""

    recent: tuple[bool, ...]
    place: tuple[int, ...]
    window: int = 0

    @staticmethod
    def of(config: DecoderConfig) -> LayerPages:
        """Give layers with windows recent pages if texts may become long enough for that to save memory, or if the
        layers' heads differ."""
        sizes = [form.window or 0 for form in config.forms]
        differ = len({config.heads_of(form) for form in config.forms}) > 1
        saves = differ or most_pages(max(sizes)) < pages_for(config.max_context)
        window = max(sizes) if saves and not config.canvas and not config.head else 0
        recent, places, counts = tuple(window > 0 and size > 0 for size in sizes), list[int](), [0, 0]
        for form, own in zip(config.forms, recent, strict=True):
            places.append(counts[own] if form.keys_of is None else places[form.keys_of])
            counts[own] += form.keys_of is None
        return LayerPages(recent, tuple(places), window)

    @staticmethod
    def alike(layers: int) -> LayerPages:
        """All layers have pages of the same kind."""
        return LayerPages((False,) * layers, tuple(range(layers)))

    def layers(self, recent: bool) -> list[int]:
        """The layers with keys of their own in pages of one kind, in the order of their ``place``."""
        found = {place: layer for layer, place in reversed(list(enumerate(self.place))) if self.recent[layer] == recent}
        return [found[place] for place in sorted(found)]

    def key_heads(self, config: DecoderConfig, recent: bool) -> KeyHeads:
        """The heads of the layers with pages of this kind; if there are none, those of the other kind."""
        own = self.layers(recent) or self.layers(not recent)
        return config.heads_of(config.forms[own[0]]) if config.layers else config.heads_of(config.llama)


def cache_room(config: DecoderConfig, number_bytes: float) -> Room:
    """The memory that texts take in the cache, at ``number_bytes`` per number of a key or value."""
    pages = LayerPages.of(config)
    whole, recent = (
        2 * len(pages.layers(kind)) * math.prod(pages.key_heads(config, kind)) * BLOCK * number_bytes
        for kind in (False, True)
    )
    if not recent:
        return Room(whole)
    longest = pages_for(config.max_context)
    return Room(whole, recent, min(most_pages(pages.window), longest), longest)


@dataclass(frozen=True, slots=True)
class Kernels:
    """A decoder's abilities; ``reason`` says in one line which kernels run, and why.

    ``pages`` says how layers share cache pages; ``cache_lanes`` and ``spread`` are those of `CacheShape`. ``part`` is
    the config of the part of the model that runs here; None: all of it. ``in_flight`` forwards may be under way at
    once, and each reads ``streamed_bytes`` from disk or the host's memory. ``chooses`` and ``likeliest`` are those of
    `RunnerSpec`. ``move_row`` moves rows within the decoder's pages.
    """

    exactness: Exactness
    reason: str
    cache_dtype: torch.dtype
    pages: LayerPages
    cache_lanes: int = 0
    spread: Spread = ALONE
    part: DecoderConfig | None = None
    in_flight: int = 1
    streamed_bytes: int = 0
    chooses: bool = False
    likeliest: bool = False
    move_row: MoveRow = PageTable.move

    def cache_shapes(self, config: DecoderConfig, device: torch.device) -> tuple[CacheShape, RecentShape | None]:
        """The cache shapes of layers that see all keys, and of layers with recent pages, if there are any."""
        layers = tuple(self.pages.layers(True))
        heads, recent_heads = (self.pages.key_heads(config, kind) for kind in (False, True))
        shape = CacheShape(
            num_layers=len(self.pages.layers(False)),
            num_kv_heads=heads.heads,
            head_dim=heads.size,
            dtype=self.cache_dtype,
            device=device,
            lanes=self.cache_lanes,
            spread=self.spread,
        )
        own = replace(shape, num_layers=len(layers), num_kv_heads=recent_heads.heads, head_dim=recent_heads.size)
        recent = RecentShape(shape=own, layers=layers, window=self.pages.window, longest=config.max_context)
        return shape, recent if layers else None


class SegmentFeatures(NamedTuple):
    """The features of one segment, which is number ``place`` of a forward; their first row is row ``first`` of the
    batch.

    ``anchors`` are the batch rows of the rows' anchors if they join; see `Join`.
    """

    place: int
    first: int
    features: Features
    anchors: Sequence[int] = ()


class ForwardBatch(NamedTuple):
    """The rows that one forward runs: the token ``ids`` of all sequences' rows in order, and which of these rows are
    ``wanted``, so get logits.

    ``places`` say where each sequence's rows lie, ``features`` what some rows read besides or instead of their ids, and
    ``inputs``, float32 ``[N, H]``, replace the embeddings of all rows. ``adapters`` has one entry per row, or is empty
    if no row has one. For models with n-grams, ``tokens`` are the ids of all rows of each place, after as many ids of
    the text before them as n-grams need (or -1). With ``likeliest`` only the likeliest token of each wanted row is
    read, and decoders that can tell it need not write logits.
    """

    ids: list[int]
    places: Sequence[Rows]
    wanted: list[int]
    taps: Sequence[int] = ()
    skip: Skip = NO_SKIP
    features: Sequence[SegmentFeatures] = ()
    adapters: Sequence[LowRankAdapter | None] = ()
    inputs: Tensor | None = None
    tokens: Sequence[Sequence[int]] = ()
    likeliest: bool = False


@dataclass(slots=True)
class Taps:
    """The hidden states ``[N, H]`` that enter some layers in one forward, and the seconds that copying them takes."""

    layers: Collection[int]
    states: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    def take(self, layer: int, hidden_NH: Tensor) -> None:
        """Copy the layer's input if the layer is tapped."""
        if layer in self.layers:
            with self.timed():
                self.states[layer] = hidden_NH.clone()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to ``seconds``."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class GrownTree(NamedTuple):
    """A draft tree that a draft head or draft model has grown: each node's token, parent, and probability.

    ``ran`` is the row at which each node ran below the text; -1 if it did not run.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    ran: tuple[int, ...]

    @property
    def rows(self) -> Tree:
        """The rows that ran, as a tree; token 0 stands for rows that are not in the draft."""
        count = max(self.ran, default=-1) + 1
        tokens, parents = [0] * count, [-1] * count
        for node, row in enumerate(self.ran):
            if row >= 0:
                above = self.parents[node]
                tokens[row], parents[row] = self.tokens[node], self.ran[above] if above >= 0 else -1
        return Tree(tuple(tokens), tuple(parents))

    @property
    def likeliest_rows(self) -> tuple[int, ...]:
        """The rows on the path of likeliest children, as far as they ran."""
        node, path = -1, []
        while ran := [child for child, above in enumerate(self.parents) if above == node and self.ran[child] >= 0]:
            node = max(ran, key=self.chances.__getitem__)
            path.append(self.ran[node])
        return tuple(path)


NO_TEXT = array("i")


class TreeRequest(NamedTuple):
    """A request for a draft of one text, of at most ``nodes`` nodes.

    For a sampled request it has the temperature, the truncation, and the noise stream of each level's tokens.
    ``unread`` are tokens of the text that the LM head should have, if it has slots for the newest ones; only requests
    with the same ``salt`` draft them. Nothing grows below ``ends``, the tokens that end the text. ``text``, int32, has
    the text's tokens so far if those that followed the same tokens in it are to be favoured; it must not change while
    the draft grows.
    """

    nodes: int
    temperature: float = 0.0
    streams: Sequence[int] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    unread: Sequence[int] = ()
    salt: str = ""
    ends: Collection[int] = ()
    text: array[int] = NO_TEXT


class HeadRows(NamedTuple):
    """Inputs and outputs of a draft head: ``tokens_D`` int64 are the target's ids of its outputs.

    The matrix ``first`` makes the inputs of the rows from their ``features``, float32 or bfloat16, in pieces.
    """

    tokens_D: Tensor
    first: Linear
    features: Sequence[PickedRows]


class Growth(NamedTuple):
    """How the trees of a draft head, or of a draft model if ``head`` is None, grow (Li et al. 2024, EAGLE-2).

    Each of at most ``levels`` levels runs the ``width`` likeliest candidates of the level before, which each offer
    ``width`` children. Paths less likely than ``least`` are not offered, and no row runs if none of its children could
    join the draft. A draft model runs at most as many rows below a text as the draft may have nodes; with ``short`` its
    LM head has only that many frequent tokens and the newest of its texts.
    """

    levels: int
    width: int
    least: float
    head: HeadRows | None = None
    short: int = 0


class ForwardOutput(NamedTuple):
    """``logits`` ``[wanted, V]`` float32, the hidden states ``[N, H]`` that enter the tapped layers, and the seconds
    that these took. With ``likeliest`` tokens of the wanted rows there are no logits."""

    logits: Tensor
    taps: Mapping[int, Tensor]
    tap_seconds: float = 0.0
    likeliest: tuple[int, ...] = ()

    def output(self, starts: tuple[int, ...], votes: tuple[Tensor | None, ...] = ()) -> Output:
        """Make the runner's `Output`, with these ``starts`` and ``votes``."""
        return Output(self.logits, starts, self.taps, self.tap_seconds, votes=votes, likeliest=self.likeliest)


def wanted_rows(segments: Sequence[Segment]) -> tuple[list[int], tuple[int, ...]]:
    """List the batch rows that want logits; the second result says where each segment's rows start in that list. Raises
    ValueError if a segment wants logits of rows that do not run."""
    rows: list[int] = []
    starts = [0]
    begin = 0
    for _, pending, tree, logits_from, base, *_ in segments:  # unpacked: this is run for each step of plain decoding
        end = len(pending) + len(tree.tokens)
        if not base <= logits_from <= end:
            raise ValueError(f"logits from row {logits_from} on, but rows {base} to {end} run")
        rows.extend(range(begin + logits_from - base, begin + end - base))
        starts.append(len(rows))
        begin += end - base
    return rows, tuple(starts)


def check_together(segment: Segment) -> None:
    """Raises ValueError unless rows that see each other or are moved are the last nodes, in chains, and all run."""
    apart = max(segment.together, len(segment.places))
    first = len(segment.tree) - apart
    last = enumerate(segment.tree.parents[max(first, 0) :], first)
    chains = all(parent == node - 1 or parent < first for node, parent in last)
    runs = segment.base <= segment.end - apart
    if first < 0 or not chains or not runs or (segment.features is not None and segment.features.join is not None):
        raise ValueError(
            f"sequence {segment.sequence}: {apart} rows can't see each other or move: they must be the last nodes, in "
            "chains below other rows, all run, and not join at a later layer"
        )
    if min(segment.places, default=0) < 0:
        raise ValueError(f"sequence {segment.sequence}: rows can't move before their root: {min(segment.places)}")


def with_features(embedded_NH: Tensor, features: Sequence[SegmentFeatures]) -> Tensor:
    """Replace rows' embeddings by `Features`, or add features to them, in place."""
    for _, first, inputs, _ in features:
        rows_KH = embedded_NH[first : first + len(inputs)]
        given_KH = inputs.rows_KH.to(device=rows_KH.device, dtype=rows_KH.dtype)
        rows_KH.copy_(rows_KH + given_KH if inputs.added else given_KH)
    return embedded_NH


class Forward(Protocol):
    """A decoder's weights and kernels."""

    @property
    def kernels(self) -> Kernels: ...

    def run(self, work: ForwardBatch) -> ForwardOutput:
        """Run the rows, and write their keys and values to the cache."""
        ...

    def begin(self, work: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Start to run the rows; returns a function that waits for the output. This default runs them at once."""
        out = self.run(work)
        return lambda: out

    def add_adapter(self, adapter: LowRankAdapter) -> LowRankAdapter:
        """Pack this decoder's part of an adapter; rows use the adapter that is returned. Any thread may call this."""
        ...

    def embed(self, ids: Sequence[int]) -> Tensor:
        """The embeddings ``[N, H]`` of these tokens, as the first layer reads them."""
        ...

    def time_reading(self) -> float:
        """Seconds that reading all weights from memory once takes at present; 0 if that is not known."""
        return 0.0

    def attach(self, budget: Budget) -> None:
        """Charge memory that forwards hold besides weights and cache to a budget; most decoders hold none."""
        return

    def with_weights(self, weights: Mapping[str, Operand]) -> Forward:
        """Make another decoder of this model, with the same cache, embeddings and norms, but other weights in its
        products.

        Raises UnsupportedModel if several processes run the model.
        """
        raise UnsupportedModel("several processes run the model, and each has a part of its weights")

    def add_ngrams(self, table: NgramTable) -> None:
        """Set the table of n-gram embeddings, before any row runs.

        Raises UnsupportedModel if several processes run the model.
        """
        raise UnsupportedModel("a table of n-grams is read in one process alone")
