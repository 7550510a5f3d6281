"""Options of the drafters that write with a smaller model. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

DRAFT_MODEL = "draft-model"
MERGED_DRAFTS = "merged-drafts"
SEQUOIA = "sequoia"

MIN_P, MIN_P_HELP = 0.1, "stop where the chance of the drafted path falls below this"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Options):
    """Which model drafts."""

    model: str = option("", "draft model, by name or directory; empty: the one that goes with the target", opens=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(ModelOptions):
    """How the model writes; see `DraftModel`."""

    shape: str = option(
        "auto", "shape of the drafts; auto: what suits the rule", choices=("auto", "chain", "tree", "beam")
    )
    width: int = option(3, "nodes per forward and children of each; drawn: chains, children, beam", low=1, high=64)
    branching: tuple[str, ...] = option((), "drawn trees: children per node by depth, such as 3+2+1; empty: width")
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDraftsOptions(Options):
    """Which models draft, and where their chains end."""

    models: tuple[str, ...] = option((), "draft models, by name or directory, joined by +", opens=True)
    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequoiaOptions(ModelOptions):
    """Options of Sequoia: the numbers from which the best tree is computed."""

    width: int = option(5, "ranks of guesses that are told apart, and most children of a node", low=1, high=64)
    levels: int = option(8, "most levels of a tree", low=1, high=64)
    level_cost: float = option(0.1, "what drafting a level costs, in forwards of the target", low=0, high=10)
