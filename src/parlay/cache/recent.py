"""Pages of sliding-window layers, which see only the last keys of a text: pages before the window are given up.

A text then has two tables: one of pages for the layers that see all keys, and one of these. A page of the first kind
refers to the page of the same tokens here, as long as there is one, so a prefix is found only if the window before its
end is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from parlay.cache.pages import BLOCK, CacheShape, Page, Pool, SparePages, pages_for
from parlay.cache.prefixes import CachedText

MARGIN = 4 * BLOCK
"""Tokens before the window whose keys stay: so far a text may be cut back, or forked in the middle of a page."""
AHEAD = 512
"""Tokens after the cached ones for which `Room` counts pages: the usual size of a prefill chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentShape:
    """The shape of pages of the model's ``layers`` that see at most the last ``window`` keys.

    ``longest`` is the model's maximum context. Keys of ``margin`` tokens before the window stay.
    """

    shape: CacheShape
    layers: tuple[int, ...]
    window: int
    longest: int
    margin: int = MARGIN
    ahead: int = AHEAD

    @property
    def most(self) -> int:
        """The most pages that a text has at once."""
        return min(most_pages(self.window, self.margin + self.ahead), pages_for(self.longest))

    def room(self, whole: float) -> Room:
        """Return the memory that texts take, if a page of the other layers has ``whole`` bytes."""
        return Room(whole, self.shape.page_bytes, self.most, pages_for(self.longest))


