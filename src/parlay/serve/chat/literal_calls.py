"""Reads calls in two notations of their own: Gemma's ``call:name{key:value}``, and Python calls."""

from __future__ import annotations

import ast
import json
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parlay.serve.chat.calls import AnswerScanner, Begin, CallFormat, Delta, FieldCallReader, State
from parlay.serve.chat.json_calls import ListedCallReader, ObjectCallReader
from parlay.serve.protocol.json_values import read_value

_DEEPEST, _LONGEST = 64, 1 << 16
"""Limits of an argument's nesting and length; beyond them it is a string."""
_OPENS, _CLOSES = "([{", ")]}"
_NO_VALUE = (ValueError, TypeError, IndexError, SyntaxError, RecursionError, MemoryError)


class LiteralCallReader(FieldCallReader):
    """Reads arguments that are a key, ``equals`` and a value, separated by commas. A value that can't be parsed is a
    string."""

    equals: str
    _longest_mark = 1
    """The length of the longest text that ``special`` matches."""
    head: re.Pattern[str]
    beginning: re.Pattern[str]
    """Any beginning of a call's head, up to its bracket."""

    def __init__(
        self, written: CallFormat, names: Collection[str], special: re.Pattern[str], *, single: bool = False
    ) -> None:
        """``special`` matches what may end an argument, begin a string, or open an inner bracket."""
        super().__init__((written.begin,), names, single=single, end=written.end)
        self._special = special
        self._rest: State = self._read_end
        self._depth, self._place, self._open = 0, 0, ""
        """How far the next argument is read: inner brackets, characters, and the quote of an open string. So what has
        come is read once, however many pieces it comes in."""

    def _cut_off(self, rest: str) -> bool:
        return super()._cut_off(rest) or self._state not in (self._search, self._read_head)

    def _read_head(self) -> Iterator[Delta]:
        head = self.head.match(self._buffer, len(self._mark))
        if head is not None and self._callable(head[1]):
            self._take(head.end())
            yield self._head_read(head[1])
        elif head is not None or self.beginning.fullmatch(self._buffer, len(self._mark)) is None:
            yield self._no_call()

    def _read_fields(self) -> Iterator[Delta]:
        end = self._field_end()
        if end is None:
            return
        self._depth, self._place, self._open = 0, 0, ""
        field, closes = self._take(end), self._take(1) != ","
        if (pair := self._pair(field)) is not None:
            yield self._tell(pair[0], self._json(pair[1]))
        if closes:
            yield self._told_all(self._rest)

    def _field_end(self) -> int | None:
        """The end of the next argument: a comma or bracket outside of strings and inner brackets; None if more text is
        needed."""
        while not self._open or self._end_text():
            mark = self._special.search(self._buffer, self._place)
            if mark is None:
                self._place = max(self._place, len(self._buffer) - self._longest_mark + 1)
                return None
            letter, self._place = mark[0], mark.end()
            if not self._depth and letter in (",", *_CLOSES):
                return mark.start()
            if letter in _OPENS:
                self._depth += 1
            elif letter in _CLOSES:
                self._depth -= 1
            elif letter != ",":
                self._open = letter
        return None

    def _end_text(self) -> bool:
        """Read on in the open string; returns whether it ends."""
        self._place, ends = self._text_end(self._open, self._place)
        self._open = "" if ends else self._open
        return ends

    def _json(self, text: str) -> str:
        try:
            return json.dumps(self._value(text) if len(text) <= _LONGEST else text, ensure_ascii=False, allow_nan=False)
        except _NO_VALUE:
            return json.dumps(text, ensure_ascii=False)

    def _pair(self, field: str) -> tuple[str, str] | None:
        """Split an argument into its name and its value as written; None if it is not an argument."""
        key, equals, value = field.partition(self.equals)
        return (self._key(key.strip()), value.strip()) if equals else None

    def _key(self, text: str) -> str:
        return text

    @abstractmethod
    def _text_end(self, quote: str, place: int) -> tuple[int, bool]:
        """How far the string with this opening quote can be read from ``place`` on, and whether it ends there."""

    @abstractmethod
    def _value(self, text: str) -> Any:
        """Parse a value. Raises one of `_NO_VALUE` if it can't be parsed."""


