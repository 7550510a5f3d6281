"""Cascades: a cheap drafter writes for a small model, which writes for a larger one, which writes for the target."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters import catalogue
from parlay.drafters.combined import members
from parlay.drafters.combined.model_level import Manner, ModelLevel
from parlay.drafters.draft_models.opening import open_draft
from parlay.drafters.entries import Resources, StrategySpec, UsageError
from parlay.types import Draft, Observation, Runner, View

NAME = "cascade"
_SETTINGS = ("k", "model", "min_p", "shape", "width")
"""What a level above the first is told by its spec."""
_SHAPES = ("auto", "chain", "tree")


class Cascade:
    """Staged speculative decoding (Spector and Re 2023, arXiv:2308.04623), which is the vertical cascade of CS Drafting
    (Chen et al. 2023, arXiv:2312.11462).

    ``levels`` go from the cheapest to the dearest. The first, any drafter, drafts; the model of each further one
    verifies what the level below proposes and so writes its own draft, the very one it would write alone, in fewer
    forwards; the target verifies the last level's. Each level drafts at most its own ``k``. A level with ``shape=tree``
    hands up the ``width`` best guesses at each token it writes. ``enough``: the last level stops after the forward that
    has written so many tokens, and what that forward verified beyond them is not wasted; 0: it writes up to its ``k``.

    Scores are the probabilities of the level that hands a token up; its source is the level that wrote it first.
    """

    def __init__(self, resources: Resources, *, levels: tuple[str, ...], enough: int = 0) -> None:
        if len(levels) < 2 or len(set(levels)) < len(levels):
            raise UsageError(f"strategy {NAME}: levels={'+'.join(levels)} must name two or more different drafters")
        specs = [catalogue.parse(text) for text in levels]
        names = [spec.name for spec in specs]
        self._top = members.build(NAME, specs[0], resources)
        for number, spec in enumerate(specs[1:], 1):
            source = spec.name if names.count(spec.name) == 1 else spec.nested
            last = number == len(specs) - 1
            manner, runner = _manner(spec, source, enough if last else 0), _runner(spec, resources)
            self._top = members.Member(ModelLevel(runner, self._top, manner), members.most_nodes(spec))
        self.needs = self._top.needs

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        return self._top.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._top.observe(observations)

    def release(self, sequence: int) -> None:
        self._top.release(sequence)


def _manner(spec: StrategySpec, source: str, enough: int) -> Manner:
    """How the level writes. UsageError for a strategy that is no model level, or for settings that a level ignores."""
    if not catalogue.find(spec.name).model_level:
        able = ", ".join(name for name, entry in catalogue.catalogue().items() if entry.model_level)
        raise UsageError(f"strategy {NAME}: {spec.name} can only be the first level; above it stand models: {able}")
    ignored = [key for key, _ in spec.parameters if key not in _SETTINGS]
    if ignored:
        known = ", ".join(_SETTINGS)
        raise UsageError(f"strategy {NAME}: above the first level {spec.name} takes {known}, but no {ignored[0]}")
    settings = catalogue.settings(spec)
    if settings["shape"] not in _SHAPES:
        known = " or ".join(_SHAPES)
        raise UsageError(f"strategy {NAME}: above the first level shape is {known}, not {settings['shape']}")
    width, min_p = settings["width"], settings["min_p"]
    assert isinstance(width, int)
    assert isinstance(min_p, float | int)
    return Manner(source, width if settings["shape"] == "tree" else 1, min_p, enough)


def _runner(spec: StrategySpec, resources: Resources) -> Runner:
    name = catalogue.settings(spec)["model"] or resources.default_draft
    if not name:
        raise UsageError(f"strategy {NAME}: {spec.name} has no model for this target; name one: {spec.name}(model=...)")
    runner = open_draft(NAME, resources, str(name))
    if runner.spec.tree == "none":
        raise UsageError(f"strategy {NAME}: {name} can't verify drafts, so it can only be the first level")
    return runner
