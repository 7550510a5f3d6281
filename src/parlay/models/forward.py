"""The interface between a native runner, which knows sequences, and the decoders that run its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import BLOCK, Budget, CacheShape, RecentShape, Room, Rows, Spread
from parlay.cache.pages import ALONE, pages_for
from parlay.cache.recent import most_pages
from parlay.compiled.structs import Linear
from parlay.models.config import DecoderConfig, KeyHeads, UnsupportedModel
from parlay.models.lookup import NgramTable
from parlay.models.lora import LowRankAdapter
from parlay.models.weights.fused import Operand
from parlay.types import NO_SKIP, Exactness, Features, Output, Segment, Skip, Tree


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Which layers have ``recent`` pages, as none of them sees more than ``window`` keys, and each layer's ``place``
    among those that share its pages. Layers that see an earlier one's keys have its place."""

    recent: tuple[bool, ...]
    place: tuple[int, ...]
    window: int = 0

    @staticmethod
    def of(config: DecoderConfig) -> LayerPages:
        """Layers with windows have recent pages where texts may become so long that this saves some, or have other
        heads than the others."""
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
        """All layers share their pages."""
        return LayerPages((False,) * layers, tuple(range(layers)))

    def layers(self, recent: bool) -> list[int]:
        """The layers that have keys of their own in pages of one kind, in the order of their places."""
        found = {place: layer for layer, place in reversed(list(enumerate(self.place))) if self.recent[layer] == recent}
        return [found[place] for place in sorted(found)]

    def key_heads(self, config: DecoderConfig, recent: bool) -> KeyHeads:
        """The heads of layers whose pages are of one kind; of no layer those of the others."""
        own = self.layers(recent) or self.layers(not recent)
        return config.heads_of(config.forms[own[0]]) if config.layers else config.heads_of(config.llama)


def cache_room(config: DecoderConfig, number_bytes: float) -> Room:
    """The memory that texts take in the cache, with so many bytes for each number of a key or value."""
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
    """``reason``: which kernels run, and why, in one line.

    ``pages``: which layers share pages. ``cache_lanes`` and ``spread`` are those of their cache's `CacheShape`.
    ``part``: sizes of the part of the model that runs here; None: all of it does. ``in_flight``: how many forwards may
    be under way at once, ``streamed_bytes`` what each of them reads from disk or the host's memory. ``chooses``: as in
    `RunnerSpec`.
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

    def cache_shapes(self, config: DecoderConfig, device: torch.device) -> tuple[CacheShape, RecentShape | None]:
        """The pages of layers that see all keys, and of the others, where these have pages of their own."""
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
    """The features of one segment, ``place`` among those of a forward; ``first`` is the flat number of their first row.

    ``anchors`` are the flat numbers of their rows' anchors where they join; see `Join`.
    """

    place: int
    first: int
    features: Features
    anchors: Sequence[int] = ()


class ForwardBatch(NamedTuple):
    """The rows that one forward runs: the ``ids`` of all sequences' rows in order. ``wanted`` are those with logits.

    ``places`` say where each sequence's rows lie, ``features`` what some of them read besides or instead of their ids,
    and ``inputs`` float32 ``[N, H]`` what all rows read in place of their embeddings. ``adapters`` are those of the
    rows, or empty where no row has one. ``tokens`` are, for models with n-grams, those of all rows of each place, and
    before them as many of the text before as n-grams reach back, or -1.
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


