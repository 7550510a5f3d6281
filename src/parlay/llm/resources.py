"""Joins the engine and strategies of one LLM, and lists the resources of its drafters, opened when first needed."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from parlay.cache import Budget
from parlay.cost.energy.power_model import PowerOf
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.drafters.stores.state_store import MappedStates
from parlay.engine import Engine, Limits
from parlay.heads.opening import heads_of
from parlay.llm.router_file import RememberedBy, cost_of, memory_of
from parlay.llm.vocabulary import open_draft
from parlay.models.ensembles.guided import GuidedRunner
from parlay.models.ensembles.nest import NestRunner
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.models.native import NativeRunner
from parlay.models.opening import round_weights
from parlay.options import Ensemble, LoadOptions, Nest, UsageError, user_path
from parlay.ranks.leader import adapter_reader
from parlay.strategies.built import RunnerCache, StrategyCache
from parlay.system import threads
from parlay.types import Runner, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """An engine, the strategies of its requests, and the cache of draft models."""

    engine: Engine
    strategies: StrategyCache
    drafts: RunnerCache


def parts_of(
    runner: Runner,
    model: str | PreTrainedModel,
    load: LoadOptions,
    limits: Limits,
    budget: Budget,
    *,
    ensemble: Ensemble | Nest | None,
    tokenizer: Tokenizer | None,
    draft_model: str | None,
    router_memory: RememberedBy,
) -> Parts:
    """Join the runner with an engine and strategies, and restore what was learned about costs before."""
    spec = runner.spec
    if limits.max_context is not None and limits.max_context > spec.max_context:
        _log.warning(
            "max_model_len=%d is more than the model's context: %d holds", limits.max_context, spec.max_context
        )
    drafts = RunnerCache(partial(open_draft, spec, tokenizer, load, budget))
    resources = resources_of(model, runner, drafts, load, draft_model=draft_model, tokenizer=tokenizer, budget=budget)
    router_file = memory_of(model, spec, f"{load.quantize or ''}{ensemble or ''}", router_memory)
    moving = runner if isinstance(runner, NativeRunner) else None
    cost = cost_of(runner, router_file, None if moving is None else moving.time_reading)
    guided = GuidedRunner(runner)
    guiding = guided if ensemble is None or ensemble.guides else None
    engine = Engine(guided, cost, limits, moving=moving, guiding=guiding)
    in_use, power = engine.requests.strategies, PowerOf(runner, cost)
    strategies = StrategyCache(resources, cost, in_use=in_use, memory=router_file, power=power)
    return Parts(engine, strategies, drafts)


def resources_of(
    model: str | PreTrainedModel,
    runner: Runner,
    drafts: RunnerCache,
    load: LoadOptions,
    *,
    draft_model: str | None,
    tokenizer: Tokenizer | None,
    budget: Budget,
) -> Resources:
    """The resources that drafters may use with the target that ``runner`` runs. ``draft_model``: the default one."""

    @cache
    def open_states(file: str) -> MappedStates:
        if file:
            return MappedStates.open(user_path(file), model, runner.spec)
        if isinstance(runner, NestRunner) and isinstance(runner.store, MappedStates):
            return runner.store
        raise UsageError(
            "no datastore is named: name one with file=PATH that was made by `parlay datastore build --states`"
        )

    target, heads = runner.spec, heads_of(model, runner.spec, budget, runner, lora=load.lora)
    return Resources(
        vocab_size=target.vocab_size,
        open_runner=drafts,
        default_draft=draft_model or heads.built_in_draft(),
        tokenizer=tokenizer,
        open_tokenizer=lambda name: load_tokenizer(resolve(name)),
        target=target,
        open_states=open_states,
        find_head=heads,
        domains=heads.domains,
        read_adapter=adapter_reader(runner),
        round_weights=partial(round_weights, runner, model, load)
        if isinstance(runner, NativeRunner) and runner.spec.hides and isinstance(model, str)
        else None,
        spare_threads=threads.count() - 1,
        room=StateRoom(budget),
    )
