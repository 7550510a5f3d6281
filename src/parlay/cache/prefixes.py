"""Cached texts, and the index that finds the pages of the longest cached prefix of a new text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from parlay.cache.pages import BLOCK, Page, PageTable, pages_for
from parlay.types import NO_TREE, ChosenPages, Segment, Skip, Tree, shared_length

_NEAREST = 64
"""Most pages, newest first, that are compared if none has exactly the next tokens."""

MoveRow = Callable[[PageTable, int, int], None]
"""Copies a token's keys and values from one slot of a table to another, as `PageTable.move` does."""

Level = dict[tuple[int, ...], Page]
"""Pages that may follow one prefix, by their tokens."""


class Rows(NamedTuple):
    """The rows of one sequence in a forward: slot i of ``table``, which is in page i // BLOCK, belongs to token i.

    ``recent`` is the table of sliding-window layers, where the model has such pages. Row 0 of the forward has slot
    ``start``: ``pending`` rows at successive positions, then the nodes of ``tree``, whose root is the last pending row.
    Rows before ``base`` are computed already, the others run and are written. The last ``together`` rows are chains
    whose rows see each other. With a ``block``, each row sees all of its own block, which begins at a multiple of it.
    ``places`` are the positions of the last rows, counted from the root's. Rows do not see the slots from the first
    number of ``hidden`` to before the second, except those in ``chosen`` pages. ``votes``, if given, receives the rows'
    votes, as in `Output`.
    """

    table: PageTable
    start: int
    pending: int
    tree: Tree = NO_TREE
    base: int = 0
    together: int = 0
    block: int = 0
    recent: PageTable | None = None
    hidden: tuple[int, int] = (0, 0)
    places: tuple[int, ...] = ()
    chosen: ChosenPages | None = None
    votes: Tensor | None = None

    @property
    def end(self) -> int:
        """Number of the last row plus one."""
        return self.pending + len(self.tree.tokens)

    @property
    def reach(self) -> int:
        """The largest rotary position of any row, plus one."""
        return self.start + max(self.end, self.pending + max(self.places, default=0))


class Staged(NamedTuple):
    """Uncommitted rows of the last forward: pending tokens after the committed ones, then nodes."""

    segment: Segment
    skip: Skip

    def serves(self, segment: Segment, skip: Skip) -> bool:
        """Tell whether these rows include the segment's rows before its base.

        If the last forward was approximate and ran committed rows again, its rows depend on rows that were restored
        since. They serve no other forward.
        """
        return self.skip == skip and not (self.approximate and self.segment.base < 0) and segment.follows(self.segment)

    @property
    def approximate(self) -> bool:
        """Whether the forward computed an approximation of the model, so that its rows can't be kept."""
        return bool(self.skip) or self.segment.approximate


