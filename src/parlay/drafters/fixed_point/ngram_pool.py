"""N-grams that a target wrote or guessed, found by their first token."""

from __future__ import annotations

from collections import OrderedDict

CAPACITY = 1 << 15  # n-grams in a pool
GRAM_BYTES = 400  # bytes per n-gram: 394 were measured for random ids


class NgramPool:
    """Holds up to ``width`` n-grams per first token and `CAPACITY` in all.

    An n-gram that is added again becomes the latest. Over capacity, the first token that was unused for longest is
    dropped.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._tails: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()  # the latest last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, first: int, tail: tuple[int, ...]) -> None:
        """Add the n-gram ``first`` + ``tail``."""
        tails = self._tails.setdefault(first, {})
        self._tails.move_to_end(first)
        self._count -= len(tails)
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self._width:
            del tails[next(iter(tails))]
        self._count += len(tails)
        while self._count > CAPACITY:
            self._count -= len(self._tails.popitem(last=False)[1])

    def after(self, first: int) -> list[tuple[int, ...]]:
        """N-grams that followed ``first``, the latest first."""
        return list(reversed(self._tails.get(first, {})))
