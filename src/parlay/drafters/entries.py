"""What the catalogue is made of: entries, their parameters, parsed specs, and the resources drafters are built from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parlay.drafters import spelling
from parlay.types import Exactness, ParlayError, Runner, RunnerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from parlay.drafters.datastore_file import Datastore


Value = int | float | bool | str | tuple[str, ...]
"""What a parameter can be; a tuple is written ``a+b`` in a spec, and what stands in parentheses is not parted."""


class UsageError(ParlayError, ValueError):
    """A strategy was asked for in a way that can't work; the message is one line that names what can."""


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
                raise UsageError(f"{name}={value}: must be at least {self.low:g}")
            if self.high is not None and not value <= self.high:
                raise UsageError(f"{name}={value}: must be at most {self.high:g}")


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


POLICIES = ("adaptive", "fixed", "heuristic", "heuristic-transient", "confidence", "risk")


def budget(nodes: int) -> dict[str, Parameter]:
    """The parameters that every drafting strategy takes. They belong to the policy, not to the drafter."""
    return {
        "k": Parameter(int, nodes, "most nodes in a draft (heuristic: in the first)", low=0, high=1024),
        "policy": Parameter(str, "adaptive", "draft while it pays, always k nodes, or by a rule", choices=POLICIES),
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy of the catalogue. ``factory`` is ``module:Class``, imported on first use; empty: nothing drafts.

    The class is called as ``Class(resources, **parameters)`` with its own parameters by keyword. ``exactness`` is
    what its accept rule promises on a runner that can give it. ``toys`` are parameter settings, written as in a
    spec, under which the conformance kit runs the entry with toy resources. ``model_level``: its ``model`` can verify
    what other drafters propose, as a level of a cascade.
    """

    name: str
    family: str
    exactness: Exactness
    training: str
    needs: str
    summary: str
    reference: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    factory: str = ""
    toys: tuple[str, ...] = ("",)
    model_level: bool = False


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy by name, with the parameters that differ from their defaults, sorted: equal specs, equal strategy."""

    name: str
    parameters: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self._settings}" if self.parameters else self.name

    @property
    def nested(self) -> str:
        """As it is written inside another strategy."""
        return f"{self.name}({self._settings})" if self.parameters else self.name

    @property
    def _settings(self) -> str:
        return ",".join(f"{key}={_spell(value)}" for key, value in self.parameters)


def _spell(value: Value) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Resources:
    """What drafters are built from; ``target`` says what the target is and can do.

    ``open_runner`` loads a model by name or path, once, and shares it; ``open_tokenizer`` gives the tokenizer that
    goes with such a model. ``open_datastore`` takes the place of opening a file, for toys.
    """

    vocab_size: int
    open_runner: Callable[[str], Runner]
    default_draft: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    open_tokenizer: Callable[[str], PreTrainedTokenizerBase] | None = None
    target: RunnerSpec | None = None
    open_datastore: Callable[[str], Datastore] | None = None


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error line: the closest known words if some are close, and else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose one of {', '.join(names)}" if names else "there is nothing to choose from"
