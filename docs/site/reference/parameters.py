"""Tables of parameters: fields of data classes, arguments of functions, options, environment variables, formats."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from parlay.options import options_of
from reference.markdown import code, meaning, meanings, table

SOURCES = Path(__file__).parents[3] / "src" / "parlay"
SKIPPED = ("self", "of_vllm")


def parameters(path: str, *groups: str) -> str:
    """The fields of a data class, or the arguments of a function, with types and defaults."""
    rows = [
        (code(name), code(_type(kind)), _default(default), meaning(path, name, *groups, "arguments"))
        for name, kind, default in named(path)
    ]
    return table(["parameter", "type", "default", "meaning"], rows)


def named(path: str) -> Iterator[tuple[str, object, object]]:
    """Name, type and default of each parameter of what the path names."""
    target = find(path)
    if dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            if not field.name.startswith("_"):
                empty = field.default is dataclasses.MISSING
                yield field.name, field.type, inspect.Parameter.empty if empty else field.default
        return
    for each in inspect.signature(target).parameters.values():
        if each.name not in SKIPPED:
            yield each.name, each.annotation, each.default


def find(path: str) -> Any:
    """What a dotted path names: ``module.Class`` or ``module.Class.method``."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise KeyError(path)


def options(path: str) -> str:
    """The fields of an options class, which say themselves what they mean."""
    rows = [(code(name), _default(each.default), each.help) for name, each in options_of(find(path)).items()]
    return table(["field", "default", "meaning"], rows)


def _type(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace(" | ", " or ")


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    text = repr(value) if isinstance(value, str | int | float | bool | tuple | None) else ""
    return code(text if text else "as loaded")


def environment() -> str:
    """Every environment variable that the package reads."""
    return table(["variable", "meaning"], [(code(name), meaning("environment", name)) for name in variables()])


def variables() -> list[str]:
    """The package's own variables, as its sources name them, and those of others that it honours."""
    own = {name for path in SOURCES.rglob("*.py") for name in re.findall(r"\bPARLAY_[A-Z]+\b", path.read_text("utf-8"))}
    return sorted(own | set(meanings()["environment"]))
