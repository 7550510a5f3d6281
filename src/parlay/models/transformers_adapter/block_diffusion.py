"""A runner over DiffusionGemma: an encoder reads the text, and a decoder a canvas of noise after it.

Both are transformers' own modules. The encoder caches the text's keys and values, causally; the decoder's rows see all
of them and each other, and are not cached. Rows of the text predict nothing, so the model only fills canvases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parlay.models.config import UnsupportedModel
from parlay.models.reserving import ReservingRunner, refuse
from parlay.models.transformers_adapter.call import copied
from parlay.models.transformers_adapter.runner import THROUGH, eos_ids
from parlay.system.threads import torch_on_all
from parlay.types import NO_SKIP, CanvasSpec, Exactness, Output, Runner, RunnerSpec, Segment, Skip


@dataclass(slots=True)
class _Text:
    """``cache`` has the tokens that are ``encoded``, the first ``cached`` of which count as cached.

    Later ones may be the canvas's root, with which each of its many forwards begins.
    """

    cache: DynamicCache
    encoded: list[int] = field(default_factory=list)
    cached: int = 0
    pending: int = 0
    reserved: int = 0


class BlockDiffusionRunner(ReservingRunner[_Text], Runner):
    """A runner over a block diffusion model of transformers, for texts without images.

    All sequences together may reserve ``max_tokens_cached`` tokens; see `ReservingRunner`. Raises UnsupportedModel if
    the text is not causal.
    """

    def __init__(self, model: PreTrainedModel, *, max_tokens_cached: int | None = None, name: str = "") -> None:
        self._model, text = model.eval(), model.config.get_text_config()
        called = name or str(model.config.name_or_path or type(model).__name__)
        if text.use_bidirectional_attention == "all":
            raise UnsupportedModel(f"{called}: rows of its text see those after them, which is not supported")
        self._spec = RunnerSpec(
            name=called,
            vocab_size=int(text.vocab_size),
            max_context=int(text.max_position_embeddings),
            tree="none",
            exactness=Exactness.SEED,
            hidden_size=int(text.hidden_size),
            num_layers=int(text.num_hidden_layers),
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            kernels=f"transformers {type(model).__name__}, {text._attn_implementation}: one canvas at a time",
            eos_ids=eos_ids(model),
            together=True,
            canvas=CanvasSpec(-1, block=int(model.config.canvas_length), noise=int(text.vocab_size)),
        )
        super().__init__(max_tokens_cached, self._spec.max_context)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is cached of it, as prefixes are not shared."""
        self.add(sequence, _Text(self._new_cache()))
        return 0

    @torch.no_grad()
    @torch_on_all()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments one after another. Logits of text rows are zeros, as they predict nothing.

        Raises ValueError for what this runner can't do: taps, skipping, and trees that are not canvases.
        """
        rows, starts = list[Tensor](), [0]
        for segment in segments:
            refuse(self._spec.name, THROUGH, segment, skip, None, untapped=taps, canvases=True)
            self._encode(self._sequences[segment.sequence], segment.pending)
            text = torch.zeros(max(0, len(segment.pending) - segment.logits_from), self._spec.vocab_size)
            rows += [text, self._denoise(segment)[max(0, segment.logits_from - len(segment.pending)) :]]
            starts.append(starts[-1] + len(rows[-2]) + len(rows[-1]))
        return Output(torch.cat(rows), tuple(starts))

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        assert not path, "rows of a canvas can't be kept"
        state = self._sequences[sequence]
        state.cached, state.pending = state.cached + state.pending, 0
        return state.cached

    def truncate(self, sequence: int, length: int) -> int:
        """Forget tokens from ``length`` on; the next forward determines which are really dropped."""
        state = self._sequences[sequence]
        state.cached, state.pending = min(state.cached, length), 0
        return state.cached

    def fork(self, sequence: int, copy: int) -> None:
        state = self._sequences[sequence]
        self.add(copy, _Text(copied(state.cache), list(state.encoded), state.cached))

    def check(self) -> None:
        """Check that each cache has exactly its sequence's tokens, and that reservations fit."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        for name, state in self._sequences.items():
            length = state.cache.get_seq_length()
            assert state.cached <= len(state.encoded) == length, (
                f"sequence {name}: {length} of {len(state.encoded)} tokens"
            )

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def _encode(self, state: _Text, pending: Sequence[int]) -> None:
        """Encode the part of the text that is not encoded; if the cache has another text it is restarted, as windows
        can't be truncated."""
        wanted = [*state.encoded[: state.cached], *pending]
        known = len(state.encoded)
        if state.encoded != wanted[:known]:
            state.cache, known = self._new_cache(), 0
        if known < len(wanted):
            ids = torch.tensor([wanted[known:]], device=self._model.device)
            at = torch.arange(known, len(wanted), device=self._model.device)[None]
            self._model.model.encoder(input_ids=ids, past_key_values=state.cache, position_ids=at)
        state.encoded, state.pending = wanted, len(pending)

    def _denoise(self, segment: Segment) -> Tensor:
        """The logits ``[P, V]`` of a canvas."""
        if not segment.tree.tokens:
            return torch.zeros(0, self._spec.vocab_size)
        state, device = self._sequences[segment.sequence], self._model.device
        first = len(state.encoded)
        out = self._model(
            decoder_input_ids=torch.tensor([segment.tree.tokens], device=device),
            past_key_values=state.cache,
            self_conditioning_logits=None if segment.guesses is None else segment.guesses.log()[None].to(device),
            decoder_position_ids=torch.arange(first, first + len(segment.tree), device=device)[None],
        )
        logits_PV: Tensor = out.logits[0].float().cpu()
        return logits_PV
