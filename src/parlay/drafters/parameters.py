"""Parameters of strategies and of accept rules: types, defaults, allowed values, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parlay.options import UsageError, Value, spelling

__all__ = ["Parameter", "UsageError", "Value"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting of a strategy: its type, default and meaning, and which values are allowed.

    ``strategies``: the values of a tuple are themselves strategies, each written ``NAME`` or ``NAME(key=value,...)``.
    """

    type: type
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    strategies: bool = False

    def read(self, name: str, text: str) -> Value:
        """The value that ``text`` spells; UsageError when it has the wrong type or lies out of range."""
        try:
            value = _READERS[self.type](text)
        except ValueError:
            raise UsageError(f"{name}={text}: expected {_TYPE_WORDS[self.type]}") from None
        self._check(name, value)
        return value

    def _check(self, name: str, value: Value) -> None:
        if self.choices and value not in self.choices:
            raise UsageError(f"{name}={value}: choose one of {', '.join(self.choices)}")
        if isinstance(value, int | float):
            # Written so that NaN fails.
            if self.low is not None and not value >= self.low:
                raise UsageError(f"{name}={value}: must be at least {self.low}")
            if self.high is not None and not value <= self.high:
                raise UsageError(f"{name}={value}: must be at most {self.high}")


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(spelling.split(text, "+"))


_READERS: Mapping[type, Callable[[str], Value]] = {
    int: int,
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
}
