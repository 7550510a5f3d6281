"""Entries of the catalogue, one per strategy, and the options that all strategies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from parlay.options import Option, Options, option, options_of
from parlay.router.goals import EFFORTS, GOALS
from parlay.router.policies import BY_NAME
from parlay.strategies import accept_rules
from parlay.types import Exactness

DEFAULT_STRATEGY = "auto"
"""The strategy of requests that name none."""

K, POLICY, GOAL, EFFORT, POWER = "k", "policy", "goal", "effort", "power"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions(Options):
    """Options of the budget policy, which all strategies have. Each entry has its own default of ``k``."""

    k: int = option(help="maximum nodes of a draft (policy=heuristic: of the first draft)", low=0, high=1024)
    policy: str = option(
        "adaptive",
        "how many nodes to draft. adaptive: as many as save time; fixed: always k; the others follow papers",
        choices=tuple(BY_NAME),
        imports=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions(Options):
    """Options of the router: the drafters to choose from, and the goal of the choice."""

    of: tuple[str, ...] = option(
        (), "the drafters to choose from, joined by +; empty: all that exist for the target", strategies=True
    )
    goal: str = option(
        "throughput",
        "throughput: most tokens per second over all requests; latency: drafts that hardly delay the other requests; "
        "energy: most tokens per joule",
        choices=tuple(GOALS),
    )
    power: float = option(
        0.0,
        "limit in watts: steps that would draw more get smaller drafts; plain decoding is not limited; 0: no limit",
        low=0,
    )
    effort: str = option(
        "medium",
        "how readily to draft. low: no trials, and only small drafts that surely save time; high: more trials, larger "
        "drafts",
        choices=tuple(EFFORTS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntry:
    """One strategy of the catalogue.

    ``factory``: ``module:Class``, imported on first use; empty if nothing drafts. It is called with `Resources` and, if
    the strategy has ``options`` of its own, with an instance of that class. ``k``: the default budget. ``policy``: the
    default policy. ``rules``: the accept rules that can judge the strategy's drafts, the default one first.
    ``exactness``: what the default rule guarantees on a runner that can give it. ``when`` completes "use it
    if". ``toys``: settings, written as in a spec, with which the conformance kit runs the entry on toy resources.
    ``vllm``: the strategy's names in vLLM's ``speculative_config``.

    ``replayable``: the proposals follow from the committed text alone and cost little; see `Arm`. ``arm``: from each
    family, ``auto`` uses the usable strategy with the highest number; strategies with 0 are used only if a spec names
    them. ``routes``: the strategy has no drafter of its own, but chooses among the drafters in its option ``of``.
    ``selects``: the strategy fills canvases, as its ``options`` say. ``beside``: it drafts on threads that the target
    does not use; ``auto`` leaves it out if there are none. ``fills``: it drafts on masked places of the target, which
    must be able to fill them. ``predicts``: it drafts from predictions; ``auto`` uses it in requests that have one.
    """

    name: str
    family: str
    exactness: Exactness = Exactness.BITS
    training: str
    needs: str
    summary: str
    reference: str = ""
    when: str = ""
    factory: str = ""
    options: type[Options] = Options
    k: int = 16
    policy: str = "adaptive"
    rules: tuple[str, ...] = accept_rules.GUESSED
    toys: tuple[str, ...] = ("",)
    vllm: tuple[str, ...] = ()
    replayable: bool = False
    arm: int = 0
    routes: bool = False
    selects: bool = False
    beside: bool = False
    fills: bool = False
    predicts: bool = False

    @property
    def parameters(self) -> Mapping[str, Option]:
        """All parameters by name: the drafter's own options, then the options of the policy and the accept rule."""
        if self.routes:
            return {**options_of(self.options), **accept_rules.parameters(self.rules)}
        if not self.factory:
            return options_of(self.options)
        budget = dict(options_of(BudgetOptions))
        budget[K] = dataclasses.replace(budget[K], default=self.k, required=False)
        budget[POLICY] = dataclasses.replace(budget[POLICY], default=self.policy)
        return {**options_of(self.options), **budget, **accept_rules.parameters(self.rules)}
