"""A roofline: the operators of a forward, and the time that a machine takes for each of them.

An operator takes about as long as its slower part: FLOPs over the machine's rate, or bytes over its bandwidth (Williams
et al. 2009 describe this for one kernel); `together` combines the two. A forward takes the sum over its operators, plus
the times to start them. FLOPs and bytes can't be added up over a forward first, because operators run one after
another: while one waits for memory, another's arithmetic does not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from parlay.cost.overheads import NO_OVERHEADS, Overheads
from parlay.types.layer_split import BUFFERS, LayerSplit

Kind = Literal["linear", "attention", "vector"]
"""``linear``: products with weights; ``attention``: products with cached keys and values; ``vector``: elementwise work
on rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSums:
    """Sizes of a decoder whose layers differ, summed over all layers.

    ``qkv``: outputs of the query, key and value projections. ``mixed``: size of all query heads. ``mlp``: inner size of
    the feed-forwards. Three are KV cache sizes of one token: ``whole`` in layers that keep all tokens, ``recent`` in
    sliding-window layers, and ``attended`` as read by all layers, because a layer may read another layer's cache.
    ``more``: further weights that rows are multiplied by. ``by_row``: weights of tables; a token reads one row of them.
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

    Each expert has ``weights`` weights. At most ``slots`` experts of all layers together are in memory at a time; None
    means all experts.
    """

    layers: int
    count: int
    chosen: int
    weights: int
    slots: int | None = None

    @property
    def all_weights(self) -> int:
        """Number of weights of all experts."""
        return self.layers * self.count * self.weights

    @property
    def share(self) -> float:
        """Share of all experts that is in memory."""
        return 1.0 if self.slots is None else self.slots / (self.layers * self.count)

    def read(self, rows: int) -> float:
        """Return the mean number of weights that ``rows`` rows read if they choose experts at random."""
        distinct = self.count * (1 - (1 - self.chosen / self.count) ** rows)
        return self.layers * distinct * self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder, in elements, and the bytes of one weight and of one number in the KV cache.

    For quantised weights ``weight_bytes`` is the mean over all matrices, scales included. ``recent_layers`` counts the
    sliding-window layers, which keep at most ``recent_tokens`` tokens. Models whose layers differ have ``sums``. With
    ``stored_twice``, memory holds a tied embedding a second time, as the LM head. With ``split``, every forward reads
    some layers from disk. ``mixed`` describes the experts; the other sizes include a feed-forward that all rows run.
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
        """Return the bytes of the KV cache of a text of ``tokens`` tokens."""
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
        """Bytes of one token's keys and values as read by all layers. A cache that two layers read counts twice."""
        return self.token_bytes if self.sums is None else round(self.sums.attended * self.kv_bytes)

    @property
    def parameters(self) -> int:
        """Number of weights of all matrices. Norms and biases, at most a thousandth of it, are left out."""
        by_row = 0 if self.sums is None else self.sums.by_row
        experts = 0 if self.mixed is None else self.mixed.all_weights
        return self.multiplied + experts + by_row + (0 if self.tie_embeddings else self.vocab_size * self.hidden_size)

    @property
    def stored_bytes(self) -> float:
        """Bytes of all weights, in memory or on disk."""
        again = self.vocab_size * self.hidden_size if self.stored_twice else 0
        return (self.parameters + again) * self.weight_bytes

    @property
    def resident_bytes(self) -> float:
        """Bytes in memory: weights, and the buffers for layers that are read from disk."""
        split, mixed = self.split, self.mixed
        away = 0 if mixed is None else (1 - mixed.share) * mixed.all_weights * self.weight_bytes
        return self.stored_bytes - away + (BUFFERS * split.buffer_bytes - split.streamed_bytes if split else 0)

    def fetched_bytes(self, rows: int) -> float:
        """Return the bytes of weights that a forward of ``rows`` rows reads from disk."""
        layers = self.split.streamed_bytes if self.split else 0
        return layers + (
            0 if self.mixed is None else (1 - self.mixed.share) * self.mixed.read(rows) * self.weight_bytes
        )

    @property
    def read_bytes(self) -> float:
        """Bytes of the weights that `multiplied` counts."""
        return self.multiplied * self.weight_bytes

    @property
    def multiplied(self) -> int:
        """Number of weights that every forward reads: all except experts, and an embedding that is not the LM head."""
        layer = self.hidden_size * (self.qkv_size + self.mixed_size + 3 * self.mlp_size)
        more = 0 if self.sums is None else self.sums.more
        return round(self.num_layers * layer) + more + self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """One forward: each of ``batch`` sequences feeds ``rows`` new tokens after ``context`` cached ones.

    Plain decoding has one row, verifying k drafted nodes has k + 1 rows, and a prefill chunk has a row for each of its
    tokens. ``logits`` is the number of rows of each sequence that go through the LM head; None means all. ``leaves`` is
    the number of paths in the tree that the rows form, 1 for a chain.
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
        """The same forward, given by its sums over all sequences."""
        rows, keys = self.batch * self.rows, self.context + self.rows
        head_rows = self.batch * (self.rows if self.logits is None else self.logits)
        return StepShape(self.batch * self.leaves, rows, head_rows, self.batch * keys, rows * keys)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: its floating-point operations (a multiply-add counts as two), and the bytes that it moves."""

    name: str
    kind: Kind
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """A forward given by sums over its sequences, which may differ from each other.

    ``sequences``: number of sequences, or of paths if the sequences have trees. ``rows``: new tokens. ``head_rows``:
    rows that go through the LM head. ``keys``: cached and new tokens that the sequences attend to. ``pairs``: pairs of
    a row and a key of its sequence.
    """

    sequences: int
    rows: int
    head_rows: int
    keys: float
    pairs: float


