"""Routes that read a JSON body while nothing else can run, of clients that do not call it JSON too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

from parlay.serve.guard.reading import read_json

_FORM = b"application/x-www-form-urlencoded"
_OF_PAGES = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that only browsers send."""


class _BodyRequest(Request):
    async def json(self) -> Any:
        value = read_json(await self.body())
        await asyncio.sleep(0)  # others have their turn before the value is looked through, which takes as long again
        return value


def _as_json(scope: Scope) -> Scope:
    """Some clients send JSON and do not say so; curl calls it a form. A web page that may send nothing here can do that
    too, but any request of a page to another origin says where it comes from.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    types = {value.lower() for name, value in headers if name == b"content-type"}
    if types - {_FORM} or any(name in _OF_PAGES for name, _ in headers):
        return scope
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class BodyRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_BodyRequest(_as_json(request.scope), request.receive))

        return answer
