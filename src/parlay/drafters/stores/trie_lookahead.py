"""Lookahead by Alipay (Zhao et al. 2023): the branches that most often followed the last few tokens, as one tree."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.stores.output_store import KnownTexts, StoreOptions
from parlay.drafters.stores.suffixes import Suffixes, chance
from parlay.options import option
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, Tree

SOURCE = "trie-lookahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrieLookaheadOptions(StoreOptions):
    """Options of the lookahead trie: how branches are looked up and weighed."""

    branch_length: int = option(12, "maximum tokens of a branch", low=1, high=64)
    max_query: int = option(
        2, "maximum tokens that are looked up; fewer if they yield too few branches", low=1, high=16
    )
    output_weight: float = option(1e-4, "weight of past outputs relative to this request", low=0, high=1)
    shape: str = option("tree", "tree: all branches; path: the likeliest", choices=("tree", "path"))


class TrieLookahead(OneByOne):
    """Lookahead with a trie (Zhao et al. 2023, arXiv:2312.12728, github.com/alipay/PainlessInferenceAcceleration).

    Branches of up to ``branch_length`` tokens follow every token: those of the request itself (its references, prompt
    and output; gone when it ends) have input frequencies, those of past outputs (`OutputStores`) output frequencies.
    The last ``max_query`` tokens are looked up; while that fills less than half the budget, one fewer. The branches
    found are taken most frequent first by (1 - w) * input + w * output, w being ``output_weight``; half the budget is
    reserved for the output frequency alone. ``shape=path`` keeps to the most frequent child of each node.

    Defaults are the authors'. Frequencies are read off counted suffixes, which are those of the trie. The authors
    bound each token's trie by halving its frequencies and dropping the rare branches; here whole outputs go, oldest
    first. Their mode of parallel branches is the same tree unfolded, for models that take no trees.
    """

    needs = Needs()

    def __init__(self, resources: Resources, options: TrieLookaheadOptions) -> None:
        self._max_query = options.max_query
        self._branch_length = options.branch_length
        self._output_weight = options.output_weight
        self._branching = options.shape == "tree"
        self._texts = KnownTexts(options.max_query + options.branch_length, resources, options, SOURCE)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._texts.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        request = view.request
        text = self._texts.own(view)
        own, past = text.suffixes if text is not None else None, self._texts.past(request)
        query = view.tokens[-self._max_query :]
        crop = _Crop(own, past, self._output_weight, self._branching)
        for length in range(len(query), 0, -1):
            crop.gather(query[-length:], self._branch_length, budget, request.stop_ids)
            if 2 * len(crop.tokens) >= budget or (crop.tokens and not self._branching):
                break
        return crop.draft()

    def observe(self, observations: Sequence[Observation]) -> None:
        self._texts.observe(observations)

    def release(self, sequence: int) -> None:
        self._texts.release(sequence)


_Candidate = tuple[float, float, int, int, int, float, int, int]
"""Two sort keys (smaller is better), order, parent, token, share, and the states in request and store."""


class _Crop:
    """The branches retrieved for one draft. Nodes found again by a shorter query are the same nodes."""

    def __init__(self, own: Suffixes | None, past: Suffixes | None, weight: float, branching: bool) -> None:
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._own = own
        self._past = past
        self._weight = weight
        self._branching = branching
        self._found: dict[tuple[int, int], int] = {}
        self._by_output = False
        self._offered = 0

    def gather(self, query: Sequence[int], branch_length: int, budget: int, stops: Collection[int]) -> None:
        """Take what followed ``query``: by mixed frequency up to half the budget, then by output frequency."""
        depths = {-1: 0}
        self._by_output = False
        frontier = self._children(-1, _find(self._own, query), _find(self._past, query))
        heapq.heapify(frontier)
        while frontier and len(self.tokens) < budget:
            if not self._by_output and 2 * len(self.tokens) >= budget:
                self._by_output = True
                frontier = [(one[1], one[0], one[2], one[3], one[4], one[5], one[6], one[7]) for one in frontier]
                heapq.heapify(frontier)
            _, _, _, parent, token, share, own, past = heapq.heappop(frontier)
            depth = depths[parent] + 1
            node = self._take(parent, token, chance(share, len(query) + depth - 1))
            depths[node] = depth
            if depth < branch_length and token not in stops:
                for candidate in self._children(node, own, past):
                    heapq.heappush(frontier, candidate)

    def _children(self, parent: int, own: int, past: int) -> list[_Candidate]:
        """All tokens that followed a node in request or past outputs.

        Among equally frequent ones, the first found wins.
        """
        total, inputs = self._own.frequent(own) if own >= 0 and self._own is not None else (0, [])
        more, outputs = self._past.frequent(past) if past >= 0 and self._past is not None else (0, [])
        total += more
        found: list[_Candidate] = []
        for token, f_in, f_out, in_request, in_store in _merged(inputs, outputs):
            self._offered += 1
            mixed = (self._weight - 1) * f_in - self._weight * f_out
            first, second = (-f_out, mixed) if self._by_output else (mixed, -f_out)
            share = (f_in + f_out) / total
            found.append((first, second, self._offered, parent, token, share, in_request, in_store))
        return found if self._branching or not found else [min(found)]

    def _take(self, parent: int, token: int, score: float) -> int:
        node = self._found.get((parent, token))
        if node is None:
            node = self._found[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
        return node

    def draft(self) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        tree = Tree(tuple(self.tokens), tuple(self._parents))
        return Draft(tree, sources=(SOURCE,) * len(tree), scores=tuple(self._scores))


def _merged(
    inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]]
) -> list[tuple[int, int, int, int, int]]:
    """Token, input and output frequency, and both states, of each entry in either list."""
    if not outputs:
        return [(token, count, 0, state, -1) for token, count, state in inputs]
    if not inputs:
        return [(token, 0, count, -1, state) for token, count, state in outputs]
    known = {token: (token, count, 0, state, -1) for token, count, state in inputs}
    for token, count, state in outputs:
        _, f_in, _, in_request, _ = known.get(token, _NEVER)
        known[token] = (token, f_in, count, in_request, state)
    return list(known.values())


_NEVER = (0, 0, 0, -1, -1)


def _find(suffixes: Suffixes | None, query: Sequence[int]) -> int:
    """The state of the query, or -1 if it never occurs."""
    state = 0
    for token in query:
        state = suffixes.follow(state, token) if suffixes is not None and state >= 0 else -1
    return state
