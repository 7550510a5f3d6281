"""The native decoder as a `Runner`: ragged batches of pending tokens and draft trees, over Parlay's own KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Literal

import torch

from parlay.cache import BLOCK, Budget, Rows, Store
from parlay.compiled.structs import Linear
from parlay.models.choosing import MakeForward, choose_forward, spec_of
from parlay.models.compiled.forward import CompiledForward
from parlay.models.compiled.growing import GrowthCall
from parlay.models.compiled.newest_tokens import RowsOfHead
from parlay.models.compiled.weights import Packed, nobody
from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.forward import (
    Forward,
    ForwardBatch,
    ForwardOutput,
    GrownTree,
    Growth,
    SegmentFeatures,
    TreeRequest,
    check_together,
    wanted_rows,
)
from parlay.models.gguf.blocks import rounded
from parlay.models.layer_lookup import USUAL_LOOKUP, LayerLookup, LookupPlan
from parlay.models.lookup import NgramTable, path_tokens
from parlay.models.lora import LowRankAdapter, adapter_rows, read_adapter
from parlay.models.lora_layout import BadAdapter
from parlay.models.rope import turn_keys
from parlay.models.segment_forms import check_features, check_form, with_choice
from parlay.models.torch_ops.kernels import choose_dtype
from parlay.models.two_depths import Begin, TwoDepths, deep_rows, unused_layers
from parlay.models.weights.fused import Operand, in_eight_bits
from parlay.types import NO_SKIP, CanvasSpec, Finish, Move, Output, PickedRows, Runner, RunnerSpec, Segment, Skip, trees

__all__ = ["NativeRunner", "Quantize", "choose_dtype"]

Quantize = Literal["int8"]
"""Formats in which weights can be stored more compactly than in their dtype."""

_WHOLE_TEXT = 1 << 40
"""A block size larger than any text."""

_log = logging.getLogger(__name__)


class NativeRunner(Runner):
    """A model of a family in `parlay.models.families`, with its KV cache.

    ``weights`` have Hugging Face names, and the shapes that ``config`` requires. If the config has a ``head``, the
    model is a draft head, whose rows read `Features`. All sequences together may reserve at most ``max_tokens_cached``
    tokens. With a ``budget`` shared with other runners, that is this runner's contribution to it.

    If rows of the text see their whole block, the cached rows of an unfinished block run again with the rows that
    follow. So every row is computed from its block's current ids, and rows of finished blocks never run again.
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
        packed: Packed = nobody,
        kv_cache_dtype: str = "auto",
        make_forward: MakeForward = choose_forward,
        ngrams: NgramTable | None = None,
        lookup: LookupPlan = USUAL_LOOKUP,
    ) -> None:
        """Raises CacheRefused for a ``kv_cache_dtype`` that is not available here. ``ngrams`` is the table of a model
        that reads n-grams, and ``lookup`` the plan of one whose first layers are looked up."""
        if config.ngrams is not None and ngrams is None:
            raise UnsupportedModel(f"{name}: {config.architecture} reads a table of n-grams, and there is none here")
        wanted = in_eight_bits(weights) if quantize == "int8" else weights
        self._forward, reason = make_forward(config, wanted, dtype, device, packed=packed, cached=kv_cache_dtype)
        kernels = self._forward.kernels
        _log.info("%s: %s", name, reason)
        whole, recent = kernels.cache_shapes(kernels.part or config, device)
        if ngrams is not None:
            self._forward.add_ngrams(ngrams)
        self.lookup = None if config.ngram_layers is None else LayerLookup(self._forward, config, device, lookup)
        self.store = Store(whole, max_tokens_cached, budget := budget or Budget(), recent)
        self.store.move_row = kernels.move_row
        self._forward.attach(budget)
        self._config, self._num_layers, self._ngrams = config, config.num_layers, ngrams
        self._block, self._uneven, self._max_context = _block_of(config.canvas), config.is_uneven, config.max_context
        self._spec = replace(
            spec_of(self._forward, config, dtype, device, in_blocks=self._block > 0),
            name=name,
            kernels=reason,
            features=kernels.part is None and self.lookup is None,
        )
        self._sublayers, self._key_heads = frozenset(self._spec.sublayers), kernels.pages.key_heads(config, False).heads
        self._quantize, self._rounded, self._rounding = quantize, dict[int, Forward](), Lock()

    @property
    def shares_prefixes(self) -> bool:
        """Whether texts with the same beginning have the same rows there, so that they can share them."""
        return not self._block or BLOCK % self._block == 0

    def round_weights(self, bits: int, weights: Mapping[str, Operand]) -> None:
        """Quantize the model's ``weights`` to ``bits`` bits, for segments that ask for these. Any thread may call this.

        Raises ValueError if the runner's own weights have hardly more bits, or do not fit into memory.
        """
        if self._spec.streamed_bytes:
            raise ValueError("the model's layers don't fit into memory, so a second copy of them does not either")
        with self._rounding:
            if bits not in self._rounded:
                own = in_eight_bits(weights) if self._quantize == "int8" else weights
                self._rounded[bits] = self._forward.with_weights(rounded(own, bits))

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def time_reading(self) -> float:
        """See `Forward.time_reading`."""
        return self._forward.time_reading()

    def read_adapter(self, folder: Path, name: str) -> LowRankAdapter:
        """Read the adapter in a folder, and pack it for the rows that use it. Any thread may call this.

        Raises BadAdapter if it can't be honoured here.
        """
        if self.lookup is not None:
            raise BadAdapter(f"{name}: {self._spec.name} looks up its first layers, so merge it with --lora instead")
        return self._forward.add_adapter(read_adapter(folder, self._config, name))

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """The embeddings ``[N, H]`` of these tokens as the first layer reads them, for `Features` made of them."""
        return self._forward.embed(ids)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence with the longest cached prefix of ``tokens``. Raises ValueError if its name is in use."""
        return self.store.open(sequence, tokens, salt if self.shares_prefixes else f"{salt}/{sequence}")

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Reserve memory for ``tokens`` tokens in all. Returns False while others hold it; raises OutOfRoom if there
        can never be enough."""
        return self.store.reserve(sequence, tokens)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Commit the last forward's pending rows and the nodes of ``path``."""
        return self.store.keep(sequence, path)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on."""
        return self.store.truncate(sequence, length)

    def move(self, sequence: int, text: Sequence[int], move: Move) -> int:
        """See `MovingRunner.move`. Nothing is moved if keys and values are quantized, or if layers have different
        heads."""
        movable = self.shares_prefixes and not self._uneven
        rows_NLSKD = self.store.rows_of(sequence, text, move.first, move.length) if movable else None
        if rows_NLSKD is None:
            return self.store.length(sequence)
        halves = bool(self._forward.kernels.cache_lanes)  # the compiled decoder rotates halves
        turn_keys(rows_NLSKD[:, :, 0], [form.rope for form in self._config.forms], move.to - move.first, halves=halves)
        return self.store.append(sequence, text[move.first : move.first + move.length], rows_NLSKD)

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cached tokens of ``sequence``, in the same memory."""
        if self.shares_prefixes:
            self.store.fork(sequence, copy)
        else:  # a page's rows depend on later tokens, so each sequence has pages of its own
            self.store.open(copy, (), f"/{copy}")

    def release(self, sequence: int) -> None:
        """End a sequence; its cached prefix can be reused while there is room."""
        self.store.release(sequence)

    def free_tokens(self) -> int:
        return self.store.free_tokens()

    def capacity(self) -> int:
        return self.store.capacity()

    def check(self) -> None:
        self.store.check()

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run the rows of all segments; see `Runner.forward`. Logits are float32.

        Raises ValueError for a token or position out of range, an unknown layer, rows that were not reserved, a base
        that the last forward did not leave, or features of the wrong shape.
        """
        return self.begin(segments, taps, skip)()

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        """Begin a forward; see `Runner.begin`. Raises ValueError now, not when the output is waited for."""
        self.store.settle()
        if self._block:
            segments = [self._with_its_block(segment, taps) for segment in segments]
        ids = [token for segment in segments for token in self.store.ids(segment)]
        self._check(ids, taps, skip)
        wanted, starts = wanted_rows(segments)
        places = [self._place(segment, skip) for segment in segments]
        work = ForwardBatch(ids, places, wanted, taps, skip, self._features(segments), adapter_rows(segments))
        if self._spec.likeliest and wanted and all(segment.likeliest for segment in segments):
            work = work._replace(likeliest=True)
        if self._ngrams is not None:
            work = work._replace(tokens=path_tokens(self.store, segments, self._ngrams.index.longest))
        if self.lookup is not None:
            work = self.lookup.prepare(work, path_tokens(self.store, segments, self.lookup.tokens))
        again = [segment for segment in segments if segment.base < 0 and not self._block]
        forward = self._forward_of(segments)
        begin = forward.begin
        if (shallow := self._config.shallow) is not None:
            begin = TwoDepths(forward, unused_layers(self._config), deep_rows(self.store, segments, shallow)).begin
        finish = self._begin_again(again, begin, work) if again else begin(work)
        votes = tuple(place.votes for place in places) if any(segment.votes for segment in segments) else ()
        return lambda: finish().output(starts, votes)

    def _forward_of(self, segments: Sequence[Segment]) -> Forward:
        """The decoder with the weights that the segments ask for."""
        bits = {segment.bits for segment in segments}
        if len(bits) > 1:
            raise ValueError(f"segments of one forward run with weights of {sorted(bits)} bits: they must be alike")
        wanted = bits.pop()
        if wanted and wanted not in self._rounded:
            raise ValueError(f"{self._spec.name}: there are no weights of {wanted} bits; round_weights makes them")
        return self._rounded[wanted] if wanted else self._forward

    @property
    def loss(self) -> Callable[[], str]:
        """A function that returns why no forward can work any more, or an empty string while one can. It does not keep
        the runner alive."""
        return self._forward.loss if isinstance(self._forward, CompiledForward) else str

    @property
    def adds_ngrams(self) -> bool:
        """Whether n-gram embeddings are added to rows that read tokens."""
        return self._ngrams is not None

    @property
    def grows(self) -> bool:
        """Whether `grow` may be called, which needs the compiled decoder."""
        plain = not self._block and self._ngrams is None and self.lookup is None and not self._spec.streamed_bytes
        plain = plain and self._config.shallow is None
        return isinstance(self._forward, CompiledForward) and self._forward.kernels.part is None and plain

    def grow(self, texts: Sequence[Segment], growth: Growth, requests: Sequence[TreeRequest]) -> list[GrownTree]:
        """Run the rows of texts, then grow a tree of likeliest nodes below each, level by level.

        Each text gets the draft of its request. Each level of a draft head reads the layer's output of the level above,
        and each text needs room for ``levels`` times ``width`` more rows. A draft model needs room for as many as the
        draft may have nodes. `keep` keeps a draft model's rows, and a draft head's rows of the text but the last, which
        runs again when the next token is known. The noise has less precision here than in the target's sampler.
        """
        grown = self.growing(texts, growth, requests).run()
        if growth.head is None:
            self.restage(texts, grown)
        else:
            for text in texts:
                self.store.restage(text._replace(pending=text.pending[:-1], logits_from=0))
        return grown

    def growing(
        self, texts: Sequence[Segment], growth: Growth, requests: Sequence[TreeRequest], beside: int = 0
    ) -> GrowthCall:
        """Stage rows and lay out the call; the caller restages them afterwards. See `CompiledForward.growing`."""
        assert isinstance(self._forward, CompiledForward), "`grows` was asked"
        if growth.head is None:  # the nodes' tokens are not known yet
            rooms = [trees.chain_tree([0] * request.nodes) for request in requests]
            texts = [text._replace(tree=room) for text, room in zip(texts, rooms, strict=True)]
        work = self._work_of(texts)
        work.wanted.extend(end - 1 for end in accumulate([place.pending for place in work.places]))
        return self._forward.growing(work, growth, requests, beside)

    def read_text(self, text: Segment, first: Linear, features: Sequence[PickedRows]) -> None:
        """Store the keys and values of a draft head's rows of a text; `keep` keeps them.

        The matrix ``first`` makes their inputs from the features. Needs `grows`.
        """
        assert isinstance(self._forward, CompiledForward), "`grows` was asked"
        self._forward.read_text(self._work_of([text]), first, features)

    def _work_of(self, texts: Sequence[Segment]) -> ForwardBatch:
        """Stage the texts' rows, for a call that reads their tokens; no logits are wanted."""
        self.store.settle()
        ids = [token for text in texts for token in text.pending]
        self._check(ids, (), NO_SKIP)
        return ForwardBatch(ids, [self._place(text, NO_SKIP) for text in texts], [])

    def restage(self, texts: Sequence[Segment], grown: Sequence[GrownTree]) -> None:
        """Make the rows of grown trees keepable."""
        for text, tree in zip(texts, grown, strict=True):
            self.store.restage(text._replace(tree=tree.rows))

    def list_newest(self, tokens_D: torch.Tensor, slot: int, rows: RowsOfHead) -> torch.Tensor:
        """Let a draft head's last outputs stand for the newest tokens; see `CompiledForward.list_newest`."""
        assert isinstance(self._forward, CompiledForward), "`grows` was asked"
        return self._forward.list_newest(tokens_D, slot, rows)

    def prepare(self, growth: Growth) -> None:
        """Prepare the LM head that the first `grow` of a draft model needs."""
        assert isinstance(self._forward, CompiledForward), "`grows` was asked"
        self._forward.short_head(growth.short)

    def _begin_again(self, again: Sequence[Segment], begin: Begin, work: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Run committed rows of these segments again, too, and restore them afterwards."""
        with ExitStack() as running:
            for segment in again:
                running.enter_context(self.store.putting_back(segment))
            return begin(work)

    def _place(self, segment: Segment, skip: Skip) -> Rows:
        """The place of the segment's rows in the cache."""
        if segment.together or segment.places:
            check_together(segment)
        special = segment.approximate or segment.chosen is not None or segment.votes
        if special:
            check_form(self._spec, segment, self.store.length(segment.sequence), self._key_heads)
        place = self.store.stage(segment, skip)
        place = with_choice(place, segment, self._num_layers, self._key_heads) if special else place
        place = place._replace(block=self._block) if self._block else place
        if place.places or place.start + place.end > self._max_context:  # unless the tree is wider than deep
            deepest = place.start + place.pending + max((*trees.depths(place.tree), *place.places), default=0)
            if deepest > self._max_context:
                raise ValueError(f"position {deepest} lies beyond the context of {self._max_context}")
        return place

    def _with_its_block(self, segment: Segment, taps: Sequence[int]) -> Segment:
        """The segment extended by the cached rows of its first block, which see what follows and so run again."""
        if segment.base or segment.features is not None or taps or not trees.is_chain(segment.tree):
            raise ValueError(
                f"{self._spec.name}: rows see those after them, so there are no trees, taps, features or bases here"
            )
        again = self.store.length(segment.sequence) % self._block
        return segment if segment.stale else segment._replace(base=-again)

    def _features(self, segments: Sequence[Segment]) -> list[SegmentFeatures]:
        """Collect the segments' features, with their rows' numbers in the batch."""
        found: list[SegmentFeatures] = []
        if all(segment.features is None for segment in segments):
            return found
        begins = list(accumulate((segment.rows for segment in segments), initial=0))
        for place, segment in enumerate(segments):
            if (features := segment.features) is not None:
                check_features(self._spec, segment, features, even=not self._uneven)
                nodes = trees.anchors(segment.tree, len(features)) if features.join else []
                root = begins[place] + len(segment.pending) - segment.base - 1
                anchors = [root + 1 + node for node in nodes]
                found.append(SegmentFeatures(place, begins[place + 1] - len(features), features, anchors))
        return found

    def _check(self, ids: list[int], taps: Sequence[int], skip: Skip) -> None:
        if not ids:
            raise ValueError("a forward needs at least one row")
        if min(ids) < 0 or max(ids) >= self._spec.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._spec.vocab_size)
            raise ValueError(f"token {wrong} is not in the vocabulary of {self._spec.vocab_size}")
        if taps and not 0 <= min(taps) <= max(taps) <= self._num_layers:
            raise ValueError(f"taps {list(taps)} must name layers from 0 to {self._num_layers}")
        if not skip <= self._sublayers:
            raise ValueError(
                f"{sorted(skip - self._sublayers)} can't be skipped: layers are 0 to {self._num_layers - 1}"
            )


def _block_of(canvas: CanvasSpec | None) -> int:
    """The size of the blocks within which rows see each other; 0 for causal attention."""
    sizes = {"causal": 0, "block": canvas.block, "full": _WHOLE_TEXT} if canvas else {"causal": 0}
    return sizes[canvas.text if canvas else "causal"]
