"""Pages of the KV cache: the slabs that they are cut from, and the page table of one sequence."""

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
"""Tokens per page. A page is the unit of memory and of prefix reuse. The compiled decoder has the same constant."""

SPAN, STRIP = 1024, 32
"""Tokens in a row on one rank, if ranks share each text; attention over them is summed separately. And the number of
which another span must be a multiple, as in the compiled decoder."""

_SLAB_BYTES, _SLAB_PAGES = 16 << 20, 64

_BORROWED = -1
"""Stands for the rank of a borrowed page."""

_MAPPED = 1 << 20
"""Buffers of at least this many bytes are mapped; smaller ones come from the heap."""

_HUGE = 2 << 20  # the system's large pages begin at multiples of this


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of zeros whose memory returns to the system as soon as it is freed.

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
    begin = -whole.data_ptr() % _HUGE  # bytes before it are never written, so they take no memory
    return whole[begin : begin + count].view(dtype).view(*size)


@dataclass(frozen=True, slots=True)
class Spread:
    """How the pages of a text are divided among ranks:

    ``span`` tokens on rank 0, the next on rank 1, and so on in turn. So rank 0 has at least as many as any other. The
    owner of a page depends only on its number.
    """

    rank: int = 0
    ranks: int = 1
    span: int = SPAN

    def owner(self, number: int) -> int:
        """Return the rank that has page ``number`` of a text."""
        return number * BLOCK // self.span % self.ranks

    def count(self, numbers: range) -> list[int]:
        """Return how many of the pages ``numbers`` each rank has."""
        if self.ranks == 1:
            return [len(numbers)]
        found = [0] * self.ranks
        for number in numbers:
            found[self.owner(number)] += 1
        return found

    def most(self, pages: int) -> int:
        """Return how many of a text's first ``pages`` pages are on the rank with most of them."""
        each = self.span // BLOCK
        turns, rest = divmod(pages, each * self.ranks)
        return turns * each + min(rest, each)

    def pages(self, each: int) -> int:
        """Return the length in pages of the longest text that fits into ``each`` pages of each rank."""
        turns, rest = divmod(each, self.span // BLOCK)
        return turns * (self.span // BLOCK) * self.ranks + rest


ALONE = Spread()
"""One rank has the whole of each text."""


CODES, CODED = 32, 34
"""Numbers that share a scale in the 8-bit format q8_0, and bytes of such a block: a code for each number, and the
scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a page: ``[layers, 2, kv_heads, BLOCK, D]``, keys then values.

    With ``lanes`` pages have the layout of the compiled decoder: see `row_in_strips`. If ``dtype`` is uint8, keys and
    values are quantised to 8 bits in blocks, ``[layers, 2, kv_heads, bytes]``: see `row_in_blocks`. ``spread`` tells
    which pages of a text are on this rank.
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
    """Return views of the key and the value of one token; ``rows`` ``[layers, 2, kv_heads, BLOCK, D]``.

    Keys of ``lanes`` tokens are interleaved by 32-bit words: the key's view is ``[layers, kv_heads, words, numbers]``.
    The value's view is ``[layers, kv_heads, D]``.
    """
    strip, lane = divmod(slot, lanes)
    keys = _split(rows[:, 0].flatten(2), BLOCK // lanes, -1, lanes, 4 // rows.itemsize)
    return keys[:, :, strip, :, lane], rows[:, 1, :, slot]


def row_in_blocks(rows: Tensor, lanes: int, slot: int) -> tuple[Tensor, ...]:
    """Return views of one token in a page of 8-bit blocks; ``rows`` ``[layers, 2, kv_heads, bytes]`` are uint8.

    The views are the key's codes plus 128 ``[layers, kv_heads, D/32, 8, 4]`` and scales ``[layers, kv_heads, D/32,
    2]``, then the value's codes ``[layers, kv_heads, D]`` and scales. Scales are float16. Keys of ``lanes`` tokens are
    interleaved by four codes, as the compiled decoder multiplies them (`CACHE_Q8_0` in core.h).
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
    """Return a view of ``tensor``, of any shape, whose last dimension is split into ``sizes``."""
    return tensor.view(*tensor.shape[:-1], *sizes)


def pages_for(tokens: int) -> int:
    """Return how many pages ``tokens`` tokens need."""
    return -(-tokens // BLOCK)


class Page:
    """Keys and values of `BLOCK` tokens: ``rows``, of the shape of `CacheShape`, at ``address``.

    ``users`` counts the tables that contain the page. The rows of one head are contiguous; the next head's begin
    ``pitch`` bytes later. The page is number ``number`` of ``memory`` ``[layers, 2, kv_heads, pages, ...]``. ``rank``
    owns the rows; a page of another rank has none here: its tensor is on torch's device "meta", at address 0.
    ``recent`` is the page of the same tokens in the sliding-window layers, see `parlay.cache.recent`, set while other
    texts can find both.
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
        """Views of one token's keys and values

        ``[layers, 2, kv_heads, D]``, or as in `row_in_strips` and `row_in_blocks`. A page without layers has no views.
        """
        if not len(self.rows):
            return ()
        if not self.lanes:
            return (self.rows[:, :, :, slot],)
        return (row_in_blocks if self.rows.dtype == torch.uint8 else row_in_strips)(self.rows, self.lanes, slot)

    def states(self, slot: int) -> Tensor:
        """Return the key and the value of one token, ``[layers, 2, kv_heads, D]``; not for 8-bit blocks."""
        row = self.row(slot)
        return torch.stack((row[0].flatten(2), row[1]), 1) if self.lanes else row[0]

    def write(self, slot: int, states_LSKD: Tensor) -> None:
        """Write the key and the value of one token, in the shape of `states`."""
        row = self.row(slot)
        for part, view in enumerate(row if self.lanes else row[0].unbind(1)):
            view.copy_(states_LSKD[:, part].view(view.shape))

    def copy(self) -> Page:
        """Return a page with the same rows in new memory, with the same pitch."""
        rows = self.rows.new_empty_strided(self.rows.shape, self.rows.stride())
        return Page(rows.copy_(self.rows).unsqueeze(3), lanes=self.lanes)


class PageTable:
    """The pages of one sequence in order, and their addresses for the compiled decoder."""

    def __init__(self) -> None:
        self._pages: list[Page] = []
        self._addresses = array("Q")
        self.pitch = 0
        """The pitch of all pages; 0 without pages."""

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, number: int) -> Page:
        return self._pages[number]

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    @property
    def address(self) -> int:
        """Address of the array of page addresses. Valid until a page is added."""
        return self._addresses.buffer_info()[0]

    def append(self, page: Page) -> None:
        page.users += 1
        self._pages.append(page)
        self._addresses.append(page.address)
        self.pitch = page.pitch

    def pop(self) -> Page:
        """Remove the last page. If it has no users then, the caller keeps it or gives it back."""
        page = self._pages.pop()
        self._addresses.pop()
        page.users -= 1
        return page

    def replace(self, number: int, page: Page) -> Page:
        """Replace a page by another one, and return the old one as `pop` does."""
        before = self.lend(number, page)
        page.users += 1
        before.users -= 1
        return before

    def lend(self, number: int, page: Page) -> Page:
        """Replace a page for a while, and return it. It still counts as used."""
        before = self._pages[number]
        self._pages[number], self._addresses[number] = page, page.address
        return before

    def row(self, slot: int) -> tuple[Tensor, ...]:
        """Views of one token's keys and values; see `Page.row`."""
        return self._pages[slot // BLOCK].row(slot % BLOCK)

    def move(self, source: int, to: int) -> None:
        """Copy a token's keys and values to another slot."""
        for cell, moved in zip(self.row(to), self.row(source), strict=True):
            cell.copy_(moved)

    def check(self) -> None:
        """Assert that the addresses are those of the pages."""
        assert list(self._addresses) == [page.address for page in self._pages], "a table points to other pages"
        assert {page.pitch for page in self._pages} <= {self.pitch}, "pages of one table have several pitches"


class _Slab:
    """Memory of ``count`` pages; ``free`` are the free pages, the first one last.

    It is ``[layers, 2, kv_heads, count, ...]``, so the rows of a head are contiguous across neighbouring pages. A
    prompt mostly has neighbouring pages, and its rows are then read as one stream.
    """

    def __init__(self, memory: Tensor, lanes: int) -> None:
        """``memory`` ``[layers, 2, kv_heads, count, ...]``."""
        self.count = memory.shape[3]
        self.free = [Page(memory, number, lanes) for number in reversed(range(self.count))]


class SparePages:
    """Unused pages that texts can still find, least recently used first; ``counts`` has each rank's number.

    Pages of sliding-window layers, of which there are ``recent``, are listed with their owner: the page that refers to
    them.
    """

    def __init__(self, ranks: int) -> None:
        self._pages: dict[Page, Page | None] = {}
        self.counts, self.recent = [0] * ranks, 0

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def __iter__(self) -> Iterator[Page]:
        return (page for page, owner in self._pages.items() if owner is None)

    def owners(self) -> dict[Page, Page]:
        """Return the pages of sliding-window layers, with their owners."""
        return {page: owner for page, owner in self._pages.items() if owner is not None}

    def oldest(self) -> tuple[Page, Page | None] | None:
        """Return the page that has been unused for longest, and its owner."""
        return next(iter(self._pages.items()), None)

    def add(self, page: Page, owner: Page | None = None) -> None:
        """Add a page that is not listed, as the most recently used one."""
        self._pages[page] = owner
        self.counts[page.rank] += owner is None
        self.recent += owner is not None

    def discard(self, page: Page) -> None:
        """Remove a page, if it is listed."""
        if page in self._pages:
            owner = self._pages.pop(page)
            self.counts[page.rank] -= owner is None
            self.recent -= owner is not None


class Pool:
    """Hands out pages from slabs. A slab is freed when none of its pages is taken.

    Pages come from the slab that has had free ones for longest, so that the others can become empty. Rows are not
    cleared: a row must be written before it is read. ``taken`` counts pages by the rank that owns them, without
    borrowed ones.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        pages = max(1, min(_SLAB_PAGES, -(-_SLAB_BYTES // max(1, shape.page_bytes))))
        self.slab_size = (*shape.size[:3], pages, *shape.size[3:])
        self._open: dict[_Slab, None] = {}  # slabs with free pages
        self._taken: dict[Page, _Slab | None] = {}  # None: another rank has it
        self.taken = [0] * shape.spread.ranks
        self._elsewhere = torch.empty(*self.slab_size, dtype=shape.dtype, device="meta")

    def take(self, number: int = 0) -> Page:
        """Take an unused page, for page ``number`` of a text."""
        owner = self._shape.spread.owner(number)
        page = self._take() if owner == self._shape.spread.rank else Page(self._elsewhere, lanes=self._shape.lanes)
        page.rank = owner
        self._taken.setdefault(page, None)
        self.taken[owner] += 1
        return page

    def borrow(self) -> Page:
        """Take a page with memory on this rank, for any number, until it is given back."""
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
        """Take back a page that is neither used nor in the index."""
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
        """Assert that ``used`` are the pages taken, each once, and that none of them is free."""
        free = [page for slab in self._open for page in slab.free]
        assert len(used) == len(self._taken), "pages are lost, or used twice"
        assert self._taken.keys() == set(used), "a page is used that was given back"
        assert self._taken.keys().isdisjoint(free), "a page is both free and taken"
        assert len(set(free)) == len(free), "a page is free twice"
        assert not any(page.users for page in free), "a free page is in use"
