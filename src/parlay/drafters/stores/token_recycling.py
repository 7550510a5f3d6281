"""Token recycling (Luo et al. 2024): drafts the tokens that the target ranked highest after the same token before."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.drafters.stores.store_files import Saving, StoreFile
from parlay.options import Options, option, user_path
from parlay.types import NO_DRAFT, Draft, Needs, Observation, Request, SequenceView, Tree

SOURCE = "token-recycling"
WIDTH = 8  # how many candidates are kept per token
_ROW_BYTES = 500  # bytes per token in a private dictionary: the row, its tokens and the entry

_RATES = (0.4, 0.12, 0.072, 0.043, 0.026, 0.016, 0.009, 0.006)
"""How often the candidate of each rank is right. With these the best tree of 80 nodes has depth 6, like the authors'.
"""

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingOptions(Options):
    """Options of token recycling: number of tenants, and the file of candidates."""

    tenants: int = option(
        16, "tenants to remember, each with 32 bytes per token of the vocabulary", low=1, high=4096, keeps=True
    )
    store: str = option("", "file that keeps the candidates between runs; empty: none", opens=True)
    save_every: int = option(8, "write the file after so many requests", low=1, high=1e6)


class TokenRecycling(OneByOne):
    """Token recycling (Luo et al. 2024, arXiv:2408.08696).

    An adjacency matrix holds for every token the eight tokens that the target preferred after its latest occurrence.
    Each verified row, rejected ones included, replaces the row of its token; rows of the accepted path are written
    last. The draft fills a static tree breadth first from the matrix. In that tree higher ranks have more descendants;
    by default it has 80 nodes and depth 6. Each other budget has the best tree of its size.

    All requests of one tenant (``salt``) share a matrix. A request with ``store=False`` reads it, but what it learns
    stays private. A matrix takes 32 bytes for each token of the vocabulary. If there are more than ``tenants``, the one
    that was longest without a request is dropped.
    """

    needs = Needs(top_k=WIDTH)

    def __init__(self, resources: Resources, options: TokenRecyclingOptions) -> None:
        self._vocab_size = resources.vocab_size
        self._tenants = options.tenants
        self._matrices: OrderedDict[str, _Matrix] = OrderedDict()
        self._private: dict[int, dict[int, Row]] = {}
        self._bytes = StateBytes(resources.room, self._private)
        self._told: set[int] = set()
        file = StoreFile(user_path(options.store), "choices", self._vocab_size, SOURCE) if options.store else None
        self._saving = Saving(file, options.save_every, partial(_lists, self._matrices))
        if file is not None:
            for salt, (tokens, candidates) in list(file.load().items())[
                -self._tenants :
            ]:  # the most recently used are last
                self._matrices[salt] = _Matrix(self._vocab_size, tokens, candidates)
        resources.closing.callback(self._saving.save)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        matrix = self._matrices.get(view.request.salt)
        private = self._private.get(view.sequence, {})
        stops = view.request.stop_ids

        def choices(token: int) -> Row:
            if token in stops:
                return ()
            return private.get(token) or (matrix.row(token) if matrix is not None else ())

        return _fill(template(budget), view.tokens[-1], choices)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            request, sequence = observation.view.request, observation.view.sequence
            if request.store:
                matrix = self._matrix(request)
                self._told.add(sequence)
                for token, choices in _seen(observation):
                    matrix.learn(token, choices)
            else:
                private = self._private.setdefault(sequence, {})
                private.update(_seen(observation))
                self._bytes.set(sequence, len(private) * _ROW_BYTES)

    def release(self, sequence: int) -> None:
        self._private.pop(sequence, None)
        self._bytes.release(sequence)
        if sequence in self._told:
            self._told.remove(sequence)
            self._saving.changed()

    def _matrix(self, request: Request) -> _Matrix:
        """The tenant's matrix, marked as the most recently used. If there are too many, the oldest one is dropped."""
        if request.salt not in self._matrices:
            self._matrices[request.salt] = _Matrix(self._vocab_size)
        self._matrices.move_to_end(request.salt)
        while len(self._matrices) > self._tenants:
            self._matrices.popitem(last=False)
        return self._matrices[request.salt]


