"""Turns exceptions into API errors: a body that pydantic refuses, a busy engine, a bug."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from parlay.aio import Busy, Closed, Lost
from parlay.serve.errors import ApiError, too_many, unavailable
from parlay.serve.field_spelling import as_sent, read_leniently
from parlay.system.terminal import counted
from parlay.types import ParlayError, show_number

_SHOWN = 200  # most characters of a client's name for a field that an error repeats


def from_validation(error: RequestValidationError) -> ApiError:
    """The error for the first mistake in a body; it names the field."""
    wrong = error.errors()
    first = wrong[0]
    if isinstance(error.body, bytes) and first["type"] != "json_invalid":
        return ApiError(400, "the body must be JSON, sent with 'Content-Type: application/json'")
    field = _field(first, error.body)
    match first["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
        case "unsupported_part":
            return ApiError(400, f"{field}: {first['msg']}", field, "unsupported_field")
        case "two_spellings":
            return ApiError(400, first["msg"], first["ctx"]["field"])
        case "extra_forbidden":
            return ApiError(400, f"unsupported field {field!r}: remove it", field, "unsupported_field")
    return _wrong_value(wrong, error.body, field)


def _wrong_value(wrong: Sequence[Mapping[str, Any]], body: object, field: str | None) -> ApiError:
    """The error that joins all complaints about one field."""
    if wrong[0]["type"] in _ABSENT:
        return ApiError(400, f"{field or 'the body'} is missing", field, "missing_field")
    reasons = dict.fromkeys(_reason(each) for each in wrong if _field(each, body) == field)
    text = _shorten(" - or: ".join(reasons))
    return ApiError(400, f"{field or 'the body'}{'' if text.startswith('must ') else ':'} {text}", field)


def _field(wrong: Mapping[str, Any], body: object) -> str | None:
    """The path of the wrong field, as in ``messages[0].role``; None for the whole body. Names that pydantic gives to
    members of a union are left out."""
    location, ends = _location(wrong)
    path, here = "", body
    paths: Mapping[str, str] = {}
    if isinstance(body, dict) and location and not any(part in body for part in (*location, *ends)):
        here, paths = read_leniently(body)
    for part in location:
        if isinstance(here, dict) and part in here:
            path, here = f"{path}.{part}", here[part]
        elif isinstance(here, list) and isinstance(part, int):
            path, here = f"{path}[{part}]", here[part]
    path = ".".join((path, *ends))
    return _shorten(as_sent(path.removeprefix("."), paths)) or None


def _location(wrong: Mapping[str, Any]) -> tuple[Sequence[str | int], Sequence[str]]:
    """Where pydantic found a mistake, and the name of the field there if it is missing (or null), or if it should name
    the member of a union."""
    location = wrong["loc"][1:]
    if wrong["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return location, [wrong["ctx"]["discriminator"].strip("'")]
    if wrong["type"] == "missing" and location:
        return location[:-1], [str(location[-1])]
    if _may_be_a_list(wrong):  # an object in its place may have a field of the tag's name
        return location[:-1], []
    return location, []


def _reason(wrong: Mapping[str, Any]) -> str:
    bound = _BOUNDS.get(wrong["type"])
    if bound is not None and isinstance(wrong["input"], int | float):
        field, words = bound
        return f"must be {words} {show_number(wrong['ctx'][field])}, got {show_number(wrong['input'])}"
    length = _LENGTHS.get(wrong["type"])
    if length is not None and wrong["ctx"].get("max_length") == 0:
        return "can't be read: this server reads text only"
    if length is not None:
        field, words = length
        return f"must hold {words} {counted(wrong['ctx'][field], 'item')}, got {wrong['ctx']['actual_length']}"
    plain = _PLAIN.get(wrong["type"])
    if _may_be_a_list(wrong):
        plain = "must be a string or a list"
    if plain is not None:
        return plain.format(**wrong.get("ctx", {})) + (", got null" if wrong["input"] is None else "")
    return str(wrong["msg"]).removeprefix("Value error, ").replace("Input should", "must")


def _may_be_a_list(wrong: Mapping[str, Any]) -> bool:
    """Whether a field that is no string may also be a list: its tag `shape_of` follows its name.

    In a part of a message the tag of its type is followed by a field of the same name.
    """
    loc: Sequence[int | str] = wrong["loc"]
    tagged = len(loc) > 1 and loc[-1] == "text" and isinstance(loc[-2], str) and loc[-2] != "text"
    return tagged and wrong["type"] == "string_type"


_PLAIN = {
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "union_tag_invalid": "must be one of {expected_tags}",
}
"""Messages that replace pydantic's, which use Python's terms."""

_ABSENT = ("missing", "union_tag_not_found")
_BOUNDS = {
    "less_than_equal": ("le", "at most"),
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than": ("lt", "below"),
}
_LENGTHS = {"too_short": ("min_length", "at least"), "too_long": ("max_length", "at most")}


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def install(app: FastAPI, retry_after: int) -> None:
    """Answer every exception in the shape of the API. A bug's traceback is logged and not sent."""

    async def answer(request: Request, error: Exception) -> Response:
        paths: Mapping[str, str] = request.scope.get("state", {}).get("spelled", {})
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = _not_there(request)
        return convert(error, retry_after).as_sent(paths).response(request.url.path)

    for kind in (ApiError, RequestValidationError, HTTPException, Busy, Closed, ParlayError, Exception):
        app.add_exception_handler(kind, answer)


def _not_there(request: Request) -> ApiError:
    """The 404 error; it names the likely address if the client's base URL has ``/v1`` twice or not at all."""
    rest = _PREFIXES.sub("", request.url.path)
    likely = [path for path in (f"/v1{rest}", rest, f"/api{rest}") if path not in ("/", request.url.path)]
    near = next((path for path in likely if _is_there(path, request)), None)
    return ApiError(404, _PLAINLY[404] + (f": give the client a base URL that leads to {near}" if near else ""))


def _is_there(path: str, request: Request) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.router.routes)


_PREFIXES = re.compile(r"^(/(v1|api))+(?=/)")


def convert(error: Exception, retry_after: int = 1) -> ApiError:
    """The error that the client gets for an exception."""
    return error if isinstance(error, ApiError) else _convert(error, retry_after)


def _convert(error: Exception, retry_after: int) -> ApiError:
    match error:
        case RequestValidationError():
            return from_validation(error)
        case HTTPException():
            message = _PLAINLY.get(error.status_code, str(error.detail))
            return ApiError(error.status_code, message, headers=error.headers)
        case Busy():
            return too_many(retry_after, "too many requests are waiting: try again later")
        case Closed():
            return _closed(error, retry_after)
        case ParlayError():
            return ApiError(400, str(error))
        case _:
            return ApiError(500, "internal error: the server's log has the details", code="internal_error")


def _closed(error: Closed, retry_after: int) -> ApiError:
    if isinstance(error, Lost):
        return unavailable(retry_after, f"the model was lost and is loaded again: try again ({error})")
    return unavailable(retry_after)


_PLAINLY = {
    400: "the body can't be read: is it JSON in UTF-8?",
    404: "there is nothing under this address: GET /openapi.json lists what there is",
    405: "this address does not take that method: GET /openapi.json lists what it takes",
}
