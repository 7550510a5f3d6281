"""Ollama's `/api/tags`, `show`, `ps`, `pull` and `version`: which models there are."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from parlay import __version__
from parlay.reasoning import reasons
from parlay.serve.bodies.extras import heed_extras
from parlay.serve.bodies.ollama import ModelBody, PullBody
from parlay.serve.chat.formats import takes_tools
from parlay.serve.chat.job import chat_template
from parlay.serve.errors import ApiError, OllamaErrorBody, responses
from parlay.serve.hosted import HostedModel
from parlay.serve.pulling import Puller
from parlay.serve.reading import BodyRoute
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings

SPOKEN = "0.12.0"
"""The version of Ollama whose API this is: its clients look at it."""
_FOREVER = "9999-12-31T23:59:59Z"
_FAILURES = responses(400, 403, 404, 408, 413, 429, 503, body=OllamaErrorBody)


def router(registry: Registry, settings: Settings, puller: Puller | None) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute, prefix="/api", tags=["ollama"])

    @routes.get("/version", summary="Which version of Ollama's API this is")
    async def ollama_version() -> dict[str, str]:
        return {"version": SPOKEN, "parlay": __version__}

    @routes.get("/tags", summary="List the models")
    async def ollama_tags() -> dict[str, Any]:
        return {"models": [_listed(model) for model in registry]}

    @routes.get("/ps", summary="List the models that are loaded")
    async def ollama_ps() -> dict[str, Any]:
        return {"models": [_running(model, settings) for model in registry if model.served is not None]}

    @routes.post("/show", summary="Tell of one model", responses=_FAILURES)
    async def ollama_show(body: ModelBody, request: Request) -> dict[str, Any]:
        heed_extras(body, request, settings)
        name = registry.known(body.model or body.name)
        await registry.use(name, request)
        return _shown(registry.get(name))

    @routes.post("/pull", summary="Bring a model to this machine", responses=_FAILURES, response_class=JSONResponse)
    async def ollama_pull(body: PullBody, request: Request) -> Response:
        heed_extras(body, request, settings)
        name = body.model or body.name
        if puller is None:
            message = "this server brings no models to its machine: whoever runs it can allow it by --allow-pull"
            raise ApiError(403, message, "model", "pull_not_allowed")
        if name is None:
            raise ApiError(400, "model is missing", "model", "missing_field")
        if body.stream is not False:
            return StreamingResponse(_lines(puller, name), media_type="application/x-ndjson")
        await puller.pull(name, lambda done, size: None)
        return JSONResponse({"status": "success"})

    return routes


async def _lines(puller: Puller, name: str) -> AsyncIterator[bytes]:
    """Progress as it comes, at most some ten lines a second."""
    news: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    digest = _digest(name)

    def tell(done: int, size: int) -> None:
        line = {"status": f"pulling {name}", "digest": digest, "total": size, "completed": done}
        loop.call_soon_threadsafe(news.put_nowait, _line(line))

    pulling = asyncio.create_task(puller.pull(name, _sparsely(tell)))
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


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _digest(name: str) -> str:
    """Ollama knows models by a hash of their files; here it is one of the name."""
    return hashlib.sha256(name.encode()).hexdigest()


def _listed(model: HostedModel) -> dict[str, Any]:
    made = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": made,
        "size": 0,
        "digest": _digest(model.name),
        "details": _details(model),
    }


def _details(model: HostedModel) -> dict[str, Any]:
    dtype = model.served.engine.llm.runner.spec.dtype if model.served is not None else ""
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": dtype,
    }


def _running(model: HostedModel, settings: Settings) -> dict[str, Any]:
    listed = _listed(model)
    keep = settings.idle_seconds if model.keep_alive is None else model.keep_alive
    expires = _FOREVER
    if model.loader is not None and keep is not None and math.isfinite(keep):
        left = model.used - time.monotonic() + keep
        expires = datetime.fromtimestamp(time.time() + left, UTC).isoformat().replace("+00:00", "Z")
    return {**listed, "expires_at": expires, "size_vram": 0, "context_length": model.max_model_len}


def _shown(model: HostedModel) -> dict[str, Any]:
    assert model.served is not None
    template = chat_template(model.served)
    spec = model.served.engine.llm.runner.spec
    abilities = {"completion": True, "tools": takes_tools(template), "thinking": reasons(template)}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(model),
        "model_info": {
            "general.architecture": "parlay",
            "parlay.context_length": model.max_model_len,
            "parlay.embedding_length": spec.hidden_size,
            "parlay.block_count": spec.num_layers,
            "parlay.vocab_size": spec.vocab_size,
        },
        "capabilities": [ability for ability, there in abilities.items() if there],
        "modified_at": _listed(model)["modified_at"],
    }
