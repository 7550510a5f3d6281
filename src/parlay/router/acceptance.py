"""How likely drafted nodes are to be accepted: the drafter's scores, calibrated by measured acceptance."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from parlay.router.ranking import Candidates
from parlay.types import Draft, trees

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # between buckets of scores
UNSCORED = 0.7  # score of a node whose drafter gives none
_LEAST, _MOST = 1e-9, 1e12  # of numbers that come from elsewhere
_WEIGHT = 4.0  # observations that the drafter's score counts as, at the start
_PROVED_LEVELS = 32.0  # observations that what held-out texts showed counts as, at the start
_PROVED_WEIGHT = 12.0  # of what all sequences show, in the record of one, if the drafter was right on held-out texts
_BUCKET_DECAY = 0.98  # per step that tested a node of the bucket
_KINDS_DIFFER = 0.1  # variance of the log-odds by which kinds of sequences differ from the calibration
_SEQUENCES_DIFFER = 0.2  # that by which sequences differ from their kind

_BOUND = 1.5  # standard errors
_SEQUENCE_DECAY = 0.9  # per step that tested a node of the sequence


def walk(draft: Draft, accepted: int, text: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The nodes on the accepted path, and the tested nodes: all whose parent was accepted, or the root.

    ``accepted`` is the number of accepted nodes. ``text`` ends with the tokens of the step, from which the path is read
    where the tree branches.
    """
    real = len(draft) - draft.probes
    if trees.is_chain(draft.tree):
        return range(accepted), range(min(accepted + 1, real))
    committed = text[len(text) - accepted - 1 :]
    families = trees.children(draft.tree)
    path: list[int] = []
    tested: list[int] = []
    node: int | None = -1
    while node is not None:
        children = [child for child in families[node] if child < real]
        tested += children
        token = committed[len(path)] if len(path) < accepted else None
        node = next((child for child in children if draft.tree.tokens[child] == token), None)
        if node is not None:
            path.append(node)
    return path, tested


Outcome = tuple[Draft, Sequence[int], Sequence[int]]
"""A draft, the nodes of it on the accepted path, and those that were tested; see `walk`."""


class _Table(NamedTuple):
    """Numbers that all drafts with the same scores share in a step.

    For each node: its bucket, the weights for (``likely``) and against it (``unlikely``) given that its parent was
    accepted, and its chance, which follows from them. ``expected[n]``: how many of the first n nodes of a chain are
    expected to be accepted, if all are tested. ``chains``: tested chains by nodes accepted and tested, to be learned
    from together.
    """

    buckets: tuple[int, ...]
    likely: list[float]
    unlikely: list[float]
    chances: list[float]
    expected: list[float]
    chains: Counter[tuple[int, int]]


