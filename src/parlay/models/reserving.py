"""Room counted in tokens, and options refused: shared by the runners over foreign runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parlay.cache import Budget
from parlay.cache.budget import format_bytes
from parlay.options import LoadOptions, UsageError
from parlay.types import OutOfRoom, ParlayError, RunnerSpec, Segment, Skip

UNBOUNDED = 1 << 20
"""Context, in tokens, of a model that names no limit (recurrent state, or positions as distances)."""
_LEAST_CAPACITY = 1 << 16
_LEAST_TOKENS = 512
_USUAL_TOKENS = 16_384
"""A runtime that takes its memory for good gets room for so many tokens, or for one full context if that is more."""
_SHARE = 0.75
"""Share of a fixed budget that is free which a model's cache may take: a draft model may come after it."""


class Reserving(Protocol):
    """A sequence, and how many tokens it has reserved."""

    reserved: int


_State = TypeVar("_State", bound=Reserving)


class ReservingRunner(Generic[_State]):
    """The base class of runners that count tokens, not bytes, because the bytes per token depend on the model."""

    _spec: RunnerSpec

    def __init__(self, most: int | None, context: int) -> None:
        """``most`` tokens may be reserved; without it, four full contexts or 65,536 tokens, whichever is more."""
        self._sequences: dict[int, _State] = {}
        self._capacity = most or max(_LEAST_CAPACITY, 4 * context)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def add(self, sequence: int, state: _State) -> None:
        """Begin a sequence, whose name must be free."""
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        self._sequences[sequence] = state

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Whether there is room for so many tokens of this sequence. Raises OutOfRoom if there never will be."""
        if tokens > self._capacity:
            raise OutOfRoom(f"{tokens} tokens can't fit a cache of {self._capacity}: raise the cache size")
        state = self._sequences[sequence]
        if tokens - state.reserved > self.free_tokens():
            return False
        state.reserved = max(state.reserved, tokens)
        return True

    def free_tokens(self) -> int:
        """Count the tokens that nobody has reserved."""
        return self._capacity - sum(state.reserved for state in self._sequences.values())

    def capacity(self) -> int:
        """Count the tokens that all sequences may reserve together."""
        return self._capacity

    def release(self, sequence: int) -> None:
        """End a sequence. Unknown names are ignored."""
        self._sequences.pop(sequence, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoom:
    """How many tokens the runtime ``through`` may cache for the model ``name``.

    ``free`` tells the bytes that they may take where neither ``cache_tokens`` nor a fixed ``budget`` says it. Texts
    have at most ``longest`` tokens.
    """

    name: str
    through: str
    free: Callable[[], float]
    cache_tokens: int | None = None
    budget: Budget | None = None
    longest: int | None = None

    def tokens(self, token_bytes: int, context: int) -> int:
        """Count them, where a token takes so many bytes. Raises ParlayError for a budget that holds next to nothing."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        if self.budget is not None and self.budget.fixed:
            room = int(self.budget.free * _SHARE) // token_bytes
            if room < _LEAST_TOKENS:
                least = format_bytes(int(_LEAST_TOKENS * token_bytes / _SHARE) + 1)
                raise ParlayError(f"memory is too small for {self.name} in {self.through}: give it at least {least}")
            return min(room, max(_USUAL_TOKENS, 4 * context))
        most = max(self.longest or context, _USUAL_TOKENS)
        return max(_LEAST_TOKENS, min(most, int(self.free() / token_bytes)))


class TakenForGood:
    """The answers to a budget of a runner whose runtime has its memory for good: ``held`` bytes."""

    held: int

    @property
    def spare(self) -> int:
        """Nothing of its memory can be given to others."""
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
    """Raise ValueError for a segment that the runtime ``through`` can't run after its sequence's ``last`` one.

    ``untapped`` are layers whose hidden states were asked for and can't be had. With ``canvases`` all nodes must see
    each other, else none may.
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
    """Raise UsageError for an option of those in ``why`` that is not at its default, with the reason that it gives."""
    said, usual = _said(options), _said(LoadOptions())
    for option, reason in why.items():
        if said[option] != usual[option]:
            raise UsageError(f"runner {runner}: {option} {said[option]} can't be had there: {reason}; leave it out")


def _said(options: LoadOptions) -> dict[str, object]:
    """The options that some runtime can't honour."""
    return {
        "dtype": options.dtype,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        "lora": options.lora,
        "compile": options.compile,
        "enforce_eager": options.enforce_eager,
        "ngram_states": options.ngram_states,
    }
