"""A runner over any causal transformers model; its exactness level is ``seed``.

A step runs on a copy of the sequence's cache, and `keep` decides which part of it stays, so a forward never changes
committed state. From key-value caches any rows can be kept. Other caches (recurrent, hybrid, sliding window) can only
be kept or dropped completely: a partly accepted chain drops the step, and the engine runs the accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from parlay.models.reserving import UNBOUNDED, ReservingRunner, refuse
from parlay.models.slots import CallRows
from parlay.models.transformers_adapter.call import (
    CallResult,
    ModelCall,
    copied,
    join,
    output_of,
    rows_selectable,
    select,
)
from parlay.models.transformers_adapter.probe import Ability, ability
from parlay.system.threads import torch_on_all
from parlay.types import NO_SKIP, Exactness, Output, Runner, RunnerSpec, Segment, Skip, trees

THROUGH = "transformers"
_BATCHED_ROWS = 32
"""Segments of at most this many rows run as one padded batch; longer ones run alone, as padding would cost more."""


@dataclass(slots=True)
class _LastForward:
    """The caches after the last forward: after all its rows, and before its tree if that was kept separately.

    ``after`` may be a whole batch's: ``index`` is this sequence's place in it, and ``slots`` are the rows' places.
    """

    segment: Segment
    after: DynamicCache
    slots: tuple[int, ...]
    before_tree: DynamicCache | None = None
    index: int = 0


@dataclass(slots=True)
class _Sequence:
    cache: DynamicCache
    cached: int = 0
    reserved: int = 0
    step: _LastForward | None = None


class AdapterRunner(ReservingRunner[_Sequence], Runner):
    """A runner over a transformers model. The constructor finds out by trying what the model can verify (see
    `spec.kernels`).

    All sequences together may reserve ``max_tokens_cached`` tokens; None: four full contexts or 65,536 tokens,
    whichever is more. Tokens are counted instead of bytes, as the bytes per token depend on the model. Raises
    UnsupportedModel, naming the model and the reason, if it can't run with a cache.
    """

    def __init__(self, model: PreTrainedModel, *, max_tokens_cached: int | None = None, name: str = "") -> None:
        self._call = ModelCall(model.eval())
        self._ability = ability(self._call)
        self._selectable = rows_selectable(self._call.new_cache())
        self._spec = spec_of(self._call, self._ability, name)
        super().__init__(max_tokens_cached, self._spec.max_context)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is cached of it, as prefixes are not shared."""
        self.add(sequence, _Sequence(self._call.new_cache()))
        return 0

    @torch.no_grad()
    @torch_on_all()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments, short ones together if the model accepts our masks and positions.

        If its cache can't drop single rows, those before a segment's base run again. Raises ValueError for what this
        runner can't do: skip sub-layers, read features, or run cached tokens again.
        """
        for segment in segments:
            step = self._sequences[segment.sequence].step
            refuse(self._call.name, THROUGH, segment, skip, step.segment if step is not None else None)
        together = [segment for segment in segments if self._can_batch(segment)] if len(segments) > 1 else []
        results = self._run_batch(together, bool(taps)) if len(together) > 1 else {}
        for segment in segments:
            if segment.sequence not in results:
                results[segment.sequence] = self._run_alone(segment, bool(taps))
        return output_of([results[segment.sequence] for segment in segments], taps)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        state = self._sequences[sequence]
        step, state.step = state.step, None
        assert step is not None, f"sequence {sequence} has no forward to keep"
        pending = len(step.segment.pending)
        if self._selectable:
            rows = [*range(pending), *(pending + node for node in path)]
            kept = [*range(state.cached), *(step.slots[row] for row in rows)]
            state.cache = select(step.after, step.index, kept)
            state.cached = len(kept)
        elif len(path) == len(step.segment.tree):
            state.cache, state.cached = step.after, state.cached + step.segment.end
        elif step.before_tree is not None:
            state.cache, state.cached = step.before_tree, state.cached + pending
        return state.cached

    def truncate(self, sequence: int, length: int) -> int:
        """Forget tokens from ``length`` on; a cache that can't be truncated is dropped completely."""
        state = self._sequences[sequence]
        state.step = None
        if length < state.cached:
            kept = length if self._selectable else 0
            state.cache = select(state.cache, 0, range(kept)) if kept else self._call.new_cache()
            state.cached = kept
        return state.cached

    def fork(self, sequence: int, copy: int) -> None:
        state = self._sequences[sequence]
        self.add(copy, _Sequence(copied(state.cache), state.cached))

    def check(self) -> None:
        """Check that every key-value layer has exactly the cached tokens, and that reservations fit."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        for name, state in self._sequences.items():
            for layer in state.cache.layers if self._selectable else ():
                length = layer.get_seq_length()
                assert length == state.cached, f"sequence {name}: a layer has {length} tokens, not {state.cached}"

    # ------------------------------------------------------------------------------------------------------ forwards

    def _can_batch(self, segment: Segment) -> bool:
        cached = self._sequences[segment.sequence].cached
        return self._ability.tree == "tree" and cached > 0 and segment.rows <= _BATCHED_ROWS

    def _run_batch(self, segments: Sequence[Segment], hidden: bool) -> dict[int, CallResult]:
        states = [self._sequences[segment.sequence] for segment in segments]
        lengths = [state.cached + segment.base for state, segment in zip(states, segments, strict=True)]
        joined = join([self._seen(segment) for segment in segments], lengths)
        batch = [CallRows.of(segment, state.cached) for segment, state in zip(segments, states, strict=True)]
        results = self._call.branched(batch, joined, hidden)
        for index, (segment, state) in enumerate(zip(segments, states, strict=True)):
            state.step = _LastForward(segment, joined, _slots(segment, state.cached, max(lengths)), index=index)
        return {
            segment.sequence: CallResult(result.logits_RV[segment.logits_from - segment.base :], result.hidden)
            for segment, result in zip(segments, results, strict=True)
        }

    def _seen(self, segment: Segment) -> DynamicCache:
        """The cache before the segment's rows: committed tokens, and the rows before its base."""
        state = self._sequences[segment.sequence]
        if not segment.base:
            return copied(state.cache)
        assert state.step is not None
        return select(state.step.after, state.step.index, [*range(state.cached), *state.step.slots[: segment.base]])

    def _run_alone(self, segment: Segment, hidden: bool) -> CallResult:
        if segment.base and not (self._selectable and self._ability.tree == "tree"):
            result = self._run_alone(segment._replace(base=0), hidden)
            return CallResult(result.logits_RV, tuple(states_NH[segment.base :] for states_NH in result.hidden))
        state, seen = self._sequences[segment.sequence], self._seen(segment)
        slots = _slots(segment, state.cached, state.cached + segment.base)
        state.step = step = _LastForward(segment, seen, slots)
        wanted = segment.end - segment.logits_from
        if segment.base or not trees.is_chain(segment.tree):
            assert self._ability.tree == "tree", f"{self._call.name} verifies chains only"
            result = self._call.branched([CallRows.of(segment, state.cached)], step.after, hidden)[0]
            return CallResult(result.logits_RV[segment.logits_from - segment.base :], result.hidden)
        if self._ability.tree == "none":
            return self._run_serially(segment, state.cached, step.after, hidden)
        if not self._selectable and len(segment.pending) > 1 and len(segment.tree):
            return self._run_in_two(step, state.cached, hidden)
        tokens = (*segment.pending, *segment.tree.tokens)
        return self._call.chain(CallRows(tokens, state.cached), step.after, wanted, hidden)

    def _run_in_two(self, step: _LastForward, cached: int, hidden: bool) -> CallResult:
        """Run the pending rows, then the tree, so that tokens repeated after a partial acceptance are never run a third
        time."""
        segment, pending = step.segment, len(step.segment.pending)
        wanted = max(pending - segment.logits_from, 0)
        above = self._call.chain(CallRows(segment.pending, cached), step.after, wanted, hidden)
        step.before_tree = copied(step.after)
        wanted = segment.end - segment.logits_from - wanted
        below = self._call.chain(CallRows(segment.tree.tokens, cached + pending), step.after, wanted, hidden)
        return _joined_results([above, below])

    def _run_serially(self, segment: Segment, cached: int, work: DynamicCache, hidden: bool) -> CallResult:
        """Run one row at a time, for models that compute several cached rows wrongly; the first chunk runs as a
        whole."""
        assert not segment.tree, f"{self._call.name} verifies no drafts"
        if cached == 0:
            return self._call.chain(CallRows(segment.pending, 0), work, segment.end - segment.logits_from, hidden)
        return _joined_results(
            [
                self._call.chain(CallRows((token,), cached + offset), work, int(offset >= segment.logits_from), hidden)
                for offset, token in enumerate(segment.pending)
            ]
        )


