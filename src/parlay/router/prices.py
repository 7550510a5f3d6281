"""What drafts cost a batch: seconds of proposals as measured, and of the steps that verify them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from parlay.router.acceptance import Record, checked, expected_accepted
from parlay.types import SequenceView

FREE = 0.01  # of a forward: drafting that costs less counts as free
_SURE = 0.98  # acceptance that the best drafts are assumed to have

_DECAY = 0.9  # per proposal
_ORIGIN = 0.1  # weight, in proposals, of the assumption that a proposal of no nodes costs nothing
_FEW = 4  # of so many first proposals the quickest sets the level
_SLOWER = 0.5  # weight of a proposal that took longer than expected
_READ = 0.3  # how far the estimates of reading and of answers follow one of them
_DEEPER = 0.1  # how far the estimate of depth follows a draft
_MOVED = 0.1  # relative change of an estimate that leads to new prices, if it is at least `FREE` of a forward


class DraftSeconds:
    """What a sequence's proposal costs: a fixed time, and a time per node.

    Both come from least squares over the proposals seen; older ones count less. Until proposals of several sizes were
    seen, the fixed time is taken to be about 0. Delays are noise: of the first few proposals the quickest sets the
    level, and later ones that took longer than expected count less.
    """

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """Raised whenever estimates have moved by more than a tenth, and by `FREE` of a forward."""
        self._fixed = self._per_node = 0.0
        self._watched = (0.0, 0.0)  # both times at the last revision
        self._seen = 0
        self._count, self._nodes, self._squares = _ORIGIN, 0.0, 0.0
        self._seconds = self._products = 0.0

    def kept(self) -> tuple[float, ...]:
        """What it has learned, as numbers for `restore`."""
        return (self._count, self._nodes, self._squares, self._seconds, self._products)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned; the first proposals may still show that it was too slow.

        Raises ValueError for what is no such thing.
        """
        count, self._nodes, self._squares, self._seconds, self._products = checked(kept, 5)
        self._count = max(count, _ORIGIN)
        self._fit()
        self._watched = self._fixed, self._per_node
        self.revision += 1

    def scale(self, factor: float) -> None:
        """To a machine that takes so many times as long."""
        self._seconds, self._products = self._seconds * factor, self._products * factor
        self._fit()
        self._watched = self._fixed, self._per_node

    def of(self, nodes: float) -> float:
        """Seconds of a proposal of so many nodes; 0 before any was seen."""
        return self._fixed + self._per_node * nodes

    def own_work(self, nodes: float, seconds: float, slowdown: float, forward: float) -> float:
        """The seconds that a proposal would have taken without delays.

        What slowed the step's forward, by ``slowdown``, is assumed to have slowed drafting too. The rest is cut to 4
        times the usual plus a quarter of a ``forward``: enough for drafters that are expensive in one step out of four
        and free in the others.
        """
        usual = self.of(nodes)
        if not usual:
            return min(seconds / slowdown, forward)
        return min(seconds, max(usual, seconds / slowdown), 4 * usual + 0.25 * forward)

    def learn(self, nodes: float, seconds: float, forward: float) -> None:
        """Learn that proposals of so many nodes on average took so long each. ``forward``: its seconds per sequence."""
        expected = self.of(nodes)
        if expected and self._seen < _FEW:
            factor = min(1.0, seconds / expected)
            self._seconds, self._products = self._seconds * factor, self._products * factor
        weight = _SLOWER if expected and seconds > expected else 1.0
        self._seen += 1
        self._count = self._count * _DECAY + weight + (1 - _DECAY) * _ORIGIN
        self._nodes = self._nodes * _DECAY + weight * nodes
        self._squares = self._squares * _DECAY + weight * nodes**2
        self._seconds = self._seconds * _DECAY + weight * seconds
        self._products = self._products * _DECAY + weight * seconds * nodes
        self._fit()
        fixed, per_node = self._watched
        known = fixed + per_node * nodes
        if abs(self.of(nodes) - known) > max(_MOVED * known, FREE * forward):
            self._watched = self._fixed, self._per_node
            self.revision += 1

    def _fit(self) -> None:
        spread = self._count * self._squares - self._nodes**2
        if spread > 0:
            self._per_node = max(0.0, (self._count * self._products - self._nodes * self._seconds) / spread)
            self._fixed = max(0.0, (self._seconds - self._per_node * self._nodes) / self._count)


