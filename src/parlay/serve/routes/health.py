"""The server's state and abilities: health, load, metrics, version, strategies."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from parlay import __version__
from parlay.models.fetch.origin import build_fingerprint
from parlay.serve.errors import ApiError, responses, unavailable
from parlay.serve.guard.auth import Limiter
from parlay.serve.hosted import Served
from parlay.serve.observe.metrics import CONTENT_TYPE, Recorder
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import listing
from parlay.types import ParlayError


class Status(BaseModel):
    status: Literal["ok"] = "ok"


class Load(BaseModel):
    """The number of requests under way."""

    server_load: int


class Version(BaseModel):
    version: str


class Identity(BaseModel):
    """Hashes of all that texts depend on besides the request: Parlay's build, the models with their weights, and the
    kernels."""

    build: str
    models: str
    kernels: str


class ParameterInfo(BaseModel):
    """A parameter of a strategy: its type, its default, and its help."""

    type: str
    default: Any
    help: str


class StrategyInfo(BaseModel):
    """A strategy as in `parlay strategies --json`."""

    name: str
    family: str
    exactness: str
    training: str
    needs: str
    summary: str
    when: str
    reference: str
    parameters: dict[str, ParameterInfo]


_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's text format"}
}


def router(registry: Registry, settings: Settings, limiter: Limiter) -> APIRouter:
    """Routes that need no key; none shows anything about requests."""
    routes = APIRouter(tags=["server"])

    @routes.head("/ping", include_in_schema=False)
    @routes.get("/ping", name="ping", summary="The same as `/health`", responses=responses(503))
    @routes.head("/health", include_in_schema=False)
    @routes.get("/v1/health", include_in_schema=False)
    @routes.get("/health", summary="Is the server alive?", responses=responses(503))
    async def health() -> Status:
        dead = [model.name for model in registry if model.dead and not model.loss]  # lost models are loaded again
        if dead and not limiter.shut:
            raise ApiError(503, f"the engine of {', '.join(dead)} has stopped: start the server again", code="dead")
        return Status()

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Does the server take requests?", responses=responses(503))
    async def ready() -> Status:
        if limiter.shut:
            raise unavailable(settings.retry_after)
        if lost := next((model for model in registry if model.loss), None):
            raise unavailable(settings.retry_after, f"model {lost.name} is being loaded again: {lost.loss}")
        if any(model.dead for model in registry):
            raise unavailable(settings.retry_after)
        return Status()

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version", summary="Which Parlay this is")
    async def version() -> Version:
        return Version(version=__version__)

    _add_identity(routes, registry, settings)
    return routes


def _add_identity(routes: APIRouter, registry: Registry, settings: Settings) -> None:
    known: asyncio.Task[Identity] | None = None

    @routes.get("/identity", summary="What its texts depend on, for a gateway that compares servers")
    async def identity() -> Identity:
        nonlocal known
        if known is None or (known.done() and known.exception() is not None):
            if (first := next(iter(registry)).served) is None:
                raise unavailable(settings.retry_after)
            names = [model.name for model in registry]
            known = asyncio.create_task(asyncio.to_thread(_identity, names, first))  # computed once, for all requests
        return await asyncio.shield(known)


def _identity(names: Sequence[str], first: Served) -> Identity:
    """Compute the identity; this reads the weights of the first model. Raises OSError if they can't be read."""
    weights = ""
    with suppress(ParlayError):  # the model has no files
        weights = first.gate.binding().weights
    models, kernels = _hash("\n".join([*names, weights])), f"{first.spec.kernels} {first.spec.dtype}"
    return Identity(build=_hash(build_fingerprint()), models=models, kernels=kernels)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def guarded(recorder: Recorder, limiter: Limiter) -> APIRouter:
    """Routes that need a key if the server has keys."""
    routes = APIRouter(tags=["server"])

    @routes.get("/metrics", summary="Counts and times for Prometheus", responses=_TEXT, response_class=Response)
    def metrics() -> Response:
        return Response(recorder.render(), media_type=CONTENT_TYPE)

    @routes.get("/load", summary="How many requests are under way")
    async def load() -> Load:
        return Load(server_load=limiter.active)

    @routes.get("/strategies", summary="The ways of decoding")
    async def strategies() -> list[StrategyInfo]:
        return [StrategyInfo.model_validate(entry) for entry in listing()]

    return routes


_PATHS = {
    "/embeddings": "/v1/embeddings",
    "/score": "/v1/score",
}


def absent() -> APIRouter:
    """Routes for addresses that this server lacks, which name the one to use instead; they are not in the OpenAPI
    document."""
    routes = APIRouter(include_in_schema=False)
    for path, what in _PATHS.items():
        routes.post(path)(_refuse(what))
    return routes


def _refuse(what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        message = f"this server has no such address: send the request to {what}"
        raise ApiError(404, message, code="not_served")

    return refuse