def spec_of(call: ModelCall, found: Ability, name: str, how: str = "") -> RunnerSpec:
    """The spec of a runner over a model; ``how`` says what else is special about it."""
    model, config = call.model, call.config
    return RunnerSpec(
        name=name or str(model.config.name_or_path or call.name),
        vocab_size=int(config.vocab_size),
        max_context=_context(config),
        tree=found.tree,
        exactness=Exactness.SEED,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        kernels=f"transformers {call.name}, {config._attn_implementation}: {found.reason}{how}",
        eos_ids=eos_ids(model),
    )


def _context(config: PreTrainedConfig) -> int:
    """The longest text of a model with this config; with longrope, the original context.

    Beyond that transformers uses other factors for all rows of a call, so a text would depend on drafts and on other
    texts.
    """
    # Some configs have no context length; then there is no limit.
    longest = int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)
    rope = config.to_dict().get("rope_parameters") or {}
    original = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return min(longest, int(original or longest))


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end the model's texts."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    if declared is None:
        declared = model.config.get_text_config(decoder=True).eos_token_id
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (int(declared),)


def _slots(segment: Segment, cached: int, first: int) -> tuple[int, ...]:
    """The cache slots of a segment's rows: those before its base follow the cached tokens, the others begin at
    ``first``."""
    return (*range(cached, cached + segment.base), *range(first, first + segment.rows))


def _joined_results(results: Sequence[CallResult]) -> CallResult:
    hidden: tuple[Tensor, ...] = tuple(torch.cat(layers) for layers in zip(*(r.hidden for r in results), strict=True))
    return CallResult(torch.cat([result.logits_RV for result in results]), hidden)
