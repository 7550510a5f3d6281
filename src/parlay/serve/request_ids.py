"""The id of each request, which its answer has in a header: the client's own id, or one made here."""

from __future__ import annotations

import re
import secrets

from starlette.types import Message, Scope, Send

from parlay.serve.errors import MESSAGES

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
"""The name under which Anthropic's clients look for it."""

_FIT = re.compile(rb"[!-~]{1,128}")
"""Ids that can stand in a log line, where a space begins the next field."""
_STATE = "request_id"


def new_id() -> str:
    """Make an id."""
    return f"req_{secrets.token_hex(12)}"


def request_id(scope: Scope) -> str:
    """Return the request's id: the client's `HEADER` if it is short and printable ASCII, else one that is made at the
    first call."""
    state: dict[str, str] = scope.setdefault("state", {})
    if _STATE not in state:
        sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
        state[_STATE] = sent.decode() if _FIT.fullmatch(sent) else new_id()
    return state[_STATE]


def naming(scope: Scope, send: Send) -> Send:
    """Return a ``send`` that adds the request's id to the head of its answer, unless it has one."""
    own = request_id(scope).encode()
    names = (HEADER, ANTHROPIC_HEADER) if scope["path"].startswith(MESSAGES) else (HEADER,)

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            if all(name != HEADER for name, _ in headers):
                message = {**message, "headers": [*headers, *((name, own) for name in names)]}
        await send(message)

    return named
