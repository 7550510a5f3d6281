"""Makes hostile bodies for every operation of an OpenAPI document."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.growing import SIZES, forms, schemas

JSON = "application/json"
_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "",
    "\xff",
    JSON + ";a=b",
)
_LARGE = 4_000_000
_DEPTHS = (10, 150, 1_000, 100_000)
_FORMS = frozenset({"structured_outputs", "response_format", "format", "guided_json", "schema", "parameters"})
"""Names of fields that hold the form of an answer."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request. ``kind`` says in what way it is hostile."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    content_type: str = JSON


class Maker:
    """Draws hostile requests from an OpenAPI document. The same seed draws the same requests."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._chance = random.Random(seed)
        self._document = document
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]
        self._writing = [one for one in self._operations if "requestBody" in one[2]]
        self._kinds: tuple[Callable[[], Hostile], ...] = (
            *(self._mutated,) * 10, self._grown, self._grown, self._raw, self._raw, self._nested, self._mistyped,
            self._asked, self._large,
        )  # fmt: skip

    def draw(self) -> Hostile:
        return self._chance.choice(self._kinds)()

    def _mutated(self) -> Hostile:
        """Draw a valid body and replace some of its fields."""
        method, path, body = self._valid()
        for _ in range(self._chance.choice((1, 1, 2, 5))):
            parent, key = self._place(body)
            parent[key] = self._value()
        return Hostile("field", method, path, _text(body))

    def _grown(self) -> Hostile:
        """Draw a large form of the answer, in a field that the document has for forms."""
        method, path, body = self._valid()
        size = self._chance.choice(SIZES)
        form, schema = self._chance.choice(forms(size)), self._chance.choice(schemas(size))
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
        own = {"name": "f", "description": "", "input_schema": schema, "parameters": schema, "type": "function"}
        answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        ways: dict[str, object] = {
            "structured_outputs": form,
            "response_format": answer,
            "tools": [self._chance.choice((tool, own))],
            "format": schema,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
            "guided_json": schema,
            "guided_grammar": form.get("grammar"),
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        }
        known = [name for name in ways if name in self._fields(path)] or list(ways)
        name = self._chance.choice(known)
        if name == "tools":
            body["tool_choice"] = self._chance.choice(("required", "auto", {"type": "any"}))
        return Hostile("growing", method, path, _text(body | {name: ways[name]}))

    def _raw(self) -> Hostile:
        """Draw bytes that are not JSON or not Unicode."""
        method, path, body = self._valid()
        text = _text(body)
        cut = self._chance.randrange(len(text))
        noise = self._chance.randbytes(self._chance.choice((1, 4, 200)))
        raw = self._chance.choice(
            (
                text[:cut], text[:cut] + noise + text[cut:], noise, b"", b"null", b"[]", b'"x"', b"{}", b"0" * 10_000,
                text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text + text, b'{"a":' * 3 + text, b"\x00" * 50,
                text[:-1] + b',"model":"\\ud800"}', text[:-1] + b',"x":NaN}', text[:-1] + b',"n":1e999}',
                text[:-1] + b',"seed":' + b"9" * self._chance.choice((30, 5_000, 100_000)) + b"}",
            )
        )  # fmt: skip
        return Hostile("bytes", method, path, raw)

    def _nested(self) -> Hostile:
        method, path, body = self._valid()
        depth = self._chance.choice(_DEPTHS)
        opening, closing = self._chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
        name = self._chance.choice(sorted(self._fields(path)) or ["a"]).encode()
        deep = opening * depth + b"1" + closing * depth
        return Hostile("nested", method, path, _text(body)[:-1] + b',"' + name + b'":' + deep + b"}")

    def _large(self) -> Hostile:
        """Draw as many bytes as a server takes, of one thing over and over, at any field."""
        method, path, body = self._valid()
        name = self._chance.choice(sorted(self._fields(path)) or ["a"]).encode()
        unit = self._chance.choice(
            (b"7", b'"a"', b"[]", b"{}", b'{"role":"user","content":"x"}', b"1e5", b"null", b"[1,2]", b'{"a":[{}]}')
        )
        many = b"[" + (unit + b",") * (self._chance.choice((_LARGE, _LARGE // 20)) // (len(unit) + 1)) + b"0]"
        text = b'"' + b"the quick brown fox " * (_LARGE // 20) + b'"'
        value = self._chance.choice((many, many, text))
        return Hostile("large", method, path, _text(body)[:-1] + b',"' + name + b'":' + value + b"}")

    def _mistyped(self) -> Hostile:
        method, path, body = self._valid()
        return Hostile("content type", method, path, _text(body), self._chance.choice(_TYPES))

    def _asked(self) -> Hostile:
        """Draw an address and a method, with bad values for the parameters of its path."""
        method, path, _ = self._chance.choice(self._operations)
        odd = self._chance.choice(("%00", "a" * 5_000, "..%2f..%2fetc", "%ff%fe", "-1", "1e999", "%2e", "a?b=c&b=c"))
        for part in [part for part in path.split("/") if part.startswith("{")]:
            path = path.replace(part, odd)
        method = self._chance.choice((method, "POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS"))
        return Hostile("address", method, path, b"{}" if method != "GET" else b"")

    # --------------------------------------------------------------------------------------------- from the document

    def _valid(self) -> tuple[str, str, dict[str, Any]]:
        """Return an operation that takes a body, and a valid body for it."""
        method, path, operation = self._chance.choice(self._writing)
        body = self._example(operation["requestBody"]["content"].get(JSON, {}).get("schema", {}), 0)
        for name in self._fields(path) & {"max_tokens", "max_output_tokens", "max_completion_tokens"}:
            body[name] = 2
        for part in [part for part in path.split("/") if part.startswith("{")]:
            path = path.replace(part, "x")
        return method, path, body if isinstance(body, dict) else {}

    def _fields(self, path: str) -> set[str]:
        operation = next((one for _, known, one in self._writing if known == path), None)
        content = (operation or {}).get("requestBody", {}).get("content", {})
        return set(self._properties(content.get(JSON, {}).get("schema", {})))

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            node: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                node = node[part]
            schema = node
        return schema

    def _properties(self, schema: Mapping[str, Any]) -> Iterator[str]:
        schema = self._resolved(schema)
        yield from schema.get("properties", {})
        for other in (*schema.get("oneOf", ()), *schema.get("anyOf", ()), *schema.get("allOf", ())):
            yield from self._properties(other)

    def _example(self, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a value of the schema, with the required fields and sometimes others."""
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        for several in ("oneOf", "anyOf"):
            if several in schema and depth < 8:
                return self._example(self._chance.choice(schema[several]), depth + 1)
        kind = schema.get("type")
        if kind == "object" and depth < 8:
            required = schema.get("required", ())
            wanted = {
                name: inner for name, inner in schema.get("properties", {}).items()
                if name in required or (name != "model" and self._chance.random() < 0.08)
            }  # fmt: skip
            return {name: self._example(inner, depth + 1) for name, inner in wanted.items()}
        if kind == "array" and depth < 8:
            return [self._example(schema.get("items", {}), depth + 1) for _ in range(max(1, schema.get("minItems", 0)))]
        plain = {"string": "hello", "integer": schema.get("minimum", 1), "number": 1.0, "boolean": True}
        return plain.get(str(kind))

    def _place(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """Return a random place in the body: an object and a key, or a list and an index. The key may be new."""
        here: Any = body
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys or (isinstance(here, dict) and self._chance.random() < 0.1):
                name = self._chance.choice(("x", "", "model", "\x00", "n" * 3_000, "__class__"))
                return (here, name) if isinstance(here, dict) else ([None], 0)
            key = self._chance.choice(keys)
            if not isinstance(here[key], dict | list) or self._chance.random() < 0.4:
                return here, key
            here = here[key]

    def _value(self) -> Any:
        size = self._chance.choice((0, 1, 10, 1_000, 50_000))
        return self._chance.choice(
            (
                None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-308,
                float("nan"), float("inf"), "", "x", "\x00", "\ud800", "\U0010ffff", "😀" * 50, "{" * 50,
                "<|im_start|>", "../../etc/passwd", "a" * size, [], {}, [[]], [None], [1] * size, ["a"] * size,
                [{}] * min(size, 1_000), {"a": {"b": {}}}, {str(number): number for number in range(min(size, 1_000))},
                [[[1]]], [True, 1, "a"], "none", "auto", "draft-model:model=/etc/passwd", "union:of=" + "union(" * 50,
                "datastore:path=x", "prompt-lookup:k=999999999",
            )
        )  # fmt: skip


def _text(body: Mapping[str, Any]) -> bytes:
    """Write JSON, including numbers and half characters that JSON does not allow."""
    return json.dumps(body).encode("utf-8", "surrogatepass")
