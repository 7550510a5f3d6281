"""How likely drafted nodes are to be accepted: the drafter's scores, calibrated by measured acceptance."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from parlay.types import Draft, trees

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # between buckets of scores
MOST_SHARE = 0.999  # of levels at which a drafter is right
UNSCORED = 0.7  # score of a node whose drafter gives none
TINY, _MOST = 1e-9, 1e12  # of numbers that come from elsewhere
_WEIGHT = 4.0  # observations that the drafter's score counts as, at the start
_PROVED_LEVELS = 32.0  # observations that what held-out texts showed counts as, at the start
_PROVED_WEIGHT = 12.0  # of what all sequences show, in the record of one, if the drafter was right on held-out texts
_BUCKET_DECAY = 0.98  # per step that tested a node of the bucket
_KINDS_DIFFER = 0.1  # variance of the log-odds by which kinds of sequences differ from the calibration
_SEQUENCES_DIFFER = 0.2  # that by which sequences differ from their kind

_SHIFT = 0.05  # of log-odds: sequences whose records differ by less share their path probabilities
_BOUND = 1.5  # standard errors
_SEQUENCE_DECAY = 0.9  # per step that tested a node of the sequence


Outcome = tuple[Draft, Sequence[int], Sequence[int]]
"""A draft, its nodes on the path that was committed, and those that were tested: the root's children, and all whose
parent lies on the path."""


def matched(draft: Draft, committed: Sequence[int]) -> Outcome:
    """Compare a draft with the tokens that its step committed, whether it was verified or not.

    Of a chain the nodes are ranges. What lies deeper than the committed tokens is not tested.
    """
    real, tokens = len(draft.tree.tokens) - draft.probes, draft.tree.tokens
    path: list[int] = []
    if trees.is_chain(draft.tree):
        most, depth = min(real, len(committed)), 0
        while depth < most and tokens[depth] == committed[depth]:
            depth += 1
        return draft, range(depth), range(min(depth + 1, most))
    families = trees.children(draft.tree)
    tested: list[int] = []
    for token in committed:
        children = [child for child in families[path[-1] if path else -1] if child < real]
        tested += children
        right = [child for child in children if tokens[child] == token]
        if not right:
            break
        path.append(right[0])
    return draft, path, tested


class Paths(NamedTuple):
    """Nodes of a draft whose path is likely enough, in ascending order, and the probability of each path.

    ``gains[n]``: tokens that the likeliest n of them are expected to bring. ``worths[n]``: what these are worth.
    """

    nodes: Sequence[int]
    path_probs: list[float]
    gains: list[float]
    worths: list[float]


class _Table(NamedTuple):
    """Numbers that all drafts with the same scores share in a step.

    For each node: its bucket, and the odds that it is accepted given that its parent was. ``seen``: how many
    chains had so many nodes accepted and tested, to be learned from together; ``chains``: how many of these nodes were
    expected to be accepted. ``paths``: those of chains, by steps of log-odds and nodes.
    """

    buckets: tuple[int, ...]
    odds: list[float]
    chains: dict[tuple[int, int], float]
    seen: dict[tuple[int, int], int]
    paths: dict[tuple[int, int], Paths]

    def expected(self, tested: Sequence[int]) -> float:
        """How many of these nodes are expected to be accepted."""
        odds = self.odds
        return sum([odds[node] / (1 + odds[node]) for node in tested])


class ScoreCalibration:
    """Acceptance by score, over all sequences of a strategy."""

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(_EDGES) + 1)
        self._rejected = [0.0] * (len(_EDGES) + 1)
        self._weights = [_WEIGHT] * (len(_EDGES) + 1)  # of the scores themselves; they decay like the observations
        self._tables: dict[tuple[float, ...] | int, _Table] = {}
        self.drafts = 0
        """How many were tested."""

    def kept(self) -> tuple[float, ...]:
        """Return what it has learned, as numbers for `restore`."""
        return (*self._accepted, *self._rejected, *self._weights, self.drafts)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError if the numbers are malformed."""
        *counts, drafts = checked(kept, 3 * (len(_EDGES) + 1) + 1)
        size = len(_EDGES) + 1
        self._accepted, self._rejected = counts[:size], counts[size : 2 * size]
        self._weights, self.drafts = [max(each, TINY) for each in counts[2 * size :]], int(drafts)

    def chance(self, score: float) -> float:
        """Share of nodes with about this score that were accepted when their parent was."""
        bucket = bisect_right(_EDGES, score)
        likely = self._accepted[bucket] + self._weights[bucket] * score
        return likely / (likely + self._rejected[bucket] + self._weights[bucket] * (1 - score))

    def paths(self, draft: Draft, shift: float, floor: float, shares: Callable[[list[float]], list[float]]) -> Paths:
        """Find the nodes whose path is accepted with a probability of at least ``floor``; probes are left out.

        A node's own probability is `chance`, its log-odds moved by ``shift`` in steps of `_SHIFT`, so that sequences
        with about the same record share the work. ``shares``: what each node adds to the worth of all.
        """
        table, real, steps = self._table(draft), len(draft.tree.tokens) - draft.probes, round(shift / _SHIFT)
        if not trees.is_chain(draft.tree):
            return _tree_paths(table, draft.tree.parents[:real], math.exp(steps * _SHIFT), floor, shares)
        paths = table.paths.get((steps, real))
        if paths is None:
            factor, path_prob, path_probs = math.exp(steps * _SHIFT), 1.0, []
            for node_odds in table.odds[:real]:
                odds = factor * node_odds
                path_prob *= odds / (1 + odds)
                if path_prob < floor:
                    break
                path_probs.append(path_prob)
            paths = _paths(range(len(path_probs)), path_probs, shares)
            table.paths[steps, real] = paths
        return paths

    def learn(self, outcomes: Sequence[Outcome]) -> list[float]:
        """Learn from one step of many drafts. Returns how many tested nodes of each were expected to be accepted."""
        right, tested = [0] * len(self._weights), [0] * len(self._weights)
        expected: list[float] = []
        for draft, path, reached in outcomes:
            table = self._table(draft)
            self.drafts += bool(reached)
            if isinstance(reached, range):
                chain = len(path), len(reached)
                if chain not in table.seen:
                    table.seen[chain], table.chains[chain] = 0, table.expected(reached)
                table.seen[chain] += 1
                expected.append(table.chains[chain])
            else:
                expected.append(table.expected(reached))
                _count(right, [table.buckets[node] for node in path], 1)
                _count(tested, [table.buckets[node] for node in reached], 1)
        for table in self._tables.values():
            for (accepted, reached_levels), count in table.seen.items():
                _count(right, table.buckets[:accepted], count)
                _count(tested, table.buckets[:reached_levels], count)
        for bucket, count in enumerate(tested):
            if count:
                self._accepted[bucket] = self._accepted[bucket] * _BUCKET_DECAY + right[bucket]
                self._rejected[bucket] = self._rejected[bucket] * _BUCKET_DECAY + count - right[bucket]
                self._weights[bucket] *= _BUCKET_DECAY
        self._tables.clear()
        return expected

    def _table(self, draft: Draft) -> _Table:
        """The table of a draft's scores. It is made once per step: it is needed before the forward and after it."""
        key = draft.scores or len(draft.tree.tokens)
        table = self._tables.get(key)
        if table is None:
            scores = draft.scores or (UNSCORED,) * len(draft.tree.tokens)
            buckets = _buckets(scores)
            right, wrong, weights = self._accepted, self._rejected, self._weights
            odds = [
                (right[bucket] + weights[bucket] * score) / (wrong[bucket] + weights[bucket] * (1 - score) or TINY)
                for bucket, score in zip(buckets, scores, strict=True)
            ]
            table = self._tables[key] = _Table(buckets, odds, {}, {}, {})
        return table


