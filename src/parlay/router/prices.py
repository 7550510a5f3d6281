"""Prices of drafts: seconds of proposals as measured, of prompts that drafters read, and of rows in a batch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from parlay.router.acceptance import checked
from parlay.router.goals import USUAL, Aim
from parlay.types import Cost, SequenceView

FREE = 0.01  # of a forward: drafting that costs less counts as free
_DECAY = 0.9  # per proposal
_ORIGIN = 0.1  # weight, in proposals, of the assumption that a proposal of no nodes costs nothing
_FEW = 4  # of so many first proposals the quickest sets the level
_SLOWER = 0.5  # weight of a proposal that took longer than expected
_READ = 0.3  # how far the estimates of reading and of answers follow one of them
_DEEPER = 0.1  # how far the estimate of depth follows a draft
_UNLIMITED, _MOST_NODES = 1 << 20, 1 << 12  # nodes of a step, without a limit of power and with one
_MOVED = 0.1  # relative change of an estimate that leads to new prices, if it is at least `FREE` of a forward


class DraftSeconds:
    """Estimates what a sequence's proposal costs: a fixed time, and a time per node.

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
        """Return what it has learned, as numbers for `restore`."""
        return (self._count, self._nodes, self._squares, self._seconds, self._products)

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned; the first proposals may still show that it was too slow.

        Raises ValueError if the numbers are malformed.
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

    @property
    def is_known(self) -> bool:
        return self._count > _ORIGIN

    def of(self, nodes: float) -> float:
        """Seconds of a proposal of so many nodes; 0 before any was seen."""
        return self._fixed + self._per_node * nodes

    def own_work(self, nodes: float, seconds: float, slowdown: float, forward: float, most: float) -> float:
        """The seconds that a proposal would have taken without delays.

        What slowed the step's forward, by ``slowdown``, is assumed to have slowed drafting too. The rest is cut to 4
        times the usual plus a quarter of a ``forward``: enough for drafters that are expensive in one step out of four
        and free in the others. The first one counts for at most ``most``.
        """
        usual = self.of(nodes)
        if not usual:
            return min(seconds / slowdown, most)
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
    """Estimates how long a drafter reads a prompt, by the prompts that it has read."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self._seen = False

    def kept(self) -> tuple[float, ...]:
        """Return what it has learned, as numbers for `restore`."""
        return (self._per_token,) if self._seen else ()

    def restore(self, kept: Sequence[float]) -> None:
        """Go on from what another one has learned. Raises ValueError if the numbers are malformed."""
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


Size = tuple[int, float, float, float]
"""Nodes to ask an arm for, tokens that they are expected to bring, what these are worth, and the seconds they cost."""


class Drafts(NamedTuple):
    """The sizes of one arm's drafts, and the levels and seconds of each."""

    sizes: list[int]
    depths: list[float]
    seconds: list[float]


class KnownSizes(NamedTuple):
    """The drafts of one arm, and the best size by its share in hundredths and its limit, at about one rate."""

    drafts: Drafts
    sizes: dict[tuple[int, int], Size]