class KeyedCallReader(LiteralCallReader):
    """Reads ``call:name{key:value}`` with strings between two quote marks: Gemma 4 and FunctionGemma."""

    equals = ":"
    head = re.compile(r"\s*call:\s*([\w.-]{1,64})\s*\{")
    beginning = re.compile(r"\s*(c(a(l(l(:\s*([\w.-]{0,64}\s*)?)?)?)?)?)?")
    _words = re.compile(r"[{}\[\],:]|[^\s{}\[\],:]+")

    def __init__(self, written: CallFormat, names: Collection[str], *, single: bool = False) -> None:
        super().__init__(written, names, re.compile(rf"{re.escape(written.quote)}|[{{}}\[\],]"), single=single)
        self._quote, self._longest_mark = written.quote, len(written.quote)

    def _text_end(self, quote: str, place: int) -> tuple[int, bool]:
        found = self._buffer.find(quote, place)
        if found >= 0:
            return found + len(quote), True
        return max(place, len(self._buffer) - len(quote) + 1), False

    def _key(self, text: str) -> str:
        return text.removeprefix(self._quote).removesuffix(self._quote)

    def _value(self, text: str) -> Any:
        tokens: list[tuple[str, bool]] = []
        for place, piece in enumerate(text.split(self._quote)):  # every second piece is a string
            words = [piece] if place % 2 else self._words.findall(piece)
            tokens += [(word, place % 2 == 1) for word in words]
        value, end = self._read(tokens, 0, 0)
        if end < len(tokens):
            raise ValueError("more than one value")
        return value

    def _read(self, tokens: list[tuple[str, bool]], place: int, depth: int) -> tuple[Any, int]:
        """Parse the value at ``place``; returns it and where it ends."""
        if place >= len(tokens) or depth > _DEEPEST:
            raise ValueError("no value")
        word, is_text = tokens[place]
        if is_text:
            return word, place + 1
        if word not in ("{", "["):
            return _plain(word), place + 1
        close, items, pairs = "]" if word == "[" else "}", list[Any](), dict[str, Any]()
        place += 1
        while place < len(tokens) and tokens[place] != (close, False):
            if word == "{":
                key, (colon, _) = tokens[place][0], tokens[place + 1]
                if colon != ":":
                    raise ValueError("no pair")
                pairs[key], place = self._read(tokens, place + 2, depth + 1)
            else:
                item, place = self._read(tokens, place, depth + 1)
                items.append(item)
            place += place < len(tokens) and tokens[place] == (",", False)
        return (items if word == "[" else pairs), place + 1


def _plain(word: str) -> Any:
    """Parse a number, true, false or null; anything else is a string without quotes."""
    if word in ("}", "]", ",", ":"):
        raise ValueError("no value")
    try:
        return read_value(word)
    except ValueError:
        return None if word in ("None", "nil") else word


_BETWEEN_CALLS = re.compile(r"(?:\s*[,\]])*")
"""List punctuation before the next call or the end of the block."""


