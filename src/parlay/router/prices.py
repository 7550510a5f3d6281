"""Prices of drafts, in seconds: of proposals as measured, of prompts that drafters read, and of rows in a batch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from parlay.router.acceptance import checked
from parlay.router.goals import USUAL, Aim
from parlay.router.ledger import AT_ONCE
from parlay.types import Cost, SequenceView

_LONG = 64  # nodes of the longest drafts, about
FREE = 0.01  # share of a forward: drafting that costs less counts as free
_DECAY = 0.9  # per proposal
_ORIGIN = 0.1  # weight, in proposals, of the assumption that a proposal of no levels costs nothing
_FEW = 4  # the quickest of this many first proposals sets the level
_SLOWER = 0.5  # weight of a proposal that took longer than expected
_READ = 0.3  # weight of the newest prompt or answer in its estimate
_DEEPER = 0.1  # weight of the newest draft in the estimate of depth
_UNLIMITED, _MOST_NODES = 1 << 20, 1 << 12  # nodes per step, without a power limit and with one
_MOVED = 0.1  # relative change of an estimate that leads to new prices, if it is at least `FREE` of a forward


class DraftSeconds:
    """Estimates what a proposal for one sequence costs: a fixed time plus a time per level.

    Both come from least squares over past proposals, with less weight on older ones. Until proposals of several depths
    were seen, the fixed time is taken to be about 0. Delays are noise: among the first few proposals the quickest sets
    the level, and a later one that took longer than expected gets less weight.
    """

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """Raised when an estimate has moved by more than a tenth, and by at least `FREE` of a forward."""
        self._fixed = self._per_level = 0.0
        self._watched = (0.0, 0.0)  # both times at the last revision
        self._seen = 0
        self._count, self._levels, self._squares = _ORIGIN, 0.0, 0.0
        self._seconds = self._products = 0.0

    def kept(self) -> tuple[float, ...]:
        """The learned state, as numbers for `restore`."""
        return (self._count, self._levels, self._squares, self._seconds, self._products)

    def restore(self, kept: Sequence[float]) -> None:
        """Start from what another router learned. The first proposals may still show that it was too slow.

        Raises ValueError if the numbers are malformed.
        """
        count, self._levels, self._squares, self._seconds, self._products = checked(kept, 5)
        self._count = max(count, _ORIGIN)
        self._fit()
        self._watched = self._fixed, self._per_level
        self.revision += 1

    def scale(self, factor: float) -> None:
        """Convert the estimates to a machine that takes ``factor`` times as long."""
        self._seconds, self._products = self._seconds * factor, self._products * factor
        self._fit()
        self._watched = self._fixed, self._per_level

    @property
    def is_known(self) -> bool:
        return self._count > _ORIGIN

    def of(self, levels: float) -> float:
        """Seconds of a proposal of ``levels`` levels; 0 before any was seen."""
        return self._fixed + self._per_level * levels

    def own_work(self, levels: float, seconds: float, slowdown: float, forward: float, most: float) -> float:
        """The seconds that a proposal would have taken without delays.

        Whatever made the step's forward ``slowdown`` times slower is assumed to have slowed drafting, too. The rest is
        cut to 4 times the usual plus a quarter of a ``forward``. That is enough for drafters that are expensive in one
        step out of four and free in the others. The first proposal counts for at most ``most``.
        """
        usual = self.of(levels)
        if not usual:
            return min(seconds / slowdown, most)
        return min(seconds, max(usual, seconds / slowdown), 4 * usual + 0.25 * forward)

    def learn(self, levels: float, seconds: float, forward: float) -> None:
        """Learn that proposals of ``levels`` levels on average took ``seconds`` each.

        ``forward``: seconds of the step's forward, per sequence.
        """
        expected = self.of(levels)
        if expected and self._seen < _FEW:
            factor = min(1.0, seconds / expected)
            self._seconds, self._products = self._seconds * factor, self._products * factor
        weight = _SLOWER if expected and seconds > expected else 1.0
        self._seen += 1
        self._count = self._count * _DECAY + weight + (1 - _DECAY) * _ORIGIN
        self._levels = self._levels * _DECAY + weight * levels
        self._squares = self._squares * _DECAY + weight * levels**2
        self._seconds = self._seconds * _DECAY + weight * seconds
        self._products = self._products * _DECAY + weight * seconds * levels
        self._fit()
        fixed, per_level = self._watched
        known = fixed + per_level * levels
        if abs(self.of(levels) - known) > max(_MOVED * known, FREE * forward):
            self._watched = self._fixed, self._per_level
            self.revision += 1

    def _fit(self) -> None:
        spread = self._count * self._squares - self._levels**2
        if spread > 0:
            self._per_level = max(0.0, (self._count * self._products - self._levels * self._seconds) / spread)
            self._fixed = max(0.0, (self._seconds - self._per_level * self._levels) / self._count)


class DraftDepth:
    """Estimates how deep drafts are: one level, plus a share of a level for each node after the first."""

    def __init__(self) -> None:
        self.share = 1.0

    def of(self, nodes: float) -> float:
        """Levels of a draft of ``nodes`` nodes."""
        return 1 + (nodes - 1) * self.share if nodes else 0.0

    def learn(self, nodes: int, depth: int) -> None:
        """Learn from a draft of ``nodes`` nodes that had ``depth`` levels."""
        if nodes > 1:
            self.share += _DEEPER * ((depth - 1) / (nodes - 1) - self.share)


class Reading:
    """Estimates how long a drafter takes to read a prompt, from the prompts that it has read."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self._seen = False

    def kept(self) -> tuple[float, ...]:
        """The learned state, as numbers for `restore`."""
        return (self._per_token,) if self._seen else ()

    def restore(self, kept: Sequence[float]) -> None:
        """Start from what another router learned. Raises ValueError if the numbers are malformed."""
        if kept:
            (self._per_token,) = checked(kept, 1)
            self._seen = True

    def scale(self, factor: float) -> None:
        """Convert the estimate to a machine that takes ``factor`` times as long."""
        self._per_token *= factor

    def of(self, tokens: int) -> float:
        """Seconds for a prompt of ``tokens`` tokens; 0 before any was seen."""
        return self._per_token * tokens

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn that a prompt of ``tokens`` tokens took ``seconds``."""
        per_token = max(0.0, seconds) / max(tokens, 1)
        self._per_token += (_READ if self._seen else 1.0) * (per_token - self._per_token)
        self._seen = True


class AnswerLengths:
    """Estimates how many tokens of an answer remain, which a drafter that reads the prompt could speed up."""

    def __init__(self) -> None:
        self._usual = math.inf

    def left(self, view: SequenceView) -> float:
        """Expected tokens to come: as many as answers usually have, or as there are so far; at most the limit.

        An answer that is already longer than others is expected to go on for about as long again.
        """
        most, done = view.request.params.max_tokens, len(view.tokens) - view.prompt_length
        limit = math.inf if most is None else most - done
        return min(limit, max(self._usual, done))

    def learn(self, view: SequenceView) -> None:
        """Learn the length of an answer that has ended."""
        done = len(view.tokens) - view.prompt_length
        self._usual = done if self._usual == math.inf else self._usual + _READ * (done - self._usual)


Size = tuple[int, float, float, float]
"""Nodes to ask an arm for, expected tokens, their worth, and their cost in seconds."""


class Drafts(NamedTuple):
    """The sizes of one arm's drafts, with the levels and the seconds of each size."""

    sizes: list[int]
    depths: list[float]
    seconds: list[float]


