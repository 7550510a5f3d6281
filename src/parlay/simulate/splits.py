"""A model over several devices: the memory that each split needs, and the cost of its steps.

All devices are equal. Four kinds of parallelism divide the work:

- Tensor parallelism divides matrices and heads among ranks. They exchange rows twice in a layer and add them up in the
  order of ranks.
- Pipeline parallelism divides layers into stages. Sequences form as many groups as there are stages, and each stage
  computes another group.
- Context parallelism divides cached keys and values, and the rows of prompts. It combines with tensor parallelism.
- Replicas divide requests.

A drafter on a device of its own drafts for one half of the sequences while the target verifies the other half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parlay.cost.roofline import Machine, ModelShape
from parlay.simulate.costs import RooflineSteps, StepCost
from parlay.simulate.drafting import DraftSeconds

_ROW_BYTES = 4
"""Bytes of a number that ranks exchange. Partial sums are in float32."""
_SPAN = 1024
"""Keys of a span, the part of a text that lies on one rank, as in `parlay.cache`. Ranks exchange sums over spans."""
_DIVIDED = 32
"""If a step has at least this many rows for each of these ranks, each rank computes only its share of the rows, as in
the compiled decoder."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two devices: bytes per second, seconds until the first byte, and the source of both numbers."""

    bandwidth: float
    latency: float
    source: str

    def seconds(self, count: float) -> float:
        """Return the seconds to send ``count`` bytes."""
        return self.latency + count / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of work among devices: ``replicas`` of ``tensor * pipeline * context`` ranks each.

    With ``drafter``, each replica has one more device for its drafter.
    """

    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    drafter: bool = False

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.pipeline * self.context + self.drafter

    @property
    def devices(self) -> int:
        return self.replicas * self.ranks

    def __str__(self) -> str:
        parts = [("tensor", self.tensor), ("pipeline", self.pipeline), ("context", self.context)]
        words = [f"{name} {count}" for name, count in parts if count > 1]
        words += ["drafter apart"] if self.drafter else []
        return f"{self.replicas} x {' '.join(words) or 'one device'}"


def splits(devices: int, shape: ModelShape, *, drafter: bool = False) -> Iterator[Split]:
    """Yield the splits that make sense for a model on at most ``devices`` devices.

    Each has as many replicas as fit. Sizes are powers of two, or all devices. With ``drafter``, splits with a device
    for the drafter come as well.
    """
    sizes = [size for size in range(1, devices + 1) if size & (size - 1) == 0 or size == devices]
    apart = (False, True) if drafter else (False,)
    for tensor, pipeline, context, own in itertools.product(sizes, sizes, sizes, apart):
        ranks = tensor * pipeline * context + own
        if ranks > devices or tensor > shape.num_kv_heads or pipeline > shape.num_layers:
            continue
        if context > 1 and pipeline > 1:
            continue  # context parallelism needs all layers on each rank
        if shape.sums is not None and tensor * pipeline * context > 1:
            continue  # layers that differ can't be divided
        yield Split(replicas=devices // ranks, tensor=tensor, pipeline=pipeline, context=context, drafter=own)


def shard(shape: ModelShape, split: Split) -> ModelShape:
    """Return the part of the model on one device. Heads, columns and layers that don't divide evenly are rounded up."""
    return replace(
        shape,
        vocab_size=math.ceil(shape.vocab_size / split.tensor),
        intermediate_size=math.ceil(shape.intermediate_size / split.tensor),
        num_heads=math.ceil(shape.num_heads / split.tensor),
        num_kv_heads=math.ceil(shape.num_kv_heads / split.tensor),
        num_layers=math.ceil(shape.num_layers / split.pipeline),
        tie_embeddings=shape.tie_embeddings
        or split.pipeline > 1,  # the first stage has only the embedding, the last only the LM head
    )


def share_of(machine: Machine, count: int) -> Machine:
    """Return one process's share of a machine on which ``count`` processes work at once."""
    return replace(
        machine,
        bandwidth=machine.bandwidth / count,
        rate=machine.rate / count,
        attention_bandwidth=machine.attention_bandwidth / count,
        attention_rate=machine.attention_rate / count,
        vector_bandwidth=machine.vector_bandwidth / count,
        cached_bandwidth=machine.cached_bandwidth / count,
        cached_rate=machine.cached_rate / count,
        cached_attention_bandwidth=machine.cached_attention_bandwidth / count,
        cache_bytes=machine.cache_bytes / count,
        threads=max(1.0, machine.threads / count),
    )


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """The memory of a split: bytes of weights on a device, usable bytes of a device, and cached tokens of a replica."""

    weights: float
    device: float | None
    cache_tokens: int