def most_pages(window: int, around: int = MARGIN + AHEAD) -> int:
    """Return the most pages of a text in layers with this window, including the margin and new rows."""
    return pages_for(window + around) + 1


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that texts take:

    ``whole`` bytes a page in layers that see all keys, ``recent`` in sliding-window layers. Sliding-window layers keep
    at most ``most`` pages of a text. ``longest``: pages of the longest text.
    """

    whole: float
    recent: float = 0
    most: int = 0
    longest: int = 0

    def bytes_for(self, tokens: int) -> float:
        """Return the bytes of ``tokens`` tokens, in texts of full length and one that has the rest."""
        texts, rest = divmod(pages_for(tokens), self.longest) if self.recent else (0, pages_for(tokens))
        return texts * self._text(self.longest) + self._text(rest)

    def tokens_in(self, size: float) -> int:
        """Return how many tokens ``size`` bytes hold, in texts of full length and one that has the rest."""
        if not self.recent:
            return max(0, int(size // self.whole)) * BLOCK
        texts, rest = divmod(max(0, size), self._text(self.longest))
        pages = min(self.most, int(rest // (self.whole + self.recent)))
        if pages == self.most and self.whole:
            pages += int((rest - self._text(pages)) // self.whole)
        return (int(texts) * self.longest + pages) * BLOCK

    def _text(self, pages: int) -> float:
        return pages * self.whole + min(pages, self.most) * self.recent


class RecentPages:
    """The pool of sliding-window pages, and the pages of each text.

    Before its window, a table has the zeroed page ``blank``. No row sees keys of the blank page, but kernels may read
    them.
    """

    def __init__(self, recent: RecentShape, spare: SparePages) -> None:
        """``spare`` are the unused pages of both kinds; pages of this kind are listed with their owner."""
        self._shape, self._pool, self._spare = recent, Pool(recent.shape), spare
        self.page_bytes = recent.shape.page_bytes
        self.blank = self._pool.take()
        self.blank.rows.zero_()
        self.blank.users = 1

    @property
    def taken(self) -> int:
        """Pages in use or reusable."""
        return self._pool.taken[0] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of these pages."""
        return self.taken * self.page_bytes

    def seen_from(self, length: int) -> int:
        """Return the first page that a text of ``length`` tokens needs for its next row."""
        return max(0, length - self._shape.window) // BLOCK

    def reach(self, length: int, pages: Sequence[Page | None]) -> int:
        """Return the longest prefix, of at most ``length`` tokens, whose window is complete in ``pages``."""
        while length:
            needed = reversed(range(self.seen_from(length), pages_for(length)))
            gap = next((number for number in needed if pages[number] is None), None)
            if gap is None:
                return length
            length = gap * BLOCK
        return 0

    # ------------------------------------------------------------------------------------------------- of one text

    def fill(self, entry: CachedText, pages: Sequence[Page | None]) -> None:
        """Give a new entry the pages that its tokens need."""
        entry.forgotten = self.seen_from(len(entry.tokens))
        for number in range(pages_for(len(entry.tokens))):
            entry.recent.append(self.blank if number < entry.forgotten else self._revived(pages[number]))

    def lacking(self, entry: CachedText, pages: int) -> int:
        """Return how many more pages an entry needs to have ``pages`` in all, except those far ahead."""
        return max(0, min(pages, entry.forgotten + self._shape.most) - len(entry.recent))

    def extend(self, entry: CachedText, count: int) -> None:
        for _ in range(count):
            entry.recent.append(self._pool.take())

    def share(self, entry: CachedText, number: int) -> None:
        """Let other texts find the entry's page ``number``. If the same text has one already, the entry gets that."""
        known, own = entry.table[number], entry.recent[number]
        if known.recent is None:
            known.recent = own
        elif known.recent is not own:
            self._let_go(known, entry.recent.replace(number, self._revived(known.recent)))

    def forget(self, entry: CachedText) -> None:
        """Replace by blank pages those that no row will see, unless the text is cut back by more than the margin."""
        first = self.seen_from(len(entry.tokens) - self._shape.margin)
        for number in range(entry.forgotten, first):
            self._let_go(entry.table[number], entry.recent.replace(number, self.blank))
        entry.forgotten = max(entry.forgotten, first)

    def found(self, entry: CachedText) -> list[Page | None]:
        """Return the entry's pages; in place of forgotten ones, the pages that other texts would find."""
        forgotten = [entry.table[number].recent for number in range(entry.forgotten)]
        return [*forgotten, *islice(entry.recent, entry.forgotten, None)]

    def recall(self, entry: CachedText, length: int) -> int:
        """Return how long the entry can be after a cut to ``length`` tokens, and restore the pages of its window."""
        pages = self.found(entry)
        length = self.reach(max(0, length), pages)
        self._put_back(entry, pages[: pages_for(length)], self.seen_from(length))
        return length

    def can_run_again(self, entry: CachedText, start: int) -> bool:
        """Tell whether the window of rows from ``start`` on is cached. If so, restore its pages."""
        pages, first = self.found(entry), self.seen_from(start)
        if None in pages[first:]:
            return False
        self._put_back(entry, pages, first)
        return True

    def _put_back(self, entry: CachedText, pages: Sequence[Page | None], first: int) -> None:
        """Restore these pages from ``first`` on in place of blank ones."""
        for number in range(first, min(entry.forgotten, len(pages))):
            entry.recent.replace(number, self._revived(pages[number]))
        entry.forgotten = min(entry.forgotten, first)

    def cut(self, entry: CachedText, owner: Page) -> None:
        """Drop the pages after the entry's last one, which ``owner`` owned until now."""
        while len(entry.recent) > len(entry.table):
            self._let_go(owner, entry.recent.pop())
        entry.forgotten = min(entry.forgotten, len(entry.table))

    def copy_last(self, entry: CachedText, owner: Page) -> None:
        """Replace the entry's last page of tokens, which ``owner`` may refer to, by a copy."""
        number, copy = len(entry.tokens) // BLOCK, self._pool.take()
        copy.rows.copy_(entry.recent[number].rows)
        self._let_go(owner, entry.recent.replace(number, copy))

    # -------------------------------------------------------------------------------------------------- unused pages

    def drop(self, owner: Page) -> None:
        """Give back the page that ``owner`` refers to and no text uses."""
        page, owner.recent = owner.recent, None
        if page is not None:
            self._pool.give(self._revived(page))

    def _revived(self, page: Page | None) -> Page:
        """Take the page off the spare list."""
        assert page is not None, "a page was found that is not there"
        self._spare.discard(page)
        return page

    def _let_go(self, owner: Page, page: Page) -> None:
        """If no text uses the page now, keep it as spare if ``owner`` refers to it, else give it back."""
        if page.users or page is self.blank:
            return
        if owner.recent is page:
            self._spare.add(page, owner)
        else:
            self._pool.give(page)

    # ------------------------------------------------------------------------------------------------ of one token

    def states(self, whole: Page, slot: int) -> Tensor:
        """Return the key and the value of one token in all layers, ``[layers, 2, kv_heads, D]``."""
        assert whole.recent is not None, "its keys are there"
        recent_LSKD = whole.recent.states(slot)
        made = recent_LSKD.new_empty(len(whole.rows) + len(recent_LSKD), *recent_LSKD.shape[1:])
        made[list(self._shape.layers)] = recent_LSKD
        if len(whole.rows):
            made[self._others(len(made))] = whole.states(slot)
        return made

    def write(self, whole: Page, recent: Page, slot: int, states_LSKD: Tensor) -> None:
        """Write the key and the value of one token, in the shape of `states`."""
        recent.write(slot, states_LSKD[list(self._shape.layers)])
        if len(whole.rows):
            whole.write(slot, states_LSKD[self._others(len(states_LSKD))])

    def _others(self, layers: int) -> list[int]:
        return [layer for layer in range(layers) if layer not in self._shape.layers]

    def check(self, entries: Sequence[CachedText]) -> None:
        """Assert that users are counted correctly, spare pages have their owners, and no other page is taken."""
        uses = Counter(page for entry in entries for page in entry.recent if page is not self.blank)
        spare = self._spare.owners()
        assert all(page.users == count for page, count in uses.items()), "a recent page's users are counted wrongly"
        assert not any(page.users for page in spare), "a spare recent page is in use"
        assert all(owner.recent is page for page, owner in spare.items()), "a spare recent page is named by no other"
        assert len(spare) == self._spare.recent, "spare recent pages are counted wrongly"
        self._pool.check([*uses, *spare, self.blank])
        for entry in entries:
            entry.recent.check()
            blank = [number for number, page in enumerate(entry.recent) if page is self.blank]
            assert blank == list(range(entry.forgotten)), "other pages are blank than those forgotten"
            assert len(entry.recent) >= pages_for(len(entry.tokens)), "recent keys of a text are missing"
