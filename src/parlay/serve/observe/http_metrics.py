"""Answered HTTP requests by path and status, under the names that dashboards for FastAPI applications know."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/version"})
"""Paths that machines poll all the time; they are not counted, and logged only at level debug."""
_NOTHING = "none"
_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


class HttpRequests:
    """Counts requests by their route's path, so that clients can't create labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Counter(
            "http_requests", "Requests that were answered.", ("method", "status", "handler"), registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request to the end of its answer.",
            ("method", "handler"),
            buckets=_BOUNDS,
            registry=registry,
        )

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        self._count.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)


class HttpMetrics:
    """ASGI middleware that reports each request when its answer has been sent."""

    def __init__(self, app: ASGIApp, requests: HttpRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            return await self._app(scope, receive, send)
        began, status = time.monotonic(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if status:
                self._requests.answered(*_route(scope), status, max(0.0, time.monotonic() - began))


def _route(scope: Scope) -> tuple[str, str]:
    """Method and path of the request's route."""
    route = scope.get("route")
    if route is None:
        return _NOTHING, _NOTHING
    return scope["method"] if scope["method"] in route.methods else _NOTHING, route.path
