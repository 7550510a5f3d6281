"""Estimates how likely drafted nodes are to be accepted: drafters' scores, calibrated by measured acceptance."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from parlay.types import Draft, trees

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # between buckets of scores
MOST_SHARE = 0.999  # highest share of levels at which a drafter counts as right
UNSCORED = 0.7  # score assumed where a drafter gives none
TINY, _MOST = 1e-9, 1e12  # bounds on restored numbers
_WEIGHT = 4.0  # how many observations a score counts as, at the start
_PROVED_LEVELS = 32.0  # how many observations a held-out result counts as, at the start
_PROVED_WEIGHT = 12.0  # weight of all sequences in the record of one, for drafters with a held-out result
_BUCKET_DECAY = 0.98  # per step that tested a node of the bucket
_KINDS_DIFFER = 0.1  # variance of the log-odds by which kinds differ from the calibration
_SEQUENCES_DIFFER = 0.2  # variance of the log-odds by which sequences differ from their kind

_SHIFT = 0.05  # step of log-odds: sequences within one step share path probabilities
_BOUND = 1.5  # standard errors above the mean
_SEQUENCE_DECAY = 0.9  # per step that tested a node of the sequence


Outcome = tuple[Draft, Sequence[int], Sequence[int]]
"""A draft, its nodes on the committed path, and the tested nodes: the children of the root and of nodes on that path.
"""


def matched(draft: Draft, committed: Sequence[int]) -> Outcome:
    """Compare a draft with the tokens that its step committed, whether it was verified or not.

    For a chain, both lists of nodes are ranges. Nodes deeper than the committed tokens are not tested.
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


Paths = tuple[Sequence[int], list[float], list[float], list[float]]
"""Nodes of a draft whose path is likely enough, in ascending order, and the probability of each path.

Then, for each n, how many tokens the n likeliest nodes are expected to bring, and what these are worth.
"""


class _Table(NamedTuple):
    """Numbers shared by all drafts of a step that have the same scores.

    ``buckets`` and ``odds``: per node, the bucket of its score and the odds that it is accepted if its parent is.
    ``paths``: the paths of chains, by (steps of log-odds, nodes).
    """

    buckets: list[int]
    odds: list[float]
    paths: dict[tuple[int, int], Paths]


class ScoreCalibration:
    """Acceptance by score, over all sequences of a strategy."""

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(_EDGES) + 1)
        self._rejected = [0.0] * (len(_EDGES) + 1)
        self._weights = [_WEIGHT] * (len(_EDGES) + 1)  # of the scores as priors; they decay like the observations
        self._tables: dict[tuple[float, ...] | int, _Table] = {}
        self.drafts = 0
        """How many were tested."""

    def kept(self) -> tuple[float, ...]:
        """The learned state, as numbers for `restore`."""
        return (*self._accepted, *self._rejected, *self._weights, self.drafts)

    def restore(self, kept: Sequence[float]) -> None:
        """Start from what another router learned. Raises ValueError if the numbers are malformed."""
        *counts, drafts = checked(kept, 3 * (len(_EDGES) + 1) + 1)
        size = len(_EDGES) + 1
        self._accepted, self._rejected = counts[:size], counts[size : 2 * size]
        self._weights, self.drafts = [max(each, TINY) for each in counts[2 * size :]], int(drafts)

    def chance(self, score: float) -> float:
        """The share of nodes with about this score that were accepted when their parent was."""
        bucket = bisect_right(_EDGES, score)
        likely = self._accepted[bucket] + self._weights[bucket] * score
        return likely / (likely + self._rejected[bucket] + self._weights[bucket] * (1 - score))

    def paths(self, draft: Draft, shift: float, floor: float, shares: Callable[[list[float]], list[float]]) -> Paths:
        """The nodes, without probes, whose path is accepted with a probability of at least ``floor``.

        A node's conditional probability is `chance` with ``shift`` added to its log-odds, rounded to steps of `_SHIFT`,
        so that sequences with similar records share the work. ``shares``: what each node adds to the worth of all.
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
        """Learn from the drafts of one step. Returns, for each, how many tested nodes were expected to be accepted."""
        right, tested = [0] * len(self._weights), [0] * len(self._weights)
        expected: list[float] = []
        for draft, path, reached in outcomes:
            buckets, odds, _ = self._table(draft)
            self.drafts += bool(reached)
            likely = 0.0
            for node in reached:
                tested[buckets[node]] += 1
                likely += odds[node] / (1 + odds[node])
            for node in path:
                right[buckets[node]] += 1
            expected.append(likely)
        for bucket, count in enumerate(tested):
            if count:
                self._accepted[bucket] = self._accepted[bucket] * _BUCKET_DECAY + right[bucket]
                self._rejected[bucket] = self._rejected[bucket] * _BUCKET_DECAY + count - right[bucket]
                self._weights[bucket] *= _BUCKET_DECAY
        self._tables.clear()
        return expected

    def _table(self, draft: Draft) -> _Table:
        """The table for a draft's scores. It is made once per step, and used before the forward and after it."""
        key = draft.scores or len(draft.tree.tokens)
        table = self._tables.get(key)
        if table is None:
            right, wrong, weights = self._accepted, self._rejected, self._weights
            table = self._tables[key] = _Table([], [], {})
            for score in draft.scores or (UNSCORED,) * len(draft.tree.tokens):
                bucket = bisect_right(_EDGES, score)
                likely = right[bucket] + weights[bucket] * score
                table.buckets.append(bucket)
                table.odds.append(likely / (wrong[bucket] + weights[bucket] * (1 - score) or TINY))
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
    return nodes, path_probs, gains, gains if shared is ranked else [0.0, *accumulate(shared)]


