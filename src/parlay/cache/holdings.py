"""Counts the pages and bytes of a store, and the tokens that still fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from parlay.cache.budget import Budget
from parlay.cache.pages import BLOCK, CacheShape, PageTable, Pool, SparePages, pages_for
from parlay.cache.prefixes import MoveRow
from parlay.cache.recent import RecentPages, RecentShape, Room


class Beside(Protocol):
    """Work on pages of texts in use that runs beside the engine's thread."""

    def end(self, *, stop: bool = False) -> None:
        """Wait for the end of the work; with ``stop`` it ends as soon as it can. Then the store forgets it."""
        ...


class Holdings(ABC):
    """The base of `Store`: its pools, their unused pages, and its part in a budget."""

    def __init__(self, shape: CacheShape, max_tokens: int, budget: Budget | None, recent: RecentShape | None) -> None:
        """See `Store`."""
        if max_tokens < 1:
            raise ValueError(f"a cache of {max_tokens} tokens is too small: it must hold at least one")
        self.shape, self._spread, self._page_bytes = shape, shape.spread, shape.page_bytes
        self.spare_pages = SparePages(shape.spread.ranks)
        self.pool = Pool(shape)
        self.move_row: MoveRow = PageTable.move
        """Moves the rows of accepted nodes; a decoder may have a faster way."""
        self.beside: Beside | None = None
        """Work that writes to the pages; `settle` ends it before they are needed elsewhere."""
        self._growing = [0] * shape.spread.ranks  # pages of each rank that room is being made for
        self._recent = None if recent is None else RecentPages(recent, self.spare_pages)
        self._room = Room(shape.page_bytes) if recent is None else recent.room(shape.page_bytes)
        self._budget, page = budget or Budget(), int(self._room.bytes_for(1))
        self._budget.join(self, self._spread.most(pages_for(max_tokens)) * page, page)

    @abstractmethod
    def drop_spare(self) -> bool:
        """See `parlay.cache.budget.Holder`."""

    def drop_used(self) -> bool:
        """Drop nothing; see `parlay.cache.budget.Holder`."""
        self.settle()
        return self._drop_used()

    @abstractmethod
    def _drop_used(self) -> bool:
        """Forget the cache of the live sequence that was opened first. False if no sequence has any."""

    def settle(self) -> None:
        """Stop the work on pages beside the engine's thread, and wait for its end."""
        if self.beside is not None:
            self.beside.end(stop=True)

    @property
    def forgets(self) -> bool:
        """Whether some layers keep only the last tokens of a text (sliding window)."""
        return self._recent is not None

    def free_tokens(self) -> int:
        """Return how many tokens could be reserved now, if reusable prefixes are given up."""
        if self._recent is not None:
            return self._room.tokens_in(self._budget.free_bytes(self))
        used = self._in_use()
        free = self._budget.free_bytes(self) // self._page_bytes
        return min(self.capacity(), sum(free + max(used) - each for each in used) * BLOCK)

    def capacity(self) -> int:
        """Return how many tokens all sequences together can hold at most."""
        if self._recent is not None:
            return self._room.tokens_in(self._budget.total)
        return self._spread.pages(self._budget.total // self.shape.page_bytes) * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in use or reusable, each counted once."""
        recent = self._recent.nbytes if self._recent is not None else 0
        return self._most(self.pool.taken, self._growing) * self._page_bytes + recent

    @property
    def spare(self) -> int:
        """Bytes of reusable pages that are not in use."""
        recent = (self.spare_pages.recent - self._recent.taken) * self._recent.page_bytes if self._recent else 0
        return self.nbytes - self._most(self._in_use(), self._growing) * self._page_bytes + recent

    def _in_use(self) -> list[int]:
        """Return how many pages of each rank are in use."""
        return [taken - spare for taken, spare in zip(self.pool.taken, self.spare_pages.counts, strict=True)]

    @staticmethod
    def _most(pages: Sequence[int], more: Sequence[int]) -> int:
        """Return the maximum over the ranks of ``pages`` plus ``more``."""
        if len(pages) == 1:  # the usual case; called several times in each step
            return pages[0] + more[0]
        return max([one + other for one, other in zip(pages, more, strict=True)])

    def _make_room(self, numbers: range) -> bool:
        """Free memory for pages ``numbers`` of a text. If that is impossible, return False and give up nothing."""
        used, new = self._in_use(), self._spread.count(numbers)
        more = self._most(used, new) - max(used)
        if more * self._page_bytes > self._budget.free_bytes(self):
            return False
        self._growing = new
        self._budget.reclaim(0, self)
        self._growing = [0] * self._spread.ranks
        return True