def _tree_paths(
    table: _Table, parents: Sequence[int], factor: float, floor: float, shares: Callable[[list[float]], list[float]]
) -> Paths:
    path_probs: list[float] = []
    for parent, odds in zip(parents, table.odds, strict=False):
        above = path_probs[parent] if parent >= 0 else 1.0
        path_probs.append(above * factor * odds / (1 + factor * odds))
    kept = [node for node, path_prob in enumerate(path_probs) if path_prob >= floor]
    return _paths(kept, [path_probs[node] for node in kept], shares)


def _paths(nodes: Sequence[int], path_probs: list[float], shares: Callable[[list[float]], list[float]]) -> Paths:
    ranked = sorted(path_probs, reverse=True)
    shared, gains = shares(ranked), [0.0, *accumulate(ranked)]
    return Paths(nodes, path_probs, gains, gains if shared is ranked else [0.0, *accumulate(shared)])


def _count(counts: list[int], buckets: Sequence[int], more: int) -> None:
    for bucket in buckets:
        counts[bucket] += more


@lru_cache(maxsize=512)
def _buckets(scores: tuple[float, ...]) -> tuple[int, ...]:
    """The buckets of a draft's scores. Cached, because many drafters give the same scores in every draft."""
    return tuple([bisect_right(_EDGES, score) for score in scores])


