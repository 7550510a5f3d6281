"""`/choices`: what a client may choose for a model. The page asks this before it shows its settings."""

from __future__ import annotations

import asyncio
import gzip

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from parlay.models.sampling_defaults import sampling_defaults
from parlay.serve.chat.job import chat_template
from parlay.serve.errors import responses
from parlay.serve.hosted import Served
from parlay.serve.registry import Registry
from parlay.serve.routes.health import StrategyInfo
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import listing
from parlay.text.chat_defaults import SAMPLING
from parlay.types import ParlayError


class Choices(BaseModel):
    """``max_model_len``: tokens of prompt and output together; ``max_tokens``: of output alone, null for no limit.

    ``chat``: whether the model has a chat template. ``sampling``: what its makers recommend for chats, or usual values.
    ``strategies``: those that work by their name alone.
    """

    model: str
    max_model_len: int
    max_tokens: int | None
    chat: bool
    sampling: dict[str, float]
    strategies: list[StrategyInfo]


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter(tags=["server"])

    @routes.get(
        "/choices", summary="What can be chosen for a model", response_model=Choices, responses=responses(404, 503)
    )
    async def choices(request: Request, model: str | None = None) -> Response:
        served = await registry.use(model, request)
        told = await asyncio.to_thread(_choices, served, settings)
        return _packed(told.model_dump_json().encode(), request.headers.get("accept-encoding", ""))

    return routes


def _packed(content: bytes, encodings: str) -> Response:
    """JSON, in a fifth of its size for a client that reads that: every visit of the page asks for it."""
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in encodings:
        content, headers["Content-Encoding"] = gzip.compress(content, mtime=0), "gzip"
    return Response(content, media_type="application/json", headers=headers)


def _choices(served: Served, settings: Settings) -> Choices:
    offered = served.strategies
    return Choices(
        model=served.name,
        max_model_len=served.max_model_len,
        max_tokens=settings.max_tokens,
        chat=bool(chat_template(served)),
        sampling=_sampling(served.spec.name),
        strategies=[StrategyInfo.model_validate(entry) for entry in listing() if entry["name"] in offered],
    )


def _sampling(source: str) -> dict[str, float]:
    try:
        return {**SAMPLING, **sampling_defaults(source)}
    except ParlayError:
        return dict(SAMPLING)  # a model that was handed over loaded has no files here
