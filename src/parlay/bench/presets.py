"""Presets of `parlay bench`: named settings, and strategies as its flag spells them."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.bench.records import PLAIN
from parlay.bench.workloads import BUILT_IN, DATA_SETS, SPEED_BENCH
from parlay.options import split
from parlay.strategies.catalogue import for_any_target
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.strategies.spelling import parse

ALL = "all"
"""Stands for all strategies that need no files or models from the user."""
_OWN = {"file", "models"}


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of a bench. A flag can change each of them."""

    workloads: tuple[str, ...] = BUILT_IN
    strategies: tuple[str, ...] = (PLAIN, DEFAULT_STRATEGY)
    prompts: int = 4
    rounds: int = 3
    most_rounds: int = 9
    against: bool = False
    """Whether `transformers` is measured, too."""


PRESETS = {
    "quick": Preset(("edit", "prose"), prompts=2, rounds=1, most_rounds=1),
    "standard": Preset(),
    "readme": Preset(("copy", "edit", "calls", "maths"), prompts=8, against=True),
    "spec-bench": Preset(("spec-bench",)),
    SPEED_BENCH: Preset((SPEED_BENCH,)),
    "published": Preset(tuple(name for name in DATA_SETS if name != SPEED_BENCH), prompts=8),
}
"""Presets by name; ``standard`` is the default. ``spec-bench``, ``speed-bench`` and ``published`` need a folder of
published sets."""


def strategies(text: str) -> tuple[str, ...]:
    """Parse strategies joined by commas. A piece ``key=value`` is an option of the strategy before it.

    Raises ValueError for a strategy that does not exist, and if none is named.
    """
    names: list[str] = []
    if not text.strip(" ,"):
        raise ValueError("no strategy is named: join names by commas, or remove the flag")
    for piece in split(text, ","):
        if names and "=" in piece.partition("(")[0].partition(":")[0]:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return tuple(dict.fromkeys(known for name in names for known in _known(name)))


def _known(name: str) -> list[str]:
    return for_any_target(without=_OWN) if name == ALL else [str(parse(name))]
