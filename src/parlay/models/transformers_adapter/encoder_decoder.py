"""A runner over T5 and Marian: the encoder reads the rows before the decoder's start token.

So the source is the beginning of the prompt, and the engine has only one kind of input. Rows of the source cost nothing
and predict nothing; the start token's row runs the encoder once, and each later row the decoder.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from parlay.models.config import UnsupportedModel
from parlay.models.reserving import UNBOUNDED, ReservingRunner
from parlay.models.transformers_adapter.call import CallResult, cache_argument, copied, join, output_of, select
from parlay.system.threads import torch_on_all
from parlay.types import NO_SKIP, EncoderSpec, Exactness, Output, Runner, RunnerSpec, Segment, Skip, trees

KINDS = ("marian", "mt5", "t5")
"""Supported model types; they count positions from the decoder's start token."""
_ENCODINGS = 64
"""Most encoded sources kept for later requests."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A source's encoding ``[1, S, H]``, and the cross-attention keys and values that a forward has made of it."""

    states_1SH: Tensor
    cross: DynamicCache


@dataclass(slots=True)
class _Sequence:
    """``source`` are the cached tokens before the start token, and ``target`` counts those from it on."""

    salt: str
    source: tuple[int, ...] = ()
    target: int = 0
    encoded: _Encoded | None = None
    cache: DynamicCache | None = None
    reserved: int = 0
    step: _Step | None = None

    @property
    def cached(self) -> int:
        return len(self.source) + self.target


@dataclass(slots=True)
class _Step:
    """The last forward's source, its encoding, the decoder's cache after all rows, and the number of pending rows.

    ``index`` is the sequence's place in the cache, which may be a batch's.
    """

    source: tuple[int, ...]
    encoded: _Encoded | None
    after: DynamicCache | None
    pending: int
    index: int = 0


