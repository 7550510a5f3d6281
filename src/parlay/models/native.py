"""The native decoder as a `Runner`: ragged batches of pending tokens and trees, over the project's own cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from parlay import trees
from parlay.cache import Budget, CacheShape, Rows, Store
from parlay.models.compiled.forward import CompiledForward
from parlay.models.compiled.library import NotBuilt, NotLoaded
from parlay.models.config import DecoderConfig
from parlay.models.eager import EagerForward
from parlay.models.forward import Forward, Work
from parlay.models.fused import Operand, in_eight_bits
from parlay.models.kernels import choose_dtype
from parlay.types import NO_SKIP, Features, Output, RunnerSpec, Segment, Skip

__all__ = ["NativeRunner", "Quantize", "choose_dtype"]

Quantize = Literal["int8"]
"""How weights may be stored more tightly than in their dtype."""

_log = logging.getLogger(__name__)


class NativeRunner:
    """A Llama, Mistral, Qwen2 or Qwen3 with its cache.

    ``weights`` bear Hugging Face names, each with the shape that ``config`` asks for. With a ``head`` in its config it
    is a draft head, whose rows read `Features`. ``max_tokens_cached`` bounds what all sequences together may reserve;
    into a ``budget`` that others share it brings the memory of so many.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens_cached: int,
        budget: Budget | None = None,
        quantize: Quantize | None = None,
        name: str = "native",
    ) -> None:
        wanted = in_eight_bits(weights) if quantize == "int8" else weights
        self._forward, reason = _choose(config, wanted, dtype, device)
        kernels = self._forward.kernels
        _log.info("%s: %s", name, reason)
        shape = CacheShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kernels.cache_dtype,
            device=device,
        )
        self._store = Store(shape, max_tokens_cached, budget)
        self._max_context, self._num_layers = config.max_context, config.num_layers
        self._spec = RunnerSpec(
            name=name,
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            tree="tree",
            exactness=kernels.exactness,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            kernels=reason,
            eos_ids=config.eos_ids,
            layer_skip=True,
            features=True,
        )
        self._sublayers = frozenset(self._spec.sublayers)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence with the longest cached prefix of ``tokens``; ValueError for a name in use."""
        return self._store.open(sequence, tokens, salt)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Room for ``tokens`` in all; False while others hold it, OutOfRoom when it never can be had."""
        return self._store.reserve(sequence, tokens)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Commit the last forward's pending rows and the nodes of ``path``."""
        return self._store.keep(sequence, path)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on."""
        return self._store.truncate(sequence, length)

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cached tokens of ``sequence``, in the same memory."""
        self._store.fork(sequence, copy)

    def release(self, sequence: int) -> None:
        """End a sequence; its cached prefix stays reusable while there is room."""
        self._store.release(sequence)

    def room(self) -> int:
        return self._store.room()

    def capacity(self) -> int:
        return self._store.capacity()

    def check(self) -> None:
        self._store.check()

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run the rows of all segments; see `Runner.forward`. Logits are float32.

        Raises ValueError for a token or position out of range, a layer that is not there, rows that were not reserved,
        a base that the last forward did not leave, or features of another shape.
        """
        ids = [token for segment in segments for token in self._store.ids(segment)]
        self._check(ids, taps, skip)
        wanted, starts = _wanted(segments)
        with ExitStack() as running:
            places = [self._place(segment, skip, running) for segment in segments]
            result = self._forward.run(Work(ids, places, wanted, taps, skip, self._features(segments)))
        return Output(result.logits, starts, result.taps)

    def _place(self, segment: Segment, skip: Skip, running: ExitStack) -> Rows:
        """Where the segment's rows lie, while it is ``running``."""
        place = self._store.stage(segment, skip)
        if place.start + place.end > self._max_context:  # unless the tree is wider than deep
            deepest = place.start + place.pending + max(trees.depths(place.tree), default=0)
            if deepest > self._max_context:
                raise ValueError(f"position {deepest} lies beyond the context of {self._max_context}")
        if segment.base < 0:
            running.enter_context(self._store.putting_back(segment))
        return place

    def _features(self, segments: Sequence[Segment]) -> list[tuple[int, Features]]:
        """Inputs that segments carry, each with the number of its first row in the batch."""
        found: list[tuple[int, Features]] = []
        end = 0
        for segment in segments:
            end += segment.rows
            if segment.features is None:
                continue
            rows, hidden = segment.features.rows_KH.shape
            if rows > segment.rows or hidden != self._spec.hidden_size:
                raise ValueError(
                    f"features of {rows} rows and {hidden} numbers for a segment that runs {segment.rows} rows of "
                    f"{self._spec.hidden_size}"
                )
            found.append((end - rows, segment.features))
        return found

    def _check(self, ids: list[int], taps: Sequence[int], skip: Skip) -> None:
        if not ids:
            raise ValueError("a forward needs at least one row")
        if min(ids) < 0 or max(ids) >= self._spec.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._spec.vocab_size)
            raise ValueError(f"token {wrong} is not in the vocabulary of {self._spec.vocab_size}")
        if any(not 0 <= layer <= self._num_layers for layer in taps):
            raise ValueError(f"taps {list(taps)} must name layers from 0 to {self._num_layers}")
        if not skip <= self._sublayers:
            raise ValueError(
                f"{sorted(skip - self._sublayers)} can't be skipped: layers are 0 to {self._num_layers - 1}"
            )


def _choose(
    config: DecoderConfig, weights: Mapping[str, Operand], dtype: torch.dtype, device: torch.device
) -> tuple[Forward, str]:
    """The compiled decoder where it runs, else torch's operators; and which it is, and why, in one line."""
    if device.type == "cpu":
        try:
            compiled = CompiledForward(config, weights, dtype)
        except NotLoaded as reason:
            why = f"; no compiled decoder: {reason}"
            if isinstance(reason, NotBuilt):
                _log.warning("torch's operators run, which take longer: no compiled decoder: %s", reason)
        else:
            return compiled, compiled.kernels.reason
    else:
        why = ""
    eager = EagerForward(config, weights, dtype, device)
    return eager, f"{eager.kernels.reason}{why}"


def _wanted(segments: Sequence[Segment]) -> tuple[list[int], tuple[int, ...]]:
    """Flat numbers of the rows that want logits, and where each segment's begin among them."""
    rows: list[int] = []
    starts = [0]
    begin = 0
    for segment in segments:
        if not segment.base <= segment.logits_from <= segment.end:
            raise ValueError(f"logits from row {segment.logits_from} on, but rows {segment.base} to {segment.end} run")
        rows.extend(range(begin + segment.logits_from - segment.base, begin + segment.rows))
        starts.append(len(rows))
        begin += segment.rows
    return rows, tuple(starts)