class DraftDepth:
    """How deep drafts are: one level, and a share of one for each node after the first."""

    def __init__(self) -> None:
        self.share = 1.0

    def of(self, nodes: float) -> float:
        """Levels of a draft of so many nodes."""
        return 1 + (nodes - 1) * self.share if nodes else 0.0

    def learn(self, nodes: int, depth: int) -> None:
        """A draft of so many nodes was so deep."""
        if nodes > 1:
            self.share += _DEEPER * ((depth - 1) / (nodes - 1) - self.share)


class Reading:
    """What it takes a drafter to read a prompt, by the prompts that it has read."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self._seen = False

    def kept(self) -> tuple[float, ...]:
        """What it has learned, as numbers for `restore`."""
        return (self._per_token,) if self._seen else ()

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError for what is no such thing."""
        if kept:
            (self._per_token,) = checked(kept, 1)
            self._seen = True

    def scale(self, factor: float) -> None:
        """To a machine that takes so many times as long."""
        self._per_token *= factor

    def of(self, tokens: int) -> float:
        """Seconds for a prompt of so many tokens; 0 before any was seen."""
        return self._per_token * tokens

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn that a prompt of so many tokens took so long."""
        per_token = max(0.0, seconds) / max(tokens, 1)
        self._per_token += (_READ if self._seen else 1.0) * (per_token - self._per_token)
        self._seen = True


class AnswerLengths:
    """How long answers were lately, in tokens: so many tokens a drafter that reads a prompt can still make quicker."""

    def __init__(self) -> None:
        self._usual = math.inf

    def left(self, view: SequenceView) -> float:
        """Tokens that are still to come: as many as answers usually have, or as there were; never more than the limit.

        An answer that is longer than others already goes on for about as long again.
        """
        most, done = view.request.params.max_tokens, len(view.tokens) - view.prompt_length
        limit = math.inf if most is None else most - done
        return min(limit, max(self._usual, done))

    def learn(self, view: SequenceView) -> None:
        """An answer is over."""
        done = len(view.tokens) - view.prompt_length
        self._usual = done if self._usual == math.inf else self._usual + _READ * (done - self._usual)


@dataclass
class Prices:
    """What drafts of a few sizes cost a batch, if each of its sequences drafts.

    They are valid as long as ``key`` is: the batch, and the revisions of the estimates that they come from.
    """

    key: tuple[int, ...]
    sequences: int
    rows: int
    """Rows of a plain step: one per sequence, and those of other strategies."""
    steps: list[tuple[int, float, float]]
    """By size: nodes per sequence, seconds of drafting and of the forward for all sequences. The first is plain."""
    sizes: dict[tuple[float, float], int] = field(default_factory=dict)
    """Results of `best_size`, by its arguments."""
    kept_whole: tuple[int, float] | None = None
    """Most nodes and lowest score of drafts of which every node was kept, and none has been rejected since."""

    def __post_init__(self) -> None:
        self._free = all(drafting <= FREE * forward for _, drafting, forward in self.steps)

    @property
    def token(self) -> float:
        """Seconds of plain decoding per token."""
        return self.steps[0][2] / self.rows

    def best_size(self, record: Record, depth: DraftDepth) -> int:
        """The number of nodes with the most tokens per second if all sequences draft so many; 0 if plain is fastest.

        If drafting is free, the number that pays at the highest acceptance: trimming cuts drafts that are less likely.
        """
        share = _SURE if self._free else round(record.share, 3)
        key = share, round(depth.share, 2)
        size = self.sizes.get(key)
        if size is None:
            best = min(self.steps, key=lambda step: self._seconds(step, share, depth))
            size = self.sizes[key] = best[0]
        return size

    def saved(self, size: int, record: Record, depth: DraftDepth) -> float:
        """Seconds that drafts of so many nodes are expected to save a sequence for each token that it decodes."""
        step = next(each for each in self.steps if each[0] == size)
        plain, drafted = (self._seconds(each, record.share, depth) for each in (self.steps[0], step))
        return plain - drafted

    def _seconds(self, step: tuple[int, float, float], share: float, depth: DraftDepth) -> float:
        """Seconds of a sequence's token if all sequences draft so."""
        nodes, drafting, forward = step
        accepted = expected_accepted(share, depth.of(nodes))
        return (drafting + forward) / (self.rows / self.sequences + accepted)


def sizes(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... up to ``most``."""
    below = {size for power in range(12) for size in (1 << power, 3 << power) if size < most}
    return [0, *sorted(below), most]
