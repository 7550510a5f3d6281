"""The page at ``/``: a few files out of the package, and no others."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from parlay.serve.errors import ApiError

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """Not in the OpenAPI document: it is no part of the API."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def index() -> Response:
        return _file("index.html")

    @routes.get("/page/{name}")
    def file(name: str) -> Response:
        return _file(name)

    return routes


def _file(name: str) -> Response:
    """The name is looked up, never joined to a path as it came. Raises ApiError 404 for any other."""
    kind = _FILES.get(name)
    if kind is None:
        raise ApiError(404, "the page has no such file")
    content = (files("parlay.serve") / "page" / name).read_bytes()
    return Response(content, headers={**_HEADERS, "Content-Type": kind})
