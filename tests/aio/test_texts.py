"""Many requests at once, from any loop and thread: each gets the text that it gets alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.serving.cases import FAILING
from parlay import RequestFailed, SamplingParams
from parlay.aio import AsyncLLM
from parlay.llm.request_options import RequestOptions
from tests.aio.conftest import LONG, PROMPTS, Plain

STRATEGIES = ["none", "prompt-lookup", "draft-model", "union", "suffix-decoding"]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24),
    SamplingParams(temperature=0.7, seed=6, max_tokens=12, top_p=0.9, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=7, max_tokens=10, n=2, logprobs=1),
]
CASES = [(PROMPTS[number % 4], SAMPLING[(number // 4 + number) % 4], STRATEGIES[number % 5]) for number in range(20)]


async def ask(service: AsyncLLM, prompt: str, params: SamplingParams, strategy: str) -> list[tuple[int, ...]]:
    output = await service.generate(prompt, params, RequestOptions(strategy=strategy))
    return [sample.token_ids for sample in output.outputs]


async def ask_all(service: AsyncLLM) -> list[list[tuple[int, ...]]]:
    return await asyncio.gather(*(ask(service, *case) for case in CASES))


def test_twenty_mixed_requests_get_the_tokens_of_plain_decoding_one_by_one(service: AsyncLLM, plain: Plain) -> None:
    expected = [plain(prompt, params) for prompt, params, _ in CASES]
    assert asyncio.run(ask_all(service)) == expected


def test_several_event_loops_in_several_threads_share_one_service(service: AsyncLLM, plain: Plain) -> None:
    expected = [plain(prompt, params) for prompt, params, _ in CASES]
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(lambda: asyncio.run(ask_all(service))) for _ in range(3)]
    assert [run.result() for run in runs] == [expected] * 3


def test_clients_that_leave_change_nobody_elses_text(service: AsyncLLM, plain: Plain) -> None:
    expected = [plain(prompt, params) for prompt, params, _ in CASES]

    async def leave(number: int) -> None:
        events = service.stream(PROMPTS[number % 4], LONG, RequestOptions(strategy=STRATEGIES[number % 5]))
        async for _ in events:
            if (number := number - 1) < 0:
                break
        await events.aclose()

    async def run() -> list[list[tuple[int, ...]]]:
        leaving = asyncio.gather(*map(leave, range(8)))
        texts = await ask_all(service)
        await leaving
        return texts

    assert asyncio.run(run()) == expected


def test_a_stream_adds_up_to_the_output_and_skips_steps_that_add_nothing(service: AsyncLLM) -> None:
    async def run() -> None:
        job = service.llm.job(PROMPTS[0] * 30, SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=12))
        stream = await service.submit(job)
        events = [event async for event in stream]
        for sample in stream.output.outputs:
            own = [event for event in events if event.index == sample.index]
            assert "".join(event.text for event in own) == sample.text
            assert [token for event in own for token in event.token_ids] == list(sample.token_ids)
            assert [event.finish_reason for event in own if event.finish_reason] == [sample.finish_reason]
        assert all(event.token_ids or event.finish_reason for event in events)
        assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]

    asyncio.run(run())


def test_a_job_whose_whole_output_is_wanted_has_one_event(service: AsyncLLM) -> None:
    async def run() -> None:
        stream = await service.submit(service.llm.job(PROMPTS[1], SamplingParams(max_tokens=8, n=2)), whole=True)
        (event,) = [event async for event in stream]
        assert event.output == stream.output == await stream.wait()

    asyncio.run(run())


def test_a_conversation_is_put_into_the_models_own_format(service: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    params = SamplingParams(temperature=0, max_tokens=8)
    output = asyncio.run(service.chat(messages, params))
    (alone,) = asyncio.run(service.between_steps(lambda llm: llm.chat(messages, params)))
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("asked", ["hello", {"role": "user", "content": "hello"}])
def test_what_is_no_conversation_is_no_prompt_in_its_place(service: AsyncLLM, asked: Any) -> None:
    """`LLM.chat` refuses it, too: a text would be continued without the model's chat format."""
    with pytest.raises(ValueError, match="a conversation is a list of messages"):
        asyncio.run(service.chat(asked))


def test_a_processor_that_raises_reaches_its_own_request_only(service: AsyncLLM, plain: Plain) -> None:
    expected = [plain(prompt, params) for prompt, params, _ in CASES]

    def explode(ids, logits):  # type: ignore[no-untyped-def]
        raise RuntimeError("boom")

    async def run() -> list[list[tuple[int, ...]]]:
        broken = asyncio.ensure_future(
            service.generate(PROMPTS[0], SamplingParams(max_tokens=4, logits_processors=[explode]))
        )
        texts = await ask_all(service)
        with pytest.raises(RequestFailed, match="boom"):
            await broken
        return texts

    assert asyncio.run(run()) == expected


def test_a_drafter_that_raises_leaves_the_text_as_it_is_and_is_counted(service: AsyncLLM, plain: Plain) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True)
    before = service.stats().drafter_faults
    output = asyncio.run(service.generate(PROMPTS[0], params, RequestOptions(strategy=f"{FAILING}:policy=fixed")))
    assert [sample.token_ids for sample in output.outputs] == plain(PROMPTS[0], params)
    assert output.outputs[0].metrics.drafter_faults == 1
    assert service.stats().drafter_faults == before + 1


def test_one_reader_of_several_jobs_gets_all_that_waits_at_once_and_in_order(service: AsyncLLM, plain: Plain) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def read() -> tuple[list[list[int]], int]:
        wake_event = asyncio.Event()
        jobs = [service.llm.job(prompt, params, RequestOptions(strategy="none")) for prompt in PROMPTS]
        streams = [await service.submit(job, wake_event=wake_event) for job in jobs]
        tokens: list[list[int]] = [[] for _ in jobs]
        takes, ended = 0, 0
        while ended < len(jobs):
            await wake_event.wait()
            wake_event.clear()
            while not await service.between_steps(lambda llm: llm.engine.idle):
                pass  # a slow reader
            takes += 1
            for mine, stream in zip(tokens, streams, strict=True):
                for event in stream.take():
                    mine += event.token_ids
                    ended += event.output is not None
        return tokens, takes

    tokens, takes = asyncio.run(read())
    assert [(tuple(mine),) for mine in tokens] == [tuple(plain(prompt, params)) for prompt in PROMPTS]
    assert takes < 40  # fewer than there were steps
