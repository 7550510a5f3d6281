"""What the catalogue is made of: entries, their parameters, parsed specs, and the resources drafters are built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parlay.drafters import accept_rules
from parlay.drafters.parameters import Parameter, UsageError, Value
from parlay.options import nearest
from parlay.types import Exactness, Runner, RunnerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from parlay.drafters.stores.datastore_file import Datastore

__all__ = [
    "Entry",
    "Parameter",
    "Resources",
    "StrategySpec",
    "UsageError",
    "Value",
    "budget",
    "nearest",
]

POLICIES = ("adaptive", "fixed", "heuristic", "heuristic-transient", "confidence", "risk")


def budget(nodes: int, rules: Sequence[str] = accept_rules.GUESSED) -> dict[str, Parameter]:
    """The parameters that every drafting strategy takes. They belong to policy and accept rule, not to the drafter.

    ``rules`` are those that can judge its drafts, its default first. A drafter that goes with rules for drawn drafts is
    told by ``rule`` which one it drafts for.
    """
    return {
        "k": Parameter(int, nodes, "most nodes in a draft (heuristic: in the first)", low=0, high=1024),
        "policy": Parameter(str, "adaptive", "draft while it pays, always k nodes, or by a rule", choices=POLICIES),
        **accept_rules.parameters(rules),
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy of the catalogue. ``factory`` is ``module:Class``, imported on first use; empty: nothing drafts.

    The class is called as ``Class(resources, **parameters)`` with its own parameters by keyword. ``exactness`` is
    what its accept rule promises on a runner that can give it. ``when`` ends the sentence "use it where". ``toys`` are
    parameter settings, written as in a spec, under which the conformance kit runs the entry with toy resources.
    ``model_level``: its ``model`` can verify what other drafters propose, as a level of a cascade.
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
    when: str = ""

    @property
    def draws(self) -> bool:
        """Whether some of its rules need drafts drawn from a law."""
        rule = self.parameters.get(accept_rules.RULE)
        return rule is not None and bool({*rule.choices} & {*accept_rules.DRAWN})


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
    goes with such a model. ``open_datastore`` takes the place of opening a file, for toys. ``closing`` runs when the
    drafter goes: what outlives it registers its last saving there.
    """

    vocab_size: int
    open_runner: Callable[[str], Runner]
    default_draft: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    open_tokenizer: Callable[[str], PreTrainedTokenizerBase] | None = None
    target: RunnerSpec | None = None
    open_datastore: Callable[[str], Datastore] | None = None
    closing: ExitStack = field(default_factory=ExitStack)
