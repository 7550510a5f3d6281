"""N-gram language models: counting, smoothing, files, queries and mixing. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlay.ngrams.building import Built, NgramOptions, Vocabulary, build, build_from_ids, convert
    from parlay.ngrams.in_context import Reward, rewards
    from parlay.ngrams.infinity import InfinityGram, Support
    from parlay.ngrams.mixture import Mixed, best_weight
    from parlay.ngrams.model import NgramModel, Scores
    from parlay.ngrams.model_file import BadNgramFile

__all__ = [
    "BadNgramFile",
    "Built",
    "InfinityGram",
    "Mixed",
    "NgramModel",
    "NgramOptions",
    "Reward",
    "Scores",
    "Support",
    "Vocabulary",
    "best_weight",
    "build",
    "build_from_ids",
    "convert",
    "rewards",
]

_HOMES = {
    "building": ("Built", "NgramOptions", "Vocabulary", "build", "build_from_ids", "convert"),
    "in_context": ("Reward", "rewards"),
    "infinity": ("InfinityGram", "Support"),
    "mixture": ("Mixed", "best_weight"),
    "model": ("NgramModel", "Scores"),
    "model_file": ("BadNgramFile",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"parlay.ngrams.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
