"""A model over several devices: the memory that each split needs, and the cost of its steps.

Devices are alike. Tensor parallelism divides matrices and heads among ranks, which exchange rows twice in a layer and
add them in rank order; pipeline parallelism divides layers, and as many groups of sequences as there are stages are
under way; context parallelism divides cached keys and prompts' rows, and goes with tensor parallelism; replicas divide
requests. A drafter on a device of its own drafts for one half of the sequences while the other half is verified.
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
"""Bytes of a number that ranks exchange: sums are in float32."""
_SPAN = 1024
"""Keys that lie together where ranks share texts, as in `parlay.cache`: their sums are exchanged."""
_DIVIDED = 32
"""Rows for each of these ranks, from which on each computes a share of them, as the compiled decoder does."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between two devices: bytes per second, seconds until the first byte, and how that is known."""

    bandwidth: float
    latency: float
    source: str

    def seconds(self, count: float) -> float:
        """Time to send so many bytes."""
        return self.latency + count / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How devices are used: ``replicas`` of ``tensor * pipeline * context`` ranks each, and maybe a drafter's."""

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
    """The splits of at most so many devices that leave none idle which could be one more replica."""
    sizes = [size for size in range(1, devices + 1) if size & (size - 1) == 0 or size == devices]
    apart = (False, True) if drafter else (False,)
    for tensor, pipeline, context, own in itertools.product(sizes, sizes, sizes, apart):
        ranks = tensor * pipeline * context + own
        if ranks > devices or tensor > shape.num_kv_heads or pipeline > shape.num_layers:
            continue
        if context > 1 and pipeline > 1:
            continue  # ranks that share texts have all layers
        if shape.sums is not None and tensor * pipeline * context > 1:
            continue  # layers that differ are not shared out
        yield Split(replicas=devices // ranks, tensor=tensor, pipeline=pipeline, context=context, drafter=own)


def shard(shape: ModelShape, split: Split) -> ModelShape:
    """The part of the model on one device: heads, columns and layers, the larger part where they don't divide."""
    return replace(
        shape,
        vocab_size=math.ceil(shape.vocab_size / split.tensor),
        intermediate_size=math.ceil(shape.intermediate_size / split.tensor),
        num_heads=math.ceil(shape.num_heads / split.tensor),
        num_kv_heads=math.ceil(shape.num_kv_heads / split.tensor),
        num_layers=math.ceil(shape.num_layers / split.pipeline),
        tie_embeddings=shape.tie_embeddings
        or split.pipeline > 1,  # the first stage has one of the two, the last the other
    )


def share_of(machine: Machine, count: int) -> Machine:
    """Give the share that one of ``count`` processes gets of a machine on which all of them work at once."""
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
    """Bytes of weights on one device, what a device has, and tokens that a replica's ranks cache together."""

    weights: float
    device: float | None
    cache_tokens: int


def memory_of(shape: ModelShape, split: Split, usable: float | None, drafter: ModelShape | None) -> SplitMemory:
    """``usable`` bytes of a device are for weights and cache; None: not known, and then without a limit.

    A drafter that has no device of its own is on each device that has the first stage.
    """
    part = shard(shape, split)
    weights = part.stored_bytes + (drafter.stored_bytes if drafter is not None and not split.drafter else 0.0)
    if usable is None:
        return SplitMemory(weights, None, 1 << 30)
    room = (usable - weights) / part.token_bytes * split.context
    return SplitMemory(weights, usable, max(0, min(1 << 30, int(room))))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step: computing on devices, and waiting for links."""

    compute: float
    link: float

    @property
    def seconds(self) -> float:
        return self.compute + self.link


class SplitSteps:
    """The steps of one replica; a `StepCost`."""

    def __init__(self, machine: Machine, shape: ModelShape, split: Split, link: Link) -> None:
        self._shape, self._split, self._link = shape, split, link
        part = shard(shape, split)
        self._part: StepCost = RooflineSteps(machine, part)
        self._headless: StepCost = RooflineSteps(machine, replace(part, vocab_size=0))
        self._engine = machine.engine

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        return self.parts(sequences, rows, head_rows, keys, pairs).seconds

    def parts(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> StepParts:
        """The step's seconds, computing and waiting apart."""
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
        """Seconds that one stage spends on links for a group."""
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
        """Cached keys are divided, and each rank gives the others each row's sums over its spans of keys.

        Many rows are divided, too, and their queries, keys and values given; few are computed by all ranks.
        """
        ranks, shape, link, tensor = self._split.context, self._shape, self._link, self._split.tensor
        heads, key_heads = math.ceil(shape.num_heads / tensor), math.ceil(shape.num_kv_heads / tensor)
        divides = rows >= _DIVIDED * ranks
        own = math.ceil(rows / ranks) if divides else rows
        compute = self._part(sequences, own, min(head_rows, own), keys / ranks, pairs / ranks)
        spans = math.ceil(pairs / max(rows, 1) / _SPAN)  # that a row sees
        given = rows * math.ceil(spans / ranks) * heads * (shape.head_dim + 2)
        given += own * (heads + 2 * key_heads) * shape.head_dim if divides else 0
        seconds = shape.num_layers * link.seconds(given * _ROW_BYTES * (ranks - 1))
        return StepParts(compute, seconds + self._exchanges(own, min(head_rows, own)))


def beside(draft: DraftSeconds, verify: StepCost, link: Link) -> DraftSeconds:
    """Seconds that drafting adds to a step if another device drafts.

    Either it drafts and the target waits; or it drafts for one half of the sequences while the other is verified, and
    then weights are read twice. The quicker way is taken. Tokens go over the link and back.
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
