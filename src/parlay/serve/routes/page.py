"""The page at ``/``, served from one folder of the package."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response

from parlay.serve.errors import ApiError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers cache the files, and ask whether they have changed
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    packed: bytes
    headers: dict[str, str]


def router() -> APIRouter:
    """Routes of the page; they are not in the OpenAPI document, as they are not part of the API."""
    routes = APIRouter(include_in_schema=False)
    known = {entry.name: _file(entry.name, entry.read_bytes()) for entry in (files("parlay.serve") / "page").iterdir()}

    @routes.head("/")  # Ollama's command line uses it to find out whether its server is there
    @routes.get("/")
    def index(request: Request) -> Response:
        return _answer(known["index.html"], request.headers)

    @routes.get("/page/{name}")
    def file(name: str, request: Request) -> Response:
        """A file of the page; its name is looked up, never joined to a path. Raises ApiError 404 for an unknown
        name."""
        if name not in known:
            raise ApiError(404, "the page has no such file")
        return _answer(known[name], request.headers)

    return routes


def _file(name: str, content: bytes) -> _File:
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'  # weak, as it is the same for both encodings
    headers = {**_HEADERS, "Content-Type": _TYPES[PurePath(name).suffix], "ETag": tag}
    return _File(content, gzip.compress(content, mtime=0), headers)


def _answer(file: _File, asked: Headers) -> Response:
    """Answer with the file, compressed for browsers that accept gzip, or with 304 if the browser has it."""
    if file.headers["ETag"] in asked.get("if-none-match", ""):
        return Response(status_code=304, headers=file.headers)
    if "gzip" in asked.get("accept-encoding", ""):
        return Response(file.packed, headers={**file.headers, "Content-Encoding": "gzip"})
    return Response(file.content, headers=file.headers)
