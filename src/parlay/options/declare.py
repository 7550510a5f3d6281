"""Declares the fields of an options class, and reads a field's value from text."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from parlay.types import KINDS, FieldError, ParlayError, UsageError
from parlay.types.base import show_number

Value = int | float | bool | str | tuple[str, ...]
"""Values of a strategy's option. In a text, the parts of a tuple are joined by ``+``."""


WHOLE = range(-(2**63), 2**64)
"""Whole numbers that options may have: a seed may use 64 bits."""
_OUT_OF_RANGE = "a whole number may have at most 64 bits"
_FEW = 16  # most names that an error lists
_ALIKE = 0.7
"""Similarity, between 0 and 1, from which one word may be a misspelling of another."""


class NotNamed(UsageError):
    """A strategy drafts with a model, file or address that was not named."""


@dataclass(frozen=True, slots=True)
class Option:
    """A field of an options class: type, default, meaning and allowed values.

    ``above`` is an exclusive lower bound. ``metavar`` stands for the value in a command's help; ``flag`` is the
    option's name there, if it is another one. ``switch``: the flag takes no value; giving it means true. ``required``:
    the option has no default, and ``default`` is None. ``optional``: its type also allows None. ``strategies``: the
    parts of the tuple are strategies, each written ``NAME`` or ``NAME(key=value,...)``. ``opens``: it names a file or a
    model, or loads weights, so a server accepts it only from its owner. ``keeps``: it sets how much is kept for later
    requests, so a request to a server can only lower it. ``kinds``: its parts are numbers for kinds of requests, as
    `of_kinds` reads them, none above ``high``. ``imports``: apart from its choices it may be a class from elsewhere,
    written ``package.module:Class``.
    """

    name: str
    type: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    flag: str = ""
    switch: bool = False
    strategies: bool = False
    opens: bool = False
    keeps: bool = False
    kinds: bool = False
    imports: bool = False
    required: bool = False
    optional: bool = False

    def read(self, label: str, text: str) -> Value:
        """Parse the value in ``text``. Raises UsageError, which calls the option ``label``, for any other text."""
        try:
            value = tuple(map(str.strip, text.split("+"))) if self.kinds else _READERS[self.type](text)
        except UsageError as error:
            raise FieldError(label, f": {error}") from None
        except ValueError:
            raise FieldError(label, f"must be {_TYPE_WORDS[self.type]}, got {text:.60}") from None
        self.check(label, value)
        return value

    def check(self, label: str, value: object) -> None:
        """Raise UsageError for a value of another type, not among the choices, or out of bounds."""
        if value is None and self.optional:
            return
        if not _fits(value, self.type):
            raise FieldError(label, f"must be {_TYPE_WORDS[self.type]}, got {value}")
        if self.choices and value not in self.choices and not (self.imports and ":" in str(value)):
            raise FieldError(label, f"={value}: choose one of {', '.join(self.choices)}")
        if isinstance(value, int) and value not in WHOLE:
            raise FieldError(label, f"is out of range: {_OUT_OF_RANGE}, got {show_number(value)}")
        if self.kinds and isinstance(value, tuple):
            of_kinds(label, value, math.inf if self.high is None else self.high)
        if isinstance(value, int | float):
            # Written so that NaN fails.
            if self.low is not None and not value >= self.low:
                raise FieldError(label, f"must be at least {show_number(self.low)}, got {show_number(value)}")
            if self.high is not None and not value <= self.high:
                raise FieldError(label, f"must be at most {show_number(self.high)}, got {show_number(value)}")
            if self.above is not None and not value > self.above:
                raise FieldError(label, f"must be above {show_number(self.above)}, got {show_number(value)}")


@dataclass(frozen=True, slots=True)
class Options:
    """Base of options classes, which are frozen dataclasses. Creating an instance checks its values.

    Raises UsageError for a value that its `Option` does not allow.
    """

    def __post_init__(self) -> None:
        check_values(self, type(self))


def check_values(given: Options, declared: type[Options]) -> None:
    """Raises UsageError for a value that its `Option` does not allow. ``declared`` is a class of ``given``.

    A class that has fields besides those of such a base checks these by itself.
    """
    values = dataclasses.asdict(given)
    for name, option in options_of(declared).items():
        option.check(name, values[name])


def whole(text: str) -> int:
    """Read a whole number. Raises ValueError for another text, and UsageError for a number outside `WHOLE`."""
    digits = text.strip().lstrip("+-").replace("_", "")
    if digits.isdigit() and (len(digits) > len(str(WHOLE[-1])) or int(text) not in WHOLE):
        raise UsageError(f"{text:.40}{'...' if len(text) > 40 else ''} is out of range: {_OUT_OF_RANGE}")
    return int(text)


