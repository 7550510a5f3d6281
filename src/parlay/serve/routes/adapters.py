"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from parlay.serve.adapters import NamedAdapter
from parlay.serve.errors import ApiError, responses
from parlay.serve.protocol.answering import BodyRoute
from parlay.serve.registry import Registry


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=200, description="what requests call the adapter, as a model")


class LoadAdapter(_Body):
    """``lora_path`` is a folder in PEFT's format below the server's adapter folder."""

    lora_path: str = Field(min_length=1, max_length=4096)
    model: str | None = Field(None, description="its base; optional if there is one model")


class UnloadAdapter(_Body):
    lora_int_id: int | None = Field(None, description="vLLM's number; the name decides")


def router(registry: Registry, folder: Path) -> APIRouter:
    """Routes that load adapters from below ``folder``."""
    routes = APIRouter(route_class=BodyRoute, tags=["models"])
    turn = asyncio.Lock()

    @routes.post(
        "/v1/load_lora_adapter",
        summary="Load an adapter",
        responses=responses(400, 404, 408, 413, 429, 503),
        response_class=PlainTextResponse,
    )
    async def load_lora_adapter(body: LoadAdapter, request: Request) -> Response:
        async with turn:
            registry.adapters.check_free(body.lora_name)
            if registry.find(body.lora_name) is not None:  # the model's requests would get the adapter
                raise ApiError(400, f"{body.lora_name!r:.100} is the name of a model: choose another", "lora_name")
            base = registry.get(body.model)
            served = await registry.use(base.name, request)
            found = _below(folder, body.lora_path)
            adapter = NamedAdapter(body.lora_name, base.name, found, shown=body.lora_path)
            await asyncio.to_thread(adapter.on, served)
            registry.adapters.add(adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(
        "/v1/unload_lora_adapter",
        summary="Unload an adapter; requests under way go on with it",
        responses=responses(400, 404, 408, 413, 429, 503),
        response_class=PlainTextResponse,
    )
    async def unload_lora_adapter(body: UnloadAdapter) -> Response:
        async with turn:
            adapter = registry.adapters.get(body.lora_name)
            if adapter is None:
                raise ApiError(404, f"there is no adapter {body.lora_name!r:.100} here", "lora_name", "model_not_found")
            registry.adapters.remove(adapter)
            served = registry.get(adapter.base).served
            if served is not None and adapter.name in served.llm.adapters:
                served.llm.adapters.unload(adapter.name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes


def _below(folder: Path, path: str) -> Path:
    """Resolve ``path`` and its links; it must be a folder below ``folder``. Raises ApiError if it is not."""
    try:
        root, found = folder.resolve(strict=True), (folder / path).resolve()
        if root in found.parents and found.is_dir():
            return found
    except (OSError, ValueError, RuntimeError):
        pass  # not a valid path on any system
    message = f"there is no folder {path!r:.200} below the server's folder of adapters (--lora-folder)"
    raise ApiError(400, message, "lora_path")
