"""Makes the ASGI application that serves models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from parlay import __version__
from parlay.aio import AsyncLLM
from parlay.serve import error_handlers, errors
from parlay.serve.anthropic import route as messages
from parlay.serve.cascades import Cascades, Link
from parlay.serve.finished import Observer
from parlay.serve.guard.auth import Limiter
from parlay.serve.guard.workers import Workers
from parlay.serve.hosted import Loader
from parlay.serve.llama_server import route as llama_server
from parlay.serve.middleware import Admission, BodyLimit, Guard, HttpMetrics
from parlay.serve.observe.logs import log_request
from parlay.serve.observe.metrics import Recorder
from parlay.serve.ollama import models_route as ollama_models
from parlay.serve.ollama import route as ollama
from parlay.serve.openai.chat import route as chat
from parlay.serve.openai.completions import route as completions
from parlay.serve.openai.responses import route as responses
from parlay.serve.openai.responses.response_store import ResponseStore
from parlay.serve.protocol.body import HEADER
from parlay.serve.registry import Leases, Puller, Registry
from parlay.serve.request_ids import HEADER as REQUEST_ID
from parlay.serve.request_ids import naming
from parlay.serve.routes import adapters, embeddings, health, models, page, tokens
from parlay.serve.settings import Settings
from parlay.system.machine import release_freed

_RELEASE_SECONDS = 10.0


class Application(FastAPI):
    """A FastAPI application whose answers have their request's id, and whose OpenAPI document lists no 422, which
    nothing here answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, naming(scope, send) if scope["type"] == "http" else send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _drop_422(document)
            errors.add_schemas(document)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _drop_422(document: dict[str, Any]) -> None:
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def operation_id(route: APIRoute) -> str:
    """Name an operation after its function."""
    return route.name


def create_app(
    hosted: Mapping[str, AsyncLLM | Loader],
    settings: Settings | None = None,
    observers: Sequence[Observer] = (),
    pulled: Callable[[str], Loader] | None = None,
    cascades: Mapping[str, Link] | None = None,
) -> FastAPI:
    """Make an ASGI application that serves models under the names in ``hosted``, and closes them at shutdown.

    A model given as a `Loader` is loaded when a request first names it. Each of ``observers`` is called with each
    finished request. ``pulled`` loads models that requests download; None: requests may not download any. ``cascades``
    name, for a large model, the small one that may answer in its place in ``/v1/chat/completions`` and
    ``/v1/completions``. ``app.state`` holds ``registry``, ``settings``, ``recorder``, ``observers``, ``limiter``,
    ``cascades`` and ``workers``. Raises ValueError if ``hosted`` is empty.
    """
    settings = settings or Settings()
    registry = Registry(
        hosted,
        max_loaded=settings.max_loaded,
        idle_seconds=settings.idle_seconds,
        retry_after=settings.retry_after,
    )
    app = _application()
    app.state.registry = registry
    app.state.settings = settings
    app.state.cascades = Cascades(registry, cascades or {})
    app.state.recorder = Recorder(registry, app.state.cascades)
    app.state.observers = [app.state.recorder.finished, log_request, *observers]
    app.state.limiter = Limiter(settings)
    app.state.ignored_before = set()
    app.state.response_store = ResponseStore(settings.responses_kept)
    app.state.workers = Workers(settings.retry_after)
    _add_routes(app, None if pulled is None else Puller(registry, pulled))
    _add_middleware(app, settings)
    error_handlers.install(app, settings.retry_after)
    return app


def _application() -> Application:
    return Application(
        title="Parlay",
        summary="Parallel decoding for LLMs behind the APIs of OpenAI, Anthropic and Ollama.",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(app.state.registry.sweep()), asyncio.create_task(_release_memory(app.state.limiter))]
    yield
    if not app.state.limiter.shut:  # a draining server has shut down already
        await shut_down(app)
    for task in tasks:
        task.cancel()


async def _release_memory(limiter: Limiter) -> None:
    """Now and then, return memory of finished requests to the system."""
    released = limiter.entered
    while True:
        await asyncio.sleep(_RELEASE_SECONDS)
        if limiter.entered != released:
            released = limiter.entered
            await asyncio.to_thread(release_freed)


async def shut_down(app: FastAPI, *, at_once: bool = False) -> None:
    """Refuse new requests, let those under way finish within ``drain_seconds`` of the settings, then close the models.

    A second call with ``at_once`` ends the requests still under way.
    """
    app.state.limiter.shut = True
    await app.state.registry.close(0 if at_once else app.state.settings.drain_seconds)


def _add_routes(app: FastAPI, puller: Puller | None) -> None:
    """Add the routes, the busiest first, because paths are matched in this order."""
    registry, settings = app.state.registry, app.state.settings
    lock = [Depends(HTTPBearer(auto_error=False, description="an API key"))] if settings.keys else []
    statuses = [500, *([403] if settings.hosts else []), *([401] if settings.keys else [])]
    for router in (
        completions.router(registry, settings),
        chat.router(registry, settings),
        responses.router(registry, settings),
        models.router(registry, settings),
        tokens.router(registry),
        embeddings.router(registry, settings),
        *([] if settings.lora_folder is None else [adapters.router(registry, settings.lora_folder)]),
        llama_server.router(registry, settings),
        health.guarded(app.state.recorder, app.state.limiter),
        health.absent(),
    ):
        app.include_router(router, dependencies=lock, responses=errors.responses(*statuses))
    for others, body in (
        ([messages.router(registry, settings)], errors.MessageErrorBody),
        ([ollama.router(registry, settings), ollama_models.router(registry, settings, puller)], errors.OllamaErrorBody),
    ):
        for router in others:
            app.include_router(router, dependencies=lock, responses=errors.responses(*statuses, body=body))
    app.include_router(page.router())
    open_to_all = errors.responses(*(status for status in statuses if status != 401))
    app.include_router(health.router(registry, settings, app.state.limiter), responses=open_to_all)


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """Add middleware, innermost first: the last one added sees a request first."""
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(Leases)
    app.add_middleware(Admission, limiter=app.state.limiter)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(HttpMetrics, answered=app.state.recorder.http.answered)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send a dozen headers of their own
            expose_headers=["Retry-After", HEADER, REQUEST_ID.decode()],
        )
