"""The native decoder as a `Runner`: ragged batches of pending tokens and trees, over the project's own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from parlay.cache import Budget, Rows, Shape, Store
from parlay.models.attention import Attend, ExactAttention
from parlay.models.attention_masked import MaskedAttention
from parlay.models.config import DecoderConfig
from parlay.models.decoder import build
from parlay.models.kernels import choose_dtype, judge
from parlay.models.linear import padded
from parlay.models.rope import Rope
from parlay.types import Chain, Output, RunnerSpec, Segment, Skip

__all__ = ["NativeRunner", "choose_dtype"]


class NativeRunner:
    """A Llama, Mistral, Qwen2 or Qwen3 with its cache.

    ``weights`` bear Hugging Face names, each with the shape that ``config`` asks for. ``max_tokens_cached`` bounds
    what all sequences together may reserve; into a ``budget`` that others share it brings the memory of so many.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens_cached: int,
        budget: Budget | None = None,
        name: str = "native",
    ) -> None:
        self._decoder = build(config, weights, dtype, device)
        kernels = judge(self._decoder, device)
        compute = self._decoder.compute
        self._rope = Rope(config.rope, config.head_dim, compute, device)
        heads = self._decoder.heads
        self._attention = (
            ExactAttention(heads, kernels.form, self._rope, compute)
            if kernels.form is not None
            else MaskedAttention(heads, self._rope)
        )
        shape = Shape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=compute if kernels.form is not None else dtype,
            device=device,
            stride=kernels.form.keys if kernels.form is not None else 16,
        )
        self._store = Store(shape, max_tokens_cached, budget)
        self._device = device
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
            kernels=kernels.reason,
            eos_ids=config.eos_ids,
            layer_skip=True,
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
        """Begin ``copy`` with the cached tokens of ``sequence``, or as many as there is room for."""
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

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        """Run the rows of all segments; see `Runner.forward`. Logits are float32.

        Raises ValueError for a token out of range, a layer that is not there, or rows that were not reserved.
        """
        ids = [token for segment in segments for token in (*segment.pending, *segment.tree.tokens)]
        self._check(ids, taps)
        return self._run(ids, segments, [self._stage(segment) for segment in segments], taps)

    def skip_forward(self, chains: Sequence[Chain], skip: Skip) -> Tensor:
        """Run the chains through all sub-layers but those of ``skip``; see `LayerSkipper.skip_forward`.

        Raises ValueError for a token or sub-layer out of range, or rows that were not reserved.
        """
        ids = [token for chain in chains for token in chain.tokens]
        self._check(ids, ())
        if not skip <= self._sublayers:
            raise ValueError(
                f"{sorted(skip - self._sublayers)} can't be skipped: layers are 0 to {self._num_layers - 1}"
            )
        if max(chain.start + len(chain.tokens) for chain in chains) > self._max_context:
            raise ValueError(f"a chain reaches beyond the context of {self._max_context}")
        segments = [Segment(chain.sequence, chain.tokens, logits_from=chain.logits_from) for chain in chains]
        with ExitStack() as scratch:
            places = [
                scratch.enter_context(self._store.scratch(chain.sequence, chain.start, len(chain.tokens)))
                for chain in chains
            ]
            return self._run(ids, segments, places, (), skip).logits_RV

    def _run(
        self,
        ids: list[int],
        segments: Sequence[Segment],
        places: Sequence[Rows],
        taps: Sequence[int],
        skip: Skip = frozenset(),
    ) -> Output:
        wanted, starts = _wanted(segments)
        with torch.inference_mode():
            rows = ids + ids[:1] * (padded(len(ids)) - len(ids))
            plan = partial(self._plan, segments, places)
            hidden, tapped = self._decoder.run(torch.tensor(rows, device=self._device), plan, taps, skip)
            hidden = self._final(hidden, wanted, tapped, taps)
        with torch.no_grad():  # logits are ordinary tensors, which their reader may change
            logits = self._decoder.head(hidden)[: len(wanted)].float()
        return Output(logits, starts, {layer: states[: len(ids)] for layer, states in tapped.items()})

    def _stage(self, segment: Segment) -> Rows:
        gap = self._attention.gap(segment.tree)
        place = self._store.stage(segment.sequence, segment.pending, segment.tree.tokens, gap)
        if place.start + segment.rows > self._max_context + len(segment.tree):
            raise ValueError(f"position {place.start + segment.rows} lies beyond the context of {self._max_context}")
        return place

    def _plan(self, segments: Sequence[Segment], places: Sequence[Rows], out: Tensor) -> list[Attend]:
        """How each segment attends, into its rows of ``out``."""
        attends: list[Attend] = []
        begin = 0
        for segment, place in zip(segments, places, strict=True):
            rows = out[begin : begin + segment.rows]
            attends.append(self._attention.plan(place, len(segment.pending), segment.tree, begin, rows))
            begin += segment.rows
        return attends

    def _final(self, hidden: Tensor, wanted: list[int], tapped: dict[int, Tensor], taps: Sequence[int]) -> Tensor:
        """The rows that the LM head reads, normed, and some more where their number asks for that."""
        if self._num_layers in taps:
            hidden = tapped[self._num_layers] = self._decoder.norm(hidden)
        count = padded(len(wanted))
        if count < len(hidden) or wanted[-1:] != [len(wanted) - 1]:
            rows = wanted + (wanted[:1] or [0]) * (count - len(wanted))
            hidden = hidden[torch.tensor(rows, device=self._device)]
        return hidden if self._num_layers in taps else self._decoder.norm(hidden)

    def _check(self, ids: list[int], taps: Sequence[int]) -> None:
        if not ids:
            raise ValueError("a forward needs at least one row")
        if min(ids) < 0 or max(ids) >= self._spec.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._spec.vocab_size)
            raise ValueError(f"token {wrong} is not in the vocabulary of {self._spec.vocab_size}")
        if any(not 0 <= layer <= self._num_layers for layer in taps):
            raise ValueError(f"taps {list(taps)} must name layers from 0 to {self._num_layers}")


def _wanted(segments: Sequence[Segment]) -> tuple[list[int], tuple[int, ...]]:
    """Flat numbers of the rows that want logits, and where each segment's begin among them."""
    rows: list[int] = []
    starts = [0]
    begin = 0
    for segment in segments:
        rows.extend(range(begin + segment.logits_from, begin + segment.rows))
        starts.append(len(rows))
        begin += segment.rows
    return rows, tuple(starts)
