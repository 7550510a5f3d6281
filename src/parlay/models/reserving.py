"""Counts room in tokens and refuses options, for runners over foreign runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parlay.cache import Budget
from parlay.cache.budget import format_bytes
from parlay.options import LoadOptions
from parlay.types import FieldError, OutOfRoom, ParlayError, RunnerSpec, Segment, Skip

UNBOUNDED = 1 << 20
"""Context, in tokens, of a model without a limit (recurrent state, or relative positions)."""
_LEAST_CAPACITY = 1 << 16
_LEAST_TOKENS = 512
_USUAL_TOKENS = 16_384
"""A runtime that allocates its cache once gets room for this many tokens, or for one full context if that is more."""
_SHARE = 0.75
"""Share of a fixed budget's free part that a model's cache may take, as a draft model may follow."""


class Reserving(Protocol):
    """A sequence that counts its reserved tokens."""

    reserved: int


_State = TypeVar("_State", bound=Reserving)


class ReservingRunner(Generic[_State]):
    """Base class of runners that count tokens instead of bytes, as the bytes per token depend on the model."""

    _spec: RunnerSpec

    def __init__(self, most: int | None, context: int) -> None:
        """``most`` tokens may be reserved; None: four full contexts or 65,536 tokens, whichever is more."""
        self._sequences: dict[int, _State] = {}
        self._capacity = most or max(_LEAST_CAPACITY, 4 * context)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def add(self, sequence: int, state: _State) -> None:
        """Begin a sequence; its name must be free."""
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        self._sequences[sequence] = state

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Whether there is room for ``tokens`` tokens of this sequence. Raises OutOfRoom if there never will be."""
        if tokens > self._capacity:
            raise OutOfRoom(f"{tokens} tokens can't fit a cache of {self._capacity}: raise the cache size")
        state = self._sequences[sequence]
        if tokens - state.reserved > self.free_tokens():
            return False
        state.reserved = max(state.reserved, tokens)
        return True

    def free_tokens(self) -> int:
        """The number of tokens that are not reserved."""
        return self._capacity - sum(state.reserved for state in self._sequences.values())

    def capacity(self) -> int:
        """The number of tokens that all sequences together may reserve."""
        return self._capacity

    def release(self, sequence: int) -> None:
        """End a sequence. Unknown names are ignored."""
        self._sequences.pop(sequence, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoom:
    """How many tokens the runtime ``through`` may cache for the model ``name``.

    ``free`` returns the bytes available if neither ``cache_tokens`` nor a fixed ``budget`` sets a limit. Texts have at
    most ``longest`` tokens.
    """

    name: str
    through: str
    free: Callable[[], float]
    cache_tokens: int | None = None
    budget: Budget | None = None
    longest: int | None = None

    def tokens(self, token_bytes: int, context: int) -> int:
        """The number of tokens at ``token_bytes`` each. Raises ParlayError for a budget that is too small."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        if self.budget is not None and self.budget.fixed:
            room = int(self.budget.free * _SHARE) // token_bytes
            if room < _LEAST_TOKENS:
                least = format_bytes(int(_LEAST_TOKENS * token_bytes / _SHARE) + 1)
                raise ParlayError(
                    f"memory is too small for {self.name} in {self.through}: give it at least {least}", "memory"
                )
            return min(room, max(_USUAL_TOKENS, 4 * context))
        most = max(self.longest or context, _USUAL_TOKENS)
        return max(_LEAST_TOKENS, min(most, int(self.free() / token_bytes)))


class TakenForGood:
    """The budget's view of a runner whose runtime keeps its memory, ``nbytes`` in all."""

    nbytes: int

    @property
    def spare(self) -> int:
        """Always 0: its memory can't be given to others."""
        return 0

    def drop_spare(self) -> bool:
        return False

    def drop_used(self) -> bool:
        return False


def refuse(
    name: str,
    through: str,
    segment: Segment,
    skip: Skip,
    last: Segment | None,
    *,
    untapped: Sequence[int] = (),
    canvases: bool = False,
) -> None:
    """Raises ValueError for a segment that the runtime ``through`` can't run after its sequence's ``last`` one.

    ``untapped`` are requested layers that can't be tapped. With ``canvases`` all nodes must see each other, otherwise
    none may.
    """
    asked = {
        "skip sub-layers": bool(skip),
        "read features": segment.features is not None,
        "run cached tokens again": segment.base < 0,
        "let rows see each other": segment.together > 0 and not canvases,
        "run rows that are no canvas": canvases and len(segment.tree) != segment.together,
        "move rows to other positions": bool(segment.places),
        "hide tokens or round weights": segment.approximate,
        "run an adapter": segment.adapter is not None or segment.mask_adapter is not None,
        f"give the hidden states of layers {list(untapped)}": bool(untapped),
    }
    if what := next((what for what, wanted in asked.items() if wanted), None):
        raise ValueError(f"{name} runs through {through}, which can't {what} here")
    if segment.base > 0 and (last is None or not segment.follows(last)):
        raise ValueError(f"sequence {segment.sequence}: its last forward left no {segment.base} rows: run them again")


def refuse_options(runner: str, options: LoadOptions, why: Mapping[str, str]) -> None:
    """Raises UsageError for an option in ``why`` that differs from its default, with the reason given there."""
    chosen, usual = _said(options), _said(LoadOptions())
    for option, reason in why.items():
        if chosen[option] != usual[option]:
            raise FieldError(
                "runner", f"{runner}: {option} {chosen[option]} is not supported: {reason}; remove it", option
            )


def _said(options: LoadOptions) -> dict[str, object]:
    """The options that some runtimes can't honour."""
    return {
        "dtype": options.dtype,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        "lora": options.lora,
        "compile": options.compile,
        "enforce_eager": options.enforce_eager,
        "ngram_states": options.ngram_states,
    }
