"""`parlay serve` as a deployment of Ray Serve: each replica runs the whole server, and Ray scales their number.

from ray import serve from parlay.ray import application

serve.run(application("smollm2-135m", max_replicas=4), name="parlay")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parlay.options import LoadOptions
from parlay.serve.settings import Settings
from parlay.types import ParlayError

if TYPE_CHECKING:
    from fastapi import FastAPI

STICKY = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Ray's router that keeps a session on one replica; the header ``x-session-id`` names the session."""


def application(
    models: str | Sequence[str],
    *,
    min_replicas: int = 1,
    max_replicas: int = 2,
    target_ongoing_requests: int = 8,
    max_ongoing_requests: int = 64,
    cpus: float = 1.0,
    sticky: bool = False,
    load: LoadOptions | None = None,
    memory: str | None = None,
    settings: Settings | None = None,
) -> Any:
    """Make the application for ``ray.serve.run``. Every replica loads all ``models``, given as NAME=MODEL or MODEL.

    Ray scales the number of replicas so that each has about ``target_ongoing_requests``. Each replica gets ``cpus``
    cores, and as many threads unless ``load`` sets another number. ``sticky``: a session stays on one replica
    (`STICKY`). ``memory`` is written as for ``parlay serve``. Raises ParlayError if Ray is not installed.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError:
        raise ParlayError("parlay.ray needs Ray Serve: pip install 'parlay[serve,ray]'") from None
    named = (models,) if isinstance(models, str) else tuple(models)
    allowed = settings or Settings()
    options = load or LoadOptions(threads=max(1, int(cpus)))

    def build() -> FastAPI:
        return server(named, options, memory, allowed)

    more = {"request_router_config": RequestRouterConfig(request_router_class=STICKY)} if sticky else {}
    deployed = serve.deployment(
        serve.ingress(build)(),
        name="parlay",
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": target_ongoing_requests,
        },
        max_ongoing_requests=max_ongoing_requests,
        graceful_shutdown_timeout_s=allowed.drain_seconds + 10,
        ray_actor_options={"num_cpus": cpus},
        **more,
    )
    return deployed.bind()


def server(models: Sequence[str], load: LoadOptions, memory: str | None, settings: Settings) -> FastAPI:
    """Make the server's application with its models loaded, which runs in each replica."""
    from parlay.aio import AsyncLLM  # here, so that replicas import them, and not the driver
    from parlay.llm.llm import LLM
    from parlay.serve.app import create_app

    hosted = {}
    for word in models:
        name, equals, model = word.partition("=")

        def make(model: str = model if equals else name) -> LLM:
            return LLM(model, load=load, memory=memory, router_memory="off")

        hosted[name] = AsyncLLM.load(make)
    return create_app(hosted, settings)
