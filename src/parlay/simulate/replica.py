"""Simulates one server. Its steps follow the engine's scheduler; equal steps in a row are simulated as one event.

As in `parlay.engine.scheduler`, a step has a limit on rows. Sequences that decode come first, with a row each and their
drafts, then chunks of prompts in the order of arrival. Waiting requests start in order, if a sequence more is allowed
and its whole text fits into memory. If memory runs out, the sequence that came last loses its cache and waits again.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

from parlay.cost.prompt_rows import PromptRows, Seconds
from parlay.simulate.costs import StepCost, forward_seconds
from parlay.simulate.drafting import Drafting
from parlay.simulate.jobs import Job, Lane, ReplicaLimits
from parlay.simulate.memory import HEADROOM, Memory, paged
from parlay.simulate.prefixes import Prefixes

_MOST_STEPS = 256
"""Limit on the steps that are simulated as one event. Over them, the seconds of a step are assumed to grow linearly."""
_MOST_CHOICES = 1 << 14


class Replica:
    """One server. `submit` gives it a request. At the time `wake` its next event ends; then the caller calls `finish`.

    Counters: ``busy`` seconds, ``rows`` and ``steps`` of forwards, ``preemptions``, and the numbers of prompt tokens
    that requests had (``asked``) and that were cached (``found``). ``version`` changes whenever `wake` may have.
    """

    def __init__(self, number: int, cost: StepCost, drafting: Drafting, limits: ReplicaLimits, seed: int) -> None:
        self.number = number
        self.limits = limits
        self.wake = math.inf
        self.version = 0
        self.busy = 0.0
        self.rows = 0.0
        self.steps = self.preemptions = self.asked = self.found = 0
        self._cost, self._drafting, self._seed = cost, drafting, seed
        self._choices: dict[tuple[object, ...], list[int]] = {}
        """Best numbers of nodes for each kind, by the numbers of sequences and the mean context; a cache."""
        self._ranks = 0
        self._clear()

    def _clear(self) -> None:
        self.waiting: deque[Job] = deque()
        self._feeding: deque[Job] = deque()
        self._lanes: dict[str, Lane] = {}
        self._decoding = 0
        self._context = 0
        """Number of cached tokens of all sequences that decode."""
        self._fed = 0
        """Number of tokens of all sequences in prefill."""
        self._memory = Memory(self.limits.cache_tokens, self._drafting.nodes, self._lanes, self._feeding)
        self._prefixes = Prefixes()
        self._chunks: list[tuple[Job, int]] = []
        self._prompt_rows = PromptRows()
        self._skipping: list[Job] = []
        self._start = 0.0
        self._planned, self._first, self._growth = 0, 0.0, 0.0
        self._refused: Job | None = None
        """The request that last had no room to start, when ``_refused_free`` tokens were free."""
        self._refused_free = 0
        self._step_rows: float = 0

    @property
    def load(self) -> int:
        """Number of requests that wait or run."""
        return len(self.waiting) + len(self._feeding) + self._decoding

    # ------------------------------------------------------------------------------------------------ from outside

    def submit(self, job: Job, now: float) -> None:
        """Take a request. It may start in the next step that begins at the time ``now`` or later."""
        self._ranks += 1
        job.rank, job.lane, job.skips = self._ranks, None, False
        job.text, job.fed = job.request.prompt + job.written, 0
        self.waiting.append(job)
        if self.wake == math.inf:  # begins at once, but after other requests that come at the same time
            self.wake, self._start, self._planned = now, now, 0
            self.version += 1
        elif self._planned > 1 and not self._chunks and len(self.waiting) == 1:
            steps = self._steps_before(now)
            if self._may_admit(job, steps):
                self._cut(steps)

    def finish(self) -> list[Job]:
        """End the planned steps at the time `wake`, and begin the next ones. Returns the requests that are done."""
        now = self.wake
        self._advance(self._planned)
        for job in self._skipping:
            if job.lane is not None:
                job.lane.skipped(job)
        self._skipping = []
        done = self._end_finished(now)
        for job, rows in self._chunks:
            job.fed += rows
            if job.fed >= job.text:
                self._feeding.remove(job)
                self._fed -= job.text
                done += self._begin_decoding(job, now)
        self._begin(now)
        return done

    def kill(self, now: float) -> list[Job]:
        """Lose all requests and the cache. Returns the requests, each with the tokens that it had written by then."""
        if self.wake < math.inf and self._planned:
            steps = self._steps_before(now, whole=True)
            self.busy -= max(0.0, self.wake - now)
            self._advance(steps)
        jobs = [*self.waiting, *self._feeding, *self._running()]
        for job in jobs:
            if job.lane is not None:
                job.written = min(job.request.output - 1, job.lane.written(job))
        self._clear()
        self.wake = math.inf
        self.version += 1
        return sorted(jobs, key=lambda job: job.rank)

    # --------------------------------------------------------------------------------------------------- a segment

    def _begin(self, now: float) -> None:
        """Plan the next step, or the equal steps until something changes."""
        self.version += 1
        self._prompt_rows.learn(now - self._start if self._decoding or self._feeding else 0.0)
        self._start = now
        self._choose_nodes()
        self._chunks = self._take_chunks(admit=not self._make_room())
        sequences = self._decoding + len(self._chunks)
        if not sequences:
            self.wake, self._planned = math.inf, 0
            return
        drafts = self._drafting.nodes > 0
        self._skipping = self._memory.skip_drafts(self._read()) if drafts and not self._fits_drafts() else []
        self._plan(1 if self._chunks or self._skipping else self._steps_to_change())

    def _plan(self, steps: int) -> None:
        """Plan ``steps`` steps from the time ``_start`` on."""
        self._planned = steps
        longer, rows, pairs = self._ahead(steps)
        mean, self._step_rows = self._seconds(longer, rows, pairs)
        self._first = self._seconds(0.0, rows, pairs)[0] if steps > 1 else mean
        self._growth = 2 * (mean - self._first) / max(1, steps - 1)
        self.busy += steps * mean
        self.wake = self._start + steps * mean

    def _steps_before(self, now: float, *, whole: bool = False) -> int:
        """Return how many planned steps, at least 1, begin before a time or, if ``whole``, how many end by then."""
        seconds, half = now - self._start, self._growth / 2
        slope = self._first - half
        steps = seconds / slope if half <= 0 else (math.sqrt(slope * slope + 4 * half * seconds) - slope) / (2 * half)
        if whole:
            return min(self._planned, max(0, math.floor(steps + 1e-9)))
        found = min(self._planned, max(1, math.ceil(steps - 1e-9)))
        if self._drafting.nodes:  # then steps don't grow evenly, so that the estimate may be of a step beside
            while found > 1 and self._total(found - 1) >= seconds:
                found -= 1
            while found < self._planned and self._total(found) < seconds:
                found += 1
        return found

    def _total(self, steps: int) -> float:
        return steps * self._seconds(*self._ahead(steps))[0]

    def _cut(self, steps: int) -> None:
        """Plan only ``steps`` steps, so that a new request can start in the first step after its arrival."""
        if steps < self._planned:
            self.busy -= self.wake - self._start
            self._plan(steps)
            self.version += 1

    def _advance(self, steps: int) -> None:
        for lane in self._lanes.values():
            if lane.count:
                self._context += lane.grown(steps)
                lane.steps += steps
        self.steps += steps
        self.rows += steps * self._step_rows

    def _steps_to_change(self) -> int:
        """Return the number of equal steps until the first sequence ends or memory runs out, also that of drafts."""
        steps = _MOST_STEPS
        for lane in self._lanes.values():
            if lane.count:
                steps = min(steps, lane.ends[0][0] - lane.steps)
        if self._fits_drafts(steps - 1):
            return max(1, steps)
        return max(1, bisect.bisect_left(range(1, steps), True, key=lambda more: not self._fits_drafts(more)) + 1)

    def _ahead(self, steps: int) -> tuple[float, float, float]:
        """Return the sums over the lanes of `Lane.ahead`."""
        longer = rows = pairs = 0.0
        for lane in self._lanes.values():
            if lane.count:
                own = lane.ahead(steps)
                longer, rows, pairs = longer + own[0], rows + own[1], pairs + own[2]
        return longer, rows, pairs

    def _seconds(self, longer: float, saved_rows: float, saved_pairs: float) -> tuple[float, float]:
        """Return the seconds and rows of a step whose decoding sequences are ``longer`` tokens longer than now, and
        whose drafts save rows and pairs by being shorter."""
        count, nodes = self._decoding, 0
        context, rows, pairs = self._context + longer, -saved_rows, -saved_pairs
        mean = context / count if count else 0.0
        for lane in self._lanes.values():
            own = lane.rows
            rows += own
            pairs += own * (mean + lane.nodes)
            nodes = max(nodes, lane.nodes if lane.count else 0)
        keys, heads = context + rows - count, rows
        for job, chunk in self._chunks:
            own = chunk
            if job.fed + chunk == job.text:  # other chunks have no row through the LM head
                own += 0 if job.skips else min(self._lane(job).nodes, job.left - 1)
                heads += 1 + own - chunk
            rows += own
            keys += job.fed + own
            pairs += own * (job.fed + own)
        sequences = count + len(self._chunks)
        seconds = self._cost(sequences, rows, heads, keys, pairs)
        if nodes:
            seconds += self._drafting.seconds(count, nodes, mean)
        return seconds, rows

    # ----------------------------------------------------------------------------------------------- the scheduler

    def _take_chunks(self, *, admit: bool) -> list[tuple[Job, int]]:
        """Divide the rows that decoding leaves among prompts: first those already begun, then newly started ones."""
        chunks: list[tuple[Job, int]] = []
        room, expected = self._room_for_prompts()
        for job in self._feeding:
            if room:
                chunks.append((job, min(room, job.text - job.fed)))
                room -= chunks[-1][1]
        while admit and room and self.waiting and self._may_admit(self.waiting[0]):
            job = self._admit()
            chunks.append((job, min(room, job.text - job.fed)))
            room -= chunks[-1][1]
        if expected is not None and chunks:
            self._prompt_rows.begin(expected(sum([rows for _, rows in chunks])))
        return chunks

    def _room_for_prompts(self) -> tuple[int, Seconds | None]:
        """How many rows of prompts the next step may have, and what the engine expects of it: its scheduler's rule."""
        count = self._decoding
        most = self.limits.max_num_batched_tokens - count
        if not count or most < 1 or not (self._feeding or self.waiting):
            return most, None
        fed = [self._feeding[0].text] if self._feeding else []
        context = (self._context + sum(fed)) // (count + len(fed))

        def expected(more: int) -> float:
            return forward_seconds(self._cost, count + more, context)

        return self._prompt_rows.within(expected, most), expected

    def _may_admit(self, job: Job, steps: int = 0) -> bool:
        """Whether the request may start after ``steps`` further steps. Without room it waits until there is more."""
        running = len(self._feeding) + self._decoding
        if running >= self.limits.max_num_seqs:
            return False
        if not running:
            return True
        if self._refused is job and self._memory.free(steps) <= self._refused_free:
            return False
        if self._fits(paged(job.text) + HEADROOM * running, steps):
            return True
        self._refused, self._refused_free = job, self._memory.free(steps)
        return False

    def _admit(self) -> Job:
        job = self.waiting.popleft()
        found = min(self._prefixes.find(job.request), job.text - 1)
        if not job.tries:  # a preempted request may find its own tokens, which do not count
            self.asked += job.request.prompt
            self.found += found
        job.tries += 1
        job.fed = found
        self._feeding.append(job)
        self._fed += job.text
        return job

    def _begin_decoding(self, job: Job, now: float) -> list[Job]:
        """Begin to decode a request whose prompt is read. The step that read it committed its first tokens."""
        self._prefixes.read(job.request)
        if job.first < 0:
            job.first = now
        lane = self._lane(job)
        if not lane.enter(job):
            return [self._end(job, now)]
        self._decoding += 1
        self._context += job.request.prompt + lane.written(job)
        return []

    def _end_finished(self, now: float) -> list[Job]:
        """End the sequences that have written all their tokens."""
        done = []
        for lane in self._lanes.values():
            while (job := lane.pop_ended()) is not None:
                self._context -= job.request.prompt + job.request.output
                self._decoding -= 1
                done.append(self._end(job, now))
        return sorted(done, key=lambda job: job.rank)

    def _end(self, job: Job, now: float) -> Job:
        job.last, job.written = now, job.request.output
        self._prefixes.write(job.request, self.limits.cache_tokens - self._context - self._fed)
        return job

    def _make_room(self) -> bool:
        """Preempt the latest sequences until the next step's tokens fit. Returns whether any was preempted."""
        before = self.preemptions
        while self._decoding and not self._fits(0):
            running = [*self._feeding, *self._running()]
            if len(running) == 1:
                break
            victim = max(running, key=lambda job: job.rank)
            if victim.lane is None:
                self._feeding.remove(victim)
                self._fed -= victim.text
            else:
                victim.written = victim.lane.written(victim)
                victim.lane.remove(victim)
                self._decoding -= 1
                self._context -= victim.request.prompt + victim.written
            self.preemptions += 1
            victim.text, victim.fed = victim.request.prompt + victim.written, 0
            self.waiting.appendleft(victim)
        return self.preemptions > before

    def _fits(self, more: float, steps: int = 0) -> bool:
        return self._memory.fits(self._context + self._fed, more, steps)

    def _fits_drafts(self, steps: int = 0) -> bool:
        return self._memory.fits_drafts(self._context + self._fed, self._read(), steps)

    def _read(self) -> list[tuple[Lane, Job]]:
        """Return the requests whose prompts the next step reads to the end."""
        return [(self._lane(job), job) for job, chunk in self._chunks if job.fed + chunk == job.text]

    def _running(self) -> Sequence[Job]:
        return [job for lane in self._lanes.values() for _, _, job in lane.ends]

    # --------------------------------------------------------------------------------------------------- drafting

    def _lane(self, job: Job) -> Lane:
        lane = self._lanes.get(job.request.kind)
        if lane is None:
            lane = self._lanes[job.request.kind] = Lane(self._drafting, job.request.kind, self._seed)
        return lane

    def _choose_nodes(self) -> None:
        """Set each kind's number of drafted nodes: the one with the most tokens per second if the strategy adapts."""
        if not self._drafting.nodes or not self._decoding:
            return
        active = {kind: lane for kind, lane in self._lanes.items() if lane.count}
        lanes = list(active.values())
        most = min(self._drafting.nodes, self.limits.max_draft_rows // self._decoding)
        chosen = [most] * len(lanes)
        if self._drafting.adapts:
            mean = self._context / self._decoding
            key = (*((kind, lane.count) for kind, lane in active.items()), int(mean) >> 8)
            if key not in self._choices:
                if len(self._choices) >= _MOST_CHOICES:
                    self._choices.clear()
                self._choices[key] = self._best_nodes(lanes, most)
            chosen = self._choices[key]
        for lane, nodes in zip(lanes, chosen, strict=True):
            lane.draft(nodes)
            lane.settle()

    def _best_nodes(self, lanes: Sequence[Lane], most: int) -> list[int]:
        """Return the numbers of nodes with the most tokens per second, found by adding the likeliest node each time."""
        reaches = sorted(
            ((lane.table[size] - lane.table[size - 1], -size, place))
            for place, lane in enumerate(lanes)
            for size in range(1, most + 1)
        )
        chunks, self._chunks = self._chunks, []
        best, highest, sizes = [0] * len(lanes), 0.0, [0] * len(lanes)
        for _, size, place in [(0.0, 0, 0), *reversed(reaches)]:
            sizes[place] = max(sizes[place], -size)
            for lane, nodes in zip(lanes, sizes, strict=True):
                lane.draft(nodes)
            rate = sum(lane.count * lane.each for lane in lanes) / self._seconds(0.0, 0.0, 0.0)[0]
            if rate > highest:
                best, highest = list(sizes), rate
        self._chunks = chunks
        return best