def operators(shape: ModelShape, work: ForwardShape) -> Iterator[Operator]:
    """Yield the operators of a forward, each summed over all layers.

    FLOPs are counted for eager attention, which multiplies every row with all cached and new keys and masks some of the
    scores afterwards. `torch.utils.flop_counter.FlopCounterMode` counts the same for the model in transformers. Bytes
    count each weight once, each sequence's keys and values once, and the rows read and written.
    """
    yield from step_operators(shape, work.sums)


def step_operators(shape: ModelShape, step: StepShape) -> Iterator[Operator]:
    """Yield the operators of a forward that is given by its sums; see `operators`."""
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
    # In each layer: two norms, two additions, rotations of heads, gate times up. Four bytes are read and written each.
    passed = 4 * shape.hidden_size + shape.qkv_size + 2 * mlp
    yield Operator("norms, rotations, gates", "vector", 0, round(8 * layers * rows * passed))
    # Masking and softmax read and write each score about three times; a score has four bytes.
    yield Operator("softmax", "vector", 0, round(24 * layers * shape.num_heads * step.pairs))


def _linear(name: str, weight_bytes: float, rows: int, sizes: tuple[float, float], count: int = 1) -> Operator:
    """Return one operator for ``count`` products of ``rows`` rows with a matrix of ``sizes`` (inputs, outputs)."""
    inputs, outputs = sizes
    moved = inputs * outputs + rows * (inputs + outputs)
    return Operator(name, "linear", round(2 * count * rows * inputs * outputs), round(count * moved * weight_bytes))


def flops(shape: ModelShape, work: ForwardShape) -> int:
    """Return the floating-point operations of a forward's matrix products."""
    return sum(operator.flops for operator in operators(shape, work))


