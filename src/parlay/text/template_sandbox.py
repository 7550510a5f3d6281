"""jinja2's sandbox for untrusted templates, with a bound on the work of one rendering.

The sandbox keeps a template from Python's workings, but not from loops within loops or from texts that double. Here
each item of a loop, each argument of a call and each character that is joined or written counts, and a rendering that
does too much raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_WORK = 100_000_000
"""Characters that one rendering may join or write: a second's work for a template that does nothing else."""

_ITEM = 200
"""What an item of a loop, or a call, counts in characters."""

_MULTIPLY = frozenset({"join", "translate", "format", "format_map"})
"""Methods and filters that may write one argument as often as another is long."""

_SURROUNDINGS = (Context, EvalContext, jinja2.Environment)
"""What jinja2 gives some filters before the value."""

_MOST_BITS = 10_000
"""Of a number that is a power of another."""

_left: ContextVar[int] = ContextVar("left")
"""What is left of `MOST_WORK` to the rendering that runs; a template can neither read nor set it."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What its templates write is what jinja2's would. Run them by `render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """``filters`` are added to jinja2's own, or take their places."""
        super().__init__(**options)
        self.filters = {name: _counted(name, apply) for name, apply in {**self.filters, **filters}.items()}
        self.filters |= {"_each": _each, "_sized": _sized}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template's tree, in which loops, concatenations and what is written are counted."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            written = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            loop.iter = _filtered(loop.iter, "_each", nodes.Const(written))
        for output in tree.find_all(nodes.Output):
            output.nodes = [
                node if isinstance(node, nodes.TemplateData) else _filtered(node, "_sized") for node in output.nodes
            ]
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [_filtered(node, "_sized") for node in joined.nodes]
        return tree

    def call(__self, __context: Any, __obj: Any, *given: Any, **named: Any) -> Any:
        method = inspect.unwrap(__obj)  # jinja2 wraps ``str.format``
        name, owner = (method.__name__, method.__self__) if isinstance(method, BuiltinMethodType) else ("", None)
        _spend(_ITEM + _growth(name, (owner, *given, *named.values())))
        return _sized(super().call(__context, __obj, *given, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _spend(_times(left, right))
        if operator == "%":
            _spend(_growth("format", (left, right)))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_above(left.bit_length() * abs(right), _MOST_BITS)
        return _sized(super().call_binop(context, operator, left, right))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text that a template of a `BoundedEnvironment` writes. Raises SecurityError where that is too much work."""
    before = _left.set(MOST_WORK)
    try:
        return template.render(variables)
    finally:
        _left.reset(before)


def _filtered(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _each(items: Iterable[Any], written: int) -> Iterator[Any]:
    """The items, each counted with so many characters that the loop writes for it whatever it is."""
    for item in items:
        _spend(_ITEM + written)
        yield item


def _counted(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are counted."""

    @wraps(apply)
    def counted(*given: Any, **named: Any) -> Any:
        values = [value for value in (*given, *named.values()) if not isinstance(value, _SURROUNDINGS)]
        _spend(_growth(name, values))
        return apply(*given, **named)

    return counted


def _growth(name: str, given: Sequence[object]) -> int:
    """How long a result may become: of a method, whose owner is given first, or of a filter."""
    sizes = [_deep_size(value) for value in given]
    if name in _MULTIPLY:
        return (max(sizes) + 1) * (sum(sizes) - max(sizes) + 1)
    if name == "replace" and all(isinstance(value, str) for value in given[:3]):
        text, old, new = map(str, given[:3])
        return len(text) + text.count(old) * len(new)
    return sum(sizes) + sum([max(0, value) for value in given if isinstance(value, int)])


def _sized(value: Any) -> Any:
    """The value, its size counted."""
    _spend(_size(value))
    return value


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _deep_size(value: object) -> int:
    """Of a list the sizes of its items: texts are written into others."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    return sum([1 + _size(item) for item in value]) if isinstance(value, list | tuple) else _size(value)


def _times(left: object, right: object) -> int:
    """The size of ``left * right``."""
    if isinstance(left, int):
        left, right = right, left
    return _size(left) * max(0, right) if isinstance(right, int) else 0


def _spend(work: int) -> None:
    left = _left.get() - work
    _refuse_above(-left, 0)
    _left.set(left)


def _refuse_above(found: int, most: int) -> None:
    if found > most:
        raise SecurityError("the chat template does too much: it loops without end, or its texts grow without bound")
