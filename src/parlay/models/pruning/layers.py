"""Chooses the layers of a model that stay, and drops the weights of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parlay.models.weights.shapes import Weight
from parlay.types import FieldError


def read_layers(name: str, text: str, layers: int) -> list[int]:
    """Parse rising layer numbers, separated by commas. Raises UsageError that names the option ``name``."""
    words = text.split(",")
    kept = [int(word) for word in words if word.strip().isdecimal()]
    if len(kept) < len(words) or kept != sorted(set(kept)) or kept[-1] >= layers:
        raise FieldError(name, f"={text:.60}: give rising numbers from 0 to {layers - 1}, with commas between")
    return kept


def evenly(count: int, layers: int) -> list[int]:
    """``count`` evenly spaced layers, including the first and the last."""
    return [round(place * (layers - 1) / max(count - 1, 1)) for place in range(count)]


def only_layers(weights: Mapping[str, Weight], kept: Sequence[int]) -> dict[str, Weight]:
    """The weights of these layers only, renumbered."""
    renamed = {f"model.layers.{place}.": f"model.layers.{new}." for new, place in enumerate(kept)}
    found = {}
    for name, weight in weights.items():
        start = ".".join((*name.split(".", 3)[:3], "")) if name.startswith("model.layers.") else ""
        if not start or start in renamed:
            found[renamed.get(start, "") + name.removeprefix(start)] = weight
    return found
