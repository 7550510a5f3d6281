"""Estimates the seconds of steps on this machine, from a few timed forwards at the start and every later step.

The estimates can be saved for later processes, which then need to measure only the present speed of the machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from parlay.cost.memory_speed import MemorySpeed
from parlay.types import KeptCost

ROWS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 18, 20, 21, 24, 25, 28, 29, 32),
    *(33, 40, 41, 48, 49, 64, 65, 96, 97, 128, 129, 192, 193, 256, 384, 512),
)
"""Row counts that have an estimate. The cost of other row counts is interpolated.

Kernels multiply several rows at a time. So the cost may jump by a fifth after multiples of 4 and of 16, where one
further row costs as much as several.
"""

_CONTEXTS = tuple(1 << power for power in range(9, 24))  # upper ends of the buckets: 512, 1024, ...
_PRIOR_SECONDS = 0.01
_PRIOR_ROW = 0.03  # guessed cost of a further row, as a share of a forward of one row: typical of small models on CPUs

_FIRST_RECORDS = 4  # the first estimate of a row count is the shortest of this many records
_WINDOW = 0.2  # relative errors are clipped to this, because a delay may be of any size
_UP, _DOWN = (
    0.22,
    0.5,
)  # a slower (quicker) step moves all estimates by this share of its error; unequal shares give a low quantile
_CHANCE_RUN = 3  # if more slower (or quicker) steps than this follow each other, the machine's speed has changed
_OWN_SHARE = 0.2  # the estimate of the measured row count moves further than the other estimates by this share

_RECORDS_TO_LOWER = 32  # after this many records, estimates that none of them measured are lowered
_TRUST_DECAY = 0.975  # decay of trust at that time: an estimate with ten records is trusted for 3,000 further records
_REVISED = 0.1  # relative change of an estimate that counts as a revision

# A forward takes (arithmetic^_BOTH + reading^_BOTH)^(1/_BOTH) seconds: either alone, if the other takes much less.
_BOTH = 5

_MIN_SECONDS, _MAX_SECONDS = 1e-9, 1e9  # seconds of any forward
_STEPS_TO_KEEP = 32  # steps after which the estimates are worth keeping


class _Curve:
    """Seconds for each of `ROWS` in one bucket of context lengths, and how often each row count was measured."""

    __slots__ = ("level", "measured", "reading", "recent", "records", "run", "seconds", "slower", "trusted", "watched")

    def __init__(self, seconds: Sequence[float], measured: Sequence[int], reading: float = 0.0) -> None:
        self.seconds = list(seconds)
        self.reading = reading  # seconds in which memory gave all weights when these were measured; 0: not known
        self.measured = list(measured)
        self.recent = [0] * len(ROWS)  # records of each row count since `_lower_untouched` last ran
        self.records = 0  # the sum of ``recent``
        self.trusted = [0.0] * len(ROWS)  # records of each row count, older records weighted less
        self.slower, self.run = False, 0  # whether the last step was slower than estimated; steps like it in a row
        self.watched = list(seconds)  # the estimates at the last revision
        self.level = seconds[0]  # seconds of one row after a short context, when the curve was last measured

    def kept(self) -> tuple[float, ...]:
        """Return the curve as numbers: the level, for each of `ROWS` its seconds, measurements and trust, and
        ``reading``."""
        measured = [min(count, _FIRST_RECORDS) for count in self.measured]
        return (self.level, *self.seconds, *measured, *self.trusted, self.reading)

    def scale(self, level: float) -> None:
        """Scale the curve to a machine on which a forward of one row after a short context takes ``level`` seconds."""
        ratio = level / self.level
        self.seconds = [estimate * ratio for estimate in self.seconds]
        self.watched, self.level = list(self.seconds), level

    @staticmethod
    def restored(numbers: Sequence[float]) -> _Curve:
        """Make a curve from the numbers of `kept`. Raises ValueError if the numbers are malformed."""
        if len(numbers) != 3 * len(ROWS) + 2 or not all(0 <= number < math.inf for number in numbers):
            raise ValueError(f"{len(numbers)} numbers are not estimates of {len(ROWS)} row counts")
        level, *rest, reading = numbers
        seconds, measured, trusted = rest[: len(ROWS)], rest[len(ROWS) : 2 * len(ROWS)], rest[2 * len(ROWS) :]
        if not all(_MIN_SECONDS < each < _MAX_SECONDS for each in (level, reading or level, seconds[0], seconds[-1])):
            raise ValueError("a forward takes no time, or years")
        curve = _Curve(list(accumulate(seconds, max)), list(map(int, measured)), reading)
        curve.level, curve.trusted = level, trusted
        return curve

    def with_memory(self, seconds: float, reading: float) -> float:
        """Convert an estimate of this curve to memory that gives all weights in ``reading`` seconds."""
        if not reading or not self.reading:
            return seconds
        share = min(self.seconds[0], self.reading) / seconds  # a forward of one row takes at least as long as reading
        return float(seconds * (1 + ((reading / self.reading) ** _BOTH - 1) * share**_BOTH) ** (1 / _BOTH))

    def convert(self, reading: float) -> None:
        """Let the curve hold for memory that gives all weights in ``reading`` seconds."""
        self.seconds = [self.with_memory(seconds, reading) for seconds in self.seconds]
        self.reading, self.watched = reading, list(self.seconds)

    def at(self, rows: int) -> float:
        """Return the seconds of a forward of ``rows`` rows."""
        high = min(bisect_left(ROWS, rows), len(ROWS) - 1)
        if high == 0 or ROWS[high] == rows:
            return self.seconds[high]
        slope = (self.seconds[high] - self.seconds[high - 1]) / (ROWS[high] - ROWS[high - 1])
        return self.seconds[high] + slope * (rows - ROWS[high])  # also extrapolates beyond the last

    def learn(self, rows: int, seconds: float) -> bool:
        """Record a step of ``rows`` rows.

        Returns whether the estimate of this row count has moved by more than `_REVISED` since the last revision, which
        is the last time that this returned True.
        """
        place = _nearest(rows)
        ratio = seconds / self.at(rows)
        if self.measured[place] >= _FIRST_RECORDS:
            self._follow(place, ratio)
        elif ratio < 1 or not self.measured[place]:
            self._set(place, ratio)
        self.measured[place] += 1
        self.recent[place] += 1
        self.trusted[place] += 1
        self.records += 1
        _keep_rising(self.seconds, place)
        if self.records >= _RECORDS_TO_LOWER:
            self._lower_untouched()
        moved = abs(self.seconds[place] - self.watched[place]) > _REVISED * self.watched[place]
        if moved:
            self.watched = list(self.seconds)
        return moved

    def _set(self, place: int, ratio: float) -> None:
        """Multiply the first estimate of a row count by ``ratio``, and the guesses for more rows as well."""
        known = [other for other in range(place + 1, len(ROWS)) if self.measured[other]]
        most = self.seconds[known[0]] if known else math.inf
        fewer = [other for other in range(place) if self.measured[other]]
        if fewer:  # several forwards with fewer rows could do the same work, so the rows cost at most as much
            times, rest = divmod(ROWS[place], ROWS[fewer[-1]])
            longest = times * self.seconds[fewer[-1]] + (self.at(rest) if rest else 0.0)
            ratio = min(ratio, longest / self.seconds[place])
            # If the step was quicker than a step of fewer rows, the machine became faster. That does not tell how much
            # these rows cost relative to fewer, so the estimate stays at least as high.
            ratio = max(ratio, self.seconds[fewer[-1]] / self.seconds[place])
        for guessed in range(place, known[0] if known else len(ROWS)):
            self.seconds[guessed] = min(self.seconds[guessed] * ratio, most)

    def _lower_untouched(self) -> None:
        """Lower the estimates of row counts that were not measured for a long time.

        A policy never tries row counts that seem too expensive, so a wrong high estimate would stay for ever. An
        estimate with more records is trusted for longer before it is lowered. Otherwise the policy would often try
        drafts again that were too expensive before.
        """
        least = base = next(place for place, count in enumerate(self.recent) if count)
        row = _PRIOR_ROW * self.seconds[base]
        for place in range(base + 1, len(ROWS)):
            if self.recent[place] or self.trusted[place] >= 1:
                base = place
                row = (self.seconds[base] - self.seconds[least]) / (ROWS[base] - ROWS[least])
                continue
            likely = self.seconds[base] + row * (ROWS[place] - ROWS[base])
            if self.seconds[place] > likely:
                self.seconds[place] = math.sqrt(self.seconds[place] * likely)
                self.measured[place] = 0
        self.seconds = list(accumulate(self.seconds, max))
        self.trusted = [_TRUST_DECAY * records for records in self.trusted]
        self.recent, self.records = [0] * len(ROWS), 0

    def _follow(self, place: int, ratio: float) -> None:
        """Move all estimates towards the measured step, and the estimate of its row count a little further.

        ``ratio`` is the step's measured time over its estimate. The error that counts is limited to ``window``, which
        grows once several steps in a row were slower, or quicker, than estimated.
        """
        slower = ratio > 1
        self.run = self.run + 1 if slower == self.slower else 1
        self.slower = slower
        window = _WINDOW * max(1, self.run - _CHANCE_RUN)
        error = min(max(math.log(ratio), -window), window)
        step = error * (_UP if error > 0 else _DOWN)
        factor = math.exp(step)
        self.seconds = [estimate * factor for estimate in self.seconds]
        self.seconds[place] *= 1 + _OWN_SHARE * step


class MeasuredCost:
    """Estimates the seconds of a step by rows and context; implements `parlay.types.Cost`.

    Each bucket of context lengths has one curve over `ROWS`. An estimate is a low quantile of recent measurements: a
    slow step moves it by a few percent, however slow it was. When the machine becomes slower, all row counts of the
    bucket move together. So their relative costs stay the same even if only some of them are measured. A bucket that
    was never measured starts from the curve of the nearest bucket. The first bucket starts from ``samples``:
    seconds by number of rows, at a short context. Without samples it starts from a guess, which the first record
    scales. The first estimate of a row count is the shortest of its first records. Curves never fall with rows: a new
    measurement moves older estimates that contradict it.

    When ``memory`` becomes slower, few rows cost more and many rows, for which arithmetic takes longer, do not. So each
    curve holds for the fastest memory so far, which hides least of what rows cost; estimates and records are converted.
    """

    def __init__(self, samples: Mapping[int, float] | None = None, memory: MemorySpeed | None = None) -> None:
        self.revision = 0
        """Increased whenever an estimate has moved by more than a tenth."""
        self._curves: dict[int, _Curve] = {}  # by context bucket
        self._guessed, self._memory = not samples, memory
        self._steps = 0
        if samples:
            most = max(samples)  # estimates up to this row count come from timed forwards
            self._curves[0] = _Curve(_fill(samples), [_FIRST_RECORDS * (rows <= most) for rows in ROWS], self._reading)

    @property
    def _reading(self) -> float:
        """Seconds in which memory gives all weights at present; 0: not known."""
        return 0.0 if self._memory is None else self._memory.seconds

    def forward(self, rows: int, context: int) -> float:
        """Return the estimated seconds of a forward of ``rows`` rows after ``context`` cached tokens."""
        curve = self._curve(bisect_left(_CONTEXTS, context))
        return curve.with_memory(curve.at(rows), self._reading)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Refine the estimates by a step that took ``seconds``."""
        self._steps += 1
        if self._memory is not None and self._memory.look():
            self._follow_memory(self._memory.seconds)
        curve = self._curve(bisect_left(_CONTEXTS, context))
        if self._guessed:
            self._guessed = False
            ratio = seconds / curve.at(rows)
            curve.seconds, curve.reading = [estimate * ratio for estimate in curve.seconds], self._reading
        estimate = curve.at(rows)
        self.revision += curve.learn(rows, seconds * estimate / curve.with_memory(estimate, self._reading))
        curve.level = self._curve(0).at(1)

    def _follow_memory(self, reading: float) -> None:
        self.revision += 1
        for curve in self._curves.values():
            if reading < curve.reading:
                curve.convert(reading)

    def kept(self) -> KeptCost:
        """Return the learned estimates, for other processes on this machine.

        They are empty before `_STEPS_TO_KEEP` steps. Any thread may call.
        """
        if self._steps < _STEPS_TO_KEEP:
            return {}
        return {str(_CONTEXTS[bucket]): curve.kept() for bucket, curve in list(self._curves.items())}

    @staticmethod
    def restored(
        kept: KeptCost, timed: Sequence[tuple[int, float]] = (), memory: MemorySpeed | None = None
    ) -> MeasuredCost:
        """Restore estimates that another process learned, scaled to the present speed of the machine.

        ``timed`` has the rows and seconds of some forwards after a short context. Of the forwards with the fewest rows,
        the shortest scales all estimates. Then each forward is recorded like a step. Without forwards the estimates are
        not scaled. Raises ValueError if ``kept`` is malformed.
        """
        cost = MeasuredCost(memory=memory)
        buckets = {str(context): bucket for bucket, context in enumerate(_CONTEXTS)}
        if not kept or not kept.keys() <= buckets.keys():
            raise ValueError("there are no estimates by context")
        cost._guessed = False
        cost._curves = {buckets[context]: _Curve.restored(numbers) for context, numbers in kept.items()}
        rows, seconds = min(timed, default=(1, cost.forward(1, 1)))
        level = cost._curve(0).at(1) * seconds / cost.forward(rows, 1)
        for curve in cost._curves.values():
            curve.scale(level)
            curve.reading = curve.reading or cost._reading
        for rows, seconds in timed:
            cost.record(rows, 1, seconds)
        cost._steps = 0
        return cost

    def _curve(self, bucket: int) -> _Curve:
        curve = self._curves.get(bucket)
        if curve is None:
            curve = self._curves[bucket] = self._neighbour(bucket)
        return curve

    def _neighbour(self, bucket: int) -> _Curve:
        if not self._curves:
            return _Curve(_fill({1: _PRIOR_SECONDS}), [0] * len(ROWS), self._reading)
        nearest = self._curves[min(self._curves, key=lambda other: abs(other - bucket))]
        curve = _Curve(nearest.seconds, nearest.measured, nearest.reading)
        curve.level, curve.trusted = nearest.level, list(nearest.trusted)
        return curve