def moved_bytes(shape: ModelShape, work: ForwardShape) -> int:
    """Return the bytes that a forward reads and writes."""
    return sum(operator.bytes for operator in operators(shape, work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speeds of a machine in a forward: bytes and FLOPs per second by kind of operator, and fixed times in seconds.

    Every forward reads a model's weights from memory, unless they fit into ``cache_bytes``. A model that fits reads and
    multiplies its weights at ``cached_bandwidth`` and ``cached_rate``, and reads its keys and values at
    ``cached_attention_bandwidth``, or at ``attention_bandwidth`` if that is 0. Streamed layers are read from disk at
    ``disk_bandwidth`` while other layers are computed. Experts outside memory are read once the layer's router has
    chosen them, so nothing is computed meanwhile. One of ``threads`` threads computes the attention of one KV head of
    one sequence; with 1, attention divides evenly. Fixed times are ``layer_seconds`` to start a layer's operators,
    ``attend_seconds`` to start one path's attention in one layer, and ``forward_seconds`` for the rest of a forward.
    ``read_bandwidth`` is how fast all threads read memory when the other constants held; 0: unknown.
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
    read_bandwidth: float = 0.0
    engine: Overheads = NO_OVERHEADS

    def at(self, read_bandwidth: float) -> Machine:
        """Return the machine while its threads read memory at ``read_bandwidth`` bytes per second; 0: unknown.

        Other guests of a shared machine change that speed. Products with weights follow it. Attention does not, even
        of one row: it reads cached keys and values more slowly than memory gives them.
        """
        if not read_bandwidth or not self.read_bandwidth:
            return self
        bandwidth = self.bandwidth * read_bandwidth / self.read_bandwidth
        return replace(self, bandwidth=bandwidth, read_bandwidth=read_bandwidth)

    def forward(self, shape: ModelShape, work: ForwardShape) -> float:
        """Return the seconds of one forward."""
        return self.step(shape, work.sums)

    def step(self, shape: ModelShape, step: StepShape) -> float:
        """Return the seconds of one forward that is given by its sums."""
        started = self.layer_seconds + self.attend_seconds * step.sequences
        seconds = self.forward_seconds + shape.num_layers * started + self._operator_seconds(shape, step)
        if shape.split:
            return max(seconds, shape.split.streamed_bytes / self.disk_bandwidth)
        fetched = shape.fetched_bytes(step.rows)
        return seconds + fetched / self.disk_bandwidth if fetched else seconds

    def prefill(self, shape: ModelShape, tokens: int, *, batch: int = 1, chunk: int = 512) -> float:
        """Return the seconds until ``batch`` prompts of ``tokens`` tokens are cached and have logits for a first token.

        As in the engine, prompts are fed one after another, in chunks of at most ``chunk`` rows.
        """
        works = [
            ForwardShape(rows=min(chunk, tokens - begin), context=begin, logits=int(begin + chunk >= tokens))
            for begin in range(0, tokens, chunk)
        ]
        return batch * sum(self.forward(shape, work) for work in works)

    def keys_bandwidth(self, shape: ModelShape) -> float:
        """Return the bytes per second at which this model's attention reads keys and values."""
        cached = shape.read_bytes <= self.cache_bytes
        return (cached and self.cached_attention_bandwidth) or self.attention_bandwidth

    def _operator_seconds(self, shape: ModelShape, step: StepShape) -> float:
        """Return the seconds of all operators, without the fixed times to start them."""
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
    """Return an operator's seconds if its reads alone take ``memory`` and its arithmetic alone ``arithmetic`` seconds.

    Linear layers read ahead while they multiply, so the longer time decides. If the times are about equal, each slows
    the other, and both take about a quarter longer. The cube root of the sum of cubes models both cases. In attention
    the two times add up.
    """
    return memory + arithmetic if kind == "attention" else math.cbrt(memory**3 + arithmetic**3)


def uneven(shape: ModelShape, sequences: int, threads: float) -> float:
    """Return the factor by which attention takes longer because KV heads do not divide evenly among threads."""
    heads = max(sequences, 1) * shape.num_kv_heads
    return math.ceil(heads / threads) * threads / heads