class Record:
    """Levels and nodes that were tested and accepted lately. They set the depth of drafts and correct the calibration.

    A sequence's record starts from ``whole``, the record of all sequences, which starts from a guess. The weight of
    both priors decays. A record of one kind of sequences may stand between the two (`of_kind`).
    """

    __slots__ = (
        *("_decay", "_expected", "_levels", "_nodes", "_prior", "_right", "_right_levels", "_spread", "_usual"),
        "_whole",
    )

    def __init__(self, whole: Record | None = None, *, expected: float = 0.0) -> None:
        """``expected``: the share from which the record of all sequences starts, if held-out texts gave one.

        Sequences are assumed to differ less from such a share than from a guess.
        """
        self._whole = whole
        self._decay = _BUCKET_DECAY if whole is None else _SEQUENCE_DECAY
        self._levels = 0.0 if whole is not None else _PROVED_LEVELS if expected else _WEIGHT
        self._right_levels = self._levels * (expected or UNSCORED)
        self._prior: float = whole._prior if whole is not None else _PROVED_WEIGHT if expected else _WEIGHT
        self._nodes = self._right = self._expected = 0.0
        self._usual, self._spread = 0.0, _SEQUENCES_DIFFER  # prior mean and variance of the log-odds

    def of_kind(self) -> Record:
        """A record for one kind of sequences. It starts from this record, which learns all that it learns."""
        record = Record(self)
        record._decay, record._spread = _BUCKET_DECAY, _KINDS_DIFFER
        return record

    def of_sequence(self) -> Record:
        """A record for one sequence of this kind. Its log-odds start from those of this record."""
        record = Record(self)
        record._usual = self.shift
        return record

    def kept(self) -> tuple[float, ...]:
        """The learned state, as numbers for `restore`."""
        return (self._levels, self._right_levels, self._nodes, self._right, self._expected)

    def restore(self, kept: Sequence[float]) -> None:
        """Start from what another router learned. Raises ValueError if the numbers are malformed."""
        levels, right_levels, nodes, right, expected = checked(kept, 5)
        if right_levels > levels or max(right, expected) > nodes + TINY:
            raise ValueError("more was accepted than was tested")
        self._levels, self._right_levels = max(levels, TINY if self._whole is None else 0.0), right_levels
        self._nodes, self._right, self._expected = nodes, right, expected

    @property
    def weight(self) -> float:
        """How many levels were observed, with more weight on the latest; priors do not count."""
        return self._levels

    @property
    def share(self) -> float:
        """The share of reached levels at which a node was accepted."""
        if self._whole is None:
            return self._right_levels / self._levels
        return (self._right_levels + self._prior * self._whole.share) / (self._levels + self._prior)

    @property
    def bound(self) -> float:
        """An upper confidence bound of the share: `_BOUND` standard errors above the mean."""
        share = self.share
        return min(1.0, share + _BOUND * math.sqrt(share * (1 - share) / (self._levels + self._prior)))

    @property
    def shift(self) -> float:
        """How much to add to the log-odds of a calibrated node; 0 before anything was seen.

        One Newton step from the prior towards the most likely shift. A shift that followed a few nodes further would
        favour whichever draft was lucky last.
        """
        known = self._expected * (1 - self._expected / self._nodes) if self._nodes else 0.0
        shift = self._right - self._expected + self._usual / self._spread
        return shift / (known + 1 / self._spread)

    def learn(self, accepted: int, missed: bool, nodes: int, expected: float) -> None:
        """Learn from one step, in this record and in those that it starts from.

        ``accepted``: levels at which a node was accepted. ``missed``: whether a level was reached at which none was.
        ``nodes``: nodes tested. ``expected``: how many of these the calibration expected to be accepted.
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
    """Check that these are ``size`` numbers, each at least 0. Raises ValueError otherwise."""
    numbers = [float(each) for each in kept]
    if len(numbers) != size or not all(0 <= each < _MOST for each in numbers):
        raise ValueError(f"{size} numbers of at least 0 were expected")
    return numbers


def expected_accepted(share: float, depth: float) -> float:
    """Expected accepted nodes of a chain, each right at rate ``share`` given its parent: a + a^2 + ... + a^depth."""
    share = min(share, MOST_SHARE)
    return share * float(1 - share**depth) / (1 - share)
