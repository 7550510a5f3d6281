"""Built strategies (drafter, accept rule and policy) and loaded draft models, each made once and shared."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache

from parlay.drafters.options import ADAPTER, SET_BLOCK
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.router.arms import Arm
from parlay.router.goals import EFFORTS, GOALS, Aim
from parlay.router.policies import Plain, make_policy
from parlay.router.router import RememberingRouter
from parlay.router.saved_state import Memory, NoMemory
from parlay.strategies import imported
from parlay.strategies.building import build_escape, build_layout, build_rule, build_selector
from parlay.strategies.candidates import as_arms, build_all, drafters_of
from parlay.strategies.catalogue import find
from parlay.strategies.entries.canvases import DENOISE
from parlay.strategies.entry import EFFORT, GOAL, POLICY, POWER, K
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Cost, Drafter, Policy, PowerModel, Runner, RunnerSpec, Strategy

NO_MEMORY = NoMemory()

KEPT = 64
"""The most strategies kept. A server's clients choose parameters freely, and each choice is a strategy of its own."""


def for_target(spec: StrategySpec, target: RunnerSpec | None) -> StrategySpec:
    """Return the spec, or `denoise` if the spec leaves the choice open and the target can only fill canvases.

    In the second case, the selector is the one that suits the target's canvases.
    """
    free = find(spec.name).routes and not spec.members
    if not free or target is None or target.canvas is None or not target.fills_only:
        return spec
    ends = target.canvas.ends
    if ends is None:
        return parse(f"{DENOISE}:selector=renoise" if target.canvas.noise else DENOISE)
    passes = "mask-predict,steps=1" if ends.copies or ends.kind == "fertilities" else "mask-predict,steps=4"
    selector = {"frames": "ctc", "graph": "lookahead-path"}.get(ends.kind, passes)
    return parse(f"{DENOISE}:selector={selector}")


def _mask_adapter(spec: StrategySpec) -> str:
    """Return the adapter for mask rows that a strategy or one of its members names; empty if none does."""
    own = str(spec.settings[ADAPTER]) if spec.name == SET_BLOCK else ""
    return own or next(filter(None, map(_mask_adapter, spec.members)), "")


def unknown_power() -> PowerModel:
    """Raise UsageError. This function stands in if the machine's power is not measured."""
    raise UsageError("nobody measures here what is drawn, as LLM and the commands do: remove goal=energy and power")


@dataclass(frozen=True, slots=True)
class _Built:
    """A strategy, and the functions that its drafters registered to be called when it is dropped.

    ``arms``: the drafters that the strategy chooses from, if it does. ``by_owner``: the same strategy with a policy for
    each owner of requests, least recently used first.
    """

    strategy: Strategy
    closing: ExitStack
    arms: tuple[Arm, ...] = ()
    by_owner: OrderedDict[str, Strategy] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class UnbuiltStrategy:
    """A strategy whose drafters are not built yet: `build` builds them, and `StrategyCache.take` completes the
    strategy.

    Building may take long, because it opens models and packs weights. ``proofs`` check heads by running the target, so
    `StrategyCache.take` calls them, in the engine thread.
    """

    spec: StrategySpec
    aim: Aim | None
    resources: Resources
    proofs: Sequence[Callable[[], None]]
    wanted: tuple[StrategySpec, ...] = ()
    drafters: tuple[Drafter, ...] = ()

    def build(self) -> None:
        """Build the drafters, in any thread. Raises UsageError or ParlayError, after dropping the drafters built so
        far."""
        with ExitStack() as failing:
            failing.enter_context(self.resources.closing)
            self.wanted = drafters_of(self.spec, self.resources)
            self.drafters = build_all(self.wanted, self.resources)
            failing.pop_all()

    def close(self) -> None:
        """Drop the drafters, which are not needed any more."""
        self.resources.closing.close()