class Record:
    """Levels and nodes that were tested and accepted lately: how deep to draft, and how far the calibration is off.

    The record of a sequence starts from ``whole``, the record of all sequences, and that one from a guess; the weight
    of both decays. Between the two may stand the record of sequences of one kind (`of_kind`).
    """

    __slots__ = (
        *("_decay", "_expected", "_levels", "_nodes", "_prior", "_right", "_right_levels", "_spread", "_usual"),
        "_whole",
    )

    def __init__(self, whole: Record | None = None, *, expected: float = 0.0) -> None:
        """``expected``: the share by which the record of all sequences starts, if held-out texts showed one. Sequences
        differ less from it than from a guess.
        """
        self._whole = whole
        self._decay = _BUCKET_DECAY if whole is None else _SEQUENCE_DECAY
        self._levels = 0.0 if whole is not None else _PROVED_LEVELS if expected else _WEIGHT
        self._right_levels = self._levels * (expected or UNSCORED)
        self._prior: float = whole._prior if whole is not None else _PROVED_WEIGHT if expected else _WEIGHT
        self._nodes = self._right = self._expected = 0.0
        self._usual, self._spread = 0.0, _SEQUENCES_DIFFER  # of log-odds beforehand: mean and variance

    def of_kind(self) -> Record:
        """A record of sequences of one kind. It starts from this one, which learns all that it learns."""
        record = Record(self)
        record._decay, record._spread = _BUCKET_DECAY, _KINDS_DIFFER
        return record

    def of_sequence(self) -> Record:
        """A record of one sequence of this kind: its odds start from those here too."""
        record = Record(self)
        record._usual = self.shift
        return record

    def kept(self) -> tuple[float, ...]:
        """Return what it has learned, as numbers for `restore`."""
        return (self._levels, self._right_levels, self._nodes, self._right, self._expected)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError if the numbers are malformed."""
        levels, right_levels, nodes, right, expected = checked(kept, 5)
        if right_levels > levels or max(right, expected) > nodes + TINY:
            raise ValueError("more was accepted than was tested")
        self._levels, self._right_levels = max(levels, TINY if self._whole is None else 0.0), right_levels
        self._nodes, self._right, self._expected = nodes, right, expected

    @property
    def weight(self) -> float:
        """How many levels it knows of, the latest ones counting most; what it started from is not among them."""
        return self._levels

    @property
    def share(self) -> float:
        """The share of reached levels at which a node was accepted."""
        if self._whole is None:
            return self._right_levels / self._levels
        return (self._right_levels + self._prior * self._whole.share) / (self._levels + self._prior)

    @property
    def bound(self) -> float:
        """The share that it may well have: so many standard errors above the mean."""
        share = self.share
        return min(1.0, share + _BOUND * math.sqrt(share * (1 - share) / (self._levels + self._prior)))

    @property
    def shift(self) -> float:
        """Return what is added to the log-odds of a calibrated node; 0 before anything was seen.

        One Newton step towards the likeliest shift, which is normally distributed beforehand. A shift that followed a
        few nodes further would favour whichever draft was lucky last.
        """
        known = self._expected * (1 - self._expected / self._nodes) if self._nodes else 0.0
        shift = self._right - self._expected + self._usual / self._spread
        return shift / (known + 1 / self._spread)

    def learn(self, accepted: int, missed: bool, nodes: int, expected: float) -> None:
        """Learn from one step, and so do the records that this one starts from.

        ``accepted``: levels at which a node was accepted; ``missed``: whether a level was reached at which none was;
        ``nodes``: nodes tested; ``expected``: how many of these the calibration expected.
        """
        record: Record | None = self
        while record is not None:
            decay = record._decay
            record._levels = record._levels * decay + accepted + missed
            record._right_levels = record._right_levels * decay + accepted
            record._nodes = record._nodes * decay + nodes
            record._right = record._right * decay + accepted
            record._expected = record._expected * decay + expected
            record = record._whole


def checked(kept: Sequence[float], size: int) -> list[float]:
    """So many numbers of at least 0. Raises ValueError for anything else."""
    numbers = [float(each) for each in kept]
    if len(numbers) != size or not all(0 <= each < _MOST for each in numbers):
        raise ValueError(f"{size} numbers of at least 0 were expected")
    return numbers


def expected_accepted(share: float, depth: float) -> float:
    """Nodes that a chain of ``depth`` gets accepted at one conditional rate: a + a^2 + ... + a^depth."""
    share = min(share, MOST_SHARE)
    return share * float(1 - share**depth) / (1 - share)