@dataclass(slots=True, eq=False)
class CachedText:
    """A text in the cache: token i has slot i of ``table``. The first ``indexed`` pages are full and in the index.

    ``lent`` are its own pages, by number, that borrowed ones replace in the table until the next commit. Sliding-window
    layers have their pages in ``recent``, of which the first ``forgotten`` are blank. The last reservation was for
    ``promised`` pages; more pages in the table are for copies.
    """

    salt: str
    table: PageTable = field(default_factory=PageTable)
    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    staged: Staged | None = None
    lent: dict[int, Page] = field(default_factory=dict)
    recent: PageTable = field(default_factory=PageTable)
    forgotten: int = 0
    promised: int = 0

    def row(self, slot: int) -> tuple[Tensor, ...]:
        """Views of one token's keys and values, in all layers."""
        return self.table.row(slot) + (self.recent.row(slot) if len(self.recent) else ())

    def pages(self) -> Iterator[Page]:
        """Yield the entry's own pages in order."""
        return (self.lent.get(number, page) for number, page in enumerate(self.table))

    @property
    def tail(self) -> Page | None:
        """The last page, if the tokens do not fill it."""
        return self.table[len(self.tokens) // BLOCK] if len(self.tokens) % BLOCK else None

    def commit(self, path: Sequence[int], move: MoveRow) -> None:
        """Append the staged pending tokens and the nodes of ``path``, whose rows ``move`` moves to follow them."""
        assert self.staged is not None, "keep without a forward"
        assert not self.staged.approximate, "rows of an approximate forward can't be kept"
        segment, self.staged = self.staged.segment, None
        self.tokens.extend(segment.pending)
        first = len(self.tokens)
        for index, node in enumerate(
            path
        ):  # node numbers rise along a path, so no row is overwritten before it is moved
            for table in (self.table, self.recent) if node != index else ():
                if len(table) and table[(first + index) // BLOCK].address:
                    move(table, first + node, first + index)
        self.tokens.extend(segment.tree.tokens[node] for node in path)

    @contextmanager
    def putting_back(self, count: int) -> Iterator[None]:
        """Context manager: the last ``count`` committed rows may be overwritten inside, and are restored afterwards.

        Full pages are replaced by copies meanwhile. The last page must be the entry's own; in it, rows after the
        committed ones are not restored.
        """
        length = len(self.tokens)
        start = length - count
        tables = [table for table in (self.table, self.recent) if len(table)]
        full = [(table, number) for table in tables for number in range(start // BLOCK, length // BLOCK)]
        before = [table.lend(number, table[number].copy()) for table, number in full]
        last = range(length - length % BLOCK, length) if start < length else ()
        cells = [cell for slot in last for cell in self.row(slot)]
        kept = [cell.clone() for cell in cells]
        try:
            yield
        finally:
            for (table, number), page in zip(full, before, strict=True):
                table.lend(number, page)
            for cell, put_back in zip(cells, kept, strict=True):
                cell.copy_(put_back)

    def check(self) -> None:
        """Assert that the tokens have pages, and that uncommitted rows are in pages that only this entry has."""
        self.table.check()
        assert len(self.table) >= pages_for(len(self.tokens)), "an entry holds more tokens than it has slots"
        if self.staged is not None:
            end = pages_for(len(self.tokens) + self.staged.segment.end)
            own = [page.users == 1 for page in islice(self.pages(), len(self.tokens) // BLOCK, end)]
            assert all(own), "rows that are not committed lie in a page that others use"


class KnownPage(NamedTuple):
    """A page in the index: its tokens, the page before it in its text, and the salt of the text."""

    page: Page
    before: Page | None
    salt: str
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """``level`` maps ``tokens`` to the page; pages in ``after`` follow it.

    Only the first page of a text has a ``salt``.
    """

    tokens: tuple[int, ...]
    level: Level
    salt: str | None
    after: Level = field(default_factory=dict)


class PrefixIndex:
    """A tree of pages for each salt. The path from its root to a page is one text, page by page.

    The tree is a dictionary at each level: the hash of the next tokens finds a page, and comparing the tokens confirms
    it, so a page is found only by the tokens of its whole text. A text has one full page for each block: a sequence
    that computes it again gets the first one. The last, unfinished page of a released text is a leaf. A sequence that
    uses a page uses all pages before it.
    """

    def __init__(self) -> None:
        self._roots: dict[str, Level] = {}
        self._known: dict[Page, _Known] = {}

    def __contains__(self, page: Page) -> bool:
        return page in self._known

    def tokens_of(self, page: Page) -> int:
        """Return how many tokens the page is indexed for."""
        return len(self._known[page].tokens) if page in self._known else 0

    def has_more(self, page: Page) -> bool:
        """Tell whether an indexed page follows this one."""
        return page in self._known and bool(self._known[page].after)

    def find(self, tokens: Sequence[int], salt: str) -> tuple[list[Page], int]:
        """Return the pages of the longest indexed prefix of ``tokens``, and its length, which is less than all of them.

        The last page may hold other tokens after these.
        """
        found: list[Page] = []
        level, length, most = self._roots.get(salt, {}), 0, len(tokens) - 1
        while length < most:
            block = tuple(tokens[length : min(length + BLOCK, most)])
            page, shared = self._nearest(level, block)
            if page is None:
                break
            found.append(page)
            length += shared
            if shared < BLOCK:
                break
            level = self._known[page].after
        return found, length

    def _nearest(self, level: Level, block: tuple[int, ...]) -> tuple[Page | None, int]:
        """Return the page with most of the block's first tokens, and how many; None if no page has any."""
        page = level.get(block)
        if page is not None:
            return page, len(block)
        others = ((shared_length(key, block), other) for key, other in islice(reversed(level.items()), _NEAREST))
        shared, page = max(others, key=lambda pair: pair[0], default=(0, None))
        return (page, shared) if shared else (None, 0)

    def add(self, entry: CachedText, number: int) -> Page:
        """Return the indexed page with the tokens of the entry's page; the entry's own if there was none."""
        tokens = tuple(entry.tokens[number * BLOCK : (number + 1) * BLOCK])
        before = entry.table[number - 1] if number else None
        return self.put(KnownPage(entry.table[number], before, entry.salt, tokens))

    def put(self, new: KnownPage) -> Page:
        """Return the page that is indexed for this text, or else index the new one and return it."""
        level = self._known[new.before].after if new.before is not None else self._roots.setdefault(new.salt, {})
        page = level.setdefault(new.tokens, new.page)
        if page not in self._known:
            self._known[page] = _Known(new.tokens, level, new.salt if new.before is None else None)
        return page

    def pages(self) -> Iterator[KnownPage]:
        """Yield all indexed pages, each after its predecessor."""
        levels: list[tuple[Page | None, str, Level]] = [(None, salt, level) for salt, level in self._roots.items()]
        while levels:
            before, salt, level = levels.pop()
            for tokens, page in level.items():
                yield KnownPage(page, before, salt, tokens)
                levels.append((page, salt, self._known[page].after))

    def remove(self, page: Page) -> list[Page]:
        """Remove a page and all that follow it. Returns the pages that followed."""
        known = self._known.pop(page)
        del known.level[known.tokens]
        if known.salt is not None and not known.level:
            del self._roots[known.salt]
        followers: list[Page] = []
        levels = [known.after]
        while levels:
            for follower in levels.pop().values():
                followers.append(follower)
                levels.append(self._known.pop(follower).after)
        return followers

    def check(self, entries: Iterable[CachedText], spare: Sequence[Page]) -> None:
        """Assert that pages are found by their texts, users of a page use those before it, and the spares' order."""
        place = {page: number for number, page in enumerate(spare)}
        for page, known in self._known.items():
            assert known.level[known.tokens] is page, "a page is known by tokens that are not its own"
            assert len(known.tokens) == BLOCK or not known.after, "a page follows one that is not full"
            assert page.users or page in place, "a known page is neither used nor spare"
            assert sum(each.users for each in known.after.values()) <= page.users, "a page is used without those before"
            assert all(each in self._known for each in known.after.values()), "a page can be found that is not known"
            if page in place:
                ends_first = all(place[each] < place[page] for each in known.after.values())
                assert ends_first, "a beginning leaves before its end"
        assert place.keys() <= self._known.keys(), "a spare page can't be found"
        assert all(self._roots.values()), "a salt is remembered that no page has"
        for entry in entries:
            assert entry.indexed == len(entry.tokens) // BLOCK, "full pages are not indexed"
            found = self.find([*entry.tokens[: entry.indexed * BLOCK], -1], entry.salt)[0]
            assert found[: entry.indexed] == list(entry.table)[: entry.indexed], "an entry's pages are not its tokens'"
