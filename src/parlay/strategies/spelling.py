"""Reads and writes strategies as text: ``NAME[:key=value,...]``, and ``NAME(key=value,...)`` inside another one.

Only this module reads such texts. Lists are joined by ``+``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parlay.options import Option, UsageError, Value, split
from parlay.strategies import accept_rules, catalogue
from parlay.strategies.catalogue import find
from parlay.strategies.entry import EFFORT, POLICY

DEPTH = 8
"""How deep strategies may be nested."""
_TOO_DEEP = f"more than {DEPTH} strategies stand inside one another"
_SHOWN = 200
"""The most characters of a text that its error repeats."""
_WHOLE = (POLICY, accept_rules.RULE)
"""Options of a whole strategy, which nested strategies do not have."""


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy as a request or option names it; `parse` makes it from the text.

    ``parameters``: the parameters that differ from their defaults, sorted, so that equal specs mean equal strategies.
    ``members``: the strategies directly inside this one.
    """

    name: str
    parameters: tuple[tuple[str, Value], ...] = ()
    members: tuple[StrategySpec, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.name}:{self._settings}" if self.parameters else self.name

    @property
    def nested(self) -> str:
        """The strategy's text inside another strategy."""
        return f"{self.name}({self._settings})" if self.parameters else self.name

    @property
    def _settings(self) -> str:
        return ",".join(f"{key}={_spell(value)}" for key, value in self.parameters)

    @property
    def settings(self) -> dict[str, Value]:
        """All parameters of the strategy, with defaults filled in."""
        parameters = catalogue.find(self.name).parameters
        return {key: option.default for key, option in parameters.items()} | dict(self.parameters)

    def changed(self, **values: Value) -> StrategySpec:
        """Return the strategy with other values for some parameters. These parameters must not name strategies."""
        parameters = catalogue.find(self.name).parameters
        merged = {**dict(self.parameters), **values}
        unusual = {key: value for key, value in merged.items() if value != parameters[key].default}
        return StrategySpec(self.name, tuple(sorted(unusual.items())), self.members)


def _spell(value: Value) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _all_parameters(name: str) -> Mapping[str, Option]:
    return find(name).parameters


def parse(text: str, parameters_of: Callable[[str], Mapping[str, Option]] = _all_parameters) -> StrategySpec:
    """Read ``NAME[:key=value,...]``.

    ``parameters_of`` gives the parameters of each strategy in the text by name, or raises UsageError; by default these
    are the parameters in the catalogue, and a name may be that of a class. Raises UsageError, whose message names the
    correct form.
    """
    complaint = _complaint(text)
    if complaint:
        raise UsageError(f"strategy {' '.join(text.split()):.{_SHOWN}}: {complaint}")
    return _read(text, parameters_of)


def name_of(text: str) -> str:
    """Return the name in ``NAME[:key=value,...]``, whether or not a strategy has this name."""
    return _head(text.strip())[0]


def _read(text: str, parameters_of: Callable[[str], Mapping[str, Option]], depth: int = 1) -> StrategySpec:
    """Read a strategy. ``depth``: 1 for the whole strategy, 2 for its members and so on."""
    name, rest = _head(text.strip())
    if depth > DEPTH:
        raise UsageError(f"strategy {name}: {_TOO_DEEP}")
    try:
        parameters = parameters_of(name)
    except catalogue.Unlisted:
        attribute, comma, settings = rest.partition(",")
        if comma and attribute.isidentifier():
            own = f"{name}:{attribute}"
            raise UsageError(f"strategy {own}: its parameters follow a colon: write {own}:{settings}") from None
        raise
    given = _given(name, rest, parameters, inside=depth > 1)
    values = {key: parameters[key].read(f"strategy {name}: {key}", word) for key, word in given.items()}
    members: list[StrategySpec] = []
    for key, option in parameters.items():
        if option.strategies:
            inside = [_read(one, parameters_of, depth + 1) for one in values.get(key, option.default)]
            members += inside
            values[key] = tuple(one.nested for one in inside)
    unusual = {key: value for key, value in values.items() if value != parameters[key].default}
    return StrategySpec(name, tuple(sorted(unusual.items())), tuple(members))


