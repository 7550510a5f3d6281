"""The horizontal cascade: an expensive drafter writes the first tokens of a draft, and cheaper ones continue it."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.combined import members
from parlay.drafters.combined.extended_view import ExtendedViews
from parlay.drafters.options import HORIZONTAL as SOURCE
from parlay.drafters.options import HorizontalOptions
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, Observation, SequenceView, Tree, trees


def horizontal(resources: Resources, options: HorizontalOptions) -> Horizontal:
    """Make a `Horizontal` of the strategies in the options."""
    if len(options.levels) < 2:
        raise UsageError(f"strategy {SOURCE}: levels={'+'.join(options.levels)} must name two or more drafters")
    return Horizontal([members.build(SOURCE, nested) for nested in resources.nested])


class Horizontal:
    """The horizontal cascade of CS Drafting (Chen et al. 2023, arXiv:2312.11462).

    Early tokens of a draft are likelier to be accepted than late ones, so a more expensive drafter pays for them. Each
    of ``levels``, from the most expensive to the cheapest, drafts at most its own ``k`` nodes. The next one continues
    after the best path as if its tokens were committed.
    """

    def __init__(self, levels: Sequence[members.Member]) -> None:
        self._members = levels
        self.needs = members.needs_of(levels)
        self._views = ExtendedViews()

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Propose level by level, each level for all sequences at once."""
        extended = [self._views.of(view) for view in views]
        whole = [NO_DRAFT] * len(views)
        spines = [NO_DRAFT] * len(views)  # the path that the next level continues
        for member in self._members:
            left = [budget - len(draft) for budget, draft in zip(budgets, whole, strict=True)]
            for place, draft in enumerate(member.propose(extended, left)):
                path = trees.best_chain(draft)
                whole[place] = trees.merge([whole[place], _hang(draft, spines[place])])
                spines[place] = _hang(path, spines[place])
                extended[place].extend(path.tree.tokens)
        return whole

    def observe(self, observations: Sequence[Observation]) -> None:
        for member in self._members:
            member.observe(observations)

    def release(self, sequence: int) -> None:
        self._views.release(sequence)
        for member in self._members:
            member.release(sequence)


def _hang(draft: Draft, spine: Draft) -> Draft:
    """The spine with the draft below its last node. Raises ValueError for a drawn draft."""
    if not len(spine) or not len(draft):
        return draft if len(draft) else spine
    if draft.kind != "point":
        raise ValueError(f"a draft of kind {draft.kind!r} can't be joined with others")
    end = len(spine) - 1
    parents = tuple(end if parent < 0 else parent + end + 1 for parent in draft.tree.parents)
    return Draft(
        Tree(spine.tree.tokens + draft.tree.tokens, spine.tree.parents + parents),
        sources=spine.sources + draft.sources,
        scores=_scores(spine) + _scores(draft),
    )


def _scores(draft: Draft) -> tuple[float, ...]:
    return draft.scores or (0.5,) * len(draft)
