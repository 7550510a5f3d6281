"""Speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023): a smaller model drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parlay.drafters.draft_models.best_first import BestChains, BestTrees, LeastOf
from parlay.drafters.draft_models.draft_sequences import DraftSequences
from parlay.drafters.draft_models.drawn_chains import DrawnChains
from parlay.drafters.draft_models.drawn_trees import Beam, Distinct, DrawnTrees, Independent, LevelDrawer
from parlay.drafters.draft_models.grown import GrownDrafts
from parlay.drafters.draft_models.opening import DraftWriter, draft_name, open_draft
from parlay.drafters.options import BIG_LITTLE, BigLittleOptions, DraftModelOptions
from parlay.drafters.options import DRAFT_MODEL as SOURCE
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.models.forward import Growth
from parlay.models.native import NativeRunner
from parlay.options import UsageError, of_kinds, refuse_unread
from parlay.types import NO_DRAFT, Draft, SequenceView

_GUESSED = ("chain", "tree")
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "rejection": ("chain",),
    "block": ("chain",),
    "k-seq": ("chain",),
    "multi-candidate": ("tree", "chain"),
    "without-replacement": ("tree", "beam"),
}
"""The shapes that each rule can judge, its default first. Rules not listed here take fixed guesses."""


class DraftModel(FromText):
    """Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    A smaller model with the target's vocabulary continues each sequence. By default it uses the request's own sampler
    and noise, so that it draws the target's token as often as the coupling allows. ``shape=chain`` drafts one
    continuation; ``tree`` expands the ``width`` likeliest nodes per forward by ``width`` children each, best path
    first. Paths below ``min_p`` are left out (the confidence stop of assisted generation).

    Under an accept rule that compares distributions, it draws from its own distribution instead, with its own noise:
    one chain; ``width`` chains (``k-seq``; ``multi-candidate`` with ``shape=chain``); a tree with ``branching``
    children per node by depth (empty: ``width`` everywhere), independent (SpecInfer) or without replacement (RSD-C,
    Sequoia); or a ``beam`` of ``width`` nodes per level (RSD-S). A drawn token is never left out: a path that falls
    below ``min_p`` ends there. Scores are the draft model's probabilities.
    """

    def __init__(self, resources: Resources, options: DraftModelOptions, *, lane: int = 0) -> None:
        runner = open_draft(SOURCE, resources, draft_name(SOURCE, resources, options.model))
        self._sequences = DraftSequences(runner)
        rule, shape = resources.rule, _shape(resources.rule, options.shape)
        self._one_chain = shape == "chain" and rule not in ("k-seq", "multi-candidate")
        if not self._one_chain and runner.spec.tree != "tree":
            needs = "a rule that draws one chain" if rule in _SHAPES else "shape=chain"
            raise UsageError(f"strategy {SOURCE}: {runner.spec.name} can't verify trees; use {needs}")
        _check_read(options, rule, one_chain=self._one_chain)
        if options.branching and (shape != "tree" or rule not in _SHAPES):
            raise UsageError(
                f"strategy {SOURCE}: branching is for trees that are drawn, not for rule={rule} and {shape}s"
            )
        parts = (runner, self._sequences, SOURCE)
        if rule not in _SHAPES:
            width = 1 if self._one_chain else options.width
            self._writer: DraftWriter = (
                BestChains(*parts, options.min_p) if self._one_chain else BestTrees(*parts, width, options.min_p)
            )
            if isinstance(runner, NativeRunner) and runner.grows:
                growth = Growth(0, width, options.min_p, short=options.tokens)
                self._writer = GrownDrafts(runner, self._sequences, SOURCE, growth, self._writer)
        elif self._one_chain:
            self._writer = DrawnChains(*parts, options.min_p, lane)
        else:
            if not all(text.isdecimal() and int(text) > 0 for text in options.branching):
                raise UsageError(
                    f"strategy {SOURCE}: branching must be children per node by depth, "
                    f"such as 3+2+1, got {'+'.join(options.branching)}"
                )
            drawer = _drawer(rule, shape, options.width, tuple(map(int, options.branching)))
            self._writer = DrawnTrees(*parts, drawer, options.min_p)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._sequences.jobs(views, budgets)
        drafts = dict(zip(jobs, self._writer.write(list(jobs.values())), strict=True))
        return [drafts.get(place, NO_DRAFT) for place in range(len(views))]

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)


class BigLittle(DraftModel):
    """Big-little decoding (BiLD, Kim et al. 2023, arXiv:2302.07863): a small model writes, and the target corrects it.

    The small model writes until a token's probability is below ``fallback`` (that token is dropped), or until ``k``
    tokens are written. Then the target reads all of them in one forward. Its rule ``rollback`` discards everything from
    the first token on that the target finds too unlikely, and the target writes the next token.
    """

    def __init__(self, resources: Resources, options: BigLittleOptions) -> None:
        runner = open_draft(BIG_LITTLE, resources, draft_name(BIG_LITTLE, resources, options.model))
        self._sequences = DraftSequences(runner)
        own = of_kinds(f"strategy {BIG_LITTLE}: by_kind", options.by_kind, high=1)
        least = LeastOf(options.fallback, own)
        self._writer = BestChains(runner, self._sequences, BIG_LITTLE, 0.0, least=least)


def _check_read(options: DraftModelOptions, rule: str, *, one_chain: bool) -> None:
    """Raises UsageError for options that have no effect under this rule or shape."""
    if one_chain:
        where = "on a single chain: remove it, or choose a shape or rule that drafts several"
        refuse_unread(f"strategy {SOURCE}", options, ("width",), where)
    if rule in _SHAPES:
        where = f"with rule={rule}, which compares whole distributions: remove it"
        refuse_unread(f"strategy {SOURCE}", options, ("tokens",), where)


def _shape(rule: str, shape: str) -> str:
    shapes = _SHAPES.get(rule, _GUESSED)
    if shape == "auto":
        return shapes[0]
    if shape not in shapes:
        raise UsageError(f"strategy {SOURCE}: rule={rule} can't judge shape={shape}; choose {' or '.join(shapes)}")
    return shape


def _drawer(rule: str, shape: str, width: int, branching: tuple[int, ...]) -> LevelDrawer:
    if shape == "beam":
        return Beam(width)
    if shape == "chain":
        return Independent((width, 1))
    return (Distinct if rule == "without-replacement" else Independent)(branching or (width,))
