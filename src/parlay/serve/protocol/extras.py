"""Fields that a body declares nowhere: those that have no effect are named to the client, others are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from fastapi import Request
from pydantic import BaseModel

from parlay.serve.errors import ApiError
from parlay.serve.protocol.common import Body
from parlay.serve.settings import Settings

logger = logging.getLogger(__name__)

HEADER = "parlay-ignored"
_MOST = 20
_LONGEST = 100  # characters of a path


def heed_extras(body: Body, request: Request, settings: Settings) -> None:
    """Note which fields of the body have no effect, for the reply's header and the log, and how it calls the others.

    Raises ApiError for one that would change the answer and can't be honoured; where the server is strict, for each.
    """
    request.state.spelled = body.spelled
    ignored = body.idle()
    for path, name, owner, value in _extras(body, ""):
        if owner.refuses(name.rpartition(".")[2], value):
            raise ApiError(400, f"{path} is not supported by this server: leave it out", path, "unsupported_field")
        ignored.append(path)
    note_ignored(request, settings, ignored)


def note_ignored(request: Request, settings: Settings, paths: Sequence[str]) -> None:
    """Add to the fields that the reply's header names. A field is logged as a warning the first time that it comes.

    Raises ApiError where the server is strict.
    """
    if not paths:
        return
    if settings.strict:
        raise ApiError(400, f"unsupported field {paths[0]!r}: leave it out", paths[0], "unsupported_field")
    plain = [_plain(path) for path in dict.fromkeys(paths)]
    request.state.ignored = [*ignored_fields(request), *plain]
    known: set[str] = request.app.state.ignored_before
    new = [path for path in plain if path not in known]
    if new and len(known) < 1000:
        known.update(new)
        logger.warning("%s: fields without effect here: %s", request.url.path, ", ".join(new))


def ignored_fields(request: Request) -> list[str]:
    known: list[str] = request.scope["state"].get("ignored", [])
    return known


def ignored_header(request: Request) -> dict[str, str]:
    """The header that names fields without effect, if there are any."""
    paths = ignored_fields(request)
    if not paths:
        return {}
    more = [f"and {len(paths) - _MOST} more"] if len(paths) > _MOST else []
    return {HEADER: ", ".join([*paths[:_MOST], *more])}


def _plain(path: str) -> str:
    """The text in printable ASCII, as a header may hold it."""
    text = path.encode("ascii", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() and letter != "," else "?" for letter in text)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _extras(body: Body, path: str) -> Iterator[tuple[str, str, Body, object]]:
    """Path, name, whose field, and value; null is as good as absent."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield f"{path}{name}", name, body, value
    for name, field in type(body).model_fields.items():
        yield from _inside(body.__dict__[name], f"{path}{field.alias or name}")


def _inside(value: object, path: str) -> Iterator[tuple[str, str, Body, object]]:
    if isinstance(value, Body):
        yield from _extras(value, f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for place, item in enumerate(value):
            yield from _inside(item, f"{path}[{place}]")
