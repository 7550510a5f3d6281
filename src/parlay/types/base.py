"""Terms that every part uses: kinds of drafts, levels of exactness, errors, noise keys, shared prefixes."""

from __future__ import annotations

import enum
import re
import reprlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """A failure that a user can act on: its message is one line that says what to do.

    ``fields`` are the fields that the message names, first the one at fault. A user may know them by other names, such
    as those of flags: `named` puts these into the message.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields

    def named(self, name_of: Callable[[str], str | None], assign: str = "=") -> str:
        """The message with another name for each of its fields; where ``name_of`` gives None, the field keeps its own.

        ``assign`` comes between a new name and a value, in place of ``=``.
        """

        def renamed(found: re.Match[str]) -> str:
            name = name_of(found[1])
            return found[0] if name is None else name + (assign if found[2] else "")

        known = "|".join(map(re.escape, sorted(self.fields, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.'=/-])({known})\b(?!['./-]\w)(=?)", renamed, str(self)) if known else str(self)


class UsageError(ParlayError, ValueError):
    """A user's request can't work as it is written. The message is one line that says what to do."""


class FieldError(UsageError):
    """A field has a value that can't work. The message is the field's name and then the ``problem``, which may begin
    with ``=`` or a colon, and may name ``others``."""

    def __init__(self, field: str, problem: str, *others: str) -> None:
        super().__init__(f"{field}{problem}" if problem[0] in "=:," else f"{field} {problem}", field, *others)

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, ...]]:
        """Let another process show the error: exceptions are copied by calling their class with the message."""
        return UsageError, (str(self), *self.fields)


def check_kind(field: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises FieldError for a value that is not of the ``kind``; ``wanted`` tells in words what to give."""
    if not isinstance(value, kind):
        raise FieldError(field, f"must be {wanted}, got {reprlib.repr(value)}")


def show_number(value: float) -> str:
    """Write a number for a message in ten digits, or name the bits of an integer that no float can hold."""
    try:
        return f"{value:.10g}"
    except OverflowError:
        return f"an integer of {int(value).bit_length()} bits"


def one_line(error: BaseException) -> str:
    """Write the message of any error in one line; the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of a message; later ones repeat it or hint at code. Without a message, the class's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_message(error: BaseException) -> str:
    """Write the name of an error's class and its message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def place_of(error: BaseException) -> str:
    """Write where an error was raised: the line and the file's name; empty if that is unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""


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
