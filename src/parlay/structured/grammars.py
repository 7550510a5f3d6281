"""From what a user asks of a text to a compiled grammar over one vocabulary."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parlay.structured.constraint import GrammarConstraint, in_one_line, unpacked
from parlay.types import ParlayError, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_KEPT = 128  # compiled grammars
_WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the parts of JSON: enough for indentation, and an end for a model that would go on for ever."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, from which each sample gets a constraint of its own."""

    tokenizer: LLTokenizer
    matcher: LLMatcher
    vocab_size: int
    lock: threading.Lock

    def constraint(self, stop_ids: Collection[int]) -> GrammarConstraint:
        """``stop_ids`` are those of the request: special ones among them may come where the text may end."""
        ends = frozenset(token for token in stop_ids if self.tokenizer.is_special_token(token))
        barred = frozenset(self.tokenizer.eos_tokens) - ends
        return GrammarConstraint(self.copy, self.vocab_size, ends=ends, barred=barred)

    def copy(self) -> LLMatcher:
        """A matcher at the beginning. Any thread may ask."""
        with self.lock:
            return self.matcher.deep_copy()


class Grammars:
    """Compiles grammars for one tokenizer and keeps those used last. Any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Raises ValueError with the reason for what is not valid or can't be written with this vocabulary, and
        ParlayError where the package that does this is missing."""
        text = _definition(wanted)
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found
            vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
        grammar = Grammar(vocabulary, _matcher(vocabulary, text), self._vocab_size, threading.Lock())
        _check_beginning(grammar.copy(), vocabulary)
        with self._lock:
            self._compiled[text] = grammar
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return grammar

    def _read_vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this model came without one")
        from llguidance import hf

        size = max(len(self._tokenizer), self._vocab_size)
        try:
            return hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_ids or None)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs can't be used with this model's tokenizer: {in_one_line(str(error))}"
            ) from None


def _definition(wanted: StructuredOutputsParams) -> str:
    """The grammar in the one form that matchers take."""
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError:
        raise ParlayError("structured output needs the package llguidance: pip install 'parlay[structured]'") from None
    if wanted.json_object or wanted.json is not None:
        schema = '{"type": "object"}' if wanted.json is None else _schema(wanted.json)
        return _json_grammar(schema)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    assert wanted.grammar is not None
    try:
        return grammar_from("grammar", wanted.grammar)
    except ValueError as error:
        raise ValueError(f"structured_outputs.grammar: {in_one_line(str(error))}") from None


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise ValueError(f"structured_outputs.json is not valid: {in_one_line(str(error))}") from None


def _schema(given: str | Mapping[str, object]) -> str:
    """Checked to be JSON, of an object."""
    try:
        schema = json.loads(given) if isinstance(given, str) else dict(given)
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is not JSON: {in_one_line(str(error))}") from None
    if not isinstance(schema, dict):
        raise ValueError("structured_outputs.json must be a JSON schema that is an object")
    return text


def _matcher(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, text, log_level=0)
    if matcher.is_error():
        raise ValueError(f"structured_outputs are not valid: {in_one_line(matcher.get_error())}")
    return matcher


def _check_beginning(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    """Raises ValueError where no text can begin."""
    may_end = matcher.is_accepting()
    first_V = unpacked(matcher.compute_bitmask(), vocabulary.vocab_size)
    first_V[vocabulary.eos_tokens] = False
    if first_V.any():
        return
    if may_end:
        raise ValueError("structured_outputs allow no text but the empty one")
    raise ValueError("structured_outputs ask for a text that can't begin with any token of this model's vocabulary")
