"""Stand-in: no operation yet."""

from __future__ import annotations

from fastapi import APIRouter

from parlay.serve.registry import Registry
from parlay.serve.settings import Settings


def router(registry: Registry, settings: Settings) -> APIRouter:
    return APIRouter()
