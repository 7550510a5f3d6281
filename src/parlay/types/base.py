"""Terms that every part uses: kinds of drafts, levels of exactness, errors, noise keys, shared prefixes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


DraftKind = Literal["point", "iid", "without_replacement"]
"""How a node's children were chosen: fixed guesses, independent draws, or ordered draws without replacement."""

FinishReason = Literal["stop", "length", "abort", "error"]

LogitsProcessor: TypeAlias = "Callable[[list[int], Tensor], Tensor]"
"""``(ids of prompt, output and path, logits_V) -> logits_V``. A pure function: it runs at each node that the accept
rule visits."""


class Exactness(enum.StrEnum):
    """How far a text equals plain decoding's: in each logit, each token per seed, the distribution, or not at all."""

    BITS = "bits"
    SEED = "seed"
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"

    @staticmethod
    def weakest(*levels: Exactness) -> Exactness:
        """The weakest of the given levels."""
        order = list(Exactness)
        return max(levels, key=order.index)


class ParlayError(Exception):
    """A failure that a user can act on: its message is one line that says what to do."""


def show_number(value: float) -> str:
    """Write a number for a message in ten digits, or name the bits of an integer that no float can hold."""
    try:
        return f"{value:.10g}"
    except OverflowError:
        return f"an integer of {int(value).bit_length()} bits"


class MachineBusy(ParlayError):
    """The machine gave a request too little computing time. A retry may succeed, so the failure is not cached."""


class OutOfRoom(ParlayError):
    """The request can never fit in the runner's cache."""


class RunnerLost(ParlayError):
    """A part of a runner is gone, such as another process that runs some of its layers. No later call can work."""


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which stream of the shared noise a sequence draws from: token = f(logits, key, absolute position)."""

    seed: int
    sample_index: int = 0


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens of both are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
