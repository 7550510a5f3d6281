"""The real engine in process, and a real server, under requests that arrive at random; and what each step took."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.serving.served import served
from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.llm.input_processor import RequestOptions
from parlay.simulate.costs import TimedStep
from parlay.simulate.fleet import Outcome
from parlay.simulate.traffic import Arrival
from parlay.text.prompts import TokensPrompt
from parlay.types import NO_SKIP, Event, Output, Segment, Skip

Send = Callable[[Arrival, Sequence[int]], AsyncIterator[int]]
"""Sends a request with these tokens as its prompt, and says how many tokens came each time some did."""


async def measure(arrivals: Sequence[Arrival], send: Send, vocabulary: int, seed: str) -> Outcome:
    """Send each request at its time; prompts are random, so that none is found cached."""
    draw = random.Random(seed)
    out = Outcome(requests=len(arrivals))
    began = time.perf_counter()

    async def one(arrival: Arrival, ids: Sequence[int]) -> None:
        await asyncio.sleep(max(0.0, arrival.seconds - (time.perf_counter() - began)))
        first, count = 0.0, 0
        async for tokens in send(arrival, ids):
            first = first or time.perf_counter() - began
            count += tokens
        last = time.perf_counter() - began
        if count != arrival.output:
            raise ValueError(f"an answer of {arrival.output} tokens has {count}")
        out.finished += 1
        out.tokens += count
        out.first.append(first - arrival.seconds)
        out.whole.append(last - arrival.seconds)
        out.per_token.append((last - first) / (count - 1) if count > 1 else -1.0)

    prompts = [[draw.randrange(100, vocabulary - 100) for _ in range(each.prompt)] for each in arrivals]
    await asyncio.gather(*map(one, arrivals, prompts))
    out.span = time.perf_counter() - began
    return out


class InProcess:
    """An LLM whose steps are timed: ``steps`` has those since it was emptied last."""

    def __init__(self, llm: LLM, strategy: str) -> None:
        self.steps: list[TimedStep] = []
        self._service, self._strategy = AsyncLLM(llm), strategy
        self._rows, self._keys = 0, 0
        self._ended, self._goes_on = 0.0, False
        self._watch(llm)

    async def send(self, arrival: Arrival, ids: Sequence[int]) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0, max_tokens=arrival.output, ignore_eos=True)
        prompt, options = TokensPrompt(prompt_token_ids=list(ids)), RequestOptions(strategy=self._strategy)
        async for event in self._service.stream(prompt, params, options):
            yield len(event.token_ids)

    async def close(self) -> None:
        await self._service.close()

    def _watch(self, llm: LLM) -> None:
        """Time every step of the engine from its begin to the next one's, while there is work."""
        engine, runner = llm.engine, llm.runner
        step, forward = engine.step, runner.forward

        def timed() -> list[Event]:
            began = time.perf_counter()
            if self._goes_on and self.steps:  # what lies between two steps belongs to the first
                last = self.steps[-1]
                self.steps[-1] = TimedStep(last.rows, last.keys, last.seconds + began - self._ended)
            self._rows = 0
            events = step()
            self._ended, self._goes_on = time.perf_counter(), not engine.idle
            if self._rows:
                self.steps.append(TimedStep(self._rows, self._keys, self._ended - began))
            return events

        def counted(segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
            cached = {each.sequence: each.cached for each in engine.scheduler.running}
            self._rows = sum(segment.rows for segment in segments)
            self._keys = sum(cached.get(segment.sequence, 0) + segment.rows for segment in segments)
            return forward(segments, taps, skip)

        vars(engine)["step"] = timed
        vars(runner)["forward"] = counted


@contextmanager
def over_http(model: str, strategy: str, context: int) -> Iterator[tuple[Send, Callable[[], Awaitable[None]]]]:
    """A server of its own process; sends completions to it."""
    words = (model, "--strategy", strategy, "--router-memory", "off", "--max-model-len", str(context))
    with served(*words) as address:
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

        yield send, client.aclose
