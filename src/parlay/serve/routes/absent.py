"""What this server does not have, told in words where clients look for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from parlay.serve.errors import ApiError

_PATHS = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores of texts",
    "/score": "scores of texts",
}


def router() -> APIRouter:
    """Not in the OpenAPI document: there is nothing to document."""
    routes = APIRouter(include_in_schema=False)
    for path, what in _PATHS.items():
        routes.post(path)(_refuse(what))
    return routes


def _refuse(what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        message = f"this server has no {what}: its models generate text. Ask a server with an embedding model"
        raise ApiError(404, message, code="not_served")

    return refuse
