"""The KV cache of a runner: sequences, their memory, and prefixes that stay when their sequence ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice

import torch
from torch import Tensor

from parlay.cache.budget import Budget, format_bytes
from parlay.cache.holdings import Holdings
from parlay.cache.pages import BLOCK, CacheShape, Page, pages_for
from parlay.cache.prefixes import CachedText, PrefixIndex, Rows, Staged
from parlay.cache.recent import RecentShape
from parlay.types import NO_SKIP, OutOfRoom, Segment, Skip


class Store(Holdings):
    """Cached rows of many sequences, in pages that a budget grants.

    A page may be in several tables; then it is copied before anything is written to it. Committed rows change only in
    `keep` and `truncate`. The pages of a released sequence stay as reusable prefixes until their memory is needed,
    least recently used first, the end of a text before its beginning. A drafter's store gives up even pages of live
    sequences if the target needs memory. Every page counts once, however many sequences share it. If several ranks
    divide each text's pages, all have the same tables and count the pages of the rank with most, so all decide alike;
    each has only the rows of its own pages. With a single rank, sliding-window layers may have pages of their own
    (``recent``): one before the window becomes reusable as soon as the text has moved on.
    """

    def __init__(
        self, shape: CacheShape, max_tokens: int, budget: Budget | None = None, recent: RecentShape | None = None
    ) -> None:
        """``max_tokens`` is the share that the store adds to the budget, or without a budget its own limit."""
        self._live: dict[int, CachedText] = {}
        self.index = PrefixIndex()
        super().__init__(shape, max_tokens, budget, recent)  # last: it joins the budget, and may be asked for room

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many of ``tokens``, fewer than all, `open` would find cached."""
        return self._find(tokens, salt)[1]

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Open a sequence with the longest cached prefix of ``tokens``; returns its length, fewer than all."""
        pages, length = self._find(tokens, salt)
        recent = [page.recent for page in pages] if self._recent is not None else ()
        self._begin(sequence, salt, pages, tokens[:length], recent)
        return length

    def fork(self, sequence: int, copy: int) -> None:
        """Open ``copy`` with the cached tokens of ``sequence``, in the same pages.

        Between a forward and its `keep`, only those of full pages: the last page is being written to.
        """
        source = self._entry(sequence)
        length = len(source.tokens) if source.staged is None else source.indexed * BLOCK
        recent = self._recent.found(source) if self._recent is not None else ()
        if self._recent is not None:
            length = self._recent.reach(length, recent)
        self._begin(copy, source.salt, source.table, source.tokens[:length], recent)

    def release(self, sequence: int) -> None:
        """End a sequence; its committed rows stay reusable. Unknown sequences are ignored."""
        entry = self._live.pop(sequence, None)
        if entry is None:
            return
        if entry.tail is not None and entry.tail not in self.index:
            known = self.index.add(entry, entry.indexed)
            if self._recent is not None and known is entry.tail:
                self._recent.share(entry, entry.indexed)
        self._cut(entry, 0)

    def length(self, sequence: int) -> int:
        """Return how many tokens of the sequence are cached."""
        return len(self._entry(sequence).tokens)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Make room for ``tokens`` in all, scratch rows included; False while other sequences hold the memory.

        That includes memory for a copy of the next row's page, if other sequences use it too, or, where there is
        memory, if they only may find it. Raises OutOfRoom if even an empty cache could not hold ``tokens``.
        """
        entry, pages = self._entry(sequence), pages_for(tokens)
        more = pages > len(entry.table)  # the pages that it has always fit
        if more and (tokens > self.capacity() or (self._recent and self._room.bytes_for(tokens) > self._budget.total)):
            raise OutOfRoom(
                f"a sequence of {tokens} tokens does not fit a cache of {self.capacity()}, which is "
                f"{format_bytes(self._budget.total)}: allow more memory"
            )
        shared = entry.tail is not None and entry.tail.users > 1
        if self._grow(entry, pages + (shared or self._is_wanted(entry))) or (not shared and self._grow(entry, pages)):
            entry.promised = pages
            return True
        return False

    def ids(self, segment: Segment) -> Sequence[int]:
        """Return the tokens of the segment's rows that run."""
        tokens = (*segment.pending, *segment.tree.tokens)
        return tokens[segment.base :] if segment.base >= 0 else (*self._again(segment), *tokens)

    def stage(self, segment: Segment, skip: Skip = NO_SKIP) -> Rows:
        """Return scratch rows for one forward. Commits nothing.

        If committed rows run again (a base below 0), the forward must run inside `putting_back`. Raises ValueError for
        rows that are not reserved, and for a base whose rows the last forward did not leave.
        """
        sequence, base = segment.sequence, segment.base
        entry, again = self._entry(sequence), len(self._again(segment)) if base < 0 else 0
        if base <= 0:
            self._give_borrowed(entry)
        if base > 0 and (entry.staged is None or not entry.staged.serves(segment, skip)):
            raise ValueError(
                f"sequence {sequence}: the first {base} rows are not those of its last forward: run them again"
            )
        start, pending = len(entry.tokens) - again, len(segment.pending) + again
        if again and self._recent is not None and not self._recent.can_run_again(entry, start):
            raise ValueError(f"sequence {sequence}: {again} cached tokens can't run again: what they see was given up")
        self._make_writable(entry, sequence, len(entry.tokens) + segment.end)
        entry.staged, recent = Staged(segment, skip), None if self._recent is None else entry.recent
        self._borrow(entry, range(len(entry.tokens) + len(segment.pending), len(entry.tokens) + segment.end))
        return Rows(
            *(entry.table, start, pending, segment.tree, max(0, base), segment.together),
            recent=recent,
            hidden=segment.hidden,
            places=segment.places,
        )

    def putting_back(self, segment: Segment) -> AbstractContextManager[None]:
        """Context manager for the forward of a segment: then restores committed rows that ran again, bit for bit."""
        return self._entry(segment.sequence).putting_back(max(0, -segment.base))

    def _again(self, segment: Segment) -> Sequence[int]:
        """Return the committed tokens that the segment runs again."""
        if segment.base >= 0:
            return ()
        tokens = self._entry(segment.sequence).tokens
        if len(tokens) < -segment.base:
            raise ValueError(
                f"sequence {segment.sequence} has {len(tokens)} cached tokens: {-segment.base} of them can't run again"
            )
        return tokens[segment.base :]

    def restage(self, segment: Segment) -> None:
        """Replace the staged segment by ``segment``, with nodes chosen during the forward and no more rows."""
        entry = self._entry(segment.sequence)
        assert entry.staged is not None, "restage without a forward"
        assert segment.end <= entry.staged.segment.end, "more rows than were staged"
        entry.staged = Staged(segment, entry.staged.skip)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Commit the staged pending tokens and the nodes of ``path``; returns how many tokens are cached now."""
        entry = self._entry(sequence)
        entry.commit(path, self.move_row)
        self._give_borrowed(entry)
        self._index_full(entry)
        return len(entry.tokens)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on, and the scratch rows; returns how many tokens are cached now.

        These may be fewer than ``length`` if keys that the next row would see were given up.
        """
        entry = self._entry(sequence)
        entry.staged = None
        self._give_borrowed(entry)
        if length < len(entry.tokens):
            if self._recent is not None:
                length = self._recent.recall(entry, length)
            self._cut(entry, max(length, 0), forget=True)
            tail = entry.tail
            if tail is not None and tail.users == 1 and tail in self.index and not self.index.has_more(tail):
                self.index.remove(tail)
                tail.recent = None
        return len(entry.tokens)

    def rows_of(self, sequence: int, text: Sequence[int], first: int, count: int) -> Tensor | None:
        """Copy cached rows of tokens of ``text``, which the sequence may share: ``[count, layers, 2, kv_heads, D]``.

        None if some of them are not cached here, and for caches in 8-bit blocks.
        """
        pages, length = self.index.find(text[: first + count + 1], self._entry(sequence).salt)
        if length < first + count or self.shape.dtype == torch.uint8 or self._spread.ranks > 1:
            return None
        slots, recent = range(first, first + count), self._recent
        if recent is None:
            return torch.stack([pages[slot // BLOCK].states(slot % BLOCK) for slot in slots])
        forgotten = any(pages[slot // BLOCK].recent is None for slot in slots)
        return None if forgotten else torch.stack([recent.states(pages[s // BLOCK], s % BLOCK) for s in slots])

    def append(self, sequence: int, tokens: Sequence[int], rows_NLSKD: Tensor) -> int:
        """Commit tokens whose keys and values are given; their rows must be reserved.

        Returns how many are cached now.
        """
        entry = self._entry(sequence)
        entry.staged, start = None, len(entry.tokens)
        self._make_writable(entry, sequence, start + len(tokens))
        for slot, states_LSKD in enumerate(rows_NLSKD, start):
            page, place = divmod(slot, BLOCK)
            if self._recent is None:
                entry.table[page].write(place, states_LSKD)
            else:
                self._recent.write(entry.table[page], entry.recent[page], place, states_LSKD)
        entry.tokens.extend(tokens)
        self._index_full(entry)
        return len(entry.tokens)

    def drop_spare(self) -> bool:
        """Give up the reusable page that has been unused for longest. False if there is none."""
        oldest, owner = self.spare_pages.oldest() or (None, None)
        if owner is not None and self._recent is not None:
            self._recent.drop(owner)
        elif oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop_used(self) -> bool:
        oldest = next((entry for entry in self._live.values() if len(entry.table)), None)
        if oldest is not None:
            oldest.staged = None
            self._cut(oldest, 0, forget=True)
        return oldest is not None

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        entries = list(self._live.values())
        uses = Counter(page for entry in entries for page in entry.pages())
        assert all(page.users == count for page, count in uses.items()), "a page's users are counted wrongly"
        assert not any(page.users for page in self.spare_pages), "a spare page is in use"
        borrowed = [entry.table[number] for entry in entries for number in entry.lent]
        self.pool.check([*uses, *self.spare_pages, *borrowed])
        for entry in entries:
            entry.check()
            exposed = entry.staged is not None and entry.tail is not None and entry.tail in self.index
            assert not exposed, "rows that are not committed lie in a page that others may find"
        self.index.check(entries, list(self.spare_pages))
        if self._recent is not None:
            self._recent.check(entries)

    # ----------------------------------------------------------------------------------------------------- pages

    def _entry(self, sequence: int) -> CachedText:
        try:
            return self._live[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None

    def _find(self, tokens: Sequence[int], salt: str) -> tuple[list[Page], int]:
        """Return the pages of the longest cached prefix, and its length; the window of its last row is cached, too."""
        pages, length = self.index.find(tokens, salt)
        if self._recent is not None:
            length = self._recent.reach(length, [page.recent for page in pages])
        return pages, length

    def _begin(
        self, name: int, salt: str, pages: Iterable[Page], tokens: Sequence[int], recent: Sequence[Page | None]
    ) -> None:
        """Open an entry with ``tokens``; its rows are in the first of ``pages`` and, for its window, of ``recent``."""
        if name in self._live:
            raise ValueError(f"sequence {name} is open already: release it first")
        entry = self._live[name] = CachedText(salt, tokens=list(tokens), indexed=len(tokens) // BLOCK)
        for page in islice(pages, pages_for(len(tokens))):
            self.spare_pages.discard(page)
            entry.table.append(page)
        if self._recent is not None:
            self._recent.fill(entry, recent)

    def _index_full(self, entry: CachedText) -> None:
        """Index the pages that the entry's tokens fill now, and forget pages that no layer sees any more."""
        for number in range(entry.indexed, len(entry.tokens) // BLOCK):
            known = self.index.add(entry, number)
            if known is not entry.table[number]:  # the same text has one page: the first one computed
                self.spare_pages.discard(known)
                self._let_go(entry.table.replace(number, known))
            if self._recent is not None:
                self._recent.share(entry, number)
            entry.indexed += 1
        if self._recent is not None:
            self._recent.forget(entry)

    def _make_writable(self, entry: CachedText, sequence: int, rows: int) -> None:
        """Give this entry alone the pages of rows after the committed ones, and keep them out of the index.

        Raises ValueError for rows that are not reserved.
        """
        reserved = len(entry.table)
        if rows > reserved * BLOCK:
            raise ValueError(
                f"sequence {sequence} has room for {reserved * BLOCK} tokens and needs {rows}: reserve them first"
            )
        tail, pages = entry.tail, pages_for(max(rows, len(entry.tokens)))
        if self._recent is not None:
            self._take_recent(entry, pages - len(entry.recent))
        if tail is None:
            return
        pages = max(pages, entry.promised)  # later rows of this step may need them
        if tail.users > 1 or (self._is_wanted(entry) and len(entry.table) > pages):
            copy = self._page_for_copy(entry, pages)
            copy.rows.copy_(tail.rows)
            before = entry.table.replace(len(entry.tokens) // BLOCK, copy)
            if self._recent is not None:
                self._budget.make_room(self._recent.page_bytes, self)
                self._recent.copy_last(entry, before)
            self._let_go(before)
        elif tail in self.index:
            followers = self.index.remove(tail)
            tail.recent = None
            for follower in followers:
                self._give(follower)

    def _is_wanted(self, entry: CachedText) -> bool:
        """Whether the entry's last page is indexed for tokens that the entry does not have."""
        return entry.tail is not None and self.index.tokens_of(entry.tail) > len(entry.tokens) % BLOCK

    def _grow(self, entry: CachedText, pages: int) -> bool:
        """Extend the entry to ``pages`` pages; all or nothing."""
        more, recent = range(len(entry.table), pages), 0
        if self._recent is not None:
            recent = self._recent.lacking(entry, pages)
            size = recent * self._recent.page_bytes + len(more) * self.shape.page_bytes
            if size and not self._budget.make_room(size, self):
                return False
        elif more and not self._make_room(more):
            return False
        for number in more:
            entry.table.append(self.pool.take(number))
        self._take_recent(entry, recent)
        return True

    def _take_recent(self, entry: CachedText, count: int) -> None:
        """Extend the entry by ``count`` recent pages, which may exceed the budget if they were not reserved."""
        if self._recent is not None and count > 0:
            self._budget.make_room(count * self._recent.page_bytes, self)
            self._recent.extend(entry, count)

    def _borrow(self, entry: CachedText, nodes: range) -> None:
        """Borrow memory for the pages of these slots that other ranks own, in all spans after the first.

        A path down a tree skips slots, so keys of the span before may be written there.
        """
        behind = (nodes.start // self._spread.span + 1) * self._spread.span // BLOCK
        for number in range(behind, pages_for(nodes.stop)) if nodes and self._spread.ranks > 1 else ():
            if not entry.table[number].address:
                entry.lent[number] = entry.table.lend(number, self.pool.borrow())

    def _give_borrowed(self, entry: CachedText) -> None:
        for number, page in entry.lent.items():
            self.pool.give(entry.table.lend(number, page))
        entry.lent.clear()

    def _page_for_copy(self, entry: CachedText, pages: int) -> Page:
        """Return a page that `reserve` took beyond ``pages``, if any, or a new one, which may exceed the budget a
        while.
        """
        number = len(entry.tokens) // BLOCK
        if len(entry.table) > pages:
            page = entry.table.pop()
            if page.rank == self._spread.owner(number):
                return page
            self.pool.give(page)
        self._make_room(range(number, number + 1))
        return self.pool.take(number)

    def _cut(self, entry: CachedText, length: int, *, forget: bool = False) -> None:
        """Keep the entry's first ``length`` tokens and their pages. The other pages are dropped, the last one first.

        An indexed page stays as spare, unless ``forget`` is set and no indexed page follows it.
        """
        self._give_borrowed(entry)
        del entry.tokens[length:]
        entry.indexed = min(entry.indexed, length // BLOCK)
        while len(entry.table) > pages_for(length):
            page = entry.table.pop()
            if self._recent is not None:
                self._recent.cut(entry, page)
            self._let_go(page, keep=not forget or self.index.has_more(page))

    def _let_go(self, page: Page, *, keep: bool = True) -> None:
        """If the page has no users now, keep it as the most recently used spare one, or give it back."""
        if page.users:
            return
        if keep and page in self.index:
            self.spare_pages.add(page)
        else:
            self._drop(page)

    def _drop(self, page: Page) -> None:
        """Give an unused page back."""
        if page in self.index:
            self.index.remove(page)
        self._give(page)

    def _give(self, page: Page) -> None:
        """Give back a page that is neither used nor indexed, with the recent page that it refers to."""
        self.spare_pages.discard(page)
        if self._recent is not None and page.recent is not None:
            self._recent.drop(page)
        self.pool.give(page)
