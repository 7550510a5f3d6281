"""Lists the families of models and what runs each, for `parlay models --families` and the reference."""

from __future__ import annotations

from typing import NamedTuple

from parlay.models.families.diffusion import DIFFUSION, REFUSED
from parlay.models.families.family import Family
from parlay.models.families.table import CAUSAL, ELSEWHERE, OF_TABLES

_NATIVE, _ADAPTER, _NOTHING = "Parlay's decoder (C, torch)", "transformers, if it loads there", "nothing here"


class FamilyRow(NamedTuple):
    """One family. ``gguf`` are its names in GGUF files; ``heads`` says whether draft heads support it."""

    architecture: str
    models: str
    runs_in: str
    gguf: tuple[str, ...]
    heads: bool
    note: str


def listing() -> list[FamilyRow]:
    """All families: those that Parlay's decoder runs, then those that transformers runs, then those that are
    refused."""
    elsewhere = [FamilyRow(name, "", _ADAPTER, (), False, why) for name, why in ELSEWHERE.items()]
    refused = [FamilyRow(name, "", _NOTHING, (), False, why) for name, why in REFUSED.items()]
    return [*map(_row, (*CAUSAL, *OF_TABLES)), *map(_row, DIFFUSION), *elsewhere, *refused]


def _row(family: Family) -> FamilyRow:
    names = (family.gguf.name,) if family.gguf else ()
    return FamilyRow(family.architecture, family.models, _NATIVE, names, family.canvas is None, family.note)
