"""Finds where each n-gram occurs in a text that does not change: sorted arrays, searched by bisection."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.drafters.step_budget import StepBudget

Texts = tuple[tuple[int, ...], ...]

END = -1
"""Ends each part of an indexed text. It never occurs in a query and is never copied."""

MOST_AT_ONCE = 16_384
"""The most tokens indexed within a step, which takes 10 ms. Longer texts are indexed by another thread."""
_PIECE = 16_384


def token_bytes(longest: int) -> int:
    """Bytes of an index per token. For 5 tokens it gives 93: 64 were measured in code, and 91 for random ids."""
    return 8 + 17 * longest


class NgramIndex:
    """The places of every n-gram of 1 to ``longest`` tokens in texts that each end with `END`.

    Level n sorts the n-grams by the rank of their last n - 1 tokens at the level before and by the token in front of
    these: a query is extended to the left, one bisection per token, and stops at the first length that is unknown.
    """

    def __init__(self, texts: Sequence[Sequence[int]], longest: int, vocab_size: int) -> None:
        """Ids outside the vocabulary end a part of the text, as `END` does."""
        self.longest = longest
        tokens = _joined(texts)
        tokens[(tokens < 0) | (tokens >= vocab_size)] = END
        self.text = array("q", tokens.tobytes())
        self._base = vocab_size + 1
        self._levels: list[_Level] = []
        ranks = np.zeros(len(tokens), np.int64)
        for size in range(1, min(longest, len(tokens)) + 1):
            level, ranks = _index(ranks, tokens, size, self._base)
            self._levels.append(level)

    def places(self, query: Sequence[int]) -> list[Sequence[int]]:
        """For n = 1, 2, ...: the rising places after the last n tokens of ``query``; ends at the first n without any.

        A place is an index into ``text``, whose token there may be `END`.
        """
        found: list[Sequence[int]] = []
        rank = 0
        for level, token in zip(self._levels, reversed(query), strict=False):
            key = rank * self._base + token + 1
            rank = bisect_left(level.keys, key)
            if rank == len(level.keys) or level.keys[rank] != key:
                break
            found.append(level.places[level.starts[rank] : level.starts[rank + 1]])
        return found

    def copy(self, place: int, count: int) -> list[int]:
        """Up to ``count`` tokens from ``place`` on, within its part of the text."""
        tokens = self.text[place : place + count].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens


class _Level:
    """The n-grams of one length: n-gram number r, by rising key, is followed by ``places[starts[r]:starts[r + 1]]``."""

    __slots__ = ("keys", "places", "starts")

    def __init__(self, keys: array[int], starts: array[int], places: memoryview) -> None:
        self.keys = keys
        self.starts = starts
        self.places = places


def _index(
    ranks: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], size: int, base: int
) -> tuple[_Level, npt.NDArray[np.int64]]:
    """The level for n-grams of ``size`` tokens, and the rank of each, from the ranks of the level before."""
    keys = ranks[min(size - 1, 1) :] * base + tokens[: len(tokens) - size + 1] + 1
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate([[True], keys[1:] != keys[:-1]])
    starts = np.flatnonzero(first)
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.cumsum(first) - 1
    bounds = np.append(starts, len(keys)).astype(np.int32)
    places = (order + size).astype(np.int32)
    return _Level(
        array("q", keys[starts].tobytes()), array("i", bounds.tobytes()), memoryview(array("i", places.tobytes()))
    ), ranks


def _joined(texts: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """The tokens of all texts, each text closed by `END`. Other threads can run between the pieces."""
    closing = np.array([END], np.int64)
    pieces = [closing[:0]]
    for text in texts:
        pieces += [np.array(text[start : start + _PIECE], np.int64) for start in range(0, len(text), _PIECE)]
        pieces.append(closing)
    return np.concatenate(pieces if texts else [closing])


class OfTexts(Protocol):
    @property
    def texts(self) -> Texts: ...
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=OfTexts)


class Shared(Generic[T]):
    """Keeps one object, made by ``make``, per group of texts while some sequence uses it.

    Texts are identified as objects and not hashed.
    """

    def __init__(self, make: Callable[[Texts], T], room: StateRoom) -> None:
        self._make = make
        self._made: dict[int, T] = {}
        self._users: dict[int, int] = {}  # the text that each sequence uses
        self._bytes = StateBytes(room, self._made)

    def of(self, sequence: int, texts: Texts) -> T:
        """Find or make the object for these texts. Call it in each step, because memory pressure may have freed it."""
        found, text = self._made.get(id(texts)), id(texts)
        if self._users.get(sequence) != text:
            self.release(sequence)
            self._users[sequence] = text
        if found is None:
            found = self._made[text] = self._make(texts)
        return found

    def count(self, made: T) -> None:
        """Update the number of bytes that the object takes."""
        self._bytes.set(id(made.texts), made.nbytes)

    def release(self, sequence: int) -> None:
        """Note that the sequence no longer uses its texts. Unknown names are ignored."""
        text = self._users.pop(sequence, None)
        if text is not None and text not in self._users.values():
            self._made.pop(text, None)
            self._bytes.release(text)


class SharedIndex:
    """The index of a request's texts, which may still have to be made."""

    def __init__(self, texts: Texts, longest: int, vocab_size: int, worker: Executor) -> None:
        self.texts = texts
        self._make = partial(NgramIndex, texts, longest, vocab_size)
        self._size, self._token_bytes = sum(map(len, texts)), token_bytes(longest)
        self._worker = worker
        self._made: NgramIndex | None = None
        self._work: Future[NgramIndex] | None = None

    @property
    def nbytes(self) -> int:
        return self._size * self._token_bytes if self._made or self._work else 0

    def ready(self, step: StepBudget) -> NgramIndex | None:
        """The index, made here if this step has time for it.

        A long one is made by another thread; None until it is ready. Raises what making it raised.
        """
        if self._made is None and self._size > MOST_AT_ONCE:
            if self._work is None and step.has_room(self._size):
                self._work = self._worker.submit(self._make)
            self._made = self._work.result() if self._work is not None and self._work.done() else None
        elif self._made is None and step.take_whole(self._size):
            self._made = self._make()
        return self._made


class Indexes(Shared[SharedIndex]):
    """The indexes of requests' texts."""

    def __init__(self, longest: int, vocab_size: int, room: StateRoom) -> None:
        worker = ThreadPoolExecutor(1, thread_name_prefix="parlay-index")  # starts no thread before there is work
        super().__init__(lambda texts: SharedIndex(texts, longest, vocab_size, worker), room)
        self._step = StepBudget(room, token_bytes(longest))

    def begin(self, budgets: Sequence[int]) -> None:
        """Begin a step in which the sequences with a budget draft."""
        self._step.begin(budgets)

    def ready(self, sequence: int, texts: Texts) -> NgramIndex | None:
        """The index of a sequence's texts; None while it is being made. Raises what making it raised."""
        shared = self.of(sequence, texts)
        index = shared.ready(self._step)
        self.count(shared)
        return index