class _Matrix:
    """Rows of candidates by token. Entries are token + 1, so 0 in untouched memory means unknown."""

    def __init__(self, vocab_size: int, tokens: Sequence[int] = (), candidates: Sequence[int] = ()) -> None:
        self._rows_VK: NDArray[np.int32] = np.zeros((vocab_size, WIDTH), np.int32)
        _, firsts, widths = np.unique(np.asarray(tokens, np.int32), return_index=True, return_counts=True)
        ranks = np.arange(len(tokens)) - np.repeat(firsts, widths)
        self._rows_VK[np.asarray(tokens, np.int32), ranks] = np.asarray(candidates, np.int32) + 1

    def row(self, token: int) -> Row:
        return tuple([entry - 1 for entry in self._rows_VK[token].tolist() if entry])

    def learn(self, token: int, choices: Row) -> None:
        entries = [choice + 1 for choice in choices[:WIDTH]]
        self._rows_VK[token] = entries + [0] * (WIDTH - len(entries))

    def lists(self) -> list[array[int]]:
        """The token and the candidate of every entry, row by row and best first."""
        rows_VK = self._rows_VK.copy()
        tokens, ranks = np.nonzero(rows_VK)
        candidates = rows_VK[tokens, ranks] - 1
        return [array("i", ids.astype(np.intc).tobytes()) for ids in (tokens, candidates)]


def _lists(matrices: Mapping[str, _Matrix]) -> dict[str, list[array[int]]]:
    """The content of all matrices. Any thread may call this: a row that changes meanwhile may be read as a mix."""
    return {salt: matrix.lists() for salt, matrix in list(matrices.items())}


def _seen(observation: Observation) -> Iterator[tuple[int, Row]]:
    """Tokens of the verified rows, with what the target ranked highest after each.

    Rows of the accepted path come last.
    """
    if not observation.top_k:
        return
    tokens, sampled = observation.view.tokens, observation.verdict.sampled
    tree, path = observation.draft.tree, set(observation.verdict.path)
    nodes = zip(range(len(tree)), tree.tokens, observation.top_k[1:], strict=True)
    known = [(node in path, token, choices) for node, token, choices in nodes if choices]
    yield from ((token, choices) for accepted, token, choices in known if not accepted)
    # If a stop has cut the sampled tokens, the root's token is unknown, and the text has ended anyway.
    if observation.top_k[0] and len(tokens) > len(sampled) and tuple(tokens[-len(sampled) :]) == sampled:
        yield tokens[-len(sampled) - 1], observation.top_k[0]
    yield from ((token, choices) for accepted, token, choices in known if accepted)


@lru_cache(maxsize=64)
def template(size: int) -> tuple[tuple[int, int], ...]:
    """The tree of that many nodes with the most accepted tokens under `_RATES`, breadth first: (parent, rank)."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(_RATES)]
    heapq.heapify(frontier)
    paths: list[tuple[int, ...]] = []
    for _ in range(size):
        path_prob, path = heapq.heappop(frontier)
        paths.append(path)
        for rank, rate in enumerate(_RATES):
            heapq.heappush(frontier, (path_prob * rate, (*path, rank)))
    paths.sort(key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate(paths)} | {(): -1}
    return tuple((place[path[:-1]], path[-1]) for path in paths)


def _fill(shape: Sequence[tuple[int, int]], root: int, choices: Callable[[int], Row]) -> Draft:
    """The shape filled with tokens, without nodes that have no candidate, and their descendants."""
    rows = {-1: choices(root)}  # by place in the shape
    nodes = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    inner = {parent for parent, _ in shape}
    for place, (parent, rank) in enumerate(shape):
        row = rows.get(parent, ())
        if rank >= len(row):
            continue
        nodes[place] = len(tokens)
        tokens.append(row[rank])
        parents.append(nodes[parent])
        scores.append(_RATES[rank])
        if place in inner:
            rows[place] = choices(row[rank])
    if not tokens:
        return NO_DRAFT
    return Draft(Tree(tuple(tokens), tuple(parents)), sources=(SOURCE,) * len(tokens), scores=tuple(scores))
