"""One model of a server: here now, or loaded when a request first names it."""

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
from parlay.llm.vocabulary import Vocabulary
from parlay.serve.errors import ApiError
from parlay.types import Adapter, RunnerSpec, SamplingParams, Tokenizer

Loader = Callable[[], AsyncLLM]
"""Loads a model and returns when it is ready. Called in a thread."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A `Loader` that says which model it loads: a name or path."""

    source: str
    load: Loader

    def __call__(self) -> AsyncLLM:
        return self.load()


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model under its name."""

    name: str
    llm: AsyncLLM
    adapter: Adapter | None = None
    """What its products are changed by for this request; the name is then the adapter's."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.llm.tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        return self.llm.llm.vocabulary

    @property
    def spec(self) -> RunnerSpec:
        return self.llm.llm.runner.spec

    @property
    def max_model_len(self) -> int:
        """How many tokens of prompt and output it holds together."""
        return self.llm.llm.engine.max_context

    @property
    def usual(self) -> SamplingParams:
        """The sampling that a request takes where neither it nor its protocol names a value."""
        return self.llm.llm.get_default_sampling_params()

    @property
    def gate(self) -> CertificateGate:
        return self.llm.llm.gate

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Names or paths of the models that draft for it."""
        return self.llm.llm.draft_models

    @property
    def strategies(self) -> frozenset[str]:
        """Names of those that a request may name without parameters."""
        return frozenset(self.llm.llm.offered())


class HostedModel:
    """A model under its name. Whoever has no ``loader`` is here from the start and stays.

    ``users`` are requests that have the model and have not handed it their jobs yet; it is not closed under them.
    ``task`` is what loads or unloads it now. Lives in one event loop.
    """

    def __init__(self, name: str, loader: Loader | None) -> None:
        self.name = name
        self.loader = loader
        self.created = int(time.time())
        self.served: Served | None = None
        self.max_model_len: int | None = None
        """Known once it has been loaded."""
        self.users = 0
        self.used = time.monotonic()
        """When a request last named it, or was last seen under way."""
        self.keep_alive: float | None = None
        """Seconds without a request after which it is unloaded; None: as the server says."""
        self.leaving = False
        self.task: asyncio.Task[None] | None = None
        self._loss = ""
        self._failure: tuple[float, ApiError] | None = None
        self._arrivals: deque[asyncio.Future[Served]] = deque()
        self._left = asyncio.Event()
        """Set when its last user leaves."""

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.served is not None:
            return "loaded"
        return "loading" if self.task is not None else "unloaded"

    @property
    def source(self) -> str | None:
        """The name or path that it is loaded from, as far as that is known."""
        if isinstance(self.loader, ModelLoader):
            return self.loader.source
        return self.served.spec.name if self.served is not None else None

    @property
    def unloadable(self) -> bool:
        """Whether it takes memory that it could give back."""
        return self.served is not None and self.loader is not None

    @property
    def dead(self) -> bool:
        """Whether its engine has stopped by itself."""
        return self.served is not None and not self.leaving and not self.served.llm.alive

    @property
    def loss(self) -> str:
        """Why a part of the model is lost; empty while none is, and once it has been loaded again."""
        if self.served is not None and not self.leaving:
            self._loss = self.served.llm.llm.loss() or self._loss
        return self._loss

    @property
    def returns(self) -> bool:
        """Whether it is to be loaded again now, because it was lost. After a failure that waits a while."""
        failed = self._failure is not None and time.monotonic() < self._failure[0]
        return bool(self.loss) and self.served is None and self.loader is not None and not failed

    @property
    def wanted(self) -> bool:
        """Whether requests wait until it is loaded."""
        return bool(self._arrivals)

    @property
    def busy(self) -> bool:
        """Whether a request has it, or is under way in its engine."""
        if self.users or self.wanted:
            return True
        stats = self.served.llm.stats() if self.served is not None else None
        return stats is not None and stats.waiting + stats.running > 0

    def arrive(self, llm: AsyncLLM) -> None:
        """Note that it has been loaded, and give it to waiting requests."""
        self.served, self._loss = Served(self.name, llm), ""
        self.max_model_len = self.served.max_model_len
        self.used = time.monotonic()
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                self.users += 1
                arrival.set_result(self.served)

    def fail(self, error: ApiError, seconds: float) -> None:
        """Note that loading failed. Requests in the next ``seconds`` get the same error without another attempt."""
        self._failure = (time.monotonic() + seconds, error)
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_exception(error)

    def take(self) -> Served | None:
        """The model, if it can be had at once. Raises ApiError if it could not be loaded a moment ago."""
        self.used = time.monotonic()
        if self._failure is not None and time.monotonic() < self._failure[0]:
            raise self._failure[1]
        if self.leaving or self.served is None:
            return None
        self.users += 1
        return self.served

    def arrival(self) -> asyncio.Future[Served]:
        """Done once it is loaded; whoever loads it calls `arrive` or `fail`. From then on the caller is a user."""
        arrival: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._arrivals.append(arrival)
        return arrival

    def leave(self) -> None:
        """A request that had the model has handed over its jobs, or needs it no more."""
        self.users -= 1
        self.used = time.monotonic()
        if not self.users:
            self._left.set()

    async def retire(self, drain_seconds: float | None = None) -> None:
        """Let no further request have it, let those under way finish (for so long), and free its memory."""
        self._loss, self.leaving, began = self.loss, True, time.monotonic()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while self.users:
                        self._left.clear()
                        await self._left.wait()
            if self.served is not None:
                over = time.monotonic() - began
                await self.served.llm.close(None if drain_seconds is None else max(0.0, drain_seconds - over))
        finally:
            if self.loader is not None:
                self.served = None
            self.leaving = False