@dataclass(slots=True)
class Taps:
    """The hidden states ``[N, H]`` that enter some layers, as one forward collects them, and the seconds it takes."""

    layers: Collection[int]
    states: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    def take(self, layer: int, hidden_NH: Tensor) -> None:
        """Copy what enters this layer, if it is tapped."""
        if layer in self.layers:
            with self.timed():
                self.states[layer] = hidden_NH.clone()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The seconds inside the block are counted as the taps'."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class GrownTree(NamedTuple):
    """A draft as a head or a draft model has grown it: of each node its token, its parent, and its probability there.

    ``ran``: which of the rows below the text a node was; -1 if it did not run.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    ran: tuple[int, ...]

    @property
    def rows(self) -> Tree:
        """The rows that ran, as a tree; token 0 stands for those that did not join the draft."""
        count = max(self.ran, default=-1) + 1
        tokens, parents = [0] * count, [-1] * count
        for node, row in enumerate(self.ran):
            if row >= 0:
                above = self.parents[node]
                tokens[row], parents[row] = self.tokens[node], self.ran[above] if above >= 0 else -1
        return Tree(tuple(tokens), tuple(parents))

    @property
    def likeliest_rows(self) -> tuple[int, ...]:
        """The rows of the path from the root on that takes the likeliest child each time, of those that ran."""
        node, path = -1, []
        while ran := [child for child, above in enumerate(self.parents) if above == node and self.ran[child] >= 0]:
            node = max(ran, key=self.chances.__getitem__)
            path.append(self.ran[node])
        return tuple(path)


class TreeRequest(NamedTuple):
    """The draft of one text: its ``nodes``, at most.

    Where the request samples, its temperature and truncation, and the noise's stream at the place of each level's
    tokens. ``unread`` are those tokens of the text that a short list of a draft model's tokens should have. Below
    ``ends``, the tokens that end the text, nothing grows.
    """

    nodes: int
    temperature: float = 0.0
    streams: Sequence[int] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    unread: Sequence[int] = ()
    ends: Collection[int] = ()


class HeadRows(NamedTuple):
    """Inputs and outputs of a draft head: ``tokens_D`` int64 are the target's tokens of its outputs.

    The rows of the texts read what ``first`` makes of ``features_NF``, float32.
    """

    tokens_D: Tensor
    first: Linear
    features_NF: Tensor


class Growth(NamedTuple):
    """How the trees of a draft head, or of a draft model if ``head`` is None, grow (Li et al. 2024, EAGLE-2).

    Each of at most ``levels`` runs the ``width`` likeliest candidates of the level before, which offer as many children
    each. None whose path is less likely than ``least`` is offered, and none runs below which nothing could join the
    draft. A draft model runs no more rows below a text than the draft may have nodes, and with ``short`` it chooses
    among so many tokens that are frequent, and the newest of its texts.
    """

    levels: int
    width: int
    least: float
    head: HeadRows | None = None
    short: int = 0


class ForwardOutput(NamedTuple):
    """``logits`` ``[wanted, V]`` float32, and the tapped hidden states."""

    logits: Tensor
    taps: Taps

    def output(self, starts: tuple[int, ...], votes: tuple[Tensor | None, ...] = ()) -> Output:
        """Show it as a runner does; ``starts`` and ``votes`` as in `Output`."""
        return Output(self.logits, starts, self.taps.states, self.taps.seconds, votes=votes)


def wanted_rows(segments: Sequence[Segment]) -> tuple[list[int], tuple[int, ...]]:
    """Number the rows of a batch that want logits, and say where each segment's begin among them. Raises ValueError."""
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
    """Raises ValueError unless rows that see each other, or have other positions, are nodes, in chains, and all run."""
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
    """The rows' embeddings, with `Features` in the place of some or added to them, in place."""
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
        """Run the rows; keys and values go to their places."""
        ...

    def begin(self, work: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Begin to run the rows, and return what waits for the output. Here the places are done with already."""
        out = self.run(work)
        return lambda: out

    def add_adapter(self, adapter: LowRankAdapter) -> LowRankAdapter:
        """Pack what belongs here of an adapter, and return it: rows will run with that. Any thread may call this."""
        ...

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Read the rows ``[N, H]`` of these tokens as the first layer does."""
        ...

    def attach(self, budget: Budget) -> None:
        """Count what forwards hold besides weights and cached rows against a budget. Most hold nothing."""
        return

    def with_weights(self, weights: Mapping[str, Operand]) -> Forward:
        """Make another decoder of this model, over the same cache, whose products have other weights.

        Embeddings and norms are as they are here. Raises UnsupportedModel where several processes run the model.
        """
        raise UnsupportedModel("several processes run the model, and each has a part of its weights")

    def add_ngrams(self, table: NgramTable) -> None:
        """Take the table that rows read besides their embeddings, before the first of them runs.

        Raises UnsupportedModel where several processes run the model.
        """
        raise UnsupportedModel("a table of n-grams is read in one process alone")