class StepPrices:
    """Prices of rows in this batch. Valid as long as ``key`` is: the batch, and the revision of the cost.

    ``rows`` of a plain step: one per sequence, and those of other strategies. ``plain`` are its seconds, ``token``
    those of plain decoding per token. For a goal in joules they are seconds in which the machine draws as many without
    rows. Within the limit of power, ``room`` nodes may be verified in all, and ``most`` are worth asking each sequence
    for. A second is worth ``rate`` tokens. A node whose path probability is below ``floor``, a quarter of what the
    cheapest row costs, is never verified. ``rows`` and nodes are those of requests that are not guided; each stands for
    ``copies`` rows of the forward, in the mean of the batch.
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
        self._is_limited = aim.power is not None and aim.most_watts > 0
        self._cost, self._aim, self._factor, self._row_seconds = cost, aim, aim.effort.price, aim.row_seconds
        self._of_nodes: dict[int, float] = {0: 0.0}
        self.rate = 0.0
        self.drafts: dict[tuple[float, ...], Drafts] = {}
        """By `ArmState.price_key`."""
        self.known: dict[int, KnownSizes] = {}
        """By arm, at the present rate."""
        self._known: dict[tuple[float, ...], KnownSizes] = {}
        self._plain_then, self._slower = self._modelled(rows), 1.0
        self.plain = self._plain_then + self._row_seconds * rows * copies
        self._of_rows = {rows: self.plain}
        self.token = self.plain / rows
        self.room = self._within_power()
        self.most = -(-self.room // sequences)
        self._floor = -1.0

    def begin(self) -> None:
        """Begin another step at these prices: the speed of the machine is looked up again when it is needed."""
        self._slower = 0.0

    @property
    def floor(self) -> float:
        if self._floor < 0:
            self._floor = 0.25 * min([self.of_nodes(nodes) / nodes for nodes in (1, 2, 4, 8)]) / self.token
        return self._floor

    def of_nodes(self, nodes: int) -> float:
        """Seconds that so many nodes take of a step, if each sequence has as many."""
        seconds = self._of_nodes.get(nodes)
        if seconds is None:
            more = self._forward(self.rows + nodes * self.sequences) - self.plain
            seconds = self._of_nodes[nodes] = self._factor * more / self.sequences
        return seconds

    def is_free(self, seconds: float) -> bool:
        """Whether a proposal of each sequence that takes so long costs next to nothing beside the forward."""
        return seconds * self.sequences <= FREE * self.plain

    def of_drafting(self, seconds: float) -> float:
        """Return what so many seconds of drafting count for."""
        return self._factor * seconds

    def of_steps(self, drafting: float, rows: Sequence[int]) -> list[float]:
        """Return what steps count for: so many seconds of drafting, and a forward of so many rows.

        Without end if rows beyond those of plain decoding draw more than the limit of power.
        """
        known, factor = self._of_rows, self._factor
        base = self.plain + factor * (drafting - self.plain)
        steps = [base + factor * (known.get(count) or self._forward(count)) for count in rows]
        if self._is_limited:
            allowed = [count <= self.rows or self._allows(count) for count in rows]
            return [step if may else math.inf for step, may in zip(steps, allowed, strict=True)]
        return steps

    @property
    def exceeds_power(self) -> bool:
        """Whether plain decoding alone draws more than the limit."""
        return not self._allows(self.rows)

    def _allows(self, rows: int) -> bool:
        return not self._aim.most_watts or self._aim.allows(round(rows * self._copies), self._modelled(rows))

    def _modelled(self, rows: int) -> float:
        return self._cost.forward(round(rows * self._copies), self.context)

    def _forward(self, rows: int) -> float:
        """Seconds of a forward at the speed that the machine had when these prices were made: what is looked up later
        lies on the same scale, or a machine that becomes slower would seem to make rows dearer.
        """
        seconds = self._of_rows.get(rows)
        if seconds is None:
            if not self._slower:
                self._slower = self._modelled(self.rows) / self._plain_then
            seconds = self._modelled(rows) / self._slower + self._row_seconds * rows * self._copies
            self._of_rows[rows] = seconds
        return seconds

    def _within_power(self) -> int:
        """How many nodes a step may have. More rows draw more, except where their seconds jump; see `of_steps`."""
        if not self._aim.most_watts:
            return _UNLIMITED
        rows = range(self.rows + 1, self.rows + 1 + _MOST_NODES)
        return bisect_left(rows, True, key=lambda rows: not self._allows(rows))

    def set_rate(self, rate: float) -> None:
        """Let a second be worth ``rate`` tokens."""
        self.rate, self.known = rate, {}

    def known_of(self, key: tuple[float, ...], drafts: Drafts) -> KnownSizes:
        """Look up what is known of an arm at about this rate. ``key``: its `ArmState.price_key`."""
        at_rate = (round(self.rate * self.token, 2), *key)
        known = self._known.get(at_rate)
        if known is None:
            known = self._known[at_rate] = KnownSizes(drafts, {})
        self.known[int(key[0])] = known
        return known


def sizes(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... up to ``most``."""
    below = {size for power in range(12) for size in (1 << power, 3 << power) if size < most}
    return [0, *sorted(below), most]
