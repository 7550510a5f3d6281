"""Pages of cached rows: the slabs that they are cut from, and the table of one sequence's pages."""

from __future__ import annotations

import math
import mmap
import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
"""Tokens per page. A page is the unit of memory and of prefix reuse. The compiled decoder has the same number."""

SPAN, STRIP = 1024, 32
"""Tokens that lie together where a text is spread over ranks, and whose part in attention is summed up by itself; and
what another such number must be a multiple of, as the compiled decoder has it."""

_SLAB_BYTES, _SLAB_PAGES = 16 << 20, 64

_BORROWED = -1
"""In place of the rank that has a page."""

_MAPPED = 1 << 20
"""Buffers from this size on, in bytes, are mapped; smaller ones come from the heap."""

_HUGE = 2 << 20  # the system's large pages begin at multiples of this


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, whose memory returns to the system as soon as it is freed.

    The C library keeps freed memory for later allocations. Buffers of many sizes leave holes that fit none of them:
    with a cache that was always full, the heap grew to twice the cache's size (measured over 2,000 requests).
    """
    count = math.prod(size) * dtype.itemsize
    if sys.platform != "linux" or device.type != "cpu" or count < _MAPPED:
        return torch.zeros(*size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have no huge pages; with them, first use is five times as fast
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE  # what comes before is never written, so it takes no memory
    return whole[begin : begin + count].view(dtype).view(*size)


@dataclass(frozen=True, slots=True)
class Spread:
    """How texts lie on several ranks: ``span`` tokens on rank 0, the next on the next rank, and so on in turn.

    So rank 0 has at least as much of each text as any other. Whoever has a page depends on its number alone.
    """

    rank: int = 0
    ranks: int = 1
    span: int = SPAN

    def owner(self, number: int) -> int:
        """The rank that has page ``number`` of a text."""
        return number * BLOCK // self.span % self.ranks

    def count(self, numbers: range) -> list[int]:
        """How many of these pages each rank has."""
        if self.ranks == 1:
            return [len(numbers)]
        found = [0] * self.ranks
        for number in numbers:
            found[self.owner(number)] += 1
        return found

    def most(self, pages: int) -> int:
        """How many of a text's first pages lie on the rank that has most of them."""
        each = self.span // BLOCK
        turns, rest = divmod(pages, each * self.ranks)
        return turns * each + min(rest, each)

    def pages(self, each: int) -> int:
        """How long a text may be, in pages, that lies in so many pages of each rank."""
        turns, rest = divmod(each, self.span // BLOCK)
        return turns * (self.span // BLOCK) * self.ranks + rest


ALONE = Spread()
"""All of each text lies here."""


CODES, CODED = 32, 34
"""Numbers that share a scale in blocks of eight bits (q8_0), and their bytes: a code each, and the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a page: ``[layers, 2, kv_heads, BLOCK, D]``, keys then values.

    With ``lanes`` pages are laid out as the compiled decoder reads them: see `row_in_strips`. If ``dtype`` is uint8,
    keys and values are in blocks of eight bits, ``[layers, 2, kv_heads, bytes]``: see `row_in_blocks`. ``spread`` says
    which pages of a text are here.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    lanes: int = 0
    spread: Spread = ALONE

    @property
    def size(self) -> tuple[int, ...]:
        heads = self.num_layers, 2, self.num_kv_heads
        coded = self.dtype == torch.uint8
        return (*heads, BLOCK * self.head_dim // CODES * CODED) if coded else (*heads, BLOCK, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def row_in_strips(rows: Tensor, lanes: int, slot: int) -> tuple[Tensor, Tensor]:
    """Views of the key and of the value of one token; ``rows`` ``[layers, 2, kv_heads, BLOCK, D]``.

    Of keys, ``lanes`` lie beside each other, 32 bits of each: the view is ``[layers, kv_heads, words, numbers]``.
    That of the value is ``[layers, kv_heads, D]``.
    """
    strip, lane = divmod(slot, lanes)
    keys = _split(rows[:, 0].flatten(2), BLOCK // lanes, -1, lanes, 4 // rows.itemsize)
    return keys[:, :, strip, :, lane], rows[:, 1, :, slot]


def row_in_blocks(rows: Tensor, lanes: int, slot: int) -> tuple[Tensor, ...]:
    """Views of what a page in blocks holds of one token; ``rows`` ``[layers, 2, kv_heads, bytes]`` are uint8.

    Returns the key's codes plus 128 ``[layers, kv_heads, D/32, 8, 4]`` and scales ``[layers, kv_heads, D/32, 2]``,
    then the value's codes ``[layers, kv_heads, D]`` and scales. Scales are float16. Of keys, ``lanes`` lie beside each
    other, four codes of each, as the compiled decoder multiplies them (`CACHE_Q8_0` in core.h).
    """
    blocks, (strip, lane) = rows.shape[-1] // (BLOCK * CODED), divmod(slot, lanes)
    keys = _split(rows[:, 0], BLOCK // lanes, blocks, lanes * CODED)[:, :, strip]
    codes, values = lanes * CODES, BLOCK * blocks * CODES
    return (
        _split(keys[..., :codes], CODES // 4, lanes, 4)[..., lane, :],
        _split(keys[..., codes:], lanes, 2)[..., lane, :],
        _split(rows[:, 1, :, :values], BLOCK, blocks * CODES)[..., slot, :],
        _split(rows[:, 1, :, values:], blocks, BLOCK, 2)[..., slot, :],
    )


def _split(tensor: Tensor, *sizes: int) -> Tensor:
    """A view of ``tensor``, of any shape, whose last dimension is split into these."""
    return tensor.view(*tensor.shape[:-1], *sizes)


def pages_for(tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // BLOCK)


class Page:
    """Keys and values of `BLOCK` tokens: ``rows``, of the shape that `CacheShape` says, which begin at ``address``.

    ``users`` counts the tables that have the page. The rows of one head are contiguous, ``pitch`` bytes from those of
    the next head. They are page ``number`` of ``memory`` ``[layers, 2, kv_heads, pages, ...]``. ``rank`` has the rows;
    of another rank's page there are none here: they are on torch's device "meta", at address 0. ``recent`` has the same
    tokens in the layers that have pages of their own, see `parlay.cache.recent`: set while others can find both.
    """

    __slots__ = ("address", "lanes", "memory", "number", "pitch", "rank", "recent", "rows", "users")

    def __init__(self, memory: Tensor, number: int = 0, lanes: int = 0) -> None:
        """``memory`` ``[layers, 2, kv_heads, pages, ...]``; ``lanes`` as in `CacheShape`."""
        rows = memory.select(3, number)
        self.rows, self.users, self.memory, self.number, self.lanes = rows, 0, memory, number, lanes
        self.address, self.pitch = 0 if memory.is_meta else rows.data_ptr(), rows.stride(2) * rows.itemsize
        self.rank = 0
        self.recent: Page | None = None

    def row(self, slot: int) -> tuple[Tensor, ...]:
        """Views of what is cached of one token: ``[layers, 2, kv_heads, D]``, or as `row_in_strips` and `row_in_blocks`
        say. Pages of no layers have no such views."""
        if not len(self.rows):
            return ()
        if not self.lanes:
            return (self.rows[:, :, :, slot],)
        return (row_in_blocks if self.rows.dtype == torch.uint8 else row_in_strips)(self.rows, self.lanes, slot)

    def states(self, slot: int) -> Tensor:
        """The key and the value of one token, ``[layers, 2, kv_heads, D]``, if they are not in blocks."""
        row = self.row(slot)
        return torch.stack((row[0].flatten(2), row[1]), 1) if self.lanes else row[0]

    def write(self, slot: int, states_LSKD: Tensor) -> None:
        """Cache a key and a value of one token, as `states` has them."""
        row = self.row(slot)
        for part, view in enumerate(row if self.lanes else row[0].unbind(1)):
            view.copy_(states_LSKD[:, part].view(view.shape))

    def copy(self) -> Page:
        """The same rows in new memory, with the same pitch."""
        rows = self.rows.new_empty_strided(self.rows.shape, self.rows.stride())
        return Page(rows.copy_(self.rows).unsqueeze(3), lanes=self.lanes)


class PageTable:
    """The pages of one sequence in order, and their addresses as the compiled decoder reads them."""

    def __init__(self) -> None:
        self._pages: list[Page] = []
        self._addresses = array("Q")
        self.pitch = 0
        """That of all pages; 0 without any."""

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, number: int) -> Page:
        return self._pages[number]

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    @property
    def address(self) -> int:
        """Where the addresses are stored. Valid until a page is added."""
        return self._addresses.buffer_info()[0]

    def append(self, page: Page) -> None:
        page.users += 1
        self._pages.append(page)
        self._addresses.append(page.address)
        self.pitch = page.pitch

    def pop(self) -> Page:
        """Take the last page out. If nobody uses it any more, the caller keeps it or gives it back."""
        page = self._pages.pop()
        self._addresses.pop()
        page.users -= 1
        return page

    def replace(self, number: int, page: Page) -> Page:
        """Put a page in the place of another, which is taken out as by `pop`."""
        before = self.lend(number, page)
        page.users += 1
        before.users -= 1
        return before

    def lend(self, number: int, page: Page) -> Page:
        """Put a page in the place of another for a while. The other still counts as used."""
        before = self._pages[number]
        self._pages[number], self._addresses[number] = page, page.address
        return before

    def row(self, slot: int) -> tuple[Tensor, ...]:
        """Views of what is cached of one token; see `Page.row`."""
        return self._pages[slot // BLOCK].row(slot % BLOCK)

    def check(self) -> None:
        """The addresses are those of the pages."""
        assert list(self._addresses) == [page.address for page in self._pages], "a table points to other pages"
        assert {page.pitch for page in self._pages} <= {self.pitch}, "pages of one table have several pitches"


class _Slab:
    """Memory of ``count`` pages; ``free`` are those that are not taken, the first one last.

    It is ``[layers, 2, kv_heads, count, ...]``, so the rows of a head are contiguous across neighbouring pages. A
    prompt mostly has neighbouring pages, and its rows are then read as one stream.
    """

    def __init__(self, memory: Tensor, lanes: int) -> None:
        """``memory`` ``[layers, 2, kv_heads, count, ...]``."""
        self.count = memory.shape[3]
        self.free = [Page(memory, number, lanes) for number in reversed(range(self.count))]


class SparePages:
    """Pages that nobody uses but that can be found, least recently used first; ``counts`` has each rank's number.

    Recent ones have an owner, which names them; there are ``recent`` of these.
    """

    def __init__(self, ranks: int) -> None:
        self._pages: dict[Page, Page | None] = {}
        self.counts, self.recent = [0] * ranks, 0

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def __iter__(self) -> Iterator[Page]:
        return (page for page, owner in self._pages.items() if owner is None)

    def owners(self) -> dict[Page, Page]:
        """The recent pages, with their owners."""
        return {page: owner for page, owner in self._pages.items() if owner is not None}

    def oldest(self) -> tuple[Page, Page | None] | None:
        """The page that has been unused for longest, and its owner."""
        return next(iter(self._pages.items()), None)

    def add(self, page: Page, owner: Page | None = None) -> None:
        """Add a page that is not there, as the most recently used one."""
        self._pages[page] = owner
        self.counts[page.rank] += owner is None
        self.recent += owner is not None

    def discard(self, page: Page) -> None:
        """Take a page out, if it is there."""
        if page in self._pages:
            owner = self._pages.pop(page)
            self.counts[page.rank] -= owner is None
            self.recent -= owner is not None


class Pool:
    """Hands out pages from slabs. A slab is freed when none of its pages is taken.

    Pages come from the slab that has had free ones for longest, so that the others can become empty. Rows are not
    cleared: nobody may read one before it was written. ``taken`` counts pages by the rank that has them, but for those
    that are lent for a while.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        pages = max(1, min(_SLAB_PAGES, -(-_SLAB_BYTES // max(1, shape.page_bytes))))
        self.slab_size = (*shape.size[:3], pages, *shape.size[3:])
        self._open: dict[_Slab, None] = {}  # those with free pages
        self._taken: dict[Page, _Slab | None] = {}  # None: another rank has it
        self.taken = [0] * shape.spread.ranks
        self._elsewhere = torch.empty(*self.slab_size, dtype=shape.dtype, device="meta")

    def take(self, number: int = 0) -> Page:
        """A page that nobody uses, for page ``number`` of a text."""
        owner = self._shape.spread.owner(number)
        page = self._take() if owner == self._shape.spread.rank else Page(self._elsewhere, lanes=self._shape.lanes)
        page.rank = owner
        self._taken.setdefault(page, None)
        self.taken[owner] += 1
        return page

    def borrow(self) -> Page:
        """A page that is here, whatever it is for, until it is given back."""
        page = self._take()
        page.rank = _BORROWED
        return page

    def adopt(self, memory: Tensor, count: int) -> list[Page]:
        """Take the first ``count`` pages of a slab with rows, ``memory`` ``[layers, 2, kv_heads, pages, ...]``."""
        slab = _Slab(memory, self._shape.lanes)
        self.taken[0] += count
        return [self._take(slab) for _ in range(count)]

    def _take(self, slab: _Slab | None = None) -> Page:
        slab = slab or next(iter(self._open), None)
        if slab is None:
            slab = _Slab(zeros(self.slab_size, self._shape.dtype, self._shape.device), self._shape.lanes)
        page = slab.free.pop()
        if slab.free:
            self._open[slab] = None
        else:
            self._open.pop(slab, None)
        self._taken[page] = slab
        return page

    def give(self, page: Page) -> None:
        """Take back a page that nobody uses and that can't be found."""
        slab = self._taken.pop(page)
        if page.rank != _BORROWED:
            self.taken[page.rank] -= 1
        if slab is None:
            return
        slab.free.append(page)
        self._open[slab] = None
        if len(slab.free) == slab.count:
            del self._open[slab]

    def check(self, used: Collection[Page]) -> None:
        """``used`` are the pages taken, each once, and none of them is free."""
        free = [page for slab in self._open for page in slab.free]
        assert len(used) == len(self._taken), "pages are lost, or used twice"
        assert self._taken.keys() == set(used), "a page is used that was given back"
        assert self._taken.keys().isdisjoint(free), "a page is both free and taken"
        assert len(set(free)) == len(free), "a page is free twice"
        assert not any(page.users for page in free), "a free page is in use"
