"""``/v1/models``: which models there are."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from parlay.serve.errors import responses
from parlay.serve.hosted import HostedModel
from parlay.serve.registry import Registry


class Model(BaseModel):
    """A model as OpenAI's API tells of it, and how many tokens of prompt and output it holds together.

    That is null until a model that is loaded on demand has been loaded once.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "parlay"
    max_model_len: int | None
    status: Literal["loaded", "loading", "unloaded"]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def router(registry: Registry) -> APIRouter:
    routes = APIRouter(prefix="/v1/models", tags=["models"])

    @routes.get("", summary="List the models")
    async def list_models() -> ModelList:
        return ModelList(data=[_describe(model) for model in registry])

    @routes.get("/{model:path}", summary="Tell of one model", responses=responses(404))
    async def retrieve_model(model: str) -> Model:
        return _describe(registry.get(model))

    return routes


def _describe(model: HostedModel) -> Model:
    return Model(id=model.name, created=model.created, max_model_len=model.max_model_len, status=model.status)
