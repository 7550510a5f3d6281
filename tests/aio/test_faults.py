"""Faults of the engine itself: everyone who was hit hears of it, and the service goes on."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import NoReturn

import pytest

from parlay import LLM, RequestFailed, SamplingParams
from parlay.aio import AsyncLLM, JobStream, Lost
from parlay.llm.request_options import RequestOptions
from parlay.types import ParlayError, RunnerLost
from tests.aio.conftest import LONG, PROMPTS, Plain

SHORT = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def broken_step(service: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twelfth step from now raises, once, before any forward that the engine could try again."""
    scheduler = service.llm.engine.scheduler
    schedule, calls = scheduler.next, iter(range(12))

    def fail():  # type: ignore[no-untyped-def]
        if next(calls, None) == 11:
            raise MemoryError("no memory\nfor this")
        return schedule()

    monkeypatch.setattr(scheduler, "next", fail)


@pytest.mark.usefixtures("broken_step")
def test_a_step_that_fails_ends_what_ran_with_one_line_and_the_next_request_runs(service: AsyncLLM) -> None:
    async def run() -> list[JobStream]:
        jobs, all_asked = [service.llm.job(prompt, LONG, RequestOptions()) for prompt in PROMPTS], threading.Event()
        held = asyncio.create_task(service.between_steps(lambda llm: all_asked.wait()))
        submitting = [asyncio.create_task(service.submit(job)) for job in jobs]
        await asyncio.sleep(0)  # all of them are in the engine's inbox, behind the one that waits
        all_asked.set()
        await held
        streams = await asyncio.gather(*submitting)
        for stream in streams:
            await stream.wait()
        await service.between_steps(lambda llm: llm.runner.check())
        assert await service.between_steps(lambda llm: llm.engine.idle)
        assert service.stats().finished == {"error": len(PROMPTS)}
        return streams

    for stream in asyncio.run(run()):
        (sample,) = stream.output.outputs
        assert sample.finish_reason == "error"
        assert sample.error is not None
        assert "no memory" in sample.error
        assert "\n" not in sample.error
    output = asyncio.run(service.generate(PROMPTS[0], SHORT))
    assert output.outputs[0].token_ids == asyncio.run(service.generate(PROMPTS[0], SHORT)).outputs[0].token_ids


@pytest.mark.usefixtures("broken_step")
def test_generate_raises_for_a_step_that_fails(service: AsyncLLM) -> None:
    with pytest.raises(RequestFailed, match="no memory"):
        asyncio.run(service.generate(PROMPTS[0], LONG))


def test_a_step_that_fails_half_way_through_its_commits_loses_nobody(
    service: AsyncLLM, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens have reached the text but not the reader: the text that was told stays what it was."""
    whole = list(plain(PROMPTS[2], LONG)[0])
    keep, calls = service.llm.runner.keep, iter(range(6))

    def fail(sequence, path):  # type: ignore[no-untyped-def]
        if next(calls, None) == 5:
            raise RuntimeError("broken")
        return keep(sequence, path)

    monkeypatch.setattr(service.llm.runner, "keep", fail)

    async def run() -> None:
        stream = await service.submit(service.llm.job(PROMPTS[2], LONG, RequestOptions(strategy="none")))
        tokens = [token async for event in stream for token in event.token_ids]
        assert stream.output.outputs[0].finish_reason == "error"
        assert len(tokens) == 5
        assert tokens == whole[: len(tokens)]

    asyncio.run(run())
    assert asyncio.run(service.between_steps(lambda llm: llm.engine.idle))


def test_text_that_cannot_be_told_ends_its_own_request_only(service: AsyncLLM, plain: Plain) -> None:
    async def run() -> None:
        job = service.llm.job(PROMPTS[0], LONG)
        job.samples[0].text = object()  # type: ignore[assignment]
        broken = await service.submit(job)
        output = await service.generate(PROMPTS[0], SHORT)
        assert [sample.token_ids for sample in output.outputs] == plain(PROMPTS[0], SHORT)
        assert broken.take() == []
        assert "can't be made into text" in str(broken.error)
        with pytest.raises(Exception, match="can't be made into text"):
            await broken.wait()
        with pytest.raises(Exception, match="can't be made into text"):
            await anext(broken)

    plain(PROMPTS[0], SHORT)
    asyncio.run(run())
    assert service.stats().running == 0


def test_what_is_called_between_steps_may_raise(service: AsyncLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(service.between_steps(lambda llm: 1 / 0))
    assert len(asyncio.run(service.generate(PROMPTS[0], SHORT)).outputs) == 1


def test_what_is_no_exception_ends_what_ran_and_the_service_goes_on(service: AsyncLLM) -> None:
    """A thread that it ended would leave everyone waiting. Panics of libraries in Rust are such, too."""

    def leave(*_: object) -> NoReturn:
        sys.exit("enough")

    with pytest.raises(RequestFailed, match="SystemExit: enough"):
        asyncio.run(service.generate(PROMPTS[0], SamplingParams(max_tokens=4, logits_processors=[leave])))
    for wrong in (leave, lambda llm: next(iter(()))):
        with pytest.raises(ParlayError, match=r"SystemExit: enough|StopIteration"):
            asyncio.run(asyncio.wait_for(service.between_steps(wrong), 20))
    assert len(asyncio.run(service.generate(PROMPTS[0], SHORT)).outputs) == 1


def test_calls_that_follow_each_other_let_requests_go_on(service: AsyncLLM) -> None:
    """However many ask for the engine's thread again as soon as they had it."""

    async def run() -> None:
        text = asyncio.ensure_future(service.generate(PROMPTS[0], SHORT))

        async def ask() -> None:
            while not text.done():
                await service.between_steps(lambda llm: time.sleep(0.002))

        await asyncio.wait_for(asyncio.gather(*[ask() for _ in range(4)]), 300)
        assert (await text).outputs[0].token_ids

    asyncio.run(run())


def test_work_put_off_is_done_once_in_the_first_pause_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine thread, so that no request runs beside it; one that comes meanwhile waits."""
    monkeypatch.setattr("parlay.aio.engine_loop._IDLE_SECONDS", 0.01)
    calls: list[str] = []

    def later(llm: LLM) -> None:
        calls.append(threading.current_thread().name)
        raise RuntimeError("broken")

    async def run() -> None:
        async with AsyncLLM.load(lambda: LLM("parlay-mini", router_memory="off"), when_idle=later) as service:
            while not calls:
                await asyncio.sleep(0.01)
            assert (await service.generate(PROMPTS[0], SHORT)).outputs[0].token_ids
            await service.between_steps(lambda llm: None)

    asyncio.run(run())
    assert calls == ["parlay-engine"]


def test_a_runner_that_is_lost_ends_the_service_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later call could work: a server loads the model again. Who asks later hears the reason, too."""
    service = AsyncLLM(LLM("parlay-mini", dtype="float32", seed=1, max_num_seqs=1))

    def fail(*_: object) -> None:
        while (stats := service.stats()).waiting + stats.running < 2:
            time.sleep(0.001)
        raise RunnerLost("rank 1 has ended")

    monkeypatch.setattr(service.llm.runner, "forward", fail)

    async def run() -> list[BaseException | object]:
        """The first one runs, and the second waits for a place."""
        return await asyncio.gather(*(service.generate(each, SHORT) for each in PROMPTS[:2]), return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, RequestFailed)
        assert "rank 1 has ended" in str(error)
    asyncio.run(service.close(0))
    assert not service.alive
    with pytest.raises(Lost, match="rank 1 has ended"):
        asyncio.run(service.generate(PROMPTS[0], SHORT))
