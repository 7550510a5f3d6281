"""Finds the cached text that shares the longest beginning with a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parlay.cache.entry import BLOCK, Entry


class PrefixIndex:
    """Full blocks of committed tokens by the hash of everything up to their end, salt included.

    Hashes only nominate: what is reused is compared token by token.
    """

    def __init__(self) -> None:
        self._holders: dict[int, dict[Entry, None]] = {}  # the last is asked first

    def extend(self, entry: Entry) -> None:
        """Index the entry's full blocks that are not yet."""
        for digest in _chain(entry.tokens, entry.salt, entry.hashes):
            entry.hashes.append(digest)
            self._holders.setdefault(digest, {})[entry] = None

    def cut(self, entry: Entry, length: int) -> None:
        """Forget the entry's blocks that do not end within ``length`` tokens."""
        kept = length // BLOCK
        for digest in entry.hashes[kept:]:
            holders = self._holders[digest]
            del holders[entry]
            if not holders:
                del self._holders[digest]
        del entry.hashes[kept:]

    def find(self, tokens: Sequence[int], salt: str) -> tuple[Entry | None, int]:
        """The best holder of a beginning of ``tokens``, and how many tokens, fewer than all, it shares with them."""
        best: Entry | None = None
        for digest in _chain(tokens, salt, []):
            holders = self._holders.get(digest)
            if holders is None:
                break
            best = next(reversed(holders))
        if best is None or best.salt != salt:
            return None, 0
        return best, _shared(best.tokens, tokens[:-1])

    def check(self, entries: Sequence[Entry]) -> None:
        """Every indexed block belongs to a known entry, and every entry's hashes are those of its tokens."""
        known = set(entries)
        for digest, holders in self._holders.items():
            assert holders.keys() <= known, "a block is indexed under an entry that is gone"
            assert all(digest in holder.hashes for holder in holders), "a block is indexed that its entry lacks"
        for entry in entries:
            assert entry.hashes == list(_chain(entry.tokens, entry.salt, [])), "an entry's hashes are not its tokens'"
            assert all(entry in self._holders[digest] for digest in entry.hashes), "an entry can't be found"


def _chain(tokens: Sequence[int], salt: str, known: Sequence[int]) -> Iterator[int]:
    """Digests of the full blocks after the ``known`` ones, each over its tokens and the digest before it."""
    digest = known[-1] if known else hash(salt)
    for begin in range(len(known) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        digest = hash((digest, *tokens[begin : begin + BLOCK]))
        yield digest


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