def _given(name: str, rest: str, parameters: Mapping[str, Option], *, inside: bool) -> dict[str, str]:
    """Return the settings as texts by key."""
    given: dict[str, str] = {}
    for part in split(rest, ","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise UsageError(f"strategy {name}: a parameter must be key=value, got {part!r:.{_SHOWN}}")
        if key in given:
            raise UsageError(f"strategy {name}: {key} is given twice: remove one of them")
        if key not in parameters:
            problem = f"strategy {name} has no parameter {key!r:.{_SHOWN}}"
            raise catalogue.Unlisted(problem, key, parameters, f"{catalogue.COMMAND} {name}")
        if inside and key in _WHOLE:
            raise UsageError(
                f"strategy {name}: {key} can be set only for the whole strategy, not for one inside it: move it"
            )
        more = [] if parameters[key].strategies else _settings_in(value, parameters)
        if more:
            meant = rest.replace(value, ",".join(more), 1)
            form = f"{name}({meant})" if inside else f"{name}:{meant}"
            raise UsageError(f"strategy {name}: commas separate parameters: write {form:.{_SHOWN}}")
        given[key] = value
    accept_rules.check(name, given, parameters)
    return given


def _settings_in(value: str, parameters: Mapping[str, Option]) -> list[str]:
    """Split a value where ``NAME=`` of a parameter follows a colon, semicolon or space; empty if there is none."""
    names = "|".join(map(re.escape, parameters))
    parts = re.split(rf"(?<=[:; ])(?=(?:{names}) *=)", value)
    return [part.strip(":; ") for part in parts] if len(parts) > 1 else []


def _head(text: str) -> tuple[str, str]:
    """Split a strategy's text into its name and its settings."""
    called = _call(text)
    if called is not None:
        return called
    name, _, rest = text.partition(":")
    piece, _, after = rest.partition(":")
    if piece and "=" not in piece and name not in catalogue.catalogue():
        return f"{name}:{piece}", after  # package.module:Class
    return name, rest


def _call(text: str) -> tuple[str, str] | None:
    """Split ``NAME(settings)`` into name and settings; None if the text has another form."""
    name, bracket, rest = text.partition("(")
    if not bracket or "=" in name or not rest.endswith(")") or _complaint(rest[:-1]):
        return None
    return name.strip(), rest[:-1]


def _complaint(text: str) -> str | None:
    """Return an error message if the parentheses in ``text`` do not match, or are nested too deep."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return "a ) without its ("
        if depth >= DEPTH:
            return _TOO_DEEP
    return None if depth == 0 else "a ( without its )"


_FOR_WHOM = "is for strategies that choose among drafters, as auto does"


def with_effort(spec: StrategySpec, effort: str) -> StrategySpec:
    """Return the strategy with this effort. Raises UsageError if it has no such option, or sets another effort."""
    if not find(spec.name).routes:
        raise UsageError(f"--effort {effort} {_FOR_WHOM}: strategy {spec} does not")
    given = dict(spec.parameters).get(EFFORT, effort)
    if given != effort:
        raise UsageError(f"--effort {effort}: strategy {spec} already sets effort={given}: remove one of them")
    return spec.changed(effort=effort)


def all_with_effort(strategies: Sequence[str], effort: str) -> tuple[str, ...]:
    """Return the strategies, with this effort set on each that chooses among drafters.

    Raises UsageError if no strategy chooses among drafters, or one sets another effort.
    """
    specs = [parse(each) for each in strategies]
    if not any(find(spec.name).routes for spec in specs):
        raise UsageError(f"--effort {effort} {_FOR_WHOM}: {', '.join(strategies)} do not")
    return tuple([str(with_effort(spec, effort) if find(spec.name).routes else spec) for spec in specs])
