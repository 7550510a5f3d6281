"""Makes constraints of a given size: schemas, grammars, regular expressions and choices, each growing in its own
way."""

from __future__ import annotations

from typing import Any

SIZES = (1, 10, 100, 1_000, 3_000, 10_000)
_LEVELS = 400
"""The deepest nesting; no client can write more levels."""


def schemas(size: int) -> list[dict[str, Any]]:
    """Return JSON schemas of this size."""
    names = [f"n{place}" for place in range(size)]
    chain = {name: {"$ref": f"#/$defs/n{place + 1}"} for place, name in enumerate(names)}
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(min(size, _LEVELS)):
        deep = {"type": "object", "properties": {"a": deep}}
    return [
        {"$ref": "#/$defs/n0", "$defs": {**chain, f"n{size}": {"type": "integer"}}},
        {"type": "object", "required": names},
        {"type": "object", "properties": {name: {"type": "integer"} for name in names}},
        {"anyOf": [{"type": "object", "properties": {name: {}}, "required": [name]} for name in names]},
        {"enum": names},
        {"type": "string", "minLength": size, "maxLength": size + 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": size},
        deep,
    ]


def forms(size: int) -> list[dict[str, Any]]:
    """Return values of ``structured_outputs`` of this size."""
    chain = "\n".join(f'r{place}: "a" r{place + 1}' for place in range(size))
    return [
        *({"json": schema} for schema in schemas(size)),
        {"grammar": f'start: r0\n{chain}\nr{size}: "b"'},
        {"grammar": "start: " + "(" * size + '"a"' + ")" * size},
        {"grammar": "start: " + '"a"? ' * size},
        {"grammar": "start: " + " | ".join(f'"a{place}"' for place in range(size))},
        {"regex": "a" + f"{{{size * 100}}}"},
        {"regex": "(" * size + "a" + ")" * size},
        {"regex": "(a|b)*" * size},
        {"choice": [f"choice {place}" for place in range(size)]},
    ]
