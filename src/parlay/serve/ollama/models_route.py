"""Ollama's `/api/tags`, `show`, `ps`, `pull` and `version`, which list and fetch models."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from parlay import __version__
from parlay.models.facts import Description, ModelFacts, describe, read_facts
from parlay.models.fetch.resolving import is_local, resolve
from parlay.serve.errors import ApiError, OllamaErrorBody, responses
from parlay.serve.hosted import HostedModel
from parlay.serve.ollama.body import ModelBody, PullBody
from parlay.serve.ollama.models_reply import described, digest_of, listed, running, shown
from parlay.serve.protocol.answering import BodyRoute
from parlay.serve.protocol.body import check_extras
from parlay.serve.registry import Puller, Registry
from parlay.serve.settings import Settings
from parlay.types import ParlayError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SPOKEN = "0.12.0"
"""The version of Ollama's API that is implemented; its clients check it."""
_LINES = "application/x-ndjson"
_FAILURES = responses(400, 403, 404, 408, 413, 429, 503, body=OllamaErrorBody)


def router(registry: Registry, settings: Settings, puller: Puller | None) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, prefix="/api", tags=["ollama"])
    _add_lists(routes, registry, settings)
    _add_show(routes, registry, settings)
    _add_pull(routes, registry, puller, settings)
    return routes


def _add_lists(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    @routes.get("/version", summary="Which version of Ollama's API this is")
    async def ollama_version() -> dict[str, str]:
        return {"version": SPOKEN, "parlay": __version__}

    @routes.get("/tags", summary="List the models")
    async def ollama_tags() -> dict[str, Any]:
        return {"models": [listed(model, await _facts_of(model)) for model in registry]}

    @routes.get("/ps", summary="List the models that are loaded")
    async def ollama_ps() -> dict[str, Any]:
        loaded = [model for model in registry if model.served is not None]
        return {"models": [running(model, await _facts_of(model), settings) for model in loaded]}


def _add_show(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    @routes.post("/show", summary="Tell of one model", responses=_FAILURES)
    async def ollama_show(body: ModelBody, request: Request) -> dict[str, Any]:
        check_extras(body, request, settings)
        model = registry.get(body.model or body.name)
        description = described(model.served) if model.served is not None else await _described_by_files(model)
        if description is None:
            description = described(await registry.use(model.name, request))
        return shown(model, await _facts_of(model), description)


def _add_pull(routes: APIRouter, registry: Registry, puller: Puller | None, settings: Settings) -> None:
    @routes.post("/pull", summary="Bring a model to this machine", responses=_FAILURES, response_class=JSONResponse)
    async def ollama_pull(body: PullBody, request: Request) -> Response:
        check_extras(body, request, settings)
        name = body.model or body.name
        known = None if name is None else registry.find(name)
        if known is not None and (puller is None or _here(known)):
            done = {"status": "success"}
            return JSONResponse(done) if body.stream is False else StreamingResponse([_line(done)], media_type=_LINES)
        if puller is None:
            message = "this server brings no models to its machine: whoever runs it can allow it by --allow-pull"
            raise ApiError(403, message, "model", "pull_not_allowed")
        if name is None:
            raise ApiError(400, "model is missing", "model", "missing_field")
        if body.stream is not False:
            return StreamingResponse(_lines(puller, name), media_type=_LINES)
        await puller.pull(name, lambda done, size: None)
        return JSONResponse({"status": "success"})


async def _lines(puller: Puller, name: str) -> AsyncIterator[bytes]:
    """Progress events, at most about ten lines per second."""
    news: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    digest = digest_of(name)

    def report(done: int, size: int) -> None:
        line = {"status": f"pulling {name}", "digest": digest, "total": size, "completed": done}
        loop.call_soon_threadsafe(news.put_nowait, _line(line))

    pulling = asyncio.create_task(puller.pull(name, _sparsely(report)))
    pulling.add_done_callback(lambda _: news.put_nowait(None))
    yield _line({"status": "pulling manifest"})
    while (line := await news.get()) is not None:
        yield line
    failure = pulling.exception()
    if failure is None:
        yield _line({"status": "success"})
    else:
        message = failure.message if isinstance(failure, ApiError) else "the model could not be brought"
        yield _line({"error": message})


def _sparsely(tell: Callable[[int, int], None]) -> Callable[[int, int], None]:
    last = 0.0

    def maybe(done: int, size: int) -> None:
        nonlocal last
        if done == size or time.monotonic() - last > 0.1:
            last = time.monotonic()
            tell(done, size)

    return maybe


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _here(model: HostedModel) -> bool:
    """Whether the model is served without a download."""
    return model.source is None or model.served is not None or is_local(model.source)


async def _facts_of(model: HostedModel) -> ModelFacts | None:
    """The model's facts; None if its files are not on this machine or can't be read."""
    return await _read_files(model, read_facts)


async def _described_by_files(model: HostedModel) -> Description | None:
    """The description of a model that is not loaded; None if its files are not on this machine or can't be read."""
    return await _read_files(model, describe)


async def _read_files(model: HostedModel, read: Callable[[Path], T]) -> T | None:
    source = model.source
    if source is None or not _here(model):
        return None
    return await asyncio.to_thread(_read, read, source)


def _read(read: Callable[[Path], T], source: str) -> T | None:
    try:
        return read(resolve(source))
    except (ParlayError, OSError) as error:
        logger.info("can't read the files of %s: %s", source, error)
        return None
