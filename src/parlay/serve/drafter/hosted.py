"""A drafter used from an event loop: requests that arrive while it drafts form the next batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from parlay.drafters.remote.messages import Answer, KnownTokens, TextUpdate
from parlay.drafters.remote.service import DraftService, Owner
from parlay.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The facts that clients need before they ask for drafts: the strategy, and the vocabulary of its ids."""

    strategy: str
    vocab_size: int
    tokenizer: str
    """The tokenizer's fingerprint; empty if there is none."""


@dataclass(eq=False, slots=True)
class _Waiting:
    owner: Owner
    updates: Sequence[TextUpdate]
    over: Sequence[int]
    answers: asyncio.Future[list[Answer]]


@dataclass
class DrafterCounts:
    """Totals since the start."""

    requests: int = 0
    batches: int = 0
    texts: int = 0
    drafted_tokens: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass(eq=False)
class HostedDrafter:
    """A drafter and the requests that wait for it. One event loop calls its methods, and one thread drafts."""

    info: DrafterInfo
    service: DraftService
    closing: ExitStack
    """Resources that are closed with it, such as stores that then write their files."""
    counts: DrafterCounts = field(default_factory=DrafterCounts)
    _waiting: list[_Waiting] = field(default_factory=list)
    _working: asyncio.Task[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "parlay-drafter"))

    async def draft(self, owner: Owner, updates: Sequence[TextUpdate], over: Sequence[int]) -> list[Answer]:
        """Draft for one client's texts, in a batch with those of all clients that wait."""
        waiting = _Waiting(owner, updates, over, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self.counts.requests += 1
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await waiting.answers

    async def close(self, drain_seconds: float | None = None) -> None:
        """Wait for the batch under way, at most ``drain_seconds``, and close the drafter. The signature is
        `Registry.close`'s."""
        if self._working is not None:
            await asyncio.wait([self._working], timeout=drain_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.closing.close()

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._draft, batch)
            except Exception as error:
                self.counts.failures += 1
                for waiting in batch:
                    _settle(waiting, error=ApiError(500, f"the drafter failed: {type(error).__name__}: {error}"))
                continue
            for waiting in batch:
                own, answers = answers[: len(waiting.updates)], answers[len(waiting.updates) :]
                _settle(waiting, own)

    def _draft(self, batch: Sequence[_Waiting]) -> list[Answer]:
        began = time.perf_counter()
        for waiting in batch:
            self.service.release(waiting.owner, waiting.over)
        answers = self.service.draft([(waiting.owner, update) for waiting in batch for update in waiting.updates])
        self.counts.batches += 1
        self.counts.texts += len(answers)
        self.counts.drafted_tokens += sum([len(draft) for draft in answers if not isinstance(draft, KnownTokens)])
        self.counts.seconds += time.perf_counter() - began
        return answers


def _settle(waiting: _Waiting, answers: list[Answer] | None = None, error: ApiError | None = None) -> None:
    """Answer a waiting request, unless its client has gone."""
    if waiting.answers.done():
        return
    if error is not None:
        waiting.answers.set_exception(error)
    else:
        waiting.answers.set_result(answers or [])
