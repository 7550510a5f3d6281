"""Requests that end early: cancelled, closed, forgotten, too slow, refused, or shut down with the service."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from parlay import LLM, ParlayError, SamplingParams
from parlay.aio import AsyncLLM, Busy, Closed, JobStream
from parlay.llm.request_options import RequestOptions
from tests.aio.conftest import LONG, PROMPTS, Plain

PLAINLY = RequestOptions(strategy="none")


async def begin(service: AsyncLLM, params: SamplingParams = LONG, *, timeout: float | None = None) -> JobStream:
    return await service.submit(service.llm.job(PROMPTS[3], params, PLAINLY), timeout=timeout)


async def is_idle(service: AsyncLLM) -> bool:
    """Whether the engine holds nothing after the step under way; what was asked of it before is done by then."""
    return await service.between_steps(lambda llm: llm.engine.idle)


async def close(stream: JobStream) -> None:
    await stream.aclose()


async def cancel_the_reader(stream: JobStream) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def cancel_the_waiter(stream: JobStream) -> None:
    waiter = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0.01)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


@pytest.mark.parametrize("leave", [close, cancel_the_reader, cancel_the_waiter])
def test_who_leaves_frees_the_sequence_within_one_step_and_keeps_what_there_was(
    slow: AsyncLLM, plain: Plain, leave: Callable[[JobStream], Awaitable[None]]
) -> None:
    async def run() -> tuple[int, ...]:
        stream = await begin(slow)
        for _ in range(3):
            await anext(stream)
        await leave(stream)
        assert await is_idle(slow)
        await stream.aclose()
        assert [event async for event in stream] == []
        (sample,) = stream.output.outputs
        assert sample.finish_reason == "abort"
        assert not stream.timed_out
        return sample.token_ids

    tokens = asyncio.run(run())
    assert 3 <= len(tokens) < 100
    assert tokens == plain(PROMPTS[3], LONG)[0][: len(tokens)]


def test_a_stream_that_nobody_holds_ends_within_one_step(slow: AsyncLLM) -> None:
    async def run() -> None:
        stream = await begin(slow)
        await anext(stream)
        assert not await is_idle(slow)
        del stream
        gc.collect()
        assert await is_idle(slow)

    asyncio.run(run())


def test_a_loop_that_is_gone_takes_its_requests_with_it(slow: AsyncLLM) -> None:
    job = slow.llm.job(PROMPTS[3], LONG, PLAINLY)
    stream = asyncio.run(slow.submit(job))

    async def wait() -> None:
        while not await is_idle(slow):  # its next news finds the loop closed
            await asyncio.sleep(0.01)

    asyncio.run(wait())
    assert job.output().outputs[0].finish_reason == "abort"
    del stream  # held until here


def test_a_request_whose_submitter_is_cancelled_is_not_left_running(service: AsyncLLM) -> None:
    async def run() -> None:
        submitting = asyncio.ensure_future(begin(service))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert await is_idle(service)

    asyncio.run(run())


def test_a_time_limit_ends_a_request_with_what_there_is(slow: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hour passes as soon as there is a token."""
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)

    async def run() -> None:
        stream = await begin(slow, timeout=3600)
        await anext(stream)
        monkeypatch.setattr("parlay.aio.engine_loop.time", late)
        events = [event async for event in stream]
        assert stream.timed_out
        assert events[-1].finish_reason == "abort"
        assert 0 < len(stream.output.outputs[0].token_ids) < 200
        assert await is_idle(slow)

    asyncio.run(run())


def test_an_output_is_there_only_when_its_request_is_over(slow: AsyncLLM) -> None:
    async def run() -> None:
        stream = await begin(slow)
        with pytest.raises(ParlayError, match="under way"):
            _ = stream.output
        await stream.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", RequestOptions(), "empty"),
        ("word " * 5000, RequestOptions(), "context"),
        ("x", RequestOptions(strategy="prompt-lookdown"), "prompt-lookup"),
    ],
)
def test_what_cannot_run_is_refused_at_submission(
    service: AsyncLLM, prompt: str, options: RequestOptions, words: str
) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match=words):
            await service.submit(service.llm.job(prompt, None, options))
        assert await is_idle(service)

    asyncio.run(run())
    assert service.stats().waiting == 0


def test_beyond_its_bound_the_queue_refuses_and_takes_again_later(late: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(late, max_waiting=1) as service:
            streams = [await begin(service) for _ in range(5)]
            with pytest.raises(Busy, match="try again"):
                await begin(service)
            await streams[0].aclose()
            streams.append(await begin(service))
            await service.close(0)
            assert service.stats().finished == {"abort": 6}

    asyncio.run(run())


def test_closing_lets_what_runs_finish_and_takes_nothing_new(fresh: LLM) -> None:
    async def run() -> None:
        service = AsyncLLM(fresh)
        assert service.alive
        stream = await begin(service, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        closing = asyncio.ensure_future(service.close())
        await asyncio.sleep(0)
        assert not service.alive
        with pytest.raises(Closed):
            await begin(service)
        await closing
        assert stream.output.outputs[0].finish_reason == "length"
        assert len([event async for event in stream]) == 60
        await service.close()
        with pytest.raises(Closed):
            await service.generate("x")
        assert (service.stats().running, service.stats().finished) == (0, {"length": 1})

    asyncio.run(run())


def test_a_drain_that_takes_too_long_ends_with_partial_outputs(late: LLM) -> None:
    async def run() -> None:
        service = AsyncLLM(late)
        stream = await begin(service)
        patient = asyncio.ensure_future(service.close())
        await anext(stream)
        await service.close(0.05)  # a later, shorter limit holds
        await patient
        (sample,) = (await stream.wait()).outputs
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.token_ids) < 200

    asyncio.run(run())


def test_leaving_the_block_by_an_error_does_not_wait_for_what_runs(late: LLM) -> None:
    async def run() -> JobStream:
        async with AsyncLLM(late) as service:
            stream = await begin(service)
            raise RuntimeError(stream)

    with pytest.raises(RuntimeError) as error:
        asyncio.run(run())
    assert error.value.args[0].output.outputs[0].finish_reason == "abort"
