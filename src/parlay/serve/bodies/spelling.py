"""Fields that other servers spell differently: what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
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
}
"""Spellings of the members of ``structured_outputs``."""
_UNLIMITED = {"n_predict": -1, "num_predict": -1}
OPTIONS = "options"
"""Where Ollama keeps what others have at the top."""


def respelled(data: Mapping[str, Any], known: Mapping[str, object]) -> dict[str, Any]:
    """The body with its fields under the names that they have here; ``known`` has those as keys.

    What ``options`` holds and nobody knows stays under its path. Raises
    PydanticCustomError for a field that is there twice, under two names and with two values.
    """
    result = {name: value for name, value in data.items() if not _moves(name, value)}
    for name, value in data.items():
        if name == OPTIONS and isinstance(value, dict):
            for inner, setting in value.items():
                _put(result, inner, setting, f"{OPTIONS}.{inner}", known)
        elif name in SPELLINGS and value is not None:
            _put(result, name, value, name, known)
        elif name in FORMS and value is not None:
            _put_form(result, name, value)
    return result


def _moves(name: str, value: object) -> bool:
    return name in SPELLINGS or name in FORMS or (name == OPTIONS and isinstance(value, dict))


def _put(result: dict[str, Any], name: str, value: Any, path: str, known: Mapping[str, object]) -> None:
    ours = SPELLINGS.get(name, name)
    if ours not in known:
        result[path] = value
    elif name not in _UNLIMITED or value != _UNLIMITED[name]:
        _set(result, ours, value, path)


def _put_form(result: dict[str, Any], name: str, value: Any) -> None:
    forms = result.get("structured_outputs") or {}
    if isinstance(forms, dict):
        forms = dict(forms)
        _set(forms, FORMS[name], value, name)
        result["structured_outputs"] = forms


def _set(fields: dict[str, Any], ours: str, value: Any, path: str) -> None:
    if fields.get(ours) is not None and fields[ours] != value:
        told = f"{path} and {ours} differ: give one of them"
        raise PydanticCustomError("two_spellings", "{told}", {"told": told, "field": path})
    fields[ours] = value


def spelling_of(field: str, body: Mapping[str, Any]) -> str:
    """How ``body`` calls the field that is ``field`` here; a field inside ``options`` is told of as a whole."""
    options = body.get(OPTIONS)
    inside = options if isinstance(options, dict) else {}
    for name in (field, *(name for name, ours in SPELLINGS.items() if ours == field)):
        if name in body:
            return name
        if name in inside:
            return OPTIONS
    return field
