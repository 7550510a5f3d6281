"""The server's addresses, the fields of requests and the metrics, from the application that serves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from parlay.serve.anthropic.body import MessagesBody
from parlay.serve.app import create_app
from parlay.serve.llama_server.body import InfillBody, LlamaCompletionBody
from parlay.serve.ollama.body import GenerateBody, OllamaChatBody, OllamaOptions
from parlay.serve.openai.chat.body import ChatBody
from parlay.serve.openai.completions.body import CompletionBody
from parlay.serve.openai.responses.body import ResponsesBody
from parlay.serve.protocol.body import GenerationBody
from parlay.serve.settings import Settings
from reference.markdown import code, meaning, table

BODIES: Mapping[str, type[BaseModel]] = {
    "common": GenerationBody,
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "ollama-chat": OllamaChatBody,
    "ollama-generate": GenerateBody,
    "ollama-options": OllamaOptions,
    "llama-completion": LlamaCompletionBody,
    "llama-infill": InfillBody,
}


@cache
def application() -> FastAPI:
    """The server's application with one model, which is never loaded, and with every address."""

    def load() -> Any:
        raise NotImplementedError

    return create_app({"model": load}, Settings(lora_folder=Path("adapters")), pulled=lambda name: load)


def endpoints() -> str:
    """A row for each method and path."""
    return table(["address", "what it does"], [(code(each), meaning("endpoints", each)) for each in addresses()])


def addresses() -> list[str]:
    """Method and path of all that the application's own document lists, and the page."""
    paths: dict[str, dict[str, Any]] = application().openapi()["paths"]
    return ["GET /", *(f"{method.upper()} {path}" for path, methods in paths.items() for method in methods)]


def fields(body: str) -> str:
    """A row for each field of a body, without those of all generating endpoints, which have a table of their own."""
    return table(["field", "type", "meaning"], [_field(body, name, schema) for name, schema in own_fields(body)])


def own_fields(body: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and JSON schema of each field."""
    model = BODIES[body]
    shared = set(GenerationBody.model_fields) if body != "common" and issubclass(model, GenerationBody) else set()
    schema = model.model_json_schema()
    for name, each in schema["properties"].items():
        if name not in shared:
            yield name, {**each, "required": name in schema.get("required", ())}


def _field(body: str, name: str, schema: Mapping[str, Any]) -> tuple[str, str, str]:
    required = " (required)" if schema["required"] else ""
    return code(name) + required, kind(schema), meaning(body, name, "common")


def kind(schema: Mapping[str, Any]) -> str:
    """A schema in a word or two: type and bounds, or the choices."""
    if "anyOf" in schema or "oneOf" in schema:
        parts = [kind(each) for each in schema.get("anyOf") or schema["oneOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return ", ".join(code(each) for each in schema["enum"] if each)
    if "const" in schema:
        return code(schema["const"])
    if "$ref" in schema or schema.get("type") == "object":
        return "object"
    if schema.get("type") == "array":
        return f"list of {kind(schema['items']) if 'items' in schema else 'values'}"
    return {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}.get(
        schema.get("type", ""), "any"
    ) + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if (low is None and high is None) or ((high or 0) >= 2**31 - 1 and (low or 0) <= 0):
        return ""
    if high is None or high >= 2**31 - 1:
        return f", at least {low:g}"
    return f", {low:g} to {high:g}"


def metrics(prefix: str) -> str:
    """A row for each family whose name begins with ``prefix``; a counter's samples end in ``_total``."""
    found = [each for each in application().state.recorder._registry.collect() if each.name.startswith(prefix)]
    rows = [(code(each.name), each.type, each.documentation) for each in sorted(found, key=lambda each: each.name)]
    return table(["metric", "type", "meaning"], rows)
