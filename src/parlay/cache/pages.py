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

_SLAB_BYTES, _SLAB_PAGES = 16 << 20, 64

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The shape of a page: ``[layers, 2, kv_heads, BLOCK, D]``, keys then values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> tuple[int, ...]:
        return self.num_layers, 2, self.num_kv_heads, BLOCK, self.head_dim

    @property
    def page_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * BLOCK * self.head_dim * self.dtype.itemsize


def pages_for(tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // BLOCK)


class Page:
    """Keys and values of `BLOCK` tokens: ``rows`` ``[layers, 2, kv_heads, BLOCK, D]``, which begin at ``address``.

    ``users`` counts the tables that have the page. The rows of one head are contiguous, ``pitch`` bytes from those of
    the next head. They are page ``number`` of ``memory`` ``[layers, 2, kv_heads, pages, BLOCK, D]``.
    """

    __slots__ = ("address", "memory", "number", "pitch", "rows", "users")

    def __init__(self, memory: Tensor, number: int = 0) -> None:
        """``memory`` ``[layers, 2, kv_heads, pages, BLOCK, D]``."""
        rows = memory.select(3, number)
        self.rows, self.users, self.memory, self.number = rows, 0, memory, number
        self.address, self.pitch = rows.data_ptr(), rows.stride(2) * rows.itemsize

    def copy(self) -> Page:
        """The same rows in new memory, with the same pitch."""
        rows = self.rows.new_empty_strided(self.rows.shape, self.rows.stride())
        return Page(rows.copy_(self.rows).unsqueeze(3))


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

    def row(self, slot: int) -> Tensor:
        """``[layers, 2, kv_heads, D]``: what is cached of one token."""
        return self._pages[slot // BLOCK].rows[:, :, :, slot % BLOCK]

    def check(self) -> None:
        """The addresses are those of the pages."""
        assert list(self._addresses) == [page.address for page in self._pages], "a table points to other pages"
        assert {page.pitch for page in self._pages} <= {self.pitch}, "pages of one table have several pitches"


class _Slab:
    """Memory of ``count`` pages; ``free`` are those that are not taken, the first one last.

    It is ``[layers, 2, kv_heads, count, BLOCK, D]``, so the rows of a head are contiguous across neighbouring pages. A
    prompt mostly has neighbouring pages, and its rows are then read as one stream.
    """

    def __init__(self, shape: CacheShape, count: int) -> None:
        *heads, block, size = shape.size
        memory = zeros((*heads, count, block, size), shape.dtype, shape.device)
        self.count = count
        self.free = [Page(memory, number) for number in reversed(range(count))]


class Pool:
    """Hands out pages from slabs. A slab is freed when none of its pages is taken.

    Pages come from the slab that has had free ones for longest, so that the others can become empty. Rows are not
    cleared: nobody may read one before it was written.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._count = max(1, min(_SLAB_PAGES, -(-_SLAB_BYTES // shape.page_bytes)))
        self._open: dict[_Slab, None] = {}  # those with free pages
        self._taken: dict[Page, _Slab] = {}

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self) -> Page:
        """A page that nobody uses."""
        slab = next(iter(self._open), None) or _Slab(self._shape, self._count)
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
