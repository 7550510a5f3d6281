"""Pages of layers that see the last keys of a text alone: what lies behind their window is given up.

A text has two tables then: pages of the layers that see all keys, and these. A page of the first kind names the page of
the same tokens here, as long as there is one, so a prefix is found only as far as the keys before its end are there.
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
"""Tokens before the window whose keys stay: a text may be cut back by so many, and forked in the middle of a page."""
AHEAD = 512
"""Tokens after the cached ones for which `Room` counts pages: as many as a forward mostly reads of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentShape:
    """The shape of pages of the layers ``layers`` of a model, none of which sees more than the last ``window`` keys.

    ``longest`` is the longest text that the model takes. Keys of so many tokens before the window stay as ``margin``.
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
        """The memory that texts take, with ``whole`` bytes of a page in the other layers."""
        return Room(whole, self.shape.page_bytes, self.most, pages_for(self.longest))


def most_pages(window: int, around: int = MARGIN + AHEAD) -> int:
    """The most pages that a text has of layers with such a window, with those of tokens before it and of new rows."""
    return pages_for(window + around) + 1


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that texts take: ``whole`` bytes a page in all layers that see all keys, ``recent`` in the others.

    These have at most ``most`` pages of a text. ``longest``: pages of the longest text.
    """

    whole: float
    recent: float = 0
    most: int = 0
    longest: int = 0

    def bytes_for(self, tokens: int) -> float:
        """Bytes of so many tokens, in texts of full length and one that has the rest."""
        texts, rest = divmod(pages_for(tokens), self.longest) if self.recent else (0, pages_for(tokens))
        return texts * self._text(self.longest) + self._text(rest)

    def tokens_in(self, size: float) -> int:
        """How many tokens so many bytes hold, in texts of full length and one that has the rest."""
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
    """The pool of such pages, and which of them a text has. Before these its table has the page ``blank``, of zeros.

    Nobody sees keys of a blank page, but kernels may read them.
    """

    def __init__(self, recent: RecentShape, spare: SparePages) -> None:
        """``spare`` are the pages that no text uses, those of this kind with the page that names them."""
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
    def held(self) -> int:
        """Bytes of these pages."""
        return self.taken * self.page_bytes

    def seen_from(self, length: int) -> int:
        """The first page that a text of ``length`` tokens needs for what comes next."""
        return max(0, length - self._shape.window) // BLOCK

    def reach(self, length: int, pages: Sequence[Page | None]) -> int:
        """The longest text of at most ``length`` tokens of which all pages that it needs are there."""
        while length:
            needed = reversed(range(self.seen_from(length), pages_for(length)))
            gap = next((number for number in needed if pages[number] is None), None)
            if gap is None:
                return length
            length = gap * BLOCK
        return 0

    # ------------------------------------------------------------------------------------------------- of one text

    def fill(self, entry: CachedText, pages: Sequence[Page | None]) -> None:
        """Give a new entry those of these pages that its tokens need."""
        entry.forgotten = self.seen_from(len(entry.tokens))
        for number in range(pages_for(len(entry.tokens))):
            entry.recent.append(self.blank if number < entry.forgotten else self._revived(pages[number]))

    def lacking(self, entry: CachedText, pages: int) -> int:
        """How many more an entry needs that is to have so many pages in all: not those far ahead."""
        return max(0, min(pages, entry.forgotten + self._shape.most) - len(entry.recent))

    def extend(self, entry: CachedText, count: int) -> None:
        for _ in range(count):
            entry.recent.append(self._pool.take())

    def share(self, entry: CachedText, number: int) -> None:
        """Let others find the entry's page ``number``. Where the same text has one already, the entry gets that."""
        known, own = entry.table[number], entry.recent[number]
        if known.recent is None:
            known.recent = own
        elif known.recent is not own:
            self._let_go(known, entry.recent.replace(number, self._revived(known.recent)))

    def forget(self, entry: CachedText) -> None:
        """Put blank pages in the place of those that no row will see, unless the text is cut back by far."""
        first = self.seen_from(len(entry.tokens) - self._shape.margin)
        for number in range(entry.forgotten, first):
            self._let_go(entry.table[number], entry.recent.replace(number, self.blank))
        entry.forgotten = max(entry.forgotten, first)

    def found(self, entry: CachedText) -> list[Page | None]:
        """The entry's pages; of those that it has forgotten what others would find."""
        forgotten = [entry.table[number].recent for number in range(entry.forgotten)]
        return [*forgotten, *islice(entry.recent, entry.forgotten, None)]

    def recall(self, entry: CachedText, length: int) -> int:
        """How long the entry can be that is to be cut to ``length`` tokens. What it needs then is put back."""
        pages = self.found(entry)
        length = self.reach(max(0, length), pages)
        self._put_back(entry, pages[: pages_for(length)], self.seen_from(length))
        return length

    def can_run_again(self, entry: CachedText, start: int) -> bool:
        """Whether rows from ``start`` on find the keys that they see. If so, these and all after them are put back."""
        pages, first = self.found(entry), self.seen_from(start)
        if None in pages[first:]:
            return False
        self._put_back(entry, pages, first)
        return True

    def _put_back(self, entry: CachedText, pages: Sequence[Page | None], first: int) -> None:
        """Put these pages from ``first`` on in the place of blank ones."""
        for number in range(first, min(entry.forgotten, len(pages))):
            entry.recent.replace(number, self._revived(pages[number]))
        entry.forgotten = min(entry.forgotten, first)

    def cut(self, entry: CachedText, owner: Page) -> None:
        """Take pages behind the entry's last one, which was ``owner`` until now."""
        while len(entry.recent) > len(entry.table):
            self._let_go(owner, entry.recent.pop())
        entry.forgotten = min(entry.forgotten, len(entry.table))

    def copy_last(self, entry: CachedText, owner: Page) -> None:
        """Give the entry a copy of its last page of tokens, which ``owner`` may name."""
        number, copy = len(entry.tokens) // BLOCK, self._pool.take()
        copy.rows.copy_(entry.recent[number].rows)
        self._let_go(owner, entry.recent.replace(number, copy))

    # ---------------------------------------------------------------------------------------------------- of nobody

    def drop(self, owner: Page) -> None:
        """Give back the page that ``owner`` names, which no text uses."""
        page, owner.recent = owner.recent, None
        if page is not None:
            self._pool.give(self._revived(page))

    def _revived(self, page: Page | None) -> Page:
        """The page, spare no more."""
        assert page is not None, "a page was found that is not there"
        self._spare.discard(page)
        return page

    def _let_go(self, owner: Page, page: Page) -> None:
        """If no text uses the page now, keep it as spare where ``owner`` names it, or give it back."""
        if page.users or page is self.blank:
            return
        if owner.recent is page:
            self._spare.add(page, owner)
        else:
            self._pool.give(page)

    # ------------------------------------------------------------------------------------------------ of one token

    def states(self, whole: Page, slot: int) -> Tensor:
        """The key and the value of one token in all layers, ``[layers, 2, kv_heads, D]``."""
        assert whole.recent is not None, "its keys are there"
        recent_LSKD = whole.recent.states(slot)
        made = recent_LSKD.new_empty(len(whole.rows) + len(recent_LSKD), *recent_LSKD.shape[1:])
        made[list(self._shape.layers)] = recent_LSKD
        if len(whole.rows):
            made[self._others(len(made))] = whole.states(slot)
        return made

    def write(self, whole: Page, recent: Page, slot: int, states_LSKD: Tensor) -> None:
        """Cache a key and a value of one token, as `states` has them."""
        recent.write(slot, states_LSKD[list(self._shape.layers)])
        if len(whole.rows):
            whole.write(slot, states_LSKD[self._others(len(states_LSKD))])

    def _others(self, layers: int) -> list[int]:
        return [layer for layer in range(layers) if layer not in self._shape.layers]

    def check(self, entries: Sequence[CachedText]) -> None:
        """Pages are used as often as they say, spare ones are those of their owners, and no other page is taken."""
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
