"""The models of one server by name; the name in a request is only looked up here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.aio import AsyncLLM
from parlay.aio.engine_loop import EngineThread
from parlay.models.fetch.pulled import Progress
from parlay.models.fetch.resolving import bring
from parlay.serve.adapters import NamedAdapters
from parlay.serve.errors import ApiError, unavailable
from parlay.serve.hosted import HostedModel, Loader, Served
from parlay.types import ParlayError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SHOWN = 100  # most characters of an unknown name that its error repeats
LATEST = ":latest"
_SWEEP_SECONDS = 0.5
_STEP_SECONDS = 5.0
"""Seconds that the last step may take after the time to drain. A rank that hangs would hold it up for a minute."""
_FAILED_SECONDS = 5.0


class Registry:
    """The models of a server, loaded on demand, a few at a time. All calls belong to one event loop.

    An `AsyncLLM` is there from the start and stays; a `Loader` is called when a request names its model. At most
    ``max_loaded`` of the models loaded on demand are in memory. To make room for another, the one that was idle longest
    is unloaded: it gets no more requests, finishes those that it has, and is closed; requests that name it meanwhile
    wait. A model is also unloaded when no request has named it for ``idle_seconds``; None: never.

    Raises ValueError if there is no model.
    """

    def __init__(
        self,
        models: Mapping[str, AsyncLLM | Loader],
        *,
        max_loaded: int = 3,
        idle_seconds: float | None = None,
        retry_after: int = 1,
    ) -> None:
        if not models:
            raise ValueError("a server needs at least one model")
        self._models: dict[str, HostedModel] = {}
        self._max_loaded = max_loaded
        self._idle_seconds = idle_seconds
        self._retry_after = retry_after
        self._closing = asyncio.Event()
        self._turn = asyncio.Lock()
        self.adapters = NamedAdapters()
        for name, source in models.items():
            self.add(name, source)

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(list(self._models.values()))

    @property
    def loaded(self) -> list[Served]:
        """The models in memory."""
        return [model.served for model in self if model.served is not None]

    def add(self, name: str, source: AsyncLLM | Loader) -> HostedModel:
        """Serve one more model; if the name is taken, that model stays."""
        if name not in self._models:
            self._models[name] = HostedModel(name, source if callable(source) else None)
            if not callable(source):
                self._models[name].arrive(source)
        return self._models[name]

    def get(self, name: str | None) -> HostedModel:
        """The model of that name, which may end in Ollama's ``:latest``; None means the only one.

        Raises ApiError 404 for an unknown name, and for None if there are several models.
        """
        if name is None and len(self._models) > 1:
            message = f"there are several models here: name one of {', '.join(self._models)}"
            raise ApiError(404, message, "model", "model_not_found")
        if name is None:
            return next(iter(self))
        model = self.find(name)
        if model is None:
            shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "..."
            known = ", ".join([*self._models, *(adapter.name for adapter in self.adapters)])
            raise ApiError(404, f"there is no model {shown!r} here, only {known}", "model", "model_not_found")
        return model

    def find(self, name: str) -> HostedModel | None:
        """The model of this name; None if there is none."""
        return self._models.get(name) or self._models.get(name.removesuffix(LATEST)) or self._from_file(name)

    def _from_file(self, name: str) -> HostedModel | None:
        """The model loaded from a file or folder of that path or name; None unless there is exactly one."""
        found = [model for model in self if model.source and name in (model.source, Path(model.source).name)]
        return found[0] if len(found) == 1 else None

    async def use(self, name: str | None, request: Request) -> Served:
        """The model of that name, loaded if necessary; it stays loaded until the request is answered or its jobs are
        under way.

        The name of an adapter gives its base model with the adapter. Raises ApiError 404 as `get` does, and 503 if the
        model can't be loaded.
        """
        adapter = self.adapters.get(name)
        model = self.get(name if adapter is None else adapter.base)
        served = await self._take(model)
        request.state.in_use.append(model)
        return served if adapter is None else await asyncio.to_thread(adapter.on, served)

    async def _take(self, model: HostedModel) -> Served:
        if self._closing.is_set():
            raise unavailable(self._retry_after)
        if model.dead or model.loss:
            await self.unload(model)
        if (served := model.take()) is not None:
            return served
        arrival = model.arrival()
        self._begin_loading(model)
        try:
            return await arrival
        except asyncio.CancelledError:
            if arrival.done() and not arrival.cancelled() and arrival.exception() is None:
                model.leave()  # the model was loaded just as the request ended
            raise

    # ------------------------------------------------------------------------------------------- loading, unloading

    def load_now(self, name: str) -> None:
        """Load a model before the event loop runs. Raises what its loader raises."""
        model = self._models[name]
        assert model.loader is not None
        model.arrive(model.loader())

    async def unload(self, model: HostedModel) -> None:
        """Let a model that was loaded on demand finish its requests, then free its memory; other models stay."""
        if not model.unloadable:
            return
        if model.task is None:
            model.task = asyncio.create_task(self._retire(model))
        await asyncio.shield(model.task)

    async def sweep(self) -> None:
        """Until the server closes, unload idle and dead models, and load lost ones again."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if self._closing.is_set():
                return
            for model in self:
                if model.task is not None:
                    continue
                if model.unloadable and (model.dead or model.loss or self._is_idle(model)):
                    logger.info("model %s was unloaded", model.name)
                    model.task = asyncio.create_task(self._retire(model))
                elif model.should_reload:
                    model.task = asyncio.create_task(self._load(model))

    def _is_idle(self, model: HostedModel) -> bool:
        if model.busy:
            model.used = time.monotonic()
            return False
        keep = self._idle_seconds if model.keep_alive is None else model.keep_alive
        return keep is not None and time.monotonic() - model.used >= keep

    def _begin_loading(self, model: HostedModel) -> None:
        """Load a model for the requests that wait for it, after it has been unloaded if that is under way."""
        if model.task is None and model.wanted:
            model.task = asyncio.create_task(self._load(model))

    async def _load(self, model: HostedModel) -> None:
        """Load a model in a thread, one model at a time, so that room is made for each."""
        assert model.loader is not None
        try:
            async with self._turn:
                await self._make_room()
                if self._closing.is_set():
                    return model.fail(unavailable(self._retry_after), 0)
                began = time.monotonic()
                llm = await asyncio.wrap_future(EngineThread.once(model.loader))
        except Exception as error:
            logger.error("model %s can't be loaded: %s", model.name, error)
            message = f"model {model.name} can't be loaded; the server's log says why"
            model.fail(ApiError(503, message, "model", "model_load_failed"), _FAILED_SECONDS)
        else:
            logger.info("model %s was loaded in %.1f s", model.name, time.monotonic() - began)
            if self._closing.is_set():
                await llm.close(0)
            else:
                model.arrive(llm)
        finally:
            model.task = None

    async def _make_room(self) -> None:
        while len(loaded := [model for model in self if model.unloadable]) >= self._max_loaded:
            await self.unload(min(loaded, key=lambda model: (model.busy, model.used)))

    async def _retire(self, model: HostedModel) -> None:
        try:
            await model.retire()
        finally:
            model.task = None
            self._begin_loading(model)

    async def unless_closing(self, task: asyncio.Future[T]) -> T:
        """Await a task, and return its result. Raises ApiError 503 as soon as the server closes."""
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((task, closing), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise unavailable(self._retry_after)
        finally:
            closing.cancel()

    async def close(self, drain_seconds: float) -> None:
        """Refuse new requests; those with a model have ``drain_seconds`` to finish. It may be called again.

        Requests that wait for a model to be loaded are refused at once. A step that does not end is abandoned.
        """
        self._closing.set()
        for model in self:
            model.fail(unavailable(self._retry_after), 0)
        try:
            async with asyncio.timeout(drain_seconds + _STEP_SECONDS):
                await asyncio.gather(*(model.retire(drain_seconds) for model in self if model.served is not None))
        except TimeoutError:
            logger.warning(
                "a step has not ended in %g s: the server stops without waiting for it", drain_seconds + _STEP_SECONDS
            )


def keep_in_use(request: Request) -> Callable[[], None]:
    """Keep the models of a request loaded until the returned function is called; a second call does nothing.

    This is for answers of several rounds, between which a model may be idle and still needed.
    """
    models: list[HostedModel] = list(request.state.in_use)
    for model in models:
        model.users += 1

    def give_back() -> None:
        while models:
            models.pop().leave()

    return give_back


class Leases:
    """ASGI middleware that keeps the models of a request loaded until its answer begins.

    A stream begins when its jobs are under way, and a model that is being closed finishes those. So a client that reads
    slowly does not keep a model in memory.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        in_use: list[HostedModel] = []
        scope.setdefault("state", {})["in_use"] = in_use

        def give_back() -> None:
            while in_use:
                in_use.pop().leave()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                give_back()
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            give_back()


class Puller:
    """Downloads what `parlay pull` can, one model at a time, and serves it afterwards. All calls belong to one event
    loop."""

    def __init__(self, registry: Registry, loader_of: Callable[[str], Loader]) -> None:
        self._registry = registry
        self._loader_of = loader_of
        self._turn = asyncio.Lock()

    async def pull(self, name: str, progress: Progress) -> None:
        """Download a model; ``progress`` is called in a thread. Raises ApiError if it can't be downloaded."""
        async with self._turn:
            try:
                bringing = EngineThread.once(lambda: bring(name, progress))
                await self._registry.unless_closing(asyncio.wrap_future(bringing))
            except (ParlayError, ValueError) as error:
                logger.warning("%s was not pulled: %s", name, error)
                raise ApiError(400, f"{name[:100]} can't be pulled; the server's log says why", "model") from None
        self._registry.add(name, self._loader_of(name))
