"""A roofline: the operators of a forward, and the time that a machine takes for each.

An operator's time is the larger of FLOPs over the machine's rate and bytes over its bandwidth, plus the time to start
it; a forward's time is the sum over its operators. The forward's own sums of FLOPs and bytes would not do: operators
run one after another, so one that waits for memory does not hide another's arithmetic (Williams et al. 2009 describe
this for one kernel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parlay.types.layer_split import BUFFERS, LayerSplit

Kind = Literal["linear", "attention", "vector"]
"""``linear``: products with weights; ``attention``: products with cached keys and values; ``vector``: elementwise work
on rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSums:
    """Sizes of a decoder whose layers differ, summed over all layers.

    ``qkv``: outputs of the query, key and value projections; ``mixed``: size of all query heads; ``mlp``: inner size of
    the feed-forwards. KV cache sizes of one token: ``whole`` in layers that keep all tokens, ``recent`` in
    sliding-window layers, ``attended`` as read by all layers (a layer may read another layer's cache). ``more`` further
    weights are multiplied; of ``by_row`` weights each token reads its own row.
    """

    qkv: int
    mixed: int
    mlp: int
    whole: int
    recent: int
    attended: int
    more: int = 0
    by_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayers:
    """Mixtures of experts: in each of ``layers`` layers a row runs ``chosen`` of ``count`` experts.

    Each expert has ``weights`` weights. At most ``slots`` experts, of all layers together, are in memory at a time;
    None: all of them.
    """

    layers: int
    count: int
    chosen: int
    weights: int
    slots: int | None = None

    @property
    def all_weights(self) -> int:
        """Weights of all experts."""
        return self.layers * self.count * self.weights

    @property
    def share(self) -> float:
        """Share of the experts that are in memory."""
        return 1.0 if self.slots is None else self.slots / (self.layers * self.count)

    def read(self, rows: int) -> float:
        """Weights of the distinct experts that ``rows`` rows run, if rows choose independently and uniformly."""
        distinct = self.count * (1 - (1 - self.chosen / self.count) ** rows)
        return self.layers * distinct * self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder, in elements, and the bytes of one weight and of one number in the KV cache.

    For quantised weights ``weight_bytes`` is the mean over all matrices, scales included. ``recent_layers`` are
    sliding-window layers, which keep at most ``recent_tokens`` tokens. ``sums`` is for models whose layers differ.
    ``stored_twice``: a tied embedding is in memory twice, also as the LM head. With ``split``, every forward reads some
    layers from disk. ``mixed`` are the layers' experts; a feed-forward that all rows run is counted in the other sizes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float = 2
    kv_bytes: float = 2
    tie_embeddings: bool = False
    stored_twice: bool = False
    recent_layers: int = 0
    recent_tokens: int = 0
    sums: LayerSums | None = None
    split: LayerSplit | None = None
    mixed: MixedLayers | None = None

    def text_bytes(self, tokens: int) -> int:
        """Bytes of the KV cache of ``tokens`` tokens."""
        recent = self.token_bytes * self.recent_layers // self.num_layers
        if self.sums is not None:
            recent = round(self.sums.recent * self.kv_bytes)
        return (self.token_bytes - recent) * tokens + recent * min(tokens, self.recent_tokens)

    @property
    def qkv_size(self) -> float:
        """Outputs of a layer's query, key and value projections; where layers differ, the mean."""
        if self.sums is not None:
            return self.sums.qkv / self.num_layers
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def mixed_size(self) -> float:
        """Size of all query heads of a layer; where layers differ, the mean."""
        return self.num_heads * self.head_dim if self.sums is None else self.sums.mixed / self.num_layers

    @property
    def mlp_size(self) -> float:
        """Inner size of a layer's feed-forward; where layers differ, the mean."""
        return self.intermediate_size if self.sums is None else self.sums.mlp / self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV cache of one token."""
        if self.sums is not None:
            return round((self.sums.whole + self.sums.recent) * self.kv_bytes)
        return round(2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes)

    @property
    def attended_bytes(self) -> int:
        """Bytes of one token's keys and values that all layers read; a cache that two layers share counts twice."""
        return self.token_bytes if self.sums is None else round(self.sums.attended * self.kv_bytes)

    @property
    def parameters(self) -> int:
        """Weights of all matrices. Norms and biases, a thousandth of them or less, are left out."""
        by_row = 0 if self.sums is None else self.sums.by_row
        experts = 0 if self.mixed is None else self.mixed.all_weights
        return self.multiplied + experts + by_row + (0 if self.tie_embeddings else self.vocab_size * self.hidden_size)

    @property
    def stored_bytes(self) -> float:
        """Bytes of all weights."""
        again = self.vocab_size * self.hidden_size if self.stored_twice else 0
        return (self.parameters + again) * self.weight_bytes

    @property
    def resident_bytes(self) -> float:
        """Bytes of the weights in memory, and of the buffers for streamed layers."""
        split, mixed = self.split, self.mixed
        away = 0 if mixed is None else (1 - mixed.share) * mixed.all_weights * self.weight_bytes
        return self.stored_bytes - away + (BUFFERS * split.buffer_bytes - split.streamed_bytes if split else 0)

    def fetched_bytes(self, rows: int) -> float:
        """Bytes of weights that a forward of ``rows`` rows reads from outside memory."""
        layers = self.split.streamed_bytes if self.split else 0
        return layers + (
            0 if self.mixed is None else (1 - self.mixed.share) * self.mixed.read(rows) * self.weight_bytes
        )

    @property
    def read_bytes(self) -> float:
        """Bytes of the weights in `multiplied`."""
        return self.multiplied * self.weight_bytes

    @property
    def multiplied(self) -> int:
        """Weights that a forward reads as a whole: all except experts and an embedding that is not also the LM head."""
        layer = self.hidden_size * (self.qkv_size + self.mixed_size + 3 * self.mlp_size)
        more = 0 if self.sums is None else self.sums.more
        return round(self.num_layers * layer) + more + self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """One forward: each of ``batch`` sequences feeds ``rows`` new tokens after ``context`` cached ones.

    Plain decoding has one row, the verify of k nodes k + 1, a prefill chunk all of its tokens. ``logits``: rows of each
    sequence that go through the LM head; None: all. ``leaves``: paths of the tree in those rows; 1: a chain.
    """

    batch: int = 1
    rows: int = 1
    context: int = 0
    logits: int | None = None
    leaves: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.rows < 1 or self.context < 0 or not 1 <= self.leaves <= self.rows:
            raise ValueError(f"work needs batch, rows >= 1, context >= 0 and leaves from 1 to rows, got {self}")

    @property
    def sums(self) -> StepShape:
        """Sums of this forward over its sequences."""
        rows, keys = self.batch * self.rows, self.context + self.rows
        head_rows = self.batch * (self.rows if self.logits is None else self.logits)
        return StepShape(self.batch * self.leaves, rows, head_rows, self.batch * keys, rows * keys)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: floating-point operations (a multiplication and an addition are two), and bytes read and written."""

    name: str
    kind: Kind
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sums over the sequences of a forward, which may differ.

    ``sequences``: number of sequences, or of paths if they have trees; ``rows`` and ``head_rows``, the rows that go
    through the LM head; ``keys``: cached and new tokens that each sequence reads, summed; ``pairs``: pairs of a row and
    a key of its sequence.
    """

    sequences: int
    rows: int
    head_rows: int
    keys: float
    pairs: float


