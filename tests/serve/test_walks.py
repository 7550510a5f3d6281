"""Few files lie between a call and its first token, and architecture.md names them: it is what a stranger opens."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import httpx
from fastapi import FastAPI

import parlay
from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.aio.stream import JobQueue, JobStream
from parlay.engine.commit import commit
from parlay.models.compiled.forward import CompiledForward
from parlay.sampling.sampler import sample
from parlay.serve.guard.connection import Connection
from parlay.serve.openai.chat.route import chat_request
from parlay.serve.protocol.answering import DataFrames, read_json
from parlay.text.detokenizer import TextStream
from tests.serve.conftest import listening

PACKAGE = Path(parlay.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "developers" / "architecture.md"
MOST_GENERATE, MOST_CHAT = 22, 36
"""The second counts the files of both tables."""

EVENTS: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        *(read_json, chat_request, CompiledForward.run, sample, commit, TextStream.push),
        *(TextStream.release, JobQueue.put, JobStream.take, DataFrames.encode),
    )
)
"""Where a request becomes something else. Whoever follows it opens all files that are on the call stack there."""
INTERFACES = {"models/forward.py"}
"""Protocols whose own lines only call what implements them."""
BESIDE = ("drafters/", "models/beside.py")
"""What drafters run is not on the way: prices of this machine decide which of them `auto` asks."""


class Trace:
    """Notes the package's files in which functions are entered, and those on the call stack at an event."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self.stacked: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or (name := _name(frame)) is None:
            return
        self.entered.add(name)
        if frame.f_code in EVENTS:
            stack: set[str] = set()
            below: FrameType | None = frame
            while below is not None:
                stack.update(filter(None, [_name(below)]))
                below = below.f_back if below.f_code is not LLM.generate.__code__ else None
            if not any(name.startswith(BESIDE) for name in stack):
                self.stacked |= stack


def _name(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(str(PACKAGE)) + 1 :].replace(os.sep, "/") if path.startswith(f"{PACKAGE}{os.sep}") else None


@contextmanager
def traced(engine: AsyncLLM) -> Iterator[Trace]:
    """Trace the engine's thread, and all threads that begin meanwhile."""
    trace = Trace()
    threading.setprofile(trace)
    asyncio.run(engine.between_steps(lambda _: sys.setprofile(trace)))
    try:
        yield trace
    finally:
        asyncio.run(engine.between_steps(lambda _: sys.setprofile(None)))
        threading.setprofile(None)


def table(title: str) -> set[str]:
    """The files that the first column of a section's table names."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


GENERATE, CHAT = table("A request in Python"), table("A request over HTTP")


def test_the_walks_are_short() -> None:
    assert len(GENERATE) <= MOST_GENERATE
    assert len(GENERATE | CHAT) <= MOST_CHAT


def test_generate_enters_the_files_of_its_walk(engine: AsyncLLM) -> None:
    def generate(llm: LLM) -> None:
        llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True))

    with traced(engine) as trace:
        asyncio.run(engine.between_steps(generate))
    assert {name for name in GENERATE if name.endswith(".py")} - trace.entered == set(), "nothing happens there"
    assert trace.stacked - INTERFACES - GENERATE == set(), "they lie on the way, and the table leaves them out"


def test_a_chat_enters_the_files_of_its_walk(engine: AsyncLLM, make_app: Callable[..., FastAPI]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": True, "stream": True}
    with traced(engine) as trace, listening(make_app(), Connection) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json={"model": "parlay-mini", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    wanted = {name for name in GENERATE | CHAT if name.endswith(".py")}
    assert wanted - trace.entered == set(), "nothing happens there"
    assert trace.stacked - INTERFACES - wanted == set(), "they lie on the way, and the tables leave them out"
