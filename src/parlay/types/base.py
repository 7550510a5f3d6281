"""Terms that every part uses: kinds of drafts, levels of exactness, errors, noise keys, equal beginnings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


DraftKind = Literal["point", "iid", "without_replacement"]
"""How the children of a node were chosen: fixed guesses, independent draws, or draws without replacement, in order."""

FinishReason = Literal["stop", "length", "abort", "error"]

LogitsProcessor: TypeAlias = "Callable[[list[int], Tensor], Tensor]"
"""``(ids_of_prompt_output_and_path, logits_V) -> logits_V``; pure: it runs at every node that the walk visits."""


class Exactness(enum.StrEnum):
    """How far a text equals plain decoding's: in each logit, each token for the same seed, distribution, or nothing."""

    BITS = "bits"
    SEED = "seed"
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"

    @staticmethod
    def weakest(*levels: Exactness) -> Exactness:
        order = list(Exactness)
        return max(levels, key=order.index)


class ParlayError(Exception):
    """A failure that a user can act on: its message is one line that says what to do."""


def show_number(value: float) -> str:
    """Write a number for a message, in ten digits; an integer beyond every float's range by its number of bits."""
    try:
        return f"{value:.10g}"
    except OverflowError:
        return f"an integer of {int(value).bit_length()} bits"


class MachineBusy(ParlayError):
    """The machine gave a request too little computing time. Another attempt may succeed, so nothing keeps it."""


class OutOfRoom(ParlayError):
    """A runner's cache can never hold what was asked of it."""


class RunnerLost(ParlayError):
    """A part of a runner has ended, say another process that runs some of its layers: no later call can work."""


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which stream of the shared noise a sequence draws from: token = f(logits, key, absolute position)."""

    seed: int
    sample_index: int = 0


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
