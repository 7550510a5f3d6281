"""The key/value store of a runner: sequences, their budget, and prefixes that outlive them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from parlay.cache.budget import Budget, format_bytes
from parlay.cache.entry import Entry, Shape, Staged, new_entry, resize
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
    """Cached rows of many sequences, in memory that a budget grants.

    Committed rows change only in `keep` and `truncate`. A released sequence's rows stay as a reusable prefix until
    their room is needed, least recently used first; those of a live one are never taken, but for the target's sake in
    a drafter's store. Buffers count in whole, what they have to spare included; beyond them there is for a moment the
    old buffer of one that grows.
    """

    def __init__(self, shape: Shape, max_tokens: int, budget: Budget | None = None) -> None:
        """``max_tokens`` is what the store brings into the budget, in tokens; without one, all that it may hold."""
        if max_tokens < 1:
            raise ValueError(f"a cache of {max_tokens} tokens is too small: it must hold at least one")
        self._shape = shape
        self._live: dict[int, Entry] = {}
        self._reusable: dict[Entry, None] = {}  # least recently used first
        self._index = PrefixIndex()
        self._slots = self._spare_slots = 0
        self._budget = budget or Budget()
        self._budget.join(self, self._bytes(shape.padded(max_tokens)), self._bytes(shape.stride))

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
        if entry.hashes:
            self._shrink(entry, spare=0.25)
            self._retire(entry)
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
        if tokens > self.capacity():
            raise OutOfRoom(
                f"a sequence of {tokens} tokens does not fit a cache of {self.capacity()}, which is "
                f"{format_bytes(self._budget.total)}: allow more memory"
            )
        return self._widen(entry, tokens)

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
            self._shrink(entry, spare=0.5)
        return len(entry.tokens)

    # ---------------------------------------------------------------------------------------------------- budget

    def room(self) -> int:
        """How many tokens could be reserved now, reusable prefixes given up."""
        return self._whole_pages(self._budget.room(self))

    def capacity(self) -> int:
        """How many tokens all sequences together could ever hold."""
        return self._whole_pages(self._budget.total)

    @property
    def held(self) -> int:
        """Bytes of all buffers."""
        return self._bytes(self._slots)

    @property
    def spare(self) -> int:
        """Bytes of reusable prefixes."""
        return self._bytes(self._spare_slots)

    def drop_spare(self) -> bool:
        """Give up the reusable prefix that went unused for longest; False when there is none."""
        oldest = next(iter(self._reusable), None)
        if oldest is not None:
            self._revive(oldest)
            self._drop(oldest)
        return oldest is not None

    def drop_used(self) -> bool:
        """Forget what is cached of the live sequence that was opened first; False when none holds anything."""
        oldest = next((entry for entry in self._live.values() if entry.slots), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def check(self) -> None:
        """Prove the invariants; AssertionError names the broken one."""
        entries = [*self._live.values(), *self._reusable]
        assert len(set(entries)) == len(entries), "an entry is held twice"
        assert self._slots == sum(entry.slots for entry in entries), "slots are lost or counted twice"
        assert self._spare_slots == sum(entry.slots for entry in self._reusable), "spare slots are counted wrongly"
        buffers = [entry.rows.data_ptr() for entry in entries if entry.slots]
        assert len(set(buffers)) == len(buffers), "two entries share a buffer"
        for entry in entries:
            assert len(entry.tokens) <= entry.slots, "an entry holds more tokens than it has slots"
            assert entry.slots % self._shape.stride == 0, "a buffer ends within a page"
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
        if rows > entry.slots:
            room = entry.slots
            raise ValueError(f"sequence {sequence} has room for {room} tokens and needs {rows}: reserve them first")
        if rows + gap > entry.slots and not self._widen(entry, rows + gap):
            self._resize(entry, self._shape.padded(rows + gap))  # a gap is short: at worst a page too much for a moment

    def _check_free(self, sequence: int) -> None:
        if sequence in self._live:
            raise ValueError(f"sequence {sequence} is open already: release it first")

    def _begin(self, sequence: int, salt: str, donor: Entry | None, length: int) -> None:
        """Open an entry with a copy of the donor's first ``length`` tokens, or of as many as there is room for."""
        entry = self._live[sequence] = new_entry(self._shape, salt)
        if donor is None:
            return
        reusable = donor in self._reusable
        if reusable:
            self._revive(donor)  # out of reach of eviction while it is read
        length = min(length, self.room())
        self._widen(entry, length)
        if reusable:
            self._retire(donor)
        entry.copy_rows(donor, length)
        self._index.extend(entry)

    def _fits_beside(self, donor: Entry, length: int) -> bool:
        return self._shape.padded(length) + donor.slots <= self.room()

    def _adopt(self, sequence: int, donor: Entry, length: int) -> None:
        """The released donor itself goes on as the sequence, cut to what they share."""
        self._revive(donor)
        self._live[sequence] = donor
        self.truncate(sequence, length)

    # ---------------------------------------------------------------------------------------------------- memory

    def _widen(self, entry: Entry, slots: int) -> bool:
        """Make room for ``slots`` slots; all or nothing. Where much is free, for half as many again as there were."""
        more = self._shape.padded(slots) - entry.slots
        if more <= 0:
            return True
        ample = min(self._bytes(entry.slots), self._budget.free) // 2
        more = max(more, self._whole_pages(ample))
        if not self._budget.make_room(self._bytes(more), self):
            return False
        self._resize(entry, entry.slots + more)
        return True

    def _shrink(self, entry: Entry, spare: float) -> None:
        """Move to a smaller buffer where more than that part of this one is of no use, which pays for the copy."""
        needed = self._shape.padded(len(entry.tokens))
        if entry.slots - needed > spare * entry.slots:
            self._resize(entry, needed)

    def _resize(self, entry: Entry, slots: int) -> None:
        self._slots += slots - entry.slots
        resize(entry, slots)

    def _retire(self, entry: Entry) -> None:
        """What nobody uses now is the most recently used of all that nobody uses."""
        self._reusable[entry] = None
        self._spare_slots += entry.slots

    def _revive(self, entry: Entry) -> None:
        del self._reusable[entry]
        self._spare_slots -= entry.slots

    def _drop(self, entry: Entry) -> None:
        self._index.cut(entry, 0)
        entry.tokens.clear()
        entry.staged = None
        self._resize(entry, 0)

    def _bytes(self, slots: int) -> int:
        return slots * self._shape.slot_bytes

    def _whole_pages(self, size: int) -> int:
        return size // self._bytes(self._shape.stride) * self._shape.stride