class EncoderDecoderRunner(ReservingRunner[_Sequence], Runner):
    """A runner over a transformers encoder-decoder; it verifies chains.

    The models' forwards take no positions, so sequences run together only if their targets are equally long, as are
    those that began in the same step; others run one after another. All sequences together may reserve
    ``max_tokens_cached`` tokens; None: 65,536 or four full contexts, whichever is more. Raises UnsupportedModel for
    types other than `KINDS`, and for a model without a start token.
    """

    def __init__(self, model: PreTrainedModel, *, max_tokens_cached: int | None = None, name: str = "") -> None:
        self._model, config, kind = model.eval(), model.config, type(model).__name__
        if config.model_type not in KINDS:
            raise UnsupportedModel(f"{kind}: of encoder-decoder models only {', '.join(KINDS)} are supported")
        if (start := _start(model)) is None:
            raise UnsupportedModel(f"{kind}: config.json has no decoder_start_token_id: add the model's own")
        value = config.max_position_embeddings if config.model_type == "marian" else None
        longest = int(value or UNBOUNDED)  # T5 has relative positions only
        self._cache_argument = cache_argument(kind, inspect.signature(model.forward).parameters)
        self._encodings: OrderedDict[tuple[str, tuple[int, ...]], _Encoded] = OrderedDict()
        super().__init__(max_tokens_cached, longest if value else 0)
        self._never = torch.tensor(_never(model), dtype=torch.long, device=model.device)
        self._spec = RunnerSpec(
            name=name or str(config.name_or_path or kind),
            vocab_size=int(config.vocab_size),
            max_context=2 * longest,  # source and target together
            tree="chain",
            exactness=Exactness.SEED,
            hidden_size=int(config.d_model),
            num_layers=len(model.get_decoder().layers if config.model_type == "marian" else model.get_decoder().block),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            kernels=f"transformers {kind}, {config._attn_implementation}: chains, sequences of one length together",
            eos_ids=_listed(_said(model, "eos_token_id")),
            encoder=EncoderSpec(start, longest, longest),
        )

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is cached of it. A source that was read before is not encoded again."""
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        self._sequences[sequence] = _Sequence(salt)
        return 0

    @torch.no_grad()
    @torch_on_all()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run segments, those of equal length together; rows before a base run again. Raises ValueError for a segment
        that can't run."""
        for segment in segments:
            self._refuse(segment, skip)
        groups = defaultdict[tuple[int, int], list[Segment]](list)
        for segment in segments:
            groups[self._sequences[segment.sequence].target, segment.end].append(segment)
        found: dict[int, CallResult] = {}
        for (target, _), group in groups.items():
            together = [group] if target else [[segment] for segment in group]
            for some in together:
                rows = self._run_batch(some, bool(taps)) if len(some) > 1 else [self._run(some[0], bool(taps))]
                found |= {segment.sequence: each for segment, each in zip(some, rows, strict=True)}
        return output_of([found[segment.sequence] for segment in segments], taps)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        state = self._sequences[sequence]
        step, state.step = state.step, None
        assert step is not None, f"sequence {sequence} has no forward to keep"
        kept = state.cached + step.pending + len(path)
        state.source, state.encoded, state.target = step.source, step.encoded, kept - len(step.source)
        state.cache = None if step.after is None else select(step.after, step.index, range(state.target))
        return state.cached

    def truncate(self, sequence: int, length: int) -> int:
        state = self._sequences[sequence]
        state.step = None
        if length <= len(state.source):
            state.source, state.target, state.cache, state.encoded = state.source[:length], 0, None, None
        elif length < state.cached:
            assert state.cache is not None
            state.target = length - len(state.source)
            state.cache = select(state.cache, 0, range(state.target))
        return state.cached

    def fork(self, sequence: int, copy: int) -> None:
        state = self._sequences[sequence]
        assert copy not in self._sequences, f"sequence {copy} is open already"
        cache = None if state.cache is None else copied(state.cache)
        self._sequences[copy] = _Sequence(state.salt, state.source, state.target, state.encoded, cache)

    def check(self) -> None:
        """Check that each decoder layer has exactly the cached target, and that reservations fit."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        for name, state in self._sequences.items():
            for layer in state.cache.layers if state.cache is not None else ():
                length = layer.get_seq_length()
                assert length == state.target, f"sequence {name}: a layer has {length} tokens, not {state.target}"

    # ------------------------------------------------------------------------------------------------------ forwards

    def _refuse(self, segment: Segment, skip: Skip) -> None:
        asked = {
            "skip sub-layers": bool(skip),
            "read features": segment.features is not None,
            "run cached tokens again": segment.base < 0,
            "let rows see each other": segment.together > 0,
            "verify trees": not trees.is_chain(segment.tree),
        }
        if what := next((what for what, wanted in asked.items() if wanted), None):
            raise ValueError(f"{self._spec.name} is an encoder-decoder, which can't {what} here")

    def _run(self, segment: Segment, hidden: bool) -> CallResult:
        """Run one segment: rows of the source are stored for the encoder, those from the start token on are decoded."""
        state, start, pending = self._sequences[segment.sequence], self._encoder.start, segment.pending
        read = 0
        if not state.target:
            read = pending.index(start) if start in pending else len(pending)
        source, tokens = (*state.source, *pending[:read]), (*pending[read:], *segment.tree.tokens)
        if not tokens:
            state.step = _Step(source, None, None, len(pending))
            return self._with_source(segment, read, None, 0, hidden)
        encoded = state.encoded or self._encode(state.salt, source)
        cache = DynamicCache() if state.cache is None else copied(state.cache)
        state.step = _Step(source, encoded, cache, len(pending))
        out = self._decode([tokens], EncoderDecoderCache(cache, encoded.cross), encoded.states_1SH, None, hidden)
        return self._with_source(segment, read, out, 0, hidden)

    def _run_batch(self, segments: Sequence[Segment], hidden: bool) -> list[CallResult]:
        """Run segments of decoder rows only, with equally long targets and equally many rows; sources are padded."""
        states = [self._sequences[segment.sequence] for segment in segments]
        caches = [state.cache for state in states if state.cache is not None]
        encoded = [state.encoded for state in states if state.encoded is not None]
        lengths = [each.states_1SH.shape[1] for each in encoded]
        cache = join(caches, [states[0].target] * len(states))
        padded_BSH = pad_sequence([each.states_1SH[0] for each in encoded], batch_first=True)
        seen_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        both = EncoderDecoderCache(cache, join([each.cross for each in encoded], lengths))
        tokens = [(*segment.pending, *segment.tree.tokens) for segment in segments]
        out = self._decode(tokens, both, padded_BSH, seen_BS.long().to(padded_BSH.device), hidden)
        for index, (state, segment) in enumerate(zip(states, segments, strict=True)):
            state.step = _Step(state.source, state.encoded, cache, len(segment.pending), index)
        return [self._with_source(segment, 0, out, index, hidden) for index, segment in enumerate(segments)]

    @property
    def _encoder(self) -> EncoderSpec:
        assert self._spec.encoder is not None
        return self._spec.encoder

    def _encode(self, salt: str, source: tuple[int, ...]) -> _Encoded:
        """Encode a source; an empty one, with which forwards are timed, becomes the start token.

        Tenants with different ``salt`` share nothing.
        """
        if (found := self._encodings.get((salt, source))) is None:
            ids = torch.tensor([source or (self._encoder.start,)], device=self._model.device)
            states = self._model.get_encoder()(input_ids=ids).last_hidden_state
            found = self._encodings[salt, source] = _Encoded(states, DynamicCache())
            if len(self._encodings) > _ENCODINGS:
                self._encodings.popitem(last=False)
        self._encodings.move_to_end((salt, source))
        return found

    def _decode(
        self,
        tokens: Sequence[Sequence[int]],
        cache: EncoderDecoderCache,
        states_BSH: Tensor,
        seen_BS: Tensor | None,
        hidden: bool,
    ) -> Any:
        """Run the decoder on ``tokens`` after the content of ``cache``, which grows. ``seen_BS`` is 1 for real tokens
        of the padded sources."""
        return self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states_BSH),
            attention_mask=seen_BS,
            decoder_input_ids=torch.tensor([list(row) for row in tokens], device=self._model.device),
            use_cache=True,
            output_hidden_states=hidden,
            **{self._cache_argument: cache},
        )

    def _with_source(self, segment: Segment, read: int, out: Any, index: int, hidden: bool) -> CallResult:
        """Put zeros for the first ``read`` rows, which belong to the source, and drop rows that were not asked for.

        ``index`` is the segment's place in the batch of ``out``.
        """
        spec, device, dtype = self._spec, self._model.device, self._model.dtype
        logits_NV = torch.zeros(read, spec.vocab_size, device=device, dtype=dtype)
        if out is not None:
            decoded_NV = out.logits[index].index_fill(-1, self._never, float("-inf"))
            logits_NV = torch.cat((logits_NV, decoded_NV))
        states: tuple[Tensor, ...] = ()
        if hidden:
            blank_NH = torch.zeros(read, spec.hidden_size, device=device, dtype=dtype)
            layers = [blank_NH] * (spec.num_layers + 1) if out is None else out.decoder_hidden_states
            states = tuple([each if out is None else torch.cat((blank_NH, each[index])) for each in layers])
        return CallResult(logits_NV[segment.logits_from :], tuple([each[segment.base :] for each in states]))


def _said(model: PreTrainedModel, name: str) -> Any:
    """A field of the generation config, else of the config; None if neither has it."""
    for value in (model.generation_config, model.config):
        fields = {} if value is None else value.to_dict()
        if fields.get(name) is not None:
            return fields[name]
    return None


def _start(model: PreTrainedModel) -> int | None:
    value = _said(model, "decoder_start_token_id")
    return None if value is None else int(value)


def _never(model: PreTrainedModel) -> list[int]:
    """Tokens that the generation config forbids, such as Marian's start token."""
    return [int(word[0]) for word in _said(model, "bad_words_ids") or () if len(word) == 1]


def _listed(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)