class StrategyCache:
    """Strategies, each built at its first request and then shared by all requests that name it.

    If there are more than ``kept``, the strategy without a request for longest is dropped. What it has learned is lost,
    except for what it keeps in files. Strategies whose names are ``in_use`` stay. So does the default strategy given to
    `build_default`, because it has learned from all requests.

    Routers give what they learn to ``memory`` after each request. If ``memory`` keeps owners apart, each owner has
    routers of its own. Owners share drafters, which keep owners' texts apart themselves.

    ``power`` measures the power that the machine draws. It is called when a strategy first needs it, may take seconds,
    and its result is kept.
    """

    def __init__(
        self,
        resources: Resources,
        cost: Cost,
        *,
        in_use: Callable[[], Collection[str]] = tuple,
        kept: int = KEPT,
        memory: Memory = NO_MEMORY,
        power: Callable[[], PowerModel] = unknown_power,
    ) -> None:
        self._resources = resources
        self._cost = cost
        self._in_use = in_use
        self._kept = kept
        self._memory = memory
        self._power = lru_cache(maxsize=1)(power)
        self._read = lru_cache(maxsize=4 * kept)(parse)
        self._built: OrderedDict[StrategySpec, _Built] = OrderedDict()  # the least recently used first
        self._default: StrategySpec | None = None

    @property
    def resources(self) -> Resources:
        """The resources that strategies are built from."""
        return self._resources

    def build_default(self, asked: str | StrategySpec) -> StrategySpec:
        """Build the default strategy, and return its spec.

        If the default strategy names an adapter for mask rows, each `set-block` that names none uses that adapter. So
        requests may change other options of `set-block`, and `auto` may try it. Raises UsageError as `get` does.
        """
        spec = self._read_for_target(asked)
        self._resources = replace(self._resources, mask_adapter=_mask_adapter(spec))
        self.get(spec)
        self._default = spec
        return spec

    def get(self, asked: str | StrategySpec, owner: str = "") -> Strategy:
        """Return the strategy for a text ``NAME[:key=value,...]`` or a spec, built if necessary.

        ``owner``: who sent the request, which matters if owners are kept apart. Raises UsageError for an unknown name
        or parameter, or a drafter that can't be built.
        """
        spec = self._read_for_target(asked)
        if spec not in self._built:
            unbuilt = self._begin(spec)
            unbuilt.build()
            self.take(unbuilt)
        self._built.move_to_end(spec)
        if len(self._built) > self._kept:
            self._forget(self._in_use())
        built = self._built[spec]
        return self._for_owner(spec, built, owner) if owner and self._memory.apart and built.arms else built.strategy

    def _read_for_target(self, asked: str | StrategySpec) -> StrategySpec:
        return for_target(asked if isinstance(asked, StrategySpec) else self._read(asked), self._resources.target)

    def _for_owner(self, spec: StrategySpec, built: _Built, owner: str) -> Strategy:
        """Return the strategy with the owner's own router."""
        if owner not in built.by_owner:
            built.by_owner[owner] = replace(built.strategy, policy=self._router(spec, built.arms, owner))
        built.by_owner.move_to_end(owner)
        if len(built.by_owner) > self._kept:
            built.by_owner.popitem(last=False)
        return built.by_owner[owner]

    def close(self) -> None:
        """Drop all strategies. Each writes what it keeps in files."""
        with ExitStack() as closing:  # closes all of them, even if one raises
            closing.callback(self._memory.write)
            for built in self._built.values():
                closing.push(built.closing)
        self._built.clear()

    def unbuilt(self, asked: str | StrategySpec) -> UnbuiltStrategy | None:
        """Return a strategy for another thread to build; None if the strategy is built already, or has no drafters.

        Raises UsageError as `get` does.
        """
        spec = self._read_for_target(asked)
        entry = find(spec.name)
        return self._begin(spec) if spec not in self._built and (entry.factory or entry.routes) else None

    def take(self, unbuilt: UnbuiltStrategy) -> None:
        """Complete a strategy whose drafters are built, and keep it. If the strategy exists already, drop the new one.

        Raises UsageError if the strategy can't be completed, after dropping its drafters.
        """
        if unbuilt.spec in self._built:
            unbuilt.close()
            return
        with ExitStack() as failing:
            failing.callback(unbuilt.close)
            for prove in unbuilt.proofs:
                prove()
            self._built[unbuilt.spec] = self._finished(unbuilt)
            failing.pop_all()

    def _begin(self, spec: StrategySpec) -> UnbuiltStrategy:
        aim = self._aim(spec) if find(spec.name).routes else None  # before the drafters, which may take long to build
        proofs: list[Callable[[], None]] = []
        return UnbuiltStrategy(spec, aim, replace(self._resources, closing=ExitStack(), prove=proofs.append), proofs)

    def _finished(self, unbuilt: UnbuiltStrategy) -> _Built:
        spec, aim, drafters = unbuilt.spec, unbuilt.aim, unbuilt.drafters
        arms = () if aim is None else as_arms(unbuilt.wanted, drafters, aim.effort.size, named=bool(spec.members))
        rule = build_rule(spec)
        known = (built.strategy.rule for built in self._built.values())
        rule = next(
            (each for each in known if each == rule), rule
        )  # share equal rules, so that one call judges all sequences
        policy = self._policy(spec, drafters, arms)
        strategy = Strategy(
            str(spec), drafters, rule, policy, build_escape(spec), build_selector(spec), build_layout(spec)
        )
        return _Built(strategy, unbuilt.resources.closing, arms)

    def _forget(self, in_use: Collection[str]) -> None:
        """Drop the strategies used least recently until at most ``kept`` are left. The strategies in use, the default
        and the newest stay."""
        *older, _ = self._built
        idle = [spec for spec in older if self._built[spec].strategy.name not in in_use and spec != self._default]
        for spec in idle[: len(self._built) - self._kept]:
            self._built.pop(spec).closing.close()

    def _policy(self, spec: StrategySpec, drafters: Sequence[Drafter], arms: Sequence[Arm]) -> Policy:
        if not drafters:
            return Plain()
        if arms:
            return self._router(spec, arms, "")
        settings = spec.settings
        name, nodes = settings[POLICY], settings[K]
        assert isinstance(name, str)
        assert isinstance(nodes, int)
        (drafter,) = drafters
        if ":" in name:
            return imported.policy(name, nodes, self._cost)
        return make_policy(name, nodes, self._cost, drafter.needs)

    def _router(self, spec: StrategySpec, arms: Sequence[Arm], owner: str) -> Policy:
        return RememberingRouter(self._memory, owner, self._cost, arms, self._aim(spec))

    def _aim(self, spec: StrategySpec) -> Aim:
        """Return the aim of a strategy that chooses among drafters. Raises UsageError if the aim needs the machine's
        power and that is not measured."""
        settings = spec.settings
        goal, watts = GOALS[str(settings[GOAL])], settings[POWER]
        assert isinstance(watts, float)
        power = self._power() if watts or goal.in_joules else None
        return Aim(goal=goal, effort=EFFORTS[str(settings[EFFORT])], power=power, most_watts=watts)


class RunnerCache:
    """Loads each draft model once, one at a time. Any thread may call it."""

    def __init__(self, load: Callable[[str], Runner]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._runners: dict[str, Runner] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._runners)

    def __call__(self, name: str) -> Runner:
        with self._lock:
            if name not in self._runners:
                self._runners[name] = self._load(name)
            return self._runners[name]
