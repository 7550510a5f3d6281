"""Errors in the shape of the API that the client used: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import Response

from parlay.serve.field_spelling import as_sent

ERROR = "error"
"""The field of the body that holds an error, and the type of an event that ends a stream with one."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """An error: a message in one line, the field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class MessageErrorDetail(BaseModel):
    """``details`` has the code, where Anthropic's client expects it."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessageErrorBody(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: MessageErrorDetail


class OllamaErrorBody(BaseModel):
    """An error in Ollama's shape."""

    error: str


class ApiError(Exception):
    """Raised to answer a request with an error. ``type`` defaults to the one that belongs to the status."""

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
        """The same error, with the field under the name that the client used."""
        param = None if self.param is None else as_sent(self.param, paths)
        if param is None or param == self.param:
            return self
        message = self.message.replace(str(self.param), param, 1)
        return ApiError(self.status, message, param, self.code, type=self.type, headers=self.headers)

    @property
    def told(self) -> str:
        """The message for clients. Programs such as LangChain and LiteLLM shorten a conversation at these first words,
        as they do not read the code."""
        return f"prompt is too long: {self.message}" if self.code == TOO_LONG else self.message

    @property
    def body(self) -> dict[str, Any]:
        detail = {"message": self.told, "type": self.type, "param": self.param, "code": self.code}
        return {ERROR: detail}

    def as_message(self) -> dict[str, Any]:
        """The error in Anthropic's shape."""
        kind = _MESSAGE_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        details = {"details": {"error_code": self.code}} if self.code == NO_THREADS else {}
        return {"type": ERROR, ERROR: {"type": kind, "message": self.told, **details}}

    def response(self, path: str) -> Response:
        """The error in the shape of the API that the path belongs to."""
        body = self.body
        if path.startswith(MESSAGES):
            body = self.as_message()
        elif path.startswith(OLLAMA):
            body = {ERROR: self.told}
        content = json.dumps(body)  # ASCII, as a name that the client sent may not be valid UTF-8
        return Response(content, self.status, self.headers, media_type="application/json")


TOO_LONG = "context_length_exceeded"
"""The code of a prompt that the model or the server can't hold."""
NO_THREADS = "thread_unsupported_request"
"""The code at which Anthropic's client sends the whole conversation."""
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
    """OpenAPI entries of the errors that an operation may answer. `add_schemas` adds the schemas of their bodies.

    If an entry named the model itself, FastAPI would build an unused serializer for each operation and status.
    """
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": {"$ref": _SCHEMA.format(model=body.__name__)}}},
        }
        for status in sorted(statuses)
    }


def add_schemas(document: dict[str, Any]) -> None:
    """Add the schemas of error bodies to an OpenAPI document."""
    paths = json.dumps(document["paths"])
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for body in (ErrorBody, MessageErrorBody, OllamaErrorBody):
        if f'"{_SCHEMA.format(model=body.__name__)}"' in paths:
            own = body.model_json_schema(mode="serialization", ref_template=_SCHEMA)
            schemas |= own.pop("$defs", {}) | {body.__name__: own}
    document["components"]["schemas"] = dict(sorted(schemas.items()))


_SCHEMA = "#/components/schemas/{model}"


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


def too_late(seconds: float | None) -> ApiError:
    message = f"the request took more than the {seconds:g} seconds that this server allows: ask for less"
    return ApiError(408, message, code="timeout", type="timeout_error")


def too_many(retry_after: int, message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after)})
