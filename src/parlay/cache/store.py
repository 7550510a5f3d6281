"""The key/value store of a runner: sequences, their budget, and prefixes that outlive them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from parlay.cache.entry import BLOCK, Entry, Shape, Staged, blocks_for, grow, new_entry
from parlay.cache.prefixes import PrefixIndex
from parlay.types import OutOfRoom


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a forward writes and reads one sequence: ``buffer`` ``[layers, 2, kv_heads, slots, D]``, keys then values.

    Committed rows fill slots 0 to ``start - 1``. Pending rows go to ``start`` and on, nodes to ``nodes_at`` and on;
    the slots between are free for the forward.
    """

    buffer: Tensor
    start: int
    nodes_at: int


class Store:
    """Cached rows of many sequences within one budget of tokens.

    Committed rows change only in `keep` and `truncate`. A released sequence's rows stay as a reusable prefix until
    their room is needed, least recently used first. Buffers may hold half as many slots again as are accounted for.
    """

    def __init__(self, shape: Shape, max_tokens: int) -> None:
        if max_tokens < BLOCK:
            raise ValueError(f"a cache of {max_tokens} tokens is too small: it must hold at least {BLOCK}")
        self._shape = shape
        self._free = self._total = max_tokens // BLOCK
        self._live: dict[int, Entry] = {}
        self._reusable: dict[Entry, None] = {}  # least recently used first
        self._index = PrefixIndex()

    # ------------------------------------------------------------------------------------------------- sequences

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many of ``tokens``, fewer than all, `open` would find cached, room permitting."""
        return self._index.find(tokens, salt)[1]

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence with the longest cached beginning of ``tokens``; returns its length, fewer than all."""
        self._check_free(sequence)
        donor, length = self._index.find(tokens, salt)
        if donor in self._reusable and (length == len(donor.tokens) or not self._fits_beside(donor, length)):
            self._adopt(sequence, donor, length)
        else:
            self._begin(sequence, salt, donor, length)
        return self.length(sequence)

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cached tokens of ``sequence``, or as many of them as there is room for."""
        self._check_free(copy)
        source = self._entry(sequence)
        self._begin(copy, source.salt, source, len(source.tokens))

    def release(self, sequence: int) -> None:
        """End a sequence; its committed rows stay reusable. Unknown names are ignored."""
        entry = self._live.pop(sequence, None)
        if entry is None:
            return
        entry.staged = None
        self._charge(entry, len(entry.tokens))
        if entry.hashes:
            self._index.extend(entry, take_over=True)
            self._reusable[entry] = None
        else:
            self._drop(entry)

    def length(self, sequence: int) -> int:
        """How many tokens of the sequence are cached."""
        return len(self._entry(sequence).tokens)

    # ------------------------------------------------------------------------------------------------------ rows

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Make room for ``tokens`` in all, scratch included; False while others hold it.

        Raises OutOfRoom when even an empty cache could not hold so many.
        """
        entry = self._entry(sequence)
        if blocks_for(tokens) > self._total:
            raise OutOfRoom(
                f"a sequence of {tokens} tokens does not fit a cache of {self._total * BLOCK}: allow more cache tokens"
            )
        more = blocks_for(tokens) - entry.blocks
        if more > 0:
            if not self._take(more):
                return False
            entry.blocks += more
        grow(entry, tokens, self._shape.stride)
        return True

    def stage(self, sequence: int, pending: tuple[int, ...], nodes: tuple[int, ...], gap: int = 0) -> Rows:
        """Scratch rows for one forward: pending tokens, ``gap`` free slots, then tree nodes. Commits nothing."""
        entry = self._entry(sequence)
        start = len(entry.tokens)
        self._make_slots(sequence, start + len(pending) + len(nodes), gap)
        entry.staged = Staged(pending, nodes, start + len(pending) + gap)
        return Rows(entry.rows, start, entry.staged.nodes_at)

    @contextmanager
    def scratch(self, sequence: int, start: int, count: int) -> Iterator[Rows]:
        """Rows from slot ``start`` on for a forward that can't be kept. Committed ones among them are put back.

        Scratch rows between the committed ones and ``start`` stay as they are.
        """
        entry = self._entry(sequence)
        entry.staged = None
        self._make_slots(sequence, start + count)
        length = len(entry.tokens)
        committed = entry.rows[:, :, :, start:length].clone()  # empty unless the rows begin before its end
        try:
            yield Rows(entry.rows, start, start + count)
        finally:
            entry.rows[:, :, :, length - committed.shape[3] : length] = committed

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Commit the staged pending tokens and the nodes of ``path``; returns how many tokens are cached now."""
        entry = self._entry(sequence)
        entry.commit(path)
        self._index.extend(entry)
        return len(entry.tokens)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on, and the scratch; returns how many are cached now."""
        entry = self._entry(sequence)
        entry.staged = None
        if length < len(entry.tokens):
            self._index.cut(entry, max(length, 0))
            del entry.tokens[max(length, 0) :]
        self._charge(entry, len(entry.tokens))
        return len(entry.tokens)

    # ---------------------------------------------------------------------------------------------------- budget

    def room(self) -> int:
        """How many tokens could be reserved now, reusable prefixes given up."""
        return (self._free + sum(entry.blocks for entry in self._reusable)) * BLOCK

    def check(self) -> None:
        """Prove the invariants; AssertionError names the broken one."""
        entries = [*self._live.values(), *self._reusable]
        assert len(set(entries)) == len(entries), "an entry is held twice"
        assert self._free >= 0, "more blocks are given out than there are"
        assert self._free + sum(entry.blocks for entry in entries) == self._total, "blocks are lost or counted twice"
        buffers = [entry.rows.data_ptr() for entry in entries if entry.slots]
        assert len(set(buffers)) == len(buffers), "two entries share a buffer"
        for entry in entries:
            assert blocks_for(len(entry.tokens)) <= entry.blocks, "an entry holds more tokens than it is charged for"
            assert len(entry.tokens) <= entry.slots, "an entry holds more tokens than it has slots"
            assert entry.slots % self._shape.stride == 0, "a buffer ends within a stride"
        assert all(entry.staged is None for entry in self._reusable), "a released sequence has scratch rows"
        self._index.check(entries)

    def _entry(self, sequence: int) -> Entry:
        try:
            return self._live[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} is not open") from None

    def _make_slots(self, sequence: int, rows: int, gap: int = 0) -> None:
        """Slots for ``rows`` reserved rows, and ``gap`` more. Raises ValueError for rows that are not reserved."""
        entry = self._entry(sequence)
        if blocks_for(rows) > entry.blocks:
            room = entry.blocks * BLOCK
            raise ValueError(f"sequence {sequence} has room for {room} tokens and needs {rows}: reserve them first")
        grow(entry, rows + gap, self._shape.stride)

    def _check_free(self, sequence: int) -> None:
        if sequence in self._live:
            raise ValueError(f"sequence {sequence} is open already: release it first")

    def _begin(self, sequence: int, salt: str, donor: Entry | None, length: int) -> None:
        """Open an entry with a copy of the donor's first ``length`` tokens, or of as many as there is room for."""
        entry = self._live[sequence] = new_entry(self._shape, salt)
        if donor is None:
            return
        reusable = donor in self._reusable
        self._reusable.pop(donor, None)  # out of reach of eviction while it is read
        length = min(length, self.room())
        self._take(blocks_for(length))
        if reusable:
            self._reusable[donor] = None
        entry.blocks = blocks_for(length)
        grow(entry, length, self._shape.stride)
        entry.copy_rows(donor, length)
        self._index.extend(entry)

    def _fits_beside(self, donor: Entry, length: int) -> bool:
        return blocks_for(length) + donor.blocks <= self.room() // BLOCK

    def _adopt(self, sequence: int, donor: Entry, length: int) -> None:
        """The released donor itself goes on as the sequence, cut to what they share."""
        del self._reusable[donor]
        self._live[sequence] = donor
        self.truncate(sequence, length)

    def _take(self, blocks: int) -> bool:
        """Take blocks from the budget, giving up reusable prefixes as needed; all or none."""
        if blocks * BLOCK > self.room():
            return False
        while self._free < blocks:
            oldest = next(iter(self._reusable))
            del self._reusable[oldest]
            self._drop(oldest)
        self._free -= blocks
        return True

    def _charge(self, entry: Entry, tokens: int) -> None:
        self._free += entry.blocks - blocks_for(tokens)
        entry.blocks = blocks_for(tokens)

    def _drop(self, entry: Entry) -> None:
        self._index.cut(entry, 0)
        self._charge(entry, 0)
