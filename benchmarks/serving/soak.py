"""Sends many requests at once, some cancelled, malformed or with a failing drafter: none may be lost, leak or differ.

    python -m benchmarks.serving.soak            # 2,000 requests, and the report
    python -m benchmarks.serving.soak --quick    # 60 requests, to see that it works

Every completed text of an exact strategy is compared with that of plain decoding, which ran alone before.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors, show_log
from benchmarks.options import add_threads_flag, command_parser
from benchmarks.serving.cases import SAMPLING, Case, cases, prompts
from benchmarks.serving.tally import Tally, report, summary
from parlay import LLM, ParlayError, RequestOutput, SamplingParams
from parlay.aio import AsyncLLM, JobStream
from parlay.bench.host import resident_bytes
from parlay.bench.provenance import provenance
from parlay.llm.request_options import RequestOptions
from parlay.system import threads
from parlay.types import Exactness

EXACT = (Exactness.BITS, Exactness.SEED)
MEMORY = "64MiB"  # for all caches: they are soon full, so later growth of memory is not theirs
CHECK_EVERY = 100
PATIENCE = 300.0
"""Seconds after which a request counts as lost."""

logger = logging.getLogger("benchmarks")

Tokens = list[tuple[int, ...]]

MALFORMED: tuple[Callable[[], tuple[str, SamplingParams, RequestOptions]], ...] = (
    lambda: ("x", SamplingParams(temperature=-1), RequestOptions()),
    lambda: ("x", SamplingParams(stop=""), RequestOptions()),
    lambda: ("x", SamplingParams(logit_bias={10**9: 1.0}), RequestOptions()),
    lambda: ("x", SamplingParams(), RequestOptions(strategy="no-such-strategy")),
    lambda: ("x", SamplingParams(n=3), RequestOptions(strategy="prompt-lookup:no_such_parameter=1")),
    lambda: ("", SamplingParams(), RequestOptions()),
    lambda: ("word " * 10_000, SamplingParams(), RequestOptions()),
)


class Soak:
    """Runs the cases against one service, several at a time."""

    def __init__(self, service: AsyncLLM, planned: list[Case]) -> None:
        self._service = service
        self._planned = planned
        self.known: dict[tuple[str, str], Tokens] = {}
        self.tally = Tally()

    async def learn(self) -> None:
        """Decode the plain text of every later request, each alone."""
        for case in self._planned:
            if case.kind != "malformed" and case.key not in self.known:
                output = await self._service.generate(case.prompt, case.params, RequestOptions(strategy="none"))
                self.known[case.key] = tokens_of(output)

    async def run(self, concurrency: int) -> None:
        queue = iter(enumerate(self._planned))
        await asyncio.gather(*(self._client(queue) for _ in range(concurrency)))
        await self._check()
        idle = await self._service.between_steps(lambda llm: llm.engine.idle)
        if not idle:
            self.tally.wrong.append("the engine still holds requests at the end")

    async def _client(self, queue: Iterator[tuple[int, Case]]) -> None:
        for number, case in queue:
            try:
                fate = await asyncio.wait_for(self._one(number, case), PATIENCE)
            except Exception as error:
                fate = "lost"
                self._wrong(number, case, f"{type(error).__name__}: {error}")
            self.tally.fates[fate] += 1
            self.tally.done += 1
            if self.tally.done % CHECK_EVERY == 0:
                await self._check()

    async def _one(self, number: int, case: Case) -> str:
        if case.kind == "malformed":
            return await self._refuse(number, case)
        stream = await self._submit(case)
        if case.leave is None:
            output = await finish(stream, case)
        else:
            await leave(stream, case)
            if case.leave == "forget":
                return "cancelled"
            output = stream.output
        del stream
        self._compare(number, case, output)
        ended = any(sample.finish_reason == "abort" for sample in output.outputs)
        return "cancelled" if ended else "completed"

    async def _submit(self, case: Case) -> JobStream:
        job = self._service.llm.job(case.prompt, case.params, case.options)
        timeout = case.patience / 100 if case.leave == "timeout" else None
        return await self._service.submit(job, timeout=timeout, whole=case.whole)

    async def _refuse(self, number: int, case: Case) -> str:
        try:
            prompt, params, options = MALFORMED[number % len(MALFORMED)]()
            await self._service.generate(prompt, params, options)
        except (ValueError, ParlayError):
            return "refused"
        self._wrong(number, case, "a malformed request was taken")
        return "completed"

    def _compare(self, number: int, case: Case, output: RequestOutput) -> None:
        """Compare tokens with those of plain decoding; of a request that ended early, as many as there are."""
        for sample, plain in zip(output.outputs, self.known[case.key], strict=True):
            self.tally.strategies[sample.strategy] += 1
            self.tally.tokens += len(sample.token_ids)
            if sample.finish_reason == "error":
                self._wrong(number, case, f"error: {sample.error}")
            if sample.metrics.drafter_faults and case.kind != "failing":
                self._wrong(number, case, "its drafter failed, unasked")
            if sample.exactness not in EXACT:
                self.tally.inexact += 1
                continue
            self.tally.exact += 1
            wanted = plain[: len(sample.token_ids)] if sample.finish_reason == "abort" else plain
            if sample.token_ids != wanted:
                self._wrong(number, case, f"sample {sample.index} differs from plain decoding")

    async def _check(self) -> None:
        done = self.tally.done  # it goes on meanwhile
        try:
            await self._service.between_steps(lambda llm: llm.runner.check())
        except AssertionError as error:
            self.tally.wrong.append(f"after {done} requests: {error}")
        gc.collect()
        self.tally.checks += 1
        self.tally.memory[done] = resident_bytes()
        logger.info("%d requests, %d wrong, %d MiB", done, len(self.tally.wrong), resident_bytes() >> 20)

    def _wrong(self, number: int, case: Case, what: str) -> None:
        self.tally.wrong.append(f"request {number} ({case.kind}, {case.options.strategy}): {what}")


async def finish(stream: JobStream, case: Case) -> RequestOutput:
    """Read a request to its end. Raises AssertionError if the stream differs from the output."""
    if case.whole:
        return await stream.wait()
    texts = [""] * case.params.n
    async for event in stream:
        texts[event.index] += event.text
    output = stream.output
    if texts != [sample.text for sample in output.outputs]:
        raise AssertionError("the stream does not add up to the output")
    return output


async def leave(stream: JobStream, case: Case) -> None:
    """Act as a client that leaves before the answer ends."""

    async def read(count: int | None) -> None:
        async for _ in stream:
            count = None if count is None else count - 1
            if count == 0:
                return

    if case.leave == "timeout":
        await read(None)
        return
    await read(case.patience)
    if case.leave == "cancel":
        reader = asyncio.ensure_future(read(None))
        await asyncio.sleep(0)
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
    if case.leave != "forget":
        await stream.aclose()


def tokens_of(output: RequestOutput) -> Tokens:
    return [sample.token_ids for sample in output.outputs]


async def soak(count: int, concurrency: int, seed: int, quick: bool) -> dict[str, Any]:
    """Run ``count`` requests, and return the results."""
    texts, sampling = (prompts(4), SAMPLING[:3]) if quick else (prompts(24), SAMPLING)
    planned = cases(count, seed, texts, sampling)
    async with AsyncLLM(LLM("parlay-mini", max_num_seqs=8, memory=MEMORY), max_waiting=10 * concurrency) as service:
        run = Soak(service, planned)
        await run.learn()
        began = time.perf_counter()
        await run.run(concurrency)
        result = summary(run.tally, Counter(case.kind for case in planned), time.perf_counter() - began)
        stats = service.stats()
    result["stats"] = {"finished": dict(stats.finished), "preemptions": stats.preemptions}
    result["drafter_faults"] = stats.drafter_faults
    result["provenance"] = provenance(f"python -m benchmarks.serving.soak --requests {count}")
    return result


@one_line_errors("serving.soak")
def main(arguments: list[str] | None = None) -> int:
    """Run the soak. Return 1 if a promise was broken."""
    parser = command_parser("serving.soak", __doc__)
    parser.add_argument("--requests", type=int, default=2000, help="number of requests (default: 2000)")
    parser.add_argument("--concurrency", type=int, default=16, help="clients at once (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument("--quick", action="store_true", help="60 short requests; no report unless --out names one")
    add_threads_flag(parser, default=1)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the report, and .json beside it (default: benchmarks/results/soak.md)"
    )
    options = parser.parse_args(arguments)
    threads.use(options.threads)
    count = 60 if options.quick else options.requests
    result = asyncio.run(soak(count, options.concurrency, options.seed, options.quick))
    print(json.dumps(result), flush=True)
    out = options.out or (None if options.quick else RESULTS / "soak.md")
    if out is not None:
        checks = {"checks of the cache's invariants": str(result["checks"])}
        out.write_text(report("Soak", result, checks), encoding="utf-8")
        out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    show_log()
    logging.getLogger("parlay").setLevel(logging.ERROR)  # drafters are made to fail
    sys.exit(main())