def memory_of(shape: ModelShape, split: Split, usable: float | None, drafter: ModelShape | None) -> SplitMemory:
    """Return the memory of a split if weights and cache may take ``usable`` bytes of each device.

    None means that this number is not known; then there is no limit. A drafter without a device of its own takes memory
    beside the weights.
    """
    part = shard(shape, split)
    weights = part.stored_bytes + (drafter.stored_bytes if drafter is not None and not split.drafter else 0.0)
    if usable is None:
        return SplitMemory(weights, None, 1 << 30)
    room = (usable - weights) / part.token_bytes * split.context
    return SplitMemory(weights, usable, max(0, min(1 << 30, int(room))))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step: computing on devices, and waiting for links between them."""

    compute: float
    link: float

    @property
    def seconds(self) -> float:
        return self.compute + self.link


class SplitSteps:
    """A `StepCost` for the steps of one replica of a split."""

    def __init__(self, machine: Machine, shape: ModelShape, split: Split, link: Link) -> None:
        self._shape, self._split, self._link = shape, split, link
        part = shard(shape, split)
        self._part: StepCost = RooflineSteps(machine, part)
        self._headless: StepCost = RooflineSteps(machine, replace(part, vocab_size=0))
        self._engine = machine.engine

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        return self.parts(sequences, rows, head_rows, keys, pairs).seconds

    def parts(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> StepParts:
        """Return the seconds of a step, separately for computing and for waiting."""
        split = self._split
        if split.context > 1:
            return self._by_context(sequences, rows, head_rows, keys, pairs)
        groups = max(1, min(split.pipeline, sequences))
        each, own = math.ceil(sequences / groups), math.ceil(rows / groups)
        heads = math.ceil(head_rows / groups)
        compute = self._part(each, own, heads, keys / groups, pairs / groups)
        if (others := split.pipeline - 1) > 0:  # stages without the LM head, and without the engine's work
            compute += others * (
                self._headless(each, own, 0, keys / groups, pairs / groups) - self._engine.of_step(each)
            )
        return StepParts(compute, split.pipeline * self._exchanges(own, heads))

    def _exchanges(self, rows: float, head_rows: float) -> float:
        """Return the seconds that one stage waits for links while it computes one group of sequences."""
        split, shape, link = self._split, self._shape, self._link
        row, seconds = rows * shape.hidden_size * _ROW_BYTES, 0.0
        if split.tensor > 1:
            layers, others = math.ceil(shape.num_layers / split.pipeline), split.tensor - 1
            seconds += 2 * layers * link.seconds(others * row)
            logits = head_rows * shape.vocab_size * _ROW_BYTES * others / split.tensor
            seconds += link.seconds(logits) / split.pipeline  # only the last stage has them
        if split.pipeline > 1:
            seconds += link.seconds(row)
        return seconds

    def _by_context(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> StepParts:
        """Return the seconds of a step in which ranks divide cached keys.

        Each rank sends the others its rows' sums over its spans of keys. If there are many rows, ranks divide them,
        too, and send each other their queries, keys and values. If there are few, every rank computes all of them.
        """
        ranks, shape, link, tensor = self._split.context, self._shape, self._link, self._split.tensor
        heads, key_heads = math.ceil(shape.num_heads / tensor), math.ceil(shape.num_kv_heads / tensor)
        divides = rows >= _DIVIDED * ranks
        own = math.ceil(rows / ranks) if divides else rows
        compute = self._part(sequences, own, min(head_rows, own), keys / ranks, pairs / ranks)
        spans = math.ceil(pairs / max(rows, 1) / _SPAN)  # that a row attends to
        given = rows * math.ceil(spans / ranks) * heads * (shape.head_dim + 2)
        given += own * (heads + 2 * key_heads) * shape.head_dim if divides else 0
        seconds = shape.num_layers * link.seconds(given * _ROW_BYTES * (ranks - 1))
        return StepParts(compute, seconds + self._exchanges(own, min(head_rows, own)))


def beside(draft: DraftSeconds, verify: StepCost, link: Link) -> DraftSeconds:
    """Return the seconds that drafting adds to a step if another device drafts.

    There are two ways, and the quicker one is taken. The target may wait while the other device drafts. Or the other
    device drafts for one half of the sequences while the target verifies the other half; then the target reads its
    weights twice. Either way, tokens go over the link and back.
    """

    def verified(sequences: int, nodes: int, context: float) -> float:
        rows = sequences * (1 + nodes)
        return verify(sequences, rows, rows, sequences * (context + nodes), rows * (context + nodes))

    def seconds(sequences: int, nodes: int, context: float) -> float:
        alone = draft(sequences, nodes, context)
        if sequences > 1:
            half = math.ceil(sequences / 2)
            in_turns = 2 * max(verified(half, nodes, context), draft(half, nodes, context))
            alone = min(alone, in_turns - verified(sequences, nodes, context))
        return max(0.0, alone) + 2 * link.latency

    return seconds
