"""One text's cached tokens, and the pages that hold their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from parlay.cache.pages import BLOCK, Page, PageTable, pages_for
from parlay.types import Segment, Skip


class Staged(NamedTuple):
    """Rows of the last forward that are not committed: pending tokens after the committed ones, then nodes."""

    segment: Segment
    skip: Skip

    def serves(self, segment: Segment, skip: Skip) -> bool:
        """Whether these rows include the segment's rows before its base.

        If the last forward skipped sub-layers and ran committed rows again, its rows depend on rows that were put back.
        They serve no other forward.
        """
        return self.skip == skip and not (skip and self.segment.base < 0) and segment.follows(self.segment)


@dataclass(slots=True, eq=False)
class CachedText:
    """Token i has slot i of ``table``. The first ``indexed`` pages are full, and other texts can find them."""

    salt: str
    table: PageTable = field(default_factory=PageTable)
    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    staged: Staged | None = None

    @property
    def tail(self) -> Page | None:
        """The last page, if the tokens do not fill it."""
        return self.table[len(self.tokens) // BLOCK] if len(self.tokens) % BLOCK else None

    def commit(self, path: Sequence[int]) -> None:
        """Append the staged pending tokens and the nodes of ``path``, whose rows are moved to follow them."""
        assert self.staged is not None, "keep without a forward"
        assert not self.staged.skip, "rows of a forward that skipped sub-layers can't be kept"
        segment, self.staged = self.staged.segment, None
        self.tokens.extend(segment.pending)
        first = len(self.tokens)
        for index, node in enumerate(path):  # nodes rise along a path, so no row is overwritten before it was moved
            if node != index:
                self.table.row(first + index).copy_(self.table.row(first + node))
        self.tokens.extend(segment.tree.tokens[node] for node in path)

    @contextmanager
    def putting_back(self, count: int) -> Iterator[None]:
        """The last ``count`` committed rows may be overwritten in the block. Afterwards they are as before.

        Full pages are replaced by copies meanwhile. The last page must be the entry's own; in it, rows after the
        committed ones are not put back.
        """
        length = len(self.tokens)
        start = length - count
        full = range(start // BLOCK, length // BLOCK)
        before = [self.table.lend(number, self.table[number].copy()) for number in full]
        tail = self.tail if start < length else None
        rows = tail.rows[:, :, :, : length % BLOCK].clone() if tail else None
        try:
            yield
        finally:
            for number, page in zip(full, before, strict=True):
                self.table.lend(number, page)
            if tail and rows is not None:
                tail.rows[:, :, :, : length % BLOCK] = rows

    def check(self) -> None:
        """The tokens have pages, and rows that are not committed are in pages that only this entry has."""
        self.table.check()
        assert len(self.table) >= pages_for(len(self.tokens)), "an entry holds more tokens than it has slots"
        if self.staged is not None:
            end = pages_for(len(self.tokens) + self.staged.segment.end)
            own = [self.table[number].users == 1 for number in range(len(self.tokens) // BLOCK, end)]
            assert all(own), "rows that are not committed lie in a page that others use"