def _nearest(rows: int) -> int:
    """Return the index in `ROWS` of the row count nearest to ``rows``."""
    place = min(bisect_left(ROWS, rows), len(ROWS) - 1)
    return place - 1 if place and rows - ROWS[place - 1] < ROWS[place] - rows else place


def _keep_rising(curve: list[float], place: int) -> None:
    """Raise estimates after ``place`` and lower those before it until the curve never falls."""
    now = curve[place]
    for above in range(place + 1, len(curve)):
        if curve[above] >= now:
            break
        curve[above] = now
    for below in range(place - 1, -1, -1):
        if curve[below] <= now:
            break
        curve[below] = now


def _fill(samples: Mapping[int, float]) -> list[float]:
    """Make a curve over `ROWS` through the samples, with straight lines between and beyond them.

    With one sample, the slope is guessed. Delays can only make a time longer. So a sample is lowered to the time of a
    forward with more rows if that is shorter, and to the time of several forwards with fewer rows that do its work: of
    17 rows, to that of 16 rows and of one.
    """
    known = sorted(samples.items())
    if len(known) == 1:
        rows, seconds = known[0]
        per_row = seconds * _PRIOR_ROW / (1 + _PRIOR_ROW * (rows - 1))
        return [seconds + per_row * (count - rows) for count in ROWS]
    least = list(accumulate((seconds for _, seconds in reversed(known)), min))[::-1]
    rising: list[tuple[int, float]] = []
    for (rows, _), seconds in zip(known, least, strict=True):
        rising.append((rows, min(seconds, _by_fewer(rising, rows))))
    return [_between(rising, count) for count in ROWS]


def _by_fewer(known: Sequence[tuple[int, float]], rows: int) -> float:
    """Seconds of several forwards with known numbers of rows, all less than ``rows``, that do the work of ``rows``."""
    if not known:
        return math.inf
    fewer, seconds = known[-1]
    times, rest = divmod(rows, fewer)
    return times * seconds + (next(each for count, each in known if count >= rest) if rest else 0.0)


def _between(known: list[tuple[int, float]], rows: int) -> float:
    high = min(max(1, bisect_left(known, (rows, 0.0))), len(known) - 1)
    (rows_a, seconds_a), (rows_b, seconds_b) = known[high - 1], known[high]
    slope = (seconds_b - seconds_a) / (rows_b - rows_a)
    return max(seconds_a, seconds_b + slope * (rows - rows_b)) if rows >= rows_a else seconds_a
