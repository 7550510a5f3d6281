"""Runs the real engine with a model, or a real server, on requests that arrive at random, and records each step's
time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serving.served import started
from benchmarks.simulation.virtual import count_event, request
from parlay.cost.timing import calibrate
from parlay.engine import Engine
from parlay.models.wrapped_runner import WrappedRunner
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.simulate.costs import StepCost, TimedStep
from parlay.simulate.fleet import Outcome
from parlay.simulate.traffic import Arrival
from parlay.types import NO_SKIP, Output, Runner, Segment, Skip, Strategy

Send = Callable[[Arrival, Sequence[int]], AsyncIterator[int]]
"""Sends a request with these tokens as its prompt, and yields the number of tokens in each piece of the answer."""


class ServerClock:
    """Measures time as a server's CPU time. While the server is idle, `skip` moves the clock on.

    So other programs don't count, and the times of two threads of the server add up.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._waited = 0.0

    def __call__(self) -> float:
        return self.computed() + self._waited

    def computed(self) -> float:
        """Return the CPU seconds of all its threads."""
        return time.clock_gettime(~self._process << 3 | _ALL_THREADS)

    def skip(self, seconds: float) -> None:
        """Move the clock on by ``seconds``, in which the server is idle."""
        self._waited += seconds

    def speaking(self) -> float:
        """Return the CPU seconds of its main thread, which handles HTTP and decodes nothing."""
        return int(Path(f"/proc/{self._process}/schedstat").read_text().split()[0]) / 1e9


_ALL_THREADS = 2
"""The part of another process's clock number that selects the CPU time of all its threads (Linux)."""
_LOOK = 0.002
"""Seconds between two readings of the clock before the next request."""


async def measure(
    arrivals: Sequence[Arrival], send: Send, vocabulary: int, seed: str, clock: ServerClock
) -> tuple[Outcome, float]:
    """Send each request at its time, and return the outcome and the CPU seconds of HTTP.

    Prompts are random, so none is found in the cache.
    """
    draw = random.Random(seed)
    out = Outcome(requests=len(arrivals))
    began, speaking = clock(), clock.speaking()

    async def one(arrival: Arrival, ids: Sequence[int]) -> None:
        first, count = 0.0, 0
        async for tokens in send(arrival, ids):
            first = first or clock() - began
            count += tokens
        last = clock() - began
        if count != arrival.output:
            raise ValueError(f"an answer of {arrival.output} tokens has {count}")
        out.finished += 1
        out.tokens += count
        out.first.append(first - arrival.seconds)
        out.whole.append(last - arrival.seconds)
        out.per_token.append((last - first) / (count - 1) if count > 1 else -1.0)

    prompts = [[draw.randrange(100, vocabulary - 100) for _ in range(each.prompt)] for each in arrivals]
    sent: list[asyncio.Task[None]] = []
    for arrival, ids in zip(arrivals, prompts, strict=True):
        while (left := arrival.seconds + began - clock()) > 0:
            if all(task.done() for task in sent):
                clock.skip(left)
            else:
                await asyncio.sleep(min(_LOOK, left / 2))
        sent.append(asyncio.create_task(one(arrival, ids)))
    await asyncio.gather(*sent)
    out.span = clock() - began
    return out, clock.speaking() - speaking


@dataclass(frozen=True)
class OverHttp:
    """A `StepCost` of a server. HTTP adds ``token`` seconds for each generated token and ``prompt`` for each prompt
    token."""

    steps: StepCost
    token: float
    prompt: float

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        spoken = self.token * head_rows + self.prompt * (rows - head_rows)
        return self.steps(sequences, rows, head_rows, keys, pairs) + spoken


