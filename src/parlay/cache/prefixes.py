"""Finds the cached text that shares the longest beginning with a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parlay.cache.entry import BLOCK, Entry


class PrefixIndex:
    """Full blocks of committed tokens by the hash of everything up to their end, salt included.

    Hashes only nominate: what is reused is compared token by token.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Entry] = {}

    def extend(self, entry: Entry, *, take_over: bool = False) -> None:
        """Index the entry's full blocks; blocks that another holds stay there unless taken over."""
        for digest in _chain(entry.tokens, entry.salt, entry.hashes):
            entry.hashes.append(digest)
            self._holders.setdefault(digest, entry)
        if take_over:
            self._holders.update(dict.fromkeys(entry.hashes, entry))

    def cut(self, entry: Entry, length: int) -> None:
        """Forget the entry's blocks that do not end within ``length`` tokens."""
        kept = length // BLOCK
        for digest in entry.hashes[kept:]:
            if self._holders.get(digest) is entry:
                del self._holders[digest]
        del entry.hashes[kept:]

    def find(self, tokens: Sequence[int], salt: str) -> tuple[Entry | None, int]:
        """The best holder of a beginning of ``tokens``, and how many tokens, fewer than all, it shares with them."""
        best: Entry | None = None
        for digest in _chain(tokens, salt, []):
            holder = self._holders.get(digest)
            if holder is None:
                break
            best = holder
        if best is None or best.salt != salt:
            return None, 0
        return best, _shared(best.tokens, tokens[:-1])

    def check(self, entries: Sequence[Entry]) -> None:
        """Every indexed block belongs to a known entry, and every entry's hashes are those of its tokens."""
        known = set(entries)
        for digest, holder in self._holders.items():
            assert holder in known, "a block is indexed under an entry that is gone"
            assert digest in holder.hashes, "a block is indexed that its entry does not hold"
        for entry in entries:
            assert entry.hashes == list(_chain(entry.tokens, entry.salt, [])), "an entry's hashes are not its tokens'"


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