def operators(shape: ModelShape, work: ForwardShape) -> Iterator[Operator]:
    """Yield the operators of a forward, each summed over all layers.

    FLOPs are those of eager attention, which computes every row against all cached and all new keys and masks some
    afterwards: what `torch.utils.flop_counter.FlopCounterMode` counts for the model in transformers. Bytes are weights
    once, each sequence's keys and values once, and rows in and out.
    """
    yield from step_operators(shape, work.sums)


def step_operators(shape: ModelShape, step: StepShape) -> Iterator[Operator]:
    """Yield the operators of a forward that is given by its sums."""
    layers, rows, heads, mlp = shape.num_layers, step.rows, shape.mixed_size, shape.mlp_size
    yield _linear("qkv", shape.weight_bytes, rows, (shape.hidden_size, shape.qkv_size), layers)
    yield Operator(
        "attention",
        "attention",
        round(4 * layers * heads * step.pairs),  # scores, then values
        round(shape.attended_bytes * step.keys + shape.token_bytes * rows),  # keys read, and new keys written
    )
    yield _linear("attention out", shape.weight_bytes, rows, (heads, shape.hidden_size), layers)
    yield _linear("gate, up", shape.weight_bytes, rows, (shape.hidden_size, 2 * mlp), layers)
    yield _linear("down", shape.weight_bytes, rows, (mlp, shape.hidden_size), layers)
    if shape.mixed is not None:
        runs, read = rows * shape.mixed.layers * shape.mixed.chosen, shape.mixed.read(rows)
        moved = round(shape.weight_bytes * (read + 2 * runs * shape.hidden_size))
        yield Operator("experts", "linear", 2 * runs * shape.mixed.weights, moved)
    if shape.sums is not None and shape.sums.more:
        more = shape.sums.more / shape.hidden_size
        yield _linear("numbers of each layer", shape.weight_bytes, rows, (shape.hidden_size, more))
    yield _linear("head", shape.weight_bytes, step.head_rows, (shape.hidden_size, shape.vocab_size))
    # Two norms and two additions per layer, rotations of heads, gate times up; four bytes each, read and written.
    passed = 4 * shape.hidden_size + shape.qkv_size + 2 * mlp
    yield Operator("norms, rotations, gates", "vector", 0, round(8 * layers * rows * passed))
    # Scores are masked and normed in four bytes: read and written about three times.
    yield Operator("softmax", "vector", 0, round(24 * layers * shape.num_heads * step.pairs))