async def with_http(steps: StepCost, send: Send, vocabulary: int, clock: ServerClock) -> OverHttp:
    """Measure the cost of a server's HTTP per token of prompt and answer, with two mixes of requests."""
    counts, seconds = [], []
    for seed, (requests, prompt, output) in enumerate(_SPOKEN):
        arrivals = [Arrival(0.0, prompt, output)] * requests
        _, took = await measure(arrivals, send, vocabulary, f"http {seed}", clock)
        counts.append((requests * output, requests * prompt))
        seconds.append(took)
    token, read = np.linalg.solve(np.array(counts, dtype=float), np.array(seconds))
    return OverHttp(steps, max(0.0, float(token)), max(0.0, float(read)))


_SPOKEN = ((24, 160, 2), (8, 16, 100))
"""Number of requests, and tokens of each one's prompt and answer."""


class InProcess:
    """Runs an engine with a model. Its clock is the CPU time of the thread that decodes.

    So other programs don't count. While the engine is idle, the clock moves on to the next request.
    """

    def __init__(self, runner: Runner) -> None:
        self.steps: list[TimedStep] = []
        """The steps of the last run."""
        self._runner, self._cost = runner, calibrate(runner)
        self._waited = 0.0

    def _now(self) -> float:
        return time.thread_time() + self._waited

    def run(self, arrivals: Sequence[Arrival], seed: str) -> Outcome:
        """Decode all requests, each added at its time. Prompts are random, so none is found in the cache."""
        draw, most = random.Random(seed), self._runner.spec.vocab_size - 100
        prompts = [tuple(draw.randrange(100, most) for _ in range(each.prompt)) for each in arrivals]
        timed = _Counted(self._runner)
        engine = Engine(timed, self._cost, clock=self._now)
        strategy = Strategy("none", (), SharedNoise(), Plain())
        self.steps.clear()
        out, firsts, begun, began = Outcome(requests=len(arrivals)), [-1.0] * len(arrivals), 0, self._now()
        while begun < len(arrivals) or not engine.idle:
            if engine.idle:
                self._waited += max(0.0, arrivals[begun].seconds + began - self._now())
            before = self._now()
            while begun < len(arrivals) and arrivals[begun].seconds + began <= before:
                engine.add(request(begun, prompts[begun], arrivals[begun].output), strategy)
                begun += 1
            events = engine.step()
            now = self._now()
            for event in events:
                count_event(out, event, arrivals, firsts, now - began)
            self.steps.append(timed.step(now - before))
        out.span = self._now() - began
        return out


class _Counted(WrappedRunner):
    """Counts the rows, keys and pairs of the last forward."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._cached: dict[int, int] = {}
        self._counts = (0, 0, 0)

    def step(self, seconds: float) -> TimedStep:
        rows, keys, pairs = self._counts
        return TimedStep(rows, keys, seconds, pairs)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        rows = keys = pairs = 0
        for segment in segments:
            read = self._cached[segment.sequence] + segment.rows
            rows, keys, pairs = rows + segment.rows, keys + read, pairs + segment.rows * read
        self._counts = rows, keys, pairs
        return super().forward(segments, taps, skip)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self._cached[sequence] = super().open(sequence, tokens, salt)
        return self._cached[sequence]

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        self._cached[sequence] = super().keep(sequence, path)
        return self._cached[sequence]

    def truncate(self, sequence: int, length: int) -> int:
        self._cached[sequence] = super().truncate(sequence, length)
        return self._cached[sequence]


@contextmanager
def over_http(model: str, context: int) -> Iterator[tuple[Send, Callable[[], Awaitable[None]], ServerClock]]:
    """Start a server that decodes plainly in one thread. Yield a function that sends it requests, and its clock."""
    words = ("--strategy", "none", "--router-memory", "off", "--max-model-len", str(context), "--threads", "1")
    with started("serve", "--port", "0", model, *words) as (address, process):
        client = httpx.AsyncClient(base_url=address, timeout=600.0)

        async def send(arrival: Arrival, ids: Sequence[int]) -> AsyncIterator[int]:
            body = {"prompt": list(ids), "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                        usage = chunk.get("usage")  # in the last one; others say no number of tokens
                        yield usage["completion_tokens"] if usage else 0

        yield send, client.aclose, ServerClock(process)
