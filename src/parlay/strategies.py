"""From a strategy's name to drafter, rule and policy: one instance per name and parameters, models shared."""

from __future__ import annotations

from collections.abc import Callable

from parlay.drafters import catalogue
from parlay.drafters.catalogue import Resources, StrategySpec
from parlay.router.policies import Plain, make_policy
from parlay.types import Cost, Drafter, Policy, Rule, Runner, Strategy

BUILT_IN_DRAFTS = {"parlay-mini": "parlay-mini-draft"}
"""The draft model that goes with a target, where none is named."""


class StrategyBook:
    """Strategies by the text that asks for them. Built on first use, then shared by every request that names them."""

    def __init__(self, resources: Resources, cost: Cost) -> None:
        self._resources = resources
        self._cost = cost
        self._rules: dict[Rule, Rule] = {}
        self._strategies: dict[StrategySpec, Strategy] = {}
        self._read: dict[str, StrategySpec] = {}

    def get(self, text: str) -> Strategy:
        """The strategy ``NAME[:key=value,...]``. Raises UsageError for a name or parameter that does not exist."""
        spec = self._read.get(text)
        if spec is None:
            spec = self._read[text] = catalogue.parse(text)
        if spec not in self._strategies:
            drafter = catalogue.build(spec, self._resources)
            rule = catalogue.build_rule(spec)
            rule = self._rules.setdefault(rule, rule)  # one rule judges all its sequences at once
            self._strategies[spec] = Strategy(str(spec), drafter, rule, self._policy(spec, drafter))
        return self._strategies[spec]

    def _policy(self, spec: StrategySpec, drafter: Drafter | None) -> Policy:
        if drafter is None:
            return Plain()
        settings = catalogue.settings(spec)
        name, nodes = settings["policy"], settings["k"]
        assert isinstance(name, str)
        assert isinstance(nodes, int)
        return make_policy(name, nodes, self._cost)


class RunnerShelf:
    """Loads each draft model once."""

    def __init__(self, load: Callable[[str], Runner]) -> None:
        self._load = load
        self._runners: dict[str, Runner] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._runners)

    def __call__(self, name: str) -> Runner:
        if name not in self._runners:
            self._runners[name] = self._load(name)
        return self._runners[name]
