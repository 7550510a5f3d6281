"""How likely drafted nodes are to be accepted: the drafter's own scores, put right by what was seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from parlay import trees
from parlay.types import Draft

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # of the buckets of scores
UNSCORED = 0.7  # score of a node whose drafter gives none
_WEIGHT = 4.0  # observations that a score is worth before anything was seen
_BUCKET_DECAY = 0.98  # per step that tested a node of the bucket
_SEQUENCE_DECAY = 0.9  # per step that tested a node of the sequence


def walk(draft: Draft, accepted: int, committed: Sequence[int]) -> tuple[list[int], list[int]]:
    """The nodes on the accepted path, and all whose parent was reached: those were tested.

    ``accepted`` nodes were; ``committed`` are the tokens of the step, which tell the path where the tree branches.
    """
    real = len(draft) - draft.probes
    if trees.is_chain(draft.tree):
        return list(range(accepted)), list(range(min(accepted + 1, real)))
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


class Calibration:
    """Acceptance by score, over all sequences of a strategy."""

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(_EDGES) + 1)
        self._tested = [0.0] * (len(_EDGES) + 1)
        self._weights = [_WEIGHT] * (len(_EDGES) + 1)  # of the scores themselves; they fade like what was seen
        self.steps = 0

    def chance(self, score: float) -> float:
        """Share of nodes with about this score that were accepted when their parent was."""
        bucket = bisect_right(_EDGES, score)
        weight = self._weights[bucket]
        return (self._accepted[bucket] + weight * score) / (self._tested[bucket] + weight)

    def expected(self, draft: Draft, nodes: Sequence[int]) -> float:
        """How many of the nodes are accepted on average, each given that its parent was."""
        scores = draft.scores
        return sum([self.chance(scores[node]) for node in nodes]) if scores else len(nodes) * self.chance(UNSCORED)

    def reaches(self, draft: Draft, odds: float, floor: float) -> list[float]:
        """Per node, probes left out, the chance that the whole path down to it is accepted; 0 for some below ``floor``.

        ``odds`` is the factor on the odds of each node.
        """
        scores = draft.scores or (UNSCORED,) * len(draft)
        result: list[float] = []
        for node, parent in enumerate(draft.tree.parents[: len(draft) - draft.probes]):
            reach = result[parent] if parent >= 0 else 1.0
            if reach < floor:
                reach = 0.0
            else:
                chance = self.chance(scores[node])
                reach *= odds * chance / (odds * chance + 1 - chance)
            result.append(reach)
        return result

    def learn(self, draft: Draft, path: Sequence[int], tested: Sequence[int]) -> None:
        """One step: the accepted nodes, and those that were tested."""
        self.steps += 1
        buckets = {node: bisect_right(_EDGES, draft.scores[node] if draft.scores else UNSCORED) for node in tested}
        for bucket in set(buckets.values()):
            self._accepted[bucket] *= _BUCKET_DECAY
            self._tested[bucket] *= _BUCKET_DECAY
            self._weights[bucket] *= _BUCKET_DECAY
        for bucket in buckets.values():
            self._tested[bucket] += 1
        for node in path:
            self._accepted[buckets[node]] += 1


class Lean:
    """How much better or worse one sequence's nodes do than the calibration says, as a shift of log-odds."""

    def __init__(self) -> None:
        self._accepted = self._tested = self._expected = 0.0

    def learn(self, accepted: int, tested: int, expected: float) -> None:
        """One step: nodes accepted, nodes tested, and how many of these should have been by the calibration."""
        self._accepted = self._accepted * _SEQUENCE_DECAY + accepted
        self._tested = self._tested * _SEQUENCE_DECAY + tested
        self._expected = self._expected * _SEQUENCE_DECAY + expected

    @property
    def odds(self) -> float:
        """The factor on the odds; 1 before anything was seen."""
        up = (self._accepted + 1) / (self._expected + 1)
        down = (self._tested - self._accepted + 1) / (self._tested - self._expected + 1)
        return up / down


class Levels:
    """Share of levels at which one of the drafted children was accepted: what tells how deep to draft.

    Of a sequence it leans on that of the whole strategy, and that on a guess which fades.
    """

    def __init__(self, whole: Levels | None = None) -> None:
        self._whole = whole
        self._decay = _BUCKET_DECAY if whole is None else _SEQUENCE_DECAY
        self._tested = _WEIGHT if whole is None else 0.0
        self._accepted = self._tested * UNSCORED

    @property
    def share(self) -> float:
        if self._whole is None:
            return self._accepted / self._tested
        return (self._accepted + _WEIGHT * self._whole.share) / (self._tested + _WEIGHT)

    def learn(self, accepted: int, missed: bool) -> None:
        """One step: levels at which a node was accepted, and whether one was reached at which none was."""
        self._accepted = self._accepted * self._decay + accepted
        self._tested = self._tested * self._decay + accepted + missed
        if self._whole is not None:
            self._whole.learn(accepted, missed)


def expected_accepted(share: float, depth: float) -> float:
    """Nodes that a chain of ``depth`` gets accepted at one conditional rate: a + a^2 + ... + a^depth."""
    share = min(share, 0.999)
    return share * float(1 - share**depth) / (1 - share)
