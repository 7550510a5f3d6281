"""One service for the tests that leave it open, and the texts of plain decoding, one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM

PROMPTS = [
    "Repeat this text exactly: the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n\nThe text:",
    "def add(a, b):\n    return",
    "The weather was",
    "Once upon a time there was a king who",
]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
"""Over ten seconds of decoding for an engine that is `hindered`. A request that ends sooner was aborted."""

Plain = Callable[[str, SamplingParams], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def service() -> Iterator[AsyncLLM]:
    alm = AsyncLLM(LLM("parlay-mini", dtype="float32", seed=1))
    yield alm
    asyncio.run(alm.close(0))


@pytest.fixture(scope="module")
def plain(service: AsyncLLM) -> Plain:
    """Return a function that gives the token ids of each sample of `LLM.generate` without drafts. It runs in the engine
    thread, alone."""
    known: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def tokens(prompt: str, params: SamplingParams) -> list[tuple[int, ...]]:
        key = prompt, repr(params)
        if key not in known:
            (output,) = asyncio.run(service.between_steps(lambda llm: llm.generate(prompt, params, strategy="none")))
            known[key] = [sample.token_ids for sample in output.outputs]
        return known[key]

    return tokens


def hindered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step after the first ten a sixteenth of a second slower, so that no machine is done before the test
    acts."""
    step, quick = llm.engine.step, iter(range(10))

    def slowly() -> Any:
        if next(quick, None) is None:
            time.sleep(1 / 16)
        return step()

    monkeypatch.setattr(llm.engine, "step", slowly)


@pytest.fixture
def slow(service: AsyncLLM, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    """The service, `hindered`."""
    plain(PROMPTS[3], LONG)  # before it becomes slow
    hindered(service.llm, monkeypatch)
    return service


@pytest.fixture
def fresh() -> LLM:
    """A model for a service that the test closes."""
    return LLM("parlay-mini", dtype="float32", seed=1, max_num_seqs=4)


@pytest.fixture
def late(fresh: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The model of `fresh`, `hindered`."""
    hindered(fresh, monkeypatch)
    return fresh
