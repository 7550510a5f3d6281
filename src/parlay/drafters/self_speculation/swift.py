"""SWIFT (Xia et al. 2024): the target drafts for itself, and searches for the sub-layers to leave out meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.options import SWIFT as SOURCE
from parlay.drafters.options import SwiftOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.layer_search import Halt, OnlineSearch, ParzenSearch
from parlay.drafters.self_speculation.skipping import ChainDraft, inner, middle, skippable, write_ahead
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, DraftForm, Needs, SequenceView, Tree


class Swift(FromText):
    """SWIFT (Xia et al. 2024, arXiv:2410.06916): layer skipping, the set found on the fly.

    It tries sets of the share ``ratio`` of the inner sub-layers, one per step. One parallel forward over the last
    ``window`` tokens of an output counts how many of them the target chooses again. Every ``every``-th set comes from
    the estimator, the others are random. The search ends when one agrees on the share ``enough``, ``patience`` sets in
    a row were no better, or ``probes`` were tried. The best set serves all later requests too; at first it is the
    middle of the model.

    A draft is a chain that ends after the token at which the largest probability is below ``threshold``, with the
    ``width`` best tokens at each of its steps as leaves beside it, likeliest path first. Scores are the probabilities.
    """

    needs = Needs(layers=True, outcomes=False)

    def __init__(self, resources: Resources, options: SwiftOptions) -> None:
        target = skippable(SOURCE, resources)
        start = middle(target, options.ratio)
        if not start:
            raise UsageError(
                f"strategy {SOURCE}: ratio={options.ratio:g} skips none of the {len(inner(target))} inner "
                f"attention and MLP blocks of {target.name}: raise it, or choose another strategy if there are none"
            )
        self._search = OnlineSearch(
            start,
            ParzenSearch(inner(target), len(start)),
            Halt(options.probes, options.patience, options.enough),
            every=options.every,
            window=options.window,
        )
        self._threshold = options.threshold
        self._width = min(options.width, resources.vocab_size)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._search.step(views)
        plans = [ChainDraft(view, budget, self._threshold) for view, budget in zip(views, budgets, strict=True)]
        write_ahead(plans, DraftForm(self._search.best), self._width)
        return [comb(plan) for plan in plans]


def comb(plan: ChainDraft) -> Draft:
    """The chain with other guesses beside each of its nodes, up to the budget, likeliest path first."""
    path_prob = 1.0
    guesses: list[tuple[float, int, int, int, float]] = []  # -probability of the path, step, rank, token, probability
    for step, level in enumerate(plan.levels):
        guesses += [(-path_prob * chance, step, rank, token, chance) for rank, (token, chance) in enumerate(level)]
        path_prob *= level[0][1]
    guesses = sorted(guesses)[: plan.budget]  # parents sort before their children
    if not guesses:
        return NO_DRAFT
    spine = {-1: -1} | {step: node for node, (_, step, rank, _, _) in enumerate(guesses) if rank == 0}
    tree = Tree(tuple(token for *_, token, _ in guesses), tuple(spine[step - 1] for _, step, *_ in guesses))
    return Draft(tree, sources=(SOURCE,) * len(guesses), scores=tuple(chance for *_, chance in guesses))
