"""Turns a request's structured output into the definition that llguidance compiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from parlay.structured.limits import in_one_line, schema_of
from parlay.structured.schemas import SPACE, in_plain_words, restated
from parlay.types import FieldError, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_SPACED: JsonCompileOptions = {"whitespace_pattern": SPACE}
_COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ROW_ITEMS = 10_000
"""The most alternatives that the parser may hold open at one place of a text; llguidance's default is 2,000."""


def definition(wanted: StructuredOutputsParams) -> str:
    """Return the definition to compile. Raises ValueError if the request's structured output is not valid."""
    if wanted.json_object or wanted.json is not None:
        schema: dict[str, object] = {"type": "object"} if wanted.json is None else schema_of(wanted.json)
        return _json(schema, _COMPACT if wanted.disable_any_whitespace else _SPACED)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:  # one terminal: as alternatives of a rule, all would stay open while they match
        texts = " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in wanted.choice)
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    assert wanted.grammar is not None
    try:
        return grammar_from("grammar", wanted.grammar)
    except ValueError as error:
        raise FieldError("structured_outputs.grammar", f"is not valid: {in_one_line(str(error))}") from None


def _json(schema: dict[str, object], between: JsonCompileOptions) -> str:
    """Return the definition for a schema. ``between``: options for the whitespace and separators between the parts."""
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(restated(schema)), defaults=between)
    except ValueError as error:
        raise FieldError("structured_outputs.json", f"is not valid: {in_one_line(str(error))}") from None


def matcher(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """Compile a definition to a matcher that has read nothing. Raises ValueError for an invalid definition.

    The compiler is compiled code that recurses, so only a thread with a large stack may call this.
    """
    compiled = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(max_items_in_row=_ROW_ITEMS))
    if compiled.is_error():
        reason = compiled.get_error()
        message = in_plain_words(reason) or f"is not valid: {in_one_line(reason)}"
        raise FieldError("structured_outputs", message)
    return compiled
