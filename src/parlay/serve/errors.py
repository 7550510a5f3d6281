"""Every failure in the shape of the API that was spoken: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from parlay.aio import Busy, Closed
from parlay.serve.field_spelling import as_sent, read_leniently
from parlay.types import ParlayError, show_number

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SHOWN = 200  # characters of a name that the client sent and that its error repeats


class ErrorDetail(BaseModel):
    """A failure: its message in one line, the field that is to blame, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageErrorBody(BaseModel):
    """Anthropic's shape."""

    type: Literal["error"]
    error: MessageErrorDetail


class OllamaErrorBody(BaseModel):
    """Ollama's shape."""

    error: str


class ApiError(Exception):
    """A failure with an answer to the client. ``type`` follows from the status if none is given."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def as_sent(self, paths: Mapping[str, str]) -> ApiError:
        """The same with the field under the name by which the client called it."""
        param = None if self.param is None else as_sent(self.param, paths)
        if param is None or param == self.param:
            return self
        message = self.message.replace(str(self.param), param, 1)
        return ApiError(self.status, message, param, self.code, type=self.type, headers=self.headers)

    @property
    def body(self) -> dict[str, Any]:
        detail = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": detail}

    def as_message(self) -> dict[str, Any]:
        """In Anthropic's shape."""
        kind = _MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """In the shape of the API that the path belongs to."""
        body = self.body
        if path.startswith(MESSAGES):
            body = self.as_message()
        elif path.startswith(OLLAMA):
            body = {"error": self.message}
        content = json.dumps(body)  # ASCII: a name that the client sent may hold what UTF-8 can't
        return Response(content, self.status, self.headers, media_type="application/json")


MESSAGES = "/v1/messages"
OLLAMA = "/api/"
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def responses(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry of each failure that an operation may answer with."""
    return {status: {"model": body, "description": _DESCRIPTIONS[status]} for status in sorted(statuses)}


_DESCRIPTIONS = {
    400: "The request can't be used; `param` names the field.",
    401: "No valid API key came with the request.",
    403: "This server does not answer under that host name.",
    404: "There is no such model.",
    405: "Not with this method.",
    408: "The request took longer than this server allows.",
    413: "The body is larger than this server takes.",
    429: "Too many requests are under way; `Retry-After` says when to try again.",
    500: "A fault of the server.",
    503: "The server is not taking requests now.",
}


def unavailable(retry_after: int, message: str = "this server is shutting down: try again") -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_after)})


def too_many(retry_after: int, message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after)})


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, its field named."""
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
            return ApiError(400, f"unsupported field {field!r}: leave it out", field, "unsupported_field")
    return _wrong_value(wrong, error.body, field)


def _wrong_value(wrong: Sequence[Mapping[str, Any]], body: object, field: str | None) -> ApiError:
    """All that is said of one field."""
    if wrong[0]["type"] == "missing":
        return ApiError(400, f"{field or 'the body'} is missing", field, "missing_field")
    reasons = dict.fromkeys(_reason(each) for each in wrong if _field(each, body) == field)
    return ApiError(400, f"{field or 'the body'}: {_shorten(' - or: '.join(reasons))}", field)


def _field(wrong: Mapping[str, Any], body: object) -> str | None:
    """``messages[0].role``; None for the whole body. The names that pydantic gives members of a union are left out."""
    location = wrong["loc"][1:]
    path, here = "", body
    paths: Mapping[str, str] = {}
    if isinstance(body, dict) and location and not any(part in body for part in location):
        here, paths = read_leniently(body)
    for part in location:
        if isinstance(here, dict) and part in here:
            path, here = f"{path}.{part}", here[part]
        elif isinstance(here, list) and isinstance(part, int):
            path, here = f"{path}[{part}]", here[part]
    if wrong["type"] == "missing" and location:
        path = f"{path}.{location[-1]}"
    return _shorten(as_sent(path.removeprefix("."), paths)) or None


def _reason(wrong: Mapping[str, Any]) -> str:
    bound = _BOUNDS.get(wrong["type"])
    if bound is not None and isinstance(wrong["input"], int | float):
        field, words = bound
        return f"is {show_number(wrong['input'])}, and must be {words} {show_number(wrong['ctx'][field])}"
    length = _LENGTHS.get(wrong["type"])
    if length is not None:
        field, words = length
        return f"holds {wrong['ctx']['actual_length']} items, and must hold {words} {wrong['ctx'][field]}"
    plain = _PLAIN.get(wrong["type"])
    if plain is not None:
        return plain.format(**wrong.get("ctx", {}))
    return str(wrong["msg"]).removeprefix("Value error, ").replace("Input should", "must")


_PLAIN = {
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "union_tag_invalid": "has a wrong {discriminator}: choose one of {expected_tags}",
}
"""What is said in place of the words of pydantic, which are those of Python."""

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
    """Answer every exception in one shape. What is a bug keeps its traceback for the log and out of the answer."""

    async def answer(request: Request, error: Exception) -> Response:
        paths: Mapping[str, str] = request.scope.get("state", {}).get("spelled", {})
        return convert(error, retry_after).as_sent(paths).response(request.url.path)

    for kind in (ApiError, RequestValidationError, HTTPException, Busy, Closed, ParlayError, Exception):
        app.add_exception_handler(kind, answer)


def convert(error: Exception, retry_after: int = 1) -> ApiError:
    """The answer to the client for an exception."""
    return error if isinstance(error, ApiError) else _convert(error, retry_after)


def _convert(error: Exception, retry_after: int) -> ApiError:
    match error:
        case RequestValidationError():
            return from_validation(error)
        case HTTPException():
            return ApiError(error.status_code, _plainly(error), headers=error.headers)
        case Busy():
            return too_many(retry_after, "too many requests are waiting: try again later")
        case Closed():
            return unavailable(retry_after)
        case ParlayError():
            return ApiError(400, str(error))
        case _:
            return ApiError(500, "a fault of the server, which its log tells more of", code="internal_error")


def _plainly(error: HTTPException) -> str:
    return _PLAINLY.get(error.status_code, str(error.detail))


_PLAINLY = {
    400: "the body can't be read: is it JSON in UTF-8?",
    404: "there is nothing under this address",
    405: "this address does not take that method",
}
