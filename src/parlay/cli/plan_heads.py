"""Finds the heads on this machine that were trained for the model of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from parlay.bench.plan.heads import HEADS
from parlay.bench.plan.shapes import known_name
from parlay.heads import store
from parlay.heads.artefact import GENERAL, read_witness, same_rows
from parlay.heads.opening import matrices_of
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.types import ParlayError


def heads_of(model: str) -> Mapping[str, str]:
    """Return the names of the general heads for a model, by method: those in the package, and those in the store.

    A model whose name tells its shape is compared by name, as nothing of it needs to be here; another one by its
    embedding. A model without weights has no heads.
    """
    found: dict[str, str] = {}
    for drafter in store.drafters():
        origin, method = drafter.facts.origin, drafter.facts.method
        if origin.domain != GENERAL or method not in HEADS or method in found:
            continue
        if origin.target.lower() == model.lower() or (not known_name(model) and _fits(drafter, model)):
            found[method] = drafter.name
    return found


def _fits(drafter: store.StoredDrafter, model: str) -> bool:
    """Whether the model has the shape and the embedding of the head's target."""
    try:
        path = resolve(model)
        config, layer = read_config(path), drafter.facts.layer
        shapes = [(each.vocab_size, each.hidden_size, each.num_layers) for each in (config, layer)]
        if shapes[0] != shapes[1]:
            return False
        return same_rows(matrices_of(model).witnesses(config.vocab_size), read_witness(drafter.folder))
    except (ParlayError, OSError):
        return False
