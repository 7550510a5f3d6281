"""One model of a server: loaded, or to be loaded when a request first names it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from parlay.aio import AsyncLLM
from parlay.certificates.gate import CertificateGate
from parlay.llm.llm import LLM
from parlay.llm.vocabulary import Vocabulary
from parlay.serve.errors import ApiError
from parlay.types import Adapter, RunnerSpec, SamplingParams, Tokenizer

Loader = Callable[[], AsyncLLM]
"""Loads a model and returns when it is ready; a thread calls it."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A `Loader` with the name or path of the model that it loads."""

    source: str
    load: Loader

    def __call__(self) -> AsyncLLM:
        return self.load()


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model under its name."""

    name: str
    service: AsyncLLM
    adapter: Adapter | None = None
    """The adapter that this request uses; ``name`` is then the adapter's."""

    @property
    def llm(self) -> LLM:
        return self.service.llm

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.tokenizer

    @property
    def required_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError if there is none."""
        if self.tokenizer is None:
            raise ApiError(400, f"model {self.name} came without a tokenizer", "model")
        return self.tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        return self.llm.vocabulary

    @property
    def spec(self) -> RunnerSpec:
        return self.llm.runner.spec

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together."""
        return self.llm.engine.max_context

    @property
    def usual(self) -> SamplingParams:
        """The sampling parameters that apply if neither the request nor its protocol sets them."""
        return self.llm.get_default_sampling_params()

    @property
    def gate(self) -> CertificateGate:
        return self.llm.gate

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Names or paths of its draft models."""
        return self.llm.draft_models

    @property
    def strategies(self) -> frozenset[str]:
        """Strategies that a request may name without parameters."""
        return frozenset(self.llm.offered())


class HostedModel:
    """A model under its name; one without a ``loader`` is loaded from the start and stays.

    ``users`` are requests that have the model but have not submitted their jobs yet; it is not closed meanwhile.
    ``task`` is the task that is loading or unloading it. All calls belong to one event loop.
    """

    def __init__(self, name: str, loader: Loader | None) -> None:
        self.name = name
        self.loader = loader
        self.created = int(time.time())
        self.served: Served | None = None
        self.max_model_len: int | None = None
        """Set once the model has been loaded."""
        self.users = 0
        self.used = time.monotonic()
        """When a request last named it or was under way."""
        self.keep_alive: float | None = None
        """Idle seconds after which it is unloaded; None: the server's setting."""
        self.leaving = False
        self.task: asyncio.Task[None] | None = None
        self._loss = ""
        self._failure: tuple[float, ApiError] | None = None
        self._arrivals: deque[asyncio.Future[Served]] = deque()
        self._left = asyncio.Event()
        """Set when the last user leaves."""

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.served is not None:
            return "loaded"
        return "loading" if self.task is not None else "unloaded"

    @property
    def source(self) -> str | None:
        """The name or path from which it is loaded, if known."""
        if isinstance(self.loader, ModelLoader):
            return self.loader.source
        return self.served.spec.name if self.served is not None else None

    @property
    def unloadable(self) -> bool:
        """Whether it is loaded and may be unloaded."""
        return self.served is not None and self.loader is not None

    @property
    def dead(self) -> bool:
        """Whether its engine has stopped by itself."""
        return self.served is not None and not self.leaving and not self.served.service.alive

    @property
    def loss(self) -> str:
        """Why a part of the model is lost; empty if none is, and after it has been loaded again."""
        if self.served is not None and not self.leaving:
            self._loss = self.served.llm.loss() or self._loss
        return self._loss

    @property
    def should_reload(self) -> bool:
        """Whether it should be loaded again now because it was lost. After a failed attempt this waits a while."""
        failed = self._failure is not None and time.monotonic() < self._failure[0]
        return bool(self.loss) and self.served is None and self.loader is not None and not failed

    @property
    def wanted(self) -> bool:
        """Whether requests wait for it to be loaded."""
        return bool(self._arrivals)

    @property
    def busy(self) -> bool:
        """Whether a request uses it or is under way in its engine."""
        if self.users or self.wanted:
            return True
        stats = self.served.service.stats() if self.served is not None else None
        return stats is not None and stats.waiting + stats.running > 0

    def arrive(self, llm: AsyncLLM) -> None:
        """Give the loaded model to the waiting requests."""
        self.served, self._loss = Served(self.name, llm), ""
        self.max_model_len = self.served.max_model_len
        self.used = time.monotonic()
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                self.users += 1
                arrival.set_result(self.served)

    def fail(self, error: ApiError, seconds: float) -> None:
        """Record that loading failed. Requests in the next ``seconds`` get the same error without another attempt."""
        self._failure = (time.monotonic() + seconds, error)
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_exception(error)

    def take(self) -> Served | None:
        """The model if it is loaded, else None. Raises ApiError if loading failed a moment ago."""
        self.used = time.monotonic()
        if self._failure is not None and time.monotonic() < self._failure[0]:
            raise self._failure[1]
        if self.leaving or self.served is None:
            return None
        self.users += 1
        return self.served

    def arrival(self) -> asyncio.Future[Served]:
        """A future for the loaded model; the task that loads it calls `arrive` or `fail`. When it is done, the caller
        counts as a user."""
        arrival: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._arrivals.append(arrival)
        return arrival

    def leave(self) -> None:
        """Release the model: the request has submitted its jobs, or no longer needs it."""
        self.users -= 1
        self.used = time.monotonic()
        if not self.users:
            self._left.set()

    async def retire(self, drain_seconds: float | None = None) -> None:
        """Give the model to no further request, let those under way finish within ``drain_seconds``, and free its
        memory."""
        self._loss, self.leaving, began = self.loss, True, time.monotonic()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while self.users:
                        self._left.clear()
                        await self._left.wait()
            if self.served is not None:
                over = time.monotonic() - began
                await self.served.service.close(None if drain_seconds is None else max(0.0, drain_seconds - over))
        finally:
            if self.loader is not None:
                self.served = None
            self.leaving = False