class PythonCallReader(LiteralCallReader):
    """Reads Python calls, one per line or in a list: OLMo 3 and LFM2."""

    equals = "="
    head = re.compile(r"[\s\[,]*([\w.-]{1,64})\(")
    beginning = re.compile(r"[\s\[,]*[\w.-]{0,64}")

    def __init__(
        self, written: CallFormat, functions: Mapping[str, Mapping[str, Any]], *, single: bool = False
    ) -> None:
        super().__init__(written, functions, re.compile(r"[\"'(){}\[\],]"), single=single)
        self._rest = self._read_next
        self._functions, self._names_in_order = functions, list[str]()

    def _head_read(self, name: str) -> Begin:
        properties = self._functions[name].get("properties")
        self._names_in_order = [*properties] if isinstance(properties, Mapping) else []
        return super()._head_read(name)

    def _pair(self, field: str) -> tuple[str, str] | None:
        """Split an argument; one without a name takes the function's next parameter, or its number if there is none."""
        key, equals, _ = field.partition(self.equals)
        if not field.strip() or (equals and key.strip().isidentifier()):
            return super()._pair(field)
        names = self._names_in_order
        return names[self._told] if self._told < len(names) else str(self._told), field.strip()

    def _read_next(self) -> Iterator[Delta]:
        """Read the next call of the block, or its end; anything else is text."""
        self._buffer = _BETWEEN_CALLS.sub("", self._buffer, count=1)
        rest = self._buffer.lstrip()
        if not rest:
            return
        head = self.head.match(rest)
        if head is not None and self._callable(head[1]):
            self._buffer = rest[head.end() :]
            yield self._head_read(head[1])
        elif self._end and (self._end.startswith(rest) or rest.startswith(self._end)):
            self._state = self._read_end
        elif self.beginning.fullmatch(rest) is None:
            self._state = self._search

    def _text_end(self, quote: str, place: int) -> tuple[int, bool]:
        inner = re.compile(rf"(?:[^\\{quote}]++|\\.)*+", re.DOTALL).match(self._buffer, place)
        assert inner is not None, "the pattern matches the empty text"
        ends = self._buffer.startswith(quote, inner.end())
        return inner.end() + ends, ends

    def _value(self, text: str) -> Any:
        return _of_python(ast.parse(text, mode="eval").body)


class MethodCallReader(PythonCallReader):
    """Reads ``name.call(key=value)``, as Llama 3 calls its built-in functions."""

    head = re.compile(r"[\s;,]*([\w-]{1,64})\.call\(")
    beginning = re.compile(r"[\s;,]*([\w-]{0,64}|[\w-]{1,64}\.(c(a(l(l)?)?)?)?)")

    def _cut_off(self, rest: str) -> bool:
        """Whether a call was cut off: calls have no closing mark, and only a semicolon announces another."""
        if self._state == self._read_next:
            return rest.lstrip().startswith(";")
        return super()._cut_off(rest)


class TaggedCallReader(AnswerScanner):
    """Reads Llama 3's calls: a bare object; or after a tag, objects or ``name.call(key=value)``.

    A tag before anything else, such as code for an interpreter, is dropped.
    """

    def __init__(
        self, written: CallFormat, functions: Mapping[str, Mapping[str, Any]], *, single: bool, certain: bool
    ) -> None:
        super().__init__(functions, self._decide, single=single)
        self._written, self._tagged, self._functions = written, replace(written, begin=written.tag), functions
        self._plain = ObjectCallReader(written, functions, single=single, certain=certain)
        self._reader: AnswerScanner = self._plain

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._reader.found

    def finish(self) -> list[Delta]:
        rest = self._take(len(self._buffer))
        return [*self._reader.feed(rest), *self._reader.finish()]

    def _decide(self) -> Iterator[Delta]:
        """Choose the reader by the beginning of the answer; nothing is read before that is certain."""
        start, tag = self._buffer.lstrip(), self._written.tag
        rest = start.removeprefix(tag).lstrip()
        if tag.startswith(start) or (start.startswith(tag) and MethodCallReader.beginning.fullmatch(rest)):
            return
        call = MethodCallReader.head.match(rest)
        if start.startswith(tag) and rest[0] in "{[":
            self._buffer, self._reader = start, ListedCallReader(self._tagged, self._names, single=self._single)
        elif start.startswith(tag) and call is not None and self._callable(call[1]):
            self._buffer, self._reader = start, MethodCallReader(self._tagged, self._functions, single=self._single)
        elif start.startswith(tag):
            self._buffer = rest
        self._state = self._go_on
        yield from ()

    def _go_on(self) -> Iterator[Delta]:
        yield from self._reader.feed(self._take(len(self._buffer)))


_NAMES = {"true": True, "false": False, "null": None}


def _of_python(node: ast.expr) -> Any:
    """Evaluate a Python or JSON literal. Raises ValueError for anything else; no code is run."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_of_python(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_of_python(key)): _of_python(value) for key, value in pairs if key is not None}
    raise ValueError("no literal")