def _linear(name: str, weight_bytes: float, rows: int, sizes: tuple[float, float], count: int = 1) -> Operator:
    """``count`` products of ``rows`` rows with a matrix of ``sizes`` (inputs, outputs), as one operator."""
    inputs, outputs = sizes
    moved = inputs * outputs + rows * (inputs + outputs)
    return Operator(name, "linear", round(2 * count * rows * inputs * outputs), round(count * moved * weight_bytes))


def flops(shape: ModelShape, work: ForwardShape) -> int:
    """Floating-point operations of a forward's products."""
    return sum(operator.flops for operator in operators(shape, work))


def moved_bytes(shape: ModelShape, work: ForwardShape) -> int:
    """Bytes that a forward reads and writes."""
    return sum(operator.bytes for operator in operators(shape, work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that the engine takes in a step besides forwards.

    ``step`` once; ``sequence`` for each sequence, ``drafted`` more for one with a draft and ``node`` for each drafted
    node; ``level`` for each forward of a draft model, ``level_sequence`` for each sequence in it.
    """

    step: float = 0.0
    sequence: float = 0.0
    drafted: float = 0.0
    node: float = 0.0
    level: float = 0.0
    level_sequence: float = 0.0

    def of_step(self, batch: int, nodes: int = 0) -> float:
        """Seconds for a step in which every sequence drafts ``nodes`` nodes."""
        return self.step + batch * (self.sequence + (self.drafted + self.node * nodes if nodes else 0.0))

    def of_level(self, batch: int) -> float:
        """Seconds for one forward of a model that drafts for ``batch`` sequences."""
        return self.level + batch * self.level_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speeds of a machine in a forward: bytes and FLOPs per second by kind of operator, and fixed times in seconds.

    A model whose weights fit into ``cache_bytes`` is read at ``cached_bandwidth`` and multiplied at ``cached_rate``,
    and its keys are read at ``cached_attention_bandwidth`` (0: as those of other models); larger models are read from
    memory in every forward. Streamed layers are read from disk at ``disk_bandwidth`` while other layers are computed.
    Experts outside memory are read when the layer's router has chosen them, so nothing is computed meanwhile. Attention
    of one KV head of a sequence runs on one of ``threads`` threads; 1: attention divides evenly. ``layer_seconds``
    starts a layer's operators, ``attend_seconds`` one path's attention in one layer; ``forward_seconds`` is the rest of
    a forward.
    """

    bandwidth: float
    rate: float
    attention_bandwidth: float
    attention_rate: float
    vector_bandwidth: float
    layer_seconds: float
    attend_seconds: float
    forward_seconds: float
    cached_bandwidth: float = 0.0
    cached_rate: float = 0.0
    cached_attention_bandwidth: float = 0.0
    cache_bytes: float = 0.0
    threads: float = 1.0
    disk_bandwidth: float = 0.0
    engine: Overheads = Overheads()

    def forward(self, shape: ModelShape, work: ForwardShape) -> float:
        """Seconds of one forward."""
        return self.step(shape, work.sums)

    def step(self, shape: ModelShape, step: StepShape) -> float:
        """Seconds of one forward that is given by its sums."""
        started = self.layer_seconds + self.attend_seconds * step.sequences
        seconds = self.forward_seconds + shape.num_layers * started + self._busy(shape, step)
        if shape.split:
            return max(seconds, shape.split.streamed_bytes / self.disk_bandwidth)
        fetched = shape.fetched_bytes(step.rows)
        return seconds + fetched / self.disk_bandwidth if fetched else seconds

    def prefill(self, shape: ModelShape, tokens: int, *, batch: int = 1, chunk: int = 512) -> float:
        """Seconds until prompts of ``tokens`` tokens are cached and each has the logits for its first token.

        Prompts are fed one after another, in chunks of at most ``chunk`` rows, as the engine does.
        """
        works = [
            ForwardShape(rows=min(chunk, tokens - begin), context=begin, logits=int(begin + chunk >= tokens))
            for begin in range(0, tokens, chunk)
        ]
        return batch * sum(self.forward(shape, work) for work in works)

    def keys_bandwidth(self, shape: ModelShape) -> float:
        """Bytes per second at which this model's attention reads keys and values."""
        cached = shape.read_bytes <= self.cache_bytes
        return (cached and self.cached_attention_bandwidth) or self.attention_bandwidth

    def _busy(self, shape: ModelShape, step: StepShape) -> float:
        """Seconds of all operators, without starting them."""
        cached = shape.read_bytes <= self.cache_bytes
        reached = {
            "linear": (self.cached_bandwidth, self.cached_rate) if cached else (self.bandwidth, self.rate),
            "attention": (self.keys_bandwidth(shape), self.attention_rate),
            "vector": (self.vector_bandwidth, float("inf")),
        }
        seconds = 0.0
        for operator in step_operators(shape, step):
            bandwidth, rate = reached[operator.kind]
            slower = uneven(shape, step.sequences, self.threads) if operator.kind == "attention" else 1.0
            seconds += slower * together(operator.kind, operator.bytes / bandwidth, operator.flops / rate)
        return seconds


def together(kind: Kind, memory: float, arithmetic: float) -> float:
    """Combine an operator's seconds of reading alone, ``memory``, with its seconds of arithmetic alone.

    Linear layers read ahead while they multiply, yet neither runs at full speed where both take as long: the root of
    the sum of squares is 1.4 times the longer one there, and close to it elsewhere. In attention the times add up.
    """
    return memory + arithmetic if kind == "attention" else math.hypot(memory, arithmetic)


def uneven(shape: ModelShape, sequences: int, threads: float) -> float:
    """Return the factor by which attention takes longer because each KV head of a sequence is one thread's work."""
    heads = max(sequences, 1) * shape.num_kv_heads
    return math.ceil(heads / threads) * threads / heads
