"""``/v1/models`` lists the models; ``/choices`` says what a client may choose for one."""

from __future__ import annotations

import asyncio
import gzip
from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, computed_field

from parlay.models.sampling_defaults import sampling_defaults
from parlay.serve.adapters import NamedAdapter
from parlay.serve.chat.job import chat_template
from parlay.serve.errors import responses
from parlay.serve.hosted import HostedModel, Served
from parlay.serve.registry import Registry
from parlay.serve.routes.health import StrategyInfo
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import listing
from parlay.text.chat_template import SAMPLING
from parlay.types import ParlayError


class Model(BaseModel):
    """A model in the shapes of OpenAI and Anthropic; ``max_model_len`` is the most tokens of prompt and output
    together.

    It is null until a model that is loaded on demand has been loaded once. An adapter has its base model as ``parent``
    and its folder as ``root``. ``created`` is in seconds since 1970; the computed fields are Anthropic's.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parlay"
    max_model_len: int | None
    status: Literal["loaded", "loading", "unloaded"]
    root: str | None = None
    parent: str | None = None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"

    @computed_field
    def display_name(self) -> str:
        return self.id

    @computed_field
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)

    @computed_field
    def max_input_tokens(self) -> int | None:
        return self.max_model_len


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False

    @computed_field
    def first_id(self) -> str:
        return self.data[0].id

    @computed_field
    def last_id(self) -> str:
        return self.data[-1].id


class Choices(BaseModel):
    """``max_model_len`` is the most tokens of prompt and output together, ``max_tokens`` of output alone (null: no
    limit), and ``default_max_tokens`` of output if a request sets no limit.

    ``chat``: whether the model has a chat template. ``sampling``: the parameters that its makers recommend for chats,
    or usual values. ``strategies``: those that work without parameters.
    """

    model: str
    max_model_len: int
    max_tokens: int | None
    default_max_tokens: int | None
    chat: bool
    sampling: dict[str, float]
    strategies: list[StrategyInfo]


def router(registry: Registry, settings: Settings) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models", summary="List the models", tags=["models"])
    async def list_models() -> ModelList:
        return ModelList(data=[*map(_describe, registry), *(_adapter(registry, each) for each in registry.adapters)])

    @routes.get("/v1/models/{model:path}", summary="Tell of one model", responses=responses(404), tags=["models"])
    async def retrieve_model(model: str) -> Model:
        adapter = registry.adapters.get(model)
        return _describe(registry.get(model)) if adapter is None else _adapter(registry, adapter)

    failures = responses(404, 503)

    @routes.get(
        "/choices",
        summary="What can be chosen for a model",
        response_model=Choices,
        responses=failures,
        tags=["server"],
    )
    async def choices(request: Request, model: str | None = None) -> Response:
        served = await registry.use(model, request)
        content = await asyncio.to_thread(lambda: _choices(served, settings).model_dump_json().encode())
        return _packed(content, request.headers.get("accept-encoding", ""))

    return routes


def _describe(model: HostedModel) -> Model:
    return Model(id=model.name, created=model.created, max_model_len=model.max_model_len, status=model.status)


def _adapter(registry: Registry, adapter: NamedAdapter) -> Model:
    base = _describe(registry.get(adapter.base))
    changes = {"id": adapter.name, "created": adapter.created, "parent": adapter.base, "root": adapter.folder.name}
    return base.model_copy(update=changes)


def _packed(content: bytes, encodings: str) -> Response:
    """JSON, compressed to a fifth for clients that accept gzip, as each visit of the page fetches it."""
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
        default_max_tokens=settings.default_max_tokens,
        chat=bool(chat_template(served)),
        sampling=_sampling(served.spec.name),
        strategies=[StrategyInfo.model_validate(entry) for entry in listing() if entry["name"] in offered],
    )


def _sampling(source: str) -> dict[str, float]:
    try:
        return {**SAMPLING, **sampling_defaults(source)}
    except ParlayError:
        return dict(SAMPLING)  # a model that was passed in loaded has no files here
