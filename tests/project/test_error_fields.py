"""Errors about a value that a user set say which one, so that each interface can call it by its own name."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from inspect import getfullargspec
from pathlib import Path

from parlay import LLM, SamplingParams
from parlay.llm.request_options import RequestOptions

PACKAGE = Path(__file__).parents[2] / "src" / "parlay"
PLACES = ["types", "options", "llm", "serve/protocol", "structured", "sampling", "text", "engine", "aio", "cache"]
"""Where users' values are read. The texts of a strategy and of an exactness have one field each, which those who read
them declare."""
RAISED = ("ValueError", "UsageError", "ParlayError")
NAMES = frozenset(
    [each.name for each in (*fields(SamplingParams), *fields(RequestOptions))]
    + [*getfullargspec(LLM.__init__).kwonlyargs, "prompt"]
)
"""The names of what a user may set."""


def beginning(message: ast.expr) -> str:
    """The name that a message begins with, if its text begins with a word; empty otherwise."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    first = parts[0] if parts else None
    text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    found = re.match(r"(?:the )?([a-z_]+)\b(?![-/])", text)
    return found[1] if found else ""


def undeclared(source: str) -> list[int]:
    """The lines that raise an error whose message begins with a field's name, and that declare no field."""
    calls = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    return [
        call.lineno
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in RAISED
        and call.args
        and beginning(call.args[0]) in NAMES
        and (call.func.id == "ValueError" or len(call.args) == 1)
    ]


def test_an_error_that_begins_with_a_field_declares_it() -> None:
    """Otherwise a server does not name it in ``param``, and a command calls it by another name than its flag's."""
    modules = [path for place in PLACES for path in sorted((PACKAGE / place).rglob("*.py"))]
    assert len(modules) > 50
    found = {str(path.relative_to(PACKAGE)): undeclared(path.read_text(encoding="utf-8")) for path in modules}
    assert not {name: lines for name, lines in found.items() if lines}


def test_the_rule_finds_what_it_is_for() -> None:
    assert undeclared('raise ValueError("temperature is wrong")') == [1]
    assert undeclared('raise UsageError(f"the prompt has {n} tokens")') == [1]
    assert not undeclared('raise UsageError(f"the prompt has {n} tokens", "prompt")')
    assert not undeclared('raise FieldError("seed", "is wrong")')
    assert not undeclared('raise ParlayError("this model has no chat template")')
