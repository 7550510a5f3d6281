"""A strategy that a request is the first to name is built beside the engine: others go on, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM, Closed
from parlay.drafters.resources import Resources
from parlay.llm.outputs import RequestOutput
from parlay.llm.request_options import RequestOptions
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView
from tests.aio.conftest import PROMPTS, Plain

SHORT = SamplingParams(temperature=0, max_tokens=12)
PATIENCE = 120  # seconds until a test fails that would wait for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowOptions(Options):
    number: int = option(0, "which one")


class Slow:
    """Takes as long to build as a test wants."""

    needs = Needs()
    begun, go_on = threading.Event(), threading.Event()
    built: ClassVar[list[int]] = []
    dropped: ClassVar[list[int]] = []
    wrong = ""

    def __init__(self, resources: Resources, options: SlowOptions) -> None:
        self.built.append(options.number)
        self.begun.set()
        self.go_on.wait(PATIENCE)
        if self.wrong:
            raise UsageError(self.wrong)
        resources.closing.callback(self.dropped.append, options.number)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"built": [], "dropped": [], "begun": threading.Event(), "go_on": threading.Event()}.items():
        monkeypatch.setattr(Slow, name, value)
    yield
    Slow.go_on.set()


def ask(service: AsyncLLM, strategy: str, prompt: str = PROMPTS[0]) -> asyncio.Task[RequestOutput]:
    return asyncio.create_task(service.generate(prompt, SHORT, RequestOptions(strategy=strategy)))


def slow(number: int) -> str:
    return f"{__name__}:Slow:number={number}"


@asynccontextmanager
async def one_is_built(service: AsyncLLM, strategy: str) -> AsyncIterator[asyncio.Task[RequestOutput]]:
    """A request whose strategy is being built, until ``Slow.go_on``."""
    async with asyncio.timeout(PATIENCE):
        asked = ask(service, strategy)
        await asyncio.to_thread(Slow.begun.wait, PATIENCE)
        yield asked


async def held(service: AsyncLLM, count: int) -> None:
    """Wait until so many requests wait, all of them seen by the engine's thread."""
    while service.stats().waiting != count:
        await asyncio.sleep(0.001)
    await service.between_steps(lambda llm: None)


def test_others_go_on_while_a_strategy_is_built(service: AsyncLLM, plain: Plain) -> None:
    expected = plain(PROMPTS[0], SHORT)

    async def run() -> None:
        async with one_is_built(service, slow(1)) as first:
            second = ask(service, slow(1), PROMPTS[1])
            await held(service, 2)
            assert [sample.token_ids for sample in (await ask(service, "none")).outputs] == expected
            assert service.stats().waiting == 2
            Slow.go_on.set()
            assert [sample.token_ids for sample in (await first).outputs] == expected
            assert (await second).outputs[0].token_ids
            assert (await ask(service, slow(1))).outputs[0].metrics.strategy == slow(1)
        assert Slow.built == [1]

    asyncio.run(run())
    assert service.stats().waiting == 0


def test_a_strategy_that_cannot_be_built_is_told_to_all_who_wait_and_tried_again(
    service: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "wrong", "the file is damaged: copy it again")

    async def run() -> None:
        async with one_is_built(service, slow(2)) as first:
            waiting = [first, ask(service, slow(2)), other := ask(service, slow(3))]
            await held(service, 3)
            Slow.go_on.set()
            for each in waiting:
                with pytest.raises(UsageError, match=r"^the file is damaged: copy it again$"):
                    await each
            assert Slow.built == [2, 3]
            assert other.done()
            monkeypatch.setattr(Slow, "wrong", "")
            assert (await ask(service, slow(2))).outputs[0].token_ids

    asyncio.run(run())
    assert service.stats().waiting == 0


def test_who_leaves_while_a_strategy_is_built_gives_its_place_back(service: AsyncLLM) -> None:
    async def run() -> None:
        async with one_is_built(service, slow(4)) as first:
            other = ask(service, slow(5))
            await held(service, 2)
            for each in (first, other):
                each.cancel()
            await held(service, 0)
            Slow.go_on.set()
            assert (await ask(service, slow(6))).outputs[0].token_ids
            assert (await ask(service, slow(4))).outputs[0].token_ids

    asyncio.run(run())
    assert Slow.built == [4, 6]  # nobody waited for the other when its turn came


def test_closing_at_once_refuses_who_waits_and_drops_what_was_built(fresh: LLM) -> None:
    async def run() -> None:
        service = AsyncLLM(fresh)
        async with one_is_built(service, slow(7)) as first:
            closing = asyncio.create_task(service.close(0))
            with pytest.raises(Closed):
                await first
            assert not closing.done()
            Slow.go_on.set()
            await closing

    asyncio.run(run())
    assert (Slow.built, Slow.dropped) == ([7], [7])


def test_closing_lets_who_waits_have_its_strategy(fresh: LLM) -> None:
    async def run() -> None:
        service = AsyncLLM(fresh)
        async with one_is_built(service, slow(8)) as first:
            closing = asyncio.create_task(service.close())
            await asyncio.sleep(0)
            Slow.go_on.set()
            assert len((await first).outputs[0].token_ids) > 0
            await closing

    asyncio.run(run())
    assert Slow.dropped == [8]


def test_a_draft_model_joins_while_another_request_decodes(service: AsyncLLM, plain: Plain) -> None:
    """Its cache takes part in the memory that the running request has pages of."""
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with asyncio.timeout(PATIENCE):
            running = asyncio.create_task(service.generate(PROMPTS[3], long, RequestOptions(strategy="none")))
            drafted = await ask(service, "draft-model:model=parlay-mini-draft")
            assert drafted.outputs[0].token_ids == plain(PROMPTS[0], SHORT)[0]
            assert (await running).outputs[0].token_ids == expected

    plain(PROMPTS[0], SHORT)
    (expected,) = plain(PROMPTS[3], long)
    asyncio.run(run())
    assert "parlay-mini-draft" in service.llm.draft_models
