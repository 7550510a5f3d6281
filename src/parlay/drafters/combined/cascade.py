"""Cascades: a cheap drafter drafts for a small model, which drafts for a larger one, which drafts for the target."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.combined import members
from parlay.drafters.combined.level_rows import FormRows, ModelRows
from parlay.drafters.combined.model_level import LevelSettings, ModelLevel
from parlay.drafters.draft_models.opening import open_draft
from parlay.drafters.options import CASCADE as SOURCE
from parlay.drafters.options import DRAFT_MODEL, SELF_DRAFT, CascadeOptions, DraftModelOptions, SelfDraftOptions
from parlay.drafters.resources import NestedStrategy, Resources
from parlay.drafters.self_speculation.self_draft import SelfDraft
from parlay.options import NotNamed, UsageError, refuse_unread
from parlay.types import Draft, Drafter, Observation, Runner, SequenceView

_TAKEN = "k, model, min_p, shape, width"


class Cascade:
    """Staged speculative decoding (Spector and Re 2023, arXiv:2308.04623), which is the vertical cascade of CS Drafting
    (Chen et al. 2023, arXiv:2312.11462), and with the target in a cheaper form as last level TriForce (Sun et al. 2024,
    arXiv:2404.11912).

    ``levels`` go from the cheapest to the most expensive. The first level can be any drafter. The model of each further
    level, or the target with rounded weights or few keys, verifies what the level below proposes. So it writes the same
    draft that it would write alone, in fewer forwards. The target verifies the draft of the last level. Each level
    drafts at most its own ``k`` nodes. A level with ``shape=tree`` adds the ``width`` best guesses at each token that
    it writes. With ``enough`` above 0 the last level stops after the forward that brings it to that many tokens, and
    keeps what that forward verified beyond them.

    A token's score is its probability in the last level. Its source is the level that proposed it first.
    """

    def __init__(self, resources: Resources, options: CascadeOptions) -> None:
        if len(options.levels) < 2 or len(set(options.levels)) < len(options.levels):
            raise UsageError(
                f"strategy {SOURCE}: levels={'+'.join(options.levels)} must name two or more different drafters"
            )
        first, *above = resources.nested
        names = [level.name for level in resources.nested]
        self._top = members.build(SOURCE, first)
        for level in above:
            source = level.name if names.count(level.name) == 1 else level.text
            self._top = level_above(self._top, level, resources, source, options.enough if level is above[-1] else 0)
        self.needs = self._top.needs

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return self._top.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._top.observe(observations)

    def release(self, sequence: int) -> None:
        self._top.release(sequence)


def level_above(
    below: Drafter, level: NestedStrategy, resources: Resources, source: str, enough: int
) -> members.Member:
    """Make the member whose model, that of ``level``, verifies the drafts of ``below``. Its own tokens have ``source``.

    Raises UsageError for a strategy that has no such model, and for options that have no effect inside a cascade.
    """
    options = level.options
    if isinstance(options, SelfDraftOptions):
        drafter = level.build()
        assert isinstance(drafter, SelfDraft), "its options are these"
        settings = LevelSettings(source, 1, options.min_p, enough)
        return members.Member(ModelLevel(FormRows(drafter), below, settings), level.k)
    if not isinstance(options, DraftModelOptions):
        raise UsageError(
            f"strategy {SOURCE}: {level.name} can only be the first level; above it stand models: {DRAFT_MODEL} and "
            f"{SELF_DRAFT}"
        )
    if options.branching:
        raise UsageError(f"strategy {SOURCE}: above the first level {level.name} takes {_TAKEN}, but no branching")
    if options.shape == "beam":
        raise UsageError(f"strategy {SOURCE}: above the first level shape is auto or chain or tree, not beam")
    unread = ("tokens",) if options.shape == "tree" else ("tokens", "width")
    where = "above the first level: remove it (width: or set shape=tree)"
    refuse_unread(f"strategy {SOURCE}: {level.name}", options, unread, where)
    settings = LevelSettings(source, options.width if options.shape == "tree" else 1, options.min_p, enough)
    rows = ModelRows(_runner(level.name, options.model, resources))
    return members.Member(ModelLevel(rows, below, settings), level.k)


def _runner(strategy: str, model: str, resources: Resources) -> Runner:
    name = model or resources.default_draft
    if not name:
        raise NotNamed(f"strategy {SOURCE}: {strategy} has no model for this target; name one: {strategy}(model=...)")
    runner = open_draft(SOURCE, resources, name)
    if runner.spec.tree == "none":
        raise UsageError(f"strategy {SOURCE}: {name} can't verify drafts, so name it first in levels")
    return runner
