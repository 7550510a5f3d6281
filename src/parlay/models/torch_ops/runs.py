"""Splits a sequence's rows into runs: rows at consecutive positions of one path, computed by one product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parlay.cache import Rows
from parlay.types import trees


@dataclass(frozen=True, slots=True)
class Run:
    """``rows``, counted from the first row to run, at positions from ``position`` on. They see keys before ``end``:
    each row those up to its own, or all if the rows are ``together``.

    Before they attend, the slots ``sources`` are copied to the slots from ``place`` on.
    """

    rows: tuple[int, ...]
    position: int
    end: int
    together: bool = False
    sources: tuple[int, ...] = ()
    place: int = 0

    def apart(self, first: int) -> Iterator[Run]:
        """Split into the rows before row ``first`` and the others; the first part makes the copies."""
        return self._split([sum(row < first for row in self.rows)])

    def cut(self, most: int) -> Iterator[Run]:
        """Split into runs of at most ``most`` rows; the first makes the copies."""
        return self._split(range(most, len(self.rows), most))

    def _split(self, places: list[int] | range) -> Iterator[Run]:
        bounds = [0, *(place for place in places if 0 < place < len(self.rows)), len(self.rows)]
        for first, last in itertools.pairwise(bounds):
            end = self.end if self.together else self.position + last
            run = replace(self, rows=self.rows[first:last], position=self.position + first, end=end)
            yield run if first == 0 else replace(run, sources=())


def runs(place: Rows, nodes_at: int) -> Iterator[Run]:
    """The runs of a sequence's rows; rows that see each other are in runs of their own. Nodes have the slots from
    ``nodes_at`` on."""
    if place.block:
        found = _block_runs(place)
    else:
        found = _chain_runs(place) if trees.is_chain(place.tree) else _tree_runs(place, nodes_at)
    first = place.end - place.base - place.together
    for run in found:
        for part in run.apart(first):
            end = place.start + place.end if place.block else run.end
            yield replace(part, together=True, end=end) if part.rows[0] >= first else part


def _chain_runs(place: Rows) -> list[Run]:
    return [Run(tuple(range(place.end - place.base)), place.start + place.base, place.start + place.end)]


def _block_runs(place: Rows) -> list[Run]:
    """A chain, split where blocks begin; the rows of each part see each other."""
    begin, end, found = place.start + place.base, place.start + place.end, []
    at = begin
    while at < end:
        behind = min(end, at - at % place.block + place.block)
        found.append(Run(tuple(range(at - begin, behind - begin)), at, behind, together=True))
        at = behind
    return found


def _tree_runs(place: Rows, nodes_at: int) -> list[Run]:
    """Pending rows, then for each leaf those nodes of its path that no earlier path or forward computed."""
    behind_root = place.start + place.pending
    alone = range(max(0, place.pending - place.base))
    found = [Run(tuple(alone), place.start + place.base, behind_root)] if alone else []
    laid: tuple[int, ...] = ()
    computed = set(range(place.base - place.pending))
    for path in trees.leaf_paths(place.tree):
        done = sum(node in computed for node in path)
        if done == len(path):
            continue
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(laid, path, strict=False)))
        sources = tuple(nodes_at + node for node in path[shared:])
        new = tuple(place.pending + node - place.base for node in path[done:])
        end = behind_root + len(path)
        found.append(Run(new, behind_root + done, end, sources=sources, place=behind_root + shared))
        laid = path
        computed.update(path)
    return found
