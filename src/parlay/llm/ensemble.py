"""Load the models that write a text together, as one runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from parlay import models
from parlay.cache import Budget, parse_bytes
from parlay.heads.deferral import facts_of_deferral, open_deferral
from parlay.models.compiled.weights import Packed
from parlay.models.ensembles.ensemble import EnsembleRunner
from parlay.models.fetch.resolving import resolve, resolve_tokenizer
from parlay.models.loading import load_tokenizer
from parlay.models.native import NativeRunner
from parlay.options import Ensemble, LoadOptions, RankOptions, UsageError
from parlay.ranks.starting import open_target
from parlay.types import ParlayError, Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Members = Ensemble | str | Sequence[str] | None
"""The other models of an ensemble; names alone stand for the mean of all laws."""


def ensemble_of(members: Members, alone: Mapping[str, object]) -> Ensemble | None:
    """The ensemble that an argument stands for. ``alone`` are other arguments, by name, which are about one model.

    Raises UsageError where any of these is there too, and for members that can't be.
    """
    ensemble = members if members is None or isinstance(members, Ensemble) else Ensemble(members)
    if ensemble is not None and any(alone.values()):
        named = next(name for name, value in alone.items() if value)
        raise UsageError(f"ensemble: {named} is for one model: leave out one of the two")
    for name in ensemble.models if ensemble is not None else ():
        resolve(name)  # one that is not there is an error now, not when the first has been loaded
    if ensemble is not None and ensemble.head:
        facts_of_deferral(ensemble.head)
    return ensemble


def open_budget(memory: int | str | None, ensemble: Ensemble | None) -> Budget:
    """Make the budget of all caches, in which no member takes a running text of another. Raises ValueError."""
    targets = 1 if ensemble is None else 1 + len(ensemble.models)
    return Budget(None if memory is None else parse_bytes(memory), targets)


def open_runner(
    model: str | PreTrainedModel,
    load: LoadOptions,
    ranks: RankOptions,
    budget: Budget,
    packed: Packed,
    *,
    longest: int | None,
    ensemble: Ensemble | None,
) -> Runner:
    """Load a model, and the others of its ensemble, each with a cache of its own in one budget.

    The others are loaded as the first is, without its adapter. Raises UsageError for members of another vocabulary.
    """
    if ensemble is not None and ranks.ranks > 1:
        raise UsageError(f"ensemble: its models run in one process; leave out {ranks.asked}")
    first = open_target(model, load, ranks, budget, packed, longest=longest)
    if ensemble is None:
        return first
    for name in ensemble.models:
        check_vocabulary(model, name)
    others = [models.load(name, replace(load, lora=None), budget=budget, longest=longest) for name in ensemble.models]
    runners = [first, *others]
    one_budget = all(isinstance(runner, NativeRunner) for runner in runners)  # others have memory of their own
    deferral = None
    if ensemble.head:
        sizes = first.spec.vocab_size, others[0].spec.vocab_size
        deferral = open_deferral(ensemble.head, model, ensemble.models[0], sizes, ensemble.threshold)
    return EnsembleRunner(runners, ensemble, one_budget=one_budget, deferral=deferral)


def check_vocabulary(model: str | PreTrainedModel, other: str) -> None:
    """Raises UsageError where an id stands for another token in the other model. One of them may have more ids."""
    if not isinstance(model, str):
        return
    first, second = _tokens(model), _tokens(other)
    for token in sorted(first.keys() & second.keys()):
        if first[token] != second[token]:
            raise UsageError(
                f"ensemble: id {token} is {second[token]!r:.40} in {other} and {first[token]!r:.40} in {model}: models "
                "that write together need one tokenizer"
            )


def _tokens(model: str) -> dict[int, str]:
    """By id, how the vocabulary writes each token; nothing where there is no tokenizer."""
    with suppress(OSError, ParlayError):
        return {number: token for token, number in load_tokenizer(resolve_tokenizer(model)).get_vocab().items()}
    return {}