class ScoreCalibration:
    """Acceptance by score, over all sequences of a strategy."""

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(_EDGES) + 1)
        self._rejected = [0.0] * (len(_EDGES) + 1)
        self._weights = [_WEIGHT] * (len(_EDGES) + 1)  # of the scores themselves; they decay like the observations
        self._tables: dict[tuple[float, ...], _Table] = {}
        self.drafts = 0
        """How many were tested."""

    def kept(self) -> tuple[float, ...]:
        """Return what was learned, as numbers for `restore`."""
        return (*self._accepted, *self._rejected, *self._weights, self.drafts)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError if the numbers are malformed."""
        *counts, drafts = checked(kept, 3 * (len(_EDGES) + 1) + 1)
        size = len(_EDGES) + 1
        self._accepted, self._rejected = counts[:size], counts[size : 2 * size]
        self._weights, self.drafts = [max(each, _LEAST) for each in counts[2 * size :]], int(drafts)

    def chance(self, score: float) -> float:
        """Share of nodes with about this score that were accepted when their parent was."""
        bucket = bisect_right(_EDGES, score)
        likely = self._accepted[bucket] + self._weights[bucket] * score
        return likely / (likely + self._rejected[bucket] + self._weights[bucket] * (1 - score))

    def candidates(self, draft: Draft, odds: float, floor: float, sure: int) -> Candidates:
        """The nodes whose path is accepted with a probability of at least ``floor``, and the first ``sure`` nodes.

        Probes are left out. A node's own probability is `chance`, with its odds multiplied by ``odds``.
        """
        table, real = self._table(draft), len(draft) - draft.probes
        weighed = zip(table.likely[:real], table.unlikely, strict=False)
        path_probs: list[float] = []
        if not trees.is_chain(draft.tree):
            for parent, (yes, no) in zip(draft.tree.parents, weighed, strict=False):
                above = path_probs[parent] if parent >= 0 else 1.0
                path_probs.append(above * odds * yes / (odds * yes + no))
            kept = [node for node, path_prob in enumerate(path_probs) if path_prob >= floor or node < sure]
            return kept, [path_probs[node] for node in kept]
        path_prob = 1.0
        for yes, no in weighed:
            path_prob *= odds * yes / (odds * yes + no)
            if path_prob < floor and len(path_probs) >= sure:
                break
            path_probs.append(path_prob)
        return range(len(path_probs)), path_probs

    def learn(self, outcomes: Sequence[Outcome]) -> list[float]:
        """Learns from one step of many drafts. Returns how many tested nodes of each were expected to be accepted."""
        right, tested = [0] * len(self._weights), [0] * len(self._weights)
        expected: list[float] = []
        for draft, path, reached in outcomes:
            table = self._table(draft)
            self.drafts += bool(reached)
            if isinstance(reached, range):
                expected.append(table.expected[len(reached)])
                table.chains[len(path), len(reached)] += 1
            else:
                expected.append(sum([table.chances[node] for node in reached]))
                _count(right, [table.buckets[node] for node in path], 1)
                _count(tested, [table.buckets[node] for node in reached], 1)
        for table in self._tables.values():
            for (accepted, reached_levels), count in table.chains.items():
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
        scores = draft.scores or (UNSCORED,) * len(draft)
        table = self._tables.get(scores)
        if table is None:
            buckets = _buckets(scores)
            pairs = list(zip(buckets, scores, strict=True))
            likely = [self._accepted[bucket] + self._weights[bucket] * score for bucket, score in pairs]
            unlikely = [self._rejected[bucket] + self._weights[bucket] * (1 - score) for bucket, score in pairs]
            chances = [yes / (yes + no) for yes, no in zip(likely, unlikely, strict=True)]
            expected = list(accumulate(chances, initial=0.0))
            table = self._tables[scores] = _Table(buckets, likely, unlikely, chances, expected, Counter())
        return table


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
        record._usual = math.log(self.odds)
        return record

    def kept(self) -> tuple[float, ...]:
        """Return what was learned, as numbers for `restore`."""
        return (self._levels, self._right_levels, self._nodes, self._right, self._expected)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError if the numbers are malformed."""
        levels, right_levels, nodes, right, expected = checked(kept, 5)
        if right_levels > levels or max(right, expected) > nodes + _LEAST:
            raise ValueError("more was accepted than was tested")
        self._levels, self._right_levels = max(levels, _LEAST if self._whole is None else 0.0), right_levels
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
    def odds(self) -> float:
        """The factor on the calibrated odds of a node; 1 before anything was seen.

        One Newton step towards the likeliest shift of log-odds, which is normally distributed beforehand. A factor that
        followed a few nodes further would favour whichever draft was lucky last.
        """
        known = self._expected * (1 - self._expected / self._nodes) if self._nodes else 0.0
        shift = self._right - self._expected + self._usual / self._spread
        return math.exp(shift / (known + 1 / self._spread))

    def learn(self, accepted: int, missed: bool, nodes: int, expected: float) -> None:
        """Learns from one step. ``accepted``: levels at which a node was accepted; ``missed``: whether a level was
        reached at which none was; ``nodes``: nodes tested; ``expected``: how many of these the calibration expected.
        """
        decay = self._decay
        self._levels = self._levels * decay + accepted + missed
        self._right_levels = self._right_levels * decay + accepted
        self._nodes = self._nodes * decay + nodes
        self._right = self._right * decay + accepted
        self._expected = self._expected * decay + expected
        if self._whole is not None:
            self._whole.learn(accepted, missed, nodes, expected)


def checked(kept: Sequence[float], size: int) -> list[float]:
    """So many numbers of at least 0. Raises ValueError for anything else."""
    numbers = [float(each) for each in kept]
    if len(numbers) != size or not all(0 <= each < _MOST for each in numbers):
        raise ValueError(f"{size} numbers of at least 0 were expected")
    return numbers


def expected_accepted(share: float, depth: float) -> float:
    """Nodes that a chain of ``depth`` gets accepted at one conditional rate: a + a^2 + ... + a^depth."""
    share = min(share, 0.999)
    return share * float(1 - share**depth) / (1 - share)