KnownSizes = tuple[Drafts, dict[tuple[int, int], Size]]
"""The drafts of one arm and, at about one rate, its best size by (share in hundredths, limit)."""


class StepPrices:
    """Prices of rows in this batch, in seconds. Valid while ``key`` is: the batch, and the revision of the cost.

    ``rows``: those of a plain step, which are one per sequence and those of other strategies. ``plain``: seconds of a
    plain step. ``token``: seconds per token of plain decoding. For a goal in joules, energy counts as the seconds in
    which the machine draws it without rows. ``room``: the most nodes of a step within the power limit. ``most``: the
    most nodes worth asking for per sequence. ``rate``: what a second is worth, in tokens. ``floor``: a node whose path
    probability is lower is never verified; it is a quarter of what the cheapest row costs. ``rows`` and nodes are
    counted without guidance; in the mean of the batch, each stands for ``copies`` rows of the forward.
    """

    def __init__(
        self,
        key: tuple[float, ...],
        cost: Cost,
        sequences: int,
        rows: int,
        context: int,
        *,
        aim: Aim = USUAL,
        copies: float = 1.0,
    ) -> None:
        self._copies = copies
        self.key, self.sequences, self.rows, self.context, self.goal = key, sequences, rows, context, aim.goal
        self.shared = 1.0 if sequences == 1 else AT_ONCE
        """The part of the share for trials that the sequences together may lose."""
        self._is_limited = aim.power is not None and aim.most_watts > 0
        self._cost, self._aim, self._factor, self._row_seconds = cost, aim, aim.effort.price, aim.row_seconds
        self._of_nodes: dict[int, float] = {0: 0.0}
        self.rate = 0.0
        self.drafts: dict[tuple[int, ...], Drafts] = {}
        """By the arm and all that the price of its drafts depends on."""
        self.known: dict[int, KnownSizes] = {}
        """By arm, at the present rate."""
        self.known_at: dict[tuple[int, ...], KnownSizes] = {}
        """By the rate in hundredths of plain decoding's, and the same."""
        self._plain_then, self._slower = self._modelled(rows), 1.0
        self.plain = self._plain_then + self._row_seconds * rows * copies
        self._of_rows = {rows: self.plain}
        self.token = self.plain / rows
        self.room = self._within_power()
        self.most = -(-self.room // sequences)
        self._floor = -1.0

    def begin(self) -> None:
        """Begin another step at these prices. The speed of the machine is looked up again when it is needed."""
        self._slower = 0.0

    @property
    def floor(self) -> float:
        if self._floor < 0:
            self._floor = 0.25 * min([self.of_nodes(nodes) / nodes for nodes in (1, 2, 4, 8)]) / self.token
        return self._floor

    def of_nodes(self, nodes: int) -> float:
        """Seconds that ``nodes`` nodes add to a step, if each sequence has as many."""
        seconds = self._of_nodes.get(nodes)
        if seconds is None:
            more = self._forward(self.rows + nodes * self.sequences) - self.plain
            seconds = self._of_nodes[nodes] = self._factor * more / self.sequences
        return seconds

    def within(self, seconds: float) -> int:
        """The most nodes, of the powers of two up to `_LONG`, that add at most ``seconds`` to a step; 0 if one adds
        more."""
        nodes = 0
        while nodes < _LONG and self.of_nodes(2 * nodes or 1) <= seconds:
            nodes = 2 * nodes or 1
        return nodes

    def is_free(self, seconds: float) -> bool:
        """Whether a proposal of ``seconds`` for each sequence costs next to nothing beside the forward."""
        return seconds * self.sequences <= FREE * self.plain

    def of_drafting(self, seconds: float) -> float:
        """Price of ``seconds`` of drafting."""
        return self._factor * seconds

    def of_step(self, drafting: float, rows: int) -> float:
        """Price of a step with ``drafting`` seconds of drafting and a forward of ``rows`` rows.

        Infinite if rows beyond those of plain decoding exceed the power limit.
        """
        if self._is_limited and rows > self.rows and not self._allows(rows):
            return math.inf
        return self.plain + self._factor * (drafting - self.plain + self._forward(rows))

    @property
    def exceeds_power(self) -> bool:
        """Whether plain decoding alone exceeds the power limit."""
        return not self._allows(self.rows)

    def _allows(self, rows: int) -> bool:
        return not self._aim.most_watts or self._aim.allows(round(rows * self._copies), self._modelled(rows))

    def _modelled(self, rows: int) -> float:
        return self._cost.forward(round(rows * self._copies), self.context)

    def _forward(self, rows: int) -> float:
        """Seconds of a forward, at the speed that the machine had when these prices were made.

        All prices must be on one scale: otherwise, on a machine that becomes slower, later look-ups would make rows
        seem dearer.
        """
        seconds = self._of_rows.get(rows)
        if seconds is None:
            if not self._slower:
                self._slower = self._modelled(self.rows) / self._plain_then
            seconds = self._modelled(rows) / self._slower + self._row_seconds * rows * self._copies
            self._of_rows[rows] = seconds
        return seconds

    def _within_power(self) -> int:
        """How many nodes a step may have.

        More rows draw more power, except where their seconds jump; see `of_step`.
        """
        if not self._aim.most_watts:
            return _UNLIMITED
        rows = range(self.rows + 1, self.rows + 1 + _MOST_NODES)
        return bisect_left(rows, True, key=lambda rows: not self._allows(rows))

    def set_rate(self, rate: float) -> None:
        """Set what a second is worth, in tokens."""
        self.rate, self.known = rate, {}


def sizes(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... up to ``most``."""
    below = {size for power in range(12) for size in (1 << power, 3 << power) if size < most}
    return [0, *sorted(below), most]