def user_path(name: str | Path) -> Path:
    """Make a path of what a user wrote: a home folder in place of ``~``. Raises ParlayError where there is none."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ParlayError(f"{name}: there is no such home folder: write the path without ~") from None


T = TypeVar("T", bound=Options)


def override(options: T, **given: Value | None) -> T:
    """Return the options with the ``given`` values that are not None."""
    return dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Iterable[str] = (),
    metavar: str = "",
    flag: str = "",
    switch: bool = False,
    strategies: bool = False,
    opens: bool = False,
    keeps: bool = False,
    kinds: bool = False,
    imports: bool = False,
) -> Any:
    """Declare a field of an options class; see `Option`. Bounds are inclusive, except ``above``."""
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "above": above,
        "choices": tuple(choices),
        "metavar": metavar,
        "flag": flag,
        "switch": switch,
        "strategies": strategies,
        "opens": opens,
        "keeps": keeps,
        "kinds": kinds,
        "imports": imports,
    }
    return field(default=default, metadata=metadata)


def refuse_unread(what: str, given: Options, names: Iterable[str], where: str) -> None:
    """Raise UsageError for the first of the options ``names`` that is not at its default: it would have no effect.

    ``what`` begins the message, ``where`` says when the option has no effect and what to do.
    """
    values = {
        each.name: value for each, value in zip(dataclasses.fields(given), dataclasses.astuple(given), strict=True)
    }
    for name in names:
        if values[name] != options_of(type(given))[name].default:
            raise UsageError(f"{what}: {name}={values[name]} has no effect {where}")


def options_of(declared: type[Any]) -> Mapping[str, Option]:
    """Return the options of a class by name, in the order of its fields.

    Raises TypeError for a field that is not an int, float, bool, str, Path or tuple[str, ...], or one of them and None.
    A Literal of texts is a str with these choices.
    """
    key: Any = declared  # for mypy, a class is not hashable if its instances might not be
    return _options_of(key)


@functools.cache
def _options_of(declared: Any) -> Mapping[str, Option]:
    hints = typing.get_type_hints(declared)
    return types.MappingProxyType({each.name: _option(each, hints[each.name]) for each in dataclasses.fields(declared)})


def _option(each: dataclasses.Field[Any], hint: object) -> Option:
    words = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    hint = str if words else hint
    known = [part for part in typing.get_args(hint) if part is not types.NoneType] if _is_union(hint) else [hint]
    if len(known) != 1 or known[0] not in _TYPES:
        raise TypeError(f"option {each.name!r} must be an int, float, bool, str, Path or tuple[str, ...], not {hint}")
    required = each.default is MISSING
    default = None if required else each.default
    metadata = {"help": "", **each.metadata} | ({"choices": words} if words else {})
    return Option(each.name, _TYPES[known[0]], default, required=required, optional=_is_union(hint), **metadata)


def _fits(value: object, wanted: type) -> bool:
    """Check the type. An int is accepted for a float; a bool only for a bool."""
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def _is_union(hint: object) -> bool:
    return isinstance(hint, types.UnionType)


def split(text: str, separator: str) -> list[str]:
    """Split ``text`` at separators outside parentheses; empty parts are left out."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def of_kinds(label: str, words: Iterable[str], high: float = math.inf) -> dict[str, float]:
    """Read numbers for kinds of requests, spelled KIND/NUMBER. Raises UsageError, which calls the option ``label``."""
    found: dict[str, float] = {}
    for word in words:
        kind, slash, number = word.partition("/")
        if not kind:
            raise FieldError(label, f"{word:.60} names no kind: write KIND/NUMBER, and join several by +")
        if kind in found:
            raise FieldError(label, f"gives {kind} twice: remove one of them")
        if kind not in KINDS:
            raise FieldError(label, f"{word:.60}: {nearest(kind, KINDS)}")
        try:
            found[kind] = float(number)
        except ValueError:
            found[kind] = math.nan
        if not slash or not 0 <= found[kind] <= high or found[kind] == math.inf:
            most = "" if high == math.inf else f" and at most {high:g}"
            raise FieldError(label, f"{word:.60}: write {kind}/NUMBER with a number of at least 0{most}")
    return found


def nearest(word: str, known: Iterable[str], listed_by: str = "") -> str:
    """Return the end of an error line: the known words that may be meant, else all of them, or the closest of many.

    ``listed_by`` says what lists the words; the line refers to it if there are many.
    """
    names = sorted(known)
    others = f"choose one of {', '.join(names)}" if names else "there are none"
    if len(names) > _FEW:
        closest = ", ".join(difflib.get_close_matches(word, names, n=3, cutoff=0))
        others = f"{listed_by} lists them" if listed_by else f"choose one of {len(names)} names such as {closest}"
    return close_to(word, names) or others


def close_to(word: str, known: Iterable[str]) -> str:
    """Return the question whether the closest known words were meant; empty where none is close.

    A word is close if it is similar as a whole, or in one part between hyphens, dots or underscores.
    """
    spelled = {each.lower(): each for each in sorted(known)}
    close = [spelled[each] for each in difflib.get_close_matches(word.lower(), spelled, n=3, cutoff=0.5)]
    close = [each for each in close if _alike(word, each) >= _ALIKE or _shares_part(word, each)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def _shares_part(word: str, other: str) -> bool:
    ours, others = (re.findall(r"[^\W_]{3,}", text) for text in (word, other))
    return any(_alike(one, two) >= _ALIKE for one in ours for two in others)


def _alike(one: str, two: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), two.lower()).ratio()


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(split(text, "+"))


_TYPES: Mapping[object, type] = {
    int: int,
    float: float,
    bool: bool,
    str: str,
    Path: Path,
    tuple[str, ...]: tuple,
}
_READERS: Mapping[type, Callable[[str], Value]] = {
    int: whole,
    float: float,
    bool: _read_bool,
    str: str,
    tuple: _read_list,
}
_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "names joined by +",
    Path: "a path",
}
