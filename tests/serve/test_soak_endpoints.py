"""The soak over all endpoints passes in small, and it would notice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from fastapi import FastAPI

from benchmarks.serving.endpoints import ENDPOINTS
from benchmarks.serving.soak_client import call
from benchmarks.serving.soak_endpoints import Soak, cases, fill, filler, soak
from benchmarks.serving.tally import growth
from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.serve.settings import Settings

Serve = Callable[[FastAPI], AbstractContextManager[str]]


def test_the_soak_in_small_keeps_every_promise(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    with serve(make_app()) as url:
        result = soak(url.removeprefix("http://"), 12, 0, 4)
    assert result["passed"], result["wrong"]
    assert result["fates"] == {"completed": 10, "cancelled": 1, "refused": 1}
    assert result["samples_equal_to_plain"] == result["samples_exact"] > 5


def test_what_differs_or_is_lost_is_told(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    (case,) = (one for one in cases(9, 0, ENDPOINTS[:1], ["none"]) if one.kind == "failing")
    with serve(make_app()) as url:
        run = Soak(url.removeprefix("http://"), frozenset({None}), {case.key: "something else"})
        run.run([case], 1)
        assert "differs" in run.tally.wrong.pop()
        run.known.clear()
        run.run([case], 1)
    assert run.tally.fates == {"completed": 1, "lost": 1}


def test_the_cache_is_full_before_memory_is_measured(serve: Serve) -> None:
    engine = AsyncLLM(LLM("parlay-mini", memory="4MiB"))
    try:
        with serve(create_app({"parlay-mini": engine}, Settings())) as url:
            address = url.removeprefix("http://")
            fill(address)
            first = json.loads(call(address, "POST", "/v1/completions", filler(0)))
    finally:
        asyncio.run(engine.close(0))
    found = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found < first["usage"]["prompt_tokens"] - 16, "the end of the first text should have made room for the last"


def test_memory_that_peaks_for_a_moment_hides_no_growth() -> None:
    memory = dict.fromkeys(range(100, 2100, 100), 800)
    assert growth(memory) == 0
    assert growth(memory | {500: 1000, 2000: 840}) == pytest.approx(0.05)
    assert growth(memory | {100: 600}) == 0, "caches fill at first"
    assert growth({100: 800, 200: 900}) is None
