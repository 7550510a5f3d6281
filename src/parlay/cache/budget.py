"""A memory budget, in bytes, that the stores of several runners share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from parlay.types import FieldError

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}

_MOST = 1 << 60  # bytes: sums of several such sizes fit into 64 bits


class Holder(Protocol):
    """A part of the program that holds bytes of a budget: ``nbytes`` in all, ``spare`` of them for unused texts."""

    @property
    def nbytes(self) -> int: ...
    @property
    def spare(self) -> int: ...

    def drop_spare(self) -> bool:
        """Give up part of the text that has been unused for longest. False if there is none."""
        ...

    def drop_used(self) -> bool:
        """Forget the cache of one text in use, whose user must notice. False if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """The most bytes for the ``requests``, and for the target's ``weights``; None: limited by free memory only."""

    requests: int | None = None
    weights: int | None = None

    @staticmethod
    def parse(memory: int | str | None) -> MemoryBounds:
        """Parse bytes, or a text such as ``2GiB``, ``weights=6GiB`` or ``2GiB,weights=6GiB``. Raises ValueError."""
        parts = [] if memory is None else memory.split(",") if isinstance(memory, str) else [memory]
        found: dict[str, int] = {}
        for part in parts:
            name, _, size = part.rpartition("=") if isinstance(part, str) else ("", "", part)
            name = name.strip() or "requests"
            if name not in ("requests", "weights") or name in found:
                raise FieldError(
                    "memory",
                    f"{memory!r} is not understood: write a size, such as 2GiB, for what requests keep, or "
                    "weights=SIZE for the model's weights, or both, joined by a comma",
                )
            found[name] = parse_bytes(size, part="" if name == "requests" else ": SIZE in weights=SIZE ")
        return MemoryBounds(**found)

    def shared_out(self, parts: int, requests: int) -> str:
        """Divide the bounds by ``parts`` processes, and return them as a text for `parse`.

        ``requests`` is used if no bound on requests is given.
        """
        weights = "" if self.weights is None else f",weights={self.weights // parts}"
        return f"{(self.requests or requests) // parts}{weights}"


class Budget:
    """Divides a number of bytes between the target's store, which must join first, and the drafters' stores.

    An ensemble has several ``targets``, whose stores join first; no target takes memory of another's running texts. A
    store that needs memory gets it from unused texts: first from those of drafters, then from the target's, in each
    store from the least recently used. The target may also take the drafters' caches of running texts, because that
    only costs them time. Drafters take nothing from a running text of the target. If ``total`` is None, each store that
    joins adds its own share. ``weights`` bounds the target's weights, which are not counted here.
    """

    def __init__(self, total: int | None = None, targets: int = 1, weights: int | None = None) -> None:
        self._fixed, self._targets, self._weights = total is not None, targets, weights
        self.total = total or 0
        self._holders: list[Holder] = []
        self._attached: list[Holder] = []

    def join(self, holder: Holder, share: int, least: int) -> None:
        """Add a store, and its ``share`` of bytes if the total is not fixed.

        Raises ValueError if a target joins and the total is below ``least``, the minimum for one text.
        """
        if not self._fixed:
            self.total += share
        if self.awaits_target and self.total < least:
            raise FieldError(
                "memory",
                f"of {format_bytes(self.total)} is too small for this model: give it more than "
                f"{format_bytes(least)}, which is what it takes in one step for the shortest text",
            )
        self._holders.append(holder)

    def attach(self, holder: Holder) -> None:
        """Count the bytes of a holder that is not a store and has no share. The target's texts may take all its bytes.

        The holder takes nothing that is in use.
        """
        self._attached.append(holder)

    @property
    def fixed(self) -> bool:
        return self._fixed

    @property
    def awaits_target(self) -> bool:
        """Return whether the next store to join is a target's."""
        return len(self._holders) < self._targets

    @property
    def weights(self) -> int | None:
        """Return the most bytes for the weights of the next target to join; None: not limited."""
        return self._weights if self.awaits_target else None

    @property
    def free(self) -> int:
        """Return the free bytes. They are below 0 while the copy of a page exceeds the total."""
        return self.total - self.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes that the stores hold, for running texts and for reusable ones."""
        return sum(holder.nbytes for holder in (*self._holders, *self._attached))

    def free_bytes(self, taker: Holder) -> int:
        """Return the bytes that ``taker`` can get in addition to its texts in use."""
        targets = self._holders[: self._targets]
        in_the_way = targets if taker in targets else [*self._holders, *self._attached]
        return max(0, self.total - sum(holder.nbytes - holder.spare for holder in in_the_way))

    def make_room(self, size: int, taker: Holder) -> bool:
        """Make ``size`` bytes free. If that is impossible, return False and give up nothing."""
        if size > self.free_bytes(taker):
            return False
        self.reclaim(size, taker)
        return True

    def drop_spare(self) -> None:
        """Give up all texts that are not in use."""
        for holder in self._holders:
            while holder.drop_spare():
                pass

    def reclaim(self, size: int, taker: Holder) -> None:
        """Free ``size`` bytes, or as many as ``taker`` may take from others."""
        if self.free >= size:
            return
        targets, drafters = self._holders[: self._targets], [*self._holders[self._targets :], *self._attached]
        for holder in (*drafters, *targets):
            while self.free < size and holder.drop_spare():
                pass
        for holder in drafters if taker in targets else ():
            while self.free < size and holder.drop_used():
                pass


def parse_bytes(size: int | str, field: str = "memory", part: str = "") -> int:
    """Parse bytes from a number, or from a text such as ``2GiB`` or ``500 MB``. Raises FieldError for another text;
    ``part`` begins what it says about the field."""
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B?)", size.strip() if isinstance(size, str) else "")
        if match is None:
            raise FieldError(
                field, f"{part}{size!r} is not understood: write bytes, or a size such as '2GiB' or '500MB'"
            )
        count = int(min(_MOST, float(match[1]) * _UNITS[match[2]]))
    if count <= 0:
        raise FieldError(field, f"{part}must be more than 0 bytes, got {size}")
    if count >= _MOST:
        raise FieldError(field, f"{part}must be less than 2^60 bytes, got {size!s:.60}")
    return count


def format_bytes(count: int) -> str:
    """Format a size for people, such as ``1.5 MiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.4g} {unit}"
    return f"{count} bytes"
