"""Names of fields that other servers spell differently, and their names here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

SPELLINGS: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama
    "n_predict": "max_tokens",  # llama.cpp
    "num_predict": "max_tokens",  # Ollama
    "typ_p": "typical_p",  # llama.cpp
}
FORMS: Mapping[str, str] = {
    "guided_json": "json",  # vLLM, before it had structured_outputs
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",  # llama.cpp
    "grammar": "grammar",
    "regex": "regex",  # SGLang
    "ebnf": "grammar",
}
"""Other servers' names of members of ``structured_outputs``."""
_UNLIMITED = {"n_predict": -1, "num_predict": -1}
_FORM = "structured_outputs"
OPTIONS = "options"
"""The object in which Ollama keeps fields that others have at the top level."""
MOST_FIELDS = 256
"""Most fields of an object whose fields are looked up, as each look-up takes time."""


Paths = dict[str, str]
"""Paths in the body as sent, by our paths of the same fields."""


def respelled(data: Mapping[str, Any], known: Container[str]) -> tuple[dict[str, Any], Paths]:
    """Rename a body's fields to the ``known`` names; the second result maps our paths to those in the body.

    Unknown fields of ``options`` keep their path. Raises PydanticCustomError if a field comes twice with different
    values, and if ``options`` has too many fields.
    """
    result, paths = {name: value for name, value in data.items() if not _moves(name, value)}, Paths()
    for name, value in data.items():
        if name == OPTIONS and isinstance(value, dict):
            _check_count(value)
            for inner, setting in value.items():
                _put(result, inner, setting, f"{OPTIONS}.{inner}", known)
                paths[SPELLINGS.get(inner, inner)] = f"{OPTIONS}.{inner}"
        elif name in SPELLINGS and value is not None:
            _put(result, name, value, name, known)
            paths[SPELLINGS[name]] = name
        elif name in FORMS and value is not None:
            _put_form(result, name, value)
            paths |= {_FORM: name, f"{_FORM}.{FORMS[name]}": name}
    return result, paths


def _check_count(options: Mapping[str, Any]) -> None:
    if len(options) > MOST_FIELDS:
        message = f"{OPTIONS} has {len(options)} fields, and no object of this API has more than {MOST_FIELDS}"
        raise PydanticCustomError("two_spellings", "{told}", {"told": message, "field": OPTIONS})


def _moves(name: str, value: object) -> bool:
    return name in SPELLINGS or name in FORMS or (name == OPTIONS and isinstance(value, dict))


def _put(result: dict[str, Any], name: str, value: Any, path: str, known: Container[str]) -> None:
    ours = SPELLINGS.get(name, name)
    if ours not in known:
        result[path] = value
    elif name not in _UNLIMITED or value != _UNLIMITED[name]:
        _set(result, ours, value, path)


def _put_form(result: dict[str, Any], name: str, value: Any) -> None:
    forms = result.get(_FORM) or {}
    if isinstance(forms, dict):
        forms = dict(forms)
        _set(forms, FORMS[name], value, name)
        result[_FORM] = forms


def _set(fields: dict[str, Any], ours: str, value: Any, path: str) -> None:
    if fields.get(ours) is not None and fields[ours] != value:
        message = f"{path} and {ours} differ: give one of them"
        raise PydanticCustomError("two_spellings", "{told}", {"told": message, "field": path})
    fields[ours] = value


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


def read_leniently(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Paths]:
    """Rename the fields of an invalid body, whose known fields can't be told."""
    try:
        return respelled(data, _Everything())
    except PydanticCustomError:
        return data, {}


def as_sent(path: str, paths: Mapping[str, str]) -> str:
    """The path in the body as sent of the field that has this path here."""
    for ours in sorted(paths, key=len, reverse=True):
        rest = path.removeprefix(ours)
        if path.startswith(ours) and (not rest or rest[0] in ".["):
            return paths[ours] + rest
    return path
